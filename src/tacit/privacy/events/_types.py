"""The events of tacit itself, and all that may stand in a ledger.

Compatibility promise: an event that was ever written to a ledger can be read by every later version and keeps its
meaning. Events are never removed from ``KNOWN``; a new meaning gets a new name.

In every event the noise is relative to the bound of one unit's contribution (the clip), whatever the neighbour
relation: the accountant applies the relation's factor.
"""

from __future__ import annotations

from typing import ClassVar

import attr
from dp_accounting import dp_event
from dp_accounting.dp_event import DpEvent as DpEvent


@attr.s(frozen=True, slots=True, auto_attribs=True)
class StreamDpEvent(DpEvent):  # type: ignore[misc]
    """A stream of noisy sums that are together ONE Gaussian release of ``noise_multiplier``.

    Each unit takes part in at most ``contributions`` steps, at least ``separation`` apart. The noise of the steps is
    drawn through ``strategy`` (see ``privacy.correlated.by_name``) in ``blocks`` of ``steps`` steps each, scaled by
    that strategy's sensitivity, so that however long the stream is, it costs what one release with this noise costs.

    Args:
        noise_multiplier: The noise of the equivalent single release, relative to the clip.
        steps: Steps of one block.
        strategy: How noise is correlated over steps.
        contributions: The most participations of a unit.
        separation: The least distance between two participations, in steps.
        blocks: How many blocks of ``steps`` steps.
    """

    noise_multiplier: float
    steps: int
    strategy: str = "independent"
    contributions: int = 1
    separation: int = 1
    blocks: int = 1
    fixed_places: ClassVar[bool] = True  # somebody more or less would move the others


@attr.s(frozen=True, slots=True, auto_attribs=True)
class PassesDpEvent(StreamDpEvent):
    """A stream in which each unit's own id decides its participation, whatever other units are present.

    One unit more or less then changes the sums of that unit's steps alone: add-remove holds as well as the relations of
    fixed places, with factor 1. Under replace-one the unit that comes may have other steps than the one that goes, and
    the factor 2 covers both.

    Args:
        noise_multiplier: The noise of the equivalent single release, relative to the clip.
        steps: The number of steps.
        strategy: How noise is correlated over steps.
        contributions: The participations of a unit.
        separation: Their distance, in steps.
        blocks: Always 1.
    """

    fixed_places: ClassVar[bool] = False


@attr.s(frozen=True, slots=True, auto_attribs=True)
class CyclicPoissonDpEvent(StreamDpEvent):
    """A stream of ``steps`` sums with banded noise, over units that are drawn from one group after the other.

    Every unit belongs to one of b groups, which its own id decides, where b is the number of bands of ``strategy``
    (``"banded:b"``, ``"toeplitz:b"``, ``"toeplitz:b@momentum"``). In step t each unit of the group t mod b is drawn
    with probability ``sample_rate``, independently. The columns of C that a unit of one group can meet have no row in
    common, so the whole is ceil(steps / b) Poisson-subsampled Gaussian releases of ``noise_multiplier``
    (Choquette-Choo et al., 2023, "(Amplified) banded matrix factorization", theorem 4): more noise is needed than for
    one release, far less than for ``steps`` of them. ``contributions`` is 1, one per column, and ``separation`` is b.

    Args:
        noise_multiplier: The noise of one of these releases, relative to the clip.
        steps: The number of steps.
        strategy: How noise is correlated over steps; banded.
        contributions: Always 1: of one column.
        separation: The number of bands.
        blocks: Always 1.
        sample_rate: The probability with which a unit of the step's group takes part.
    """

    sample_rate: float = 1.0
    fixed_places: ClassVar[bool] = False


@attr.s(frozen=True, slots=True, auto_attribs=True)
class BallsInBinsDpEvent(DpEvent):  # type: ignore[misc]
    """``steps`` Gaussian releases in turns over ``bins`` bins, into which all units are thrown once, before the first.

    Every unit is in one bin, each with the same probability, independently of all other units and of what is released;
    step t sums the units of bin t mod ``bins``.

    Args:
        noise_multiplier: The noise of one step, relative to the clip.
        steps: The number of steps; the last round through the bins may be cut short.
        bins: The number of bins.
    """

    noise_multiplier: float
    steps: int
    bins: int


@attr.s(frozen=True, slots=True, auto_attribs=True)
class NoisyMaxDpEvent(DpEvent):  # type: ignore[misc]
    """The index of the largest of several noisy scores, and nothing else: pure epsilon 2/noise_multiplier.

    ``noise_multiplier`` is the noise's scale relative to the most that one unit can move any one score.

    Args:
        noise_multiplier: The noise's scale relative to the most that one unit moves any one score.
    """

    noise_multiplier: float


@attr.s(frozen=True, slots=True, auto_attribs=True)
class SharedNoiseDpEvent(DpEvent):  # type: ignore[misc]
    """A total over several parties, each of which adds a share of one noise (``mechanisms.share``); it alone is seen.

    The price is that of the whole noise: pure epsilon 1/noise_multiplier, or one Gaussian release. It assumes that at
    least ``honest`` parties, this one among them, add their shares and keep them to themselves, and that only
    the total is seen (secure aggregation).

    Args:
        kind: "laplace" or "gaussian".
        noise_multiplier: The scale of the honest parties' noise together, relative to the bound of one contribution.
        honest: How many shares make up that noise.
    """

    kind: str
    noise_multiplier: float
    honest: int


KNOWN: dict[str, type[DpEvent]] = {
    cls.__name__: cls
    for cls in (
        dp_event.NoOpDpEvent,
        dp_event.NonPrivateDpEvent,
        dp_event.GaussianDpEvent,
        dp_event.LaplaceDpEvent,
        dp_event.DiscreteLaplaceDpEvent,
        dp_event.RandomizedResponseDpEvent,
        dp_event.SelfComposedDpEvent,
        dp_event.ComposedDpEvent,
        dp_event.PoissonSampledDpEvent,
        dp_event.SampledWithoutReplacementDpEvent,
        dp_event.RepeatAndSelectDpEvent,
        dp_event.ZCDpEvent,
        StreamDpEvent,
        PassesDpEvent,
        CyclicPoissonDpEvent,
        BallsInBinsDpEvent,
        NoisyMaxDpEvent,
        SharedNoiseDpEvent,
    )
}
