"""Functions that make events, with every number checked."""

from __future__ import annotations

import math
from collections.abc import Iterable

import attr
from dp_accounting import dp_event

from tacit.privacy.events._strategy_names import strategy_name
from tacit.privacy.events._tree import check, check_count
from tacit.privacy.events._types import (
    BallsInBinsDpEvent,
    CyclicPoissonDpEvent,
    DpEvent,
    NoisyMaxDpEvent,
    PassesDpEvent,
    SharedNoiseDpEvent,
    StreamDpEvent,
)


def gaussian(noise_multiplier: float, steps: int = 1) -> DpEvent:
    """``steps`` Gaussian releases over all units (no subsampling).

    Args:
        noise_multiplier: The noise's standard deviation relative to the L2 bound (clip).
        steps: How many.

    Returns:
        The event.
    """
    return repeat(check(dp_event.GaussianDpEvent(noise_multiplier)), steps)


def laplace(noise_multiplier: float, steps: int = 1) -> DpEvent:
    """``steps`` queries with Laplace noise, its scale relative to the L1 bound.

    Args:
        noise_multiplier: The noise's scale relative to the L1 bound.
        steps: How many.

    Returns:
        The event.
    """
    return repeat(check(dp_event.LaplaceDpEvent(noise_multiplier)), steps)


def noisy_max(noise_multiplier: float) -> DpEvent:
    """One private choice of the best of several candidates (report noisy max).

    Args:
        noise_multiplier: The noise's scale relative to the most that one unit moves any one score.

    Returns:
        The event.
    """
    return check(NoisyMaxDpEvent(noise_multiplier))


def shared_noise(kind: str, noise_multiplier: float, honest: int, steps: int = 1) -> DpEvent:
    """``steps`` totals over several parties, each with one noise to which every party adds a share.

    Args:
        kind: "laplace" (pure epsilon) or "gaussian".
        noise_multiplier: The scale of ``honest`` shares together, relative to the bound of one contribution.
        honest: How many shares make up that noise.
        steps: How many.

    Returns:
        The event.
    """
    return repeat(check(SharedNoiseDpEvent(kind, noise_multiplier, honest)), steps)


def poisson(sample_rate: float, event: DpEvent, steps: int = 1) -> DpEvent:
    """``steps`` Poisson-subsampled releases: each draws every unit with probability ``sample_rate``, then releases
    ``event``.

    Args:
        sample_rate: The probability with which a unit takes part, independently of all others.
        event: Everything that is released from one draw.
        steps: How many independent draws.

    Returns:
        The event.

    Examples:
        >>> from tacit.privacy import events
        >>> events.releases(events.poisson(0.01, events.gaussian(1.0), steps=1000))
        1000
    """
    if not 0 < sample_rate <= 1:
        raise ValueError(f"A sample rate is a probability above 0; got {sample_rate:g}.")
    return repeat(check(event if sample_rate == 1 else dp_event.PoissonSampledDpEvent(sample_rate, event)), steps)


def without_replacement(sample_size: int, size: int, event: DpEvent, steps: int = 1) -> DpEvent:
    """``steps`` releases, each from ``sample_size`` of ``size`` units that are drawn at random without replacement.

    It is bounded under replace-one, for Gaussian noise: by PLD (docs/proofs.md, lemma 13a), or by Renyi divergences
    (Wang, Balle & Kasiviswanathan 2019).

    Args:
        sample_size: The number of units of every draw.
        size: The number of units, which is public under replace-one.
        event: Everything that is released from one draw.
        steps: How many independent draws.

    Returns:
        The event.

    Examples:
        >>> from tacit.privacy import events
        >>> events.releases(events.without_replacement(10, 1000, events.gaussian(1.0), steps=100))
        100
    """
    sampled = check(dp_event.SampledWithoutReplacementDpEvent(size, sample_size, event))
    return repeat(event if sample_size == size else sampled, steps)


def balls_in_bins(noise_multiplier: float, *, bins: int, steps: int) -> DpEvent:
    """``steps`` Gaussian releases in turns over ``bins`` bins, into which all units are thrown once and for all.

    It is bounded by PLD under add-remove and zero-out (docs/proofs.md, lemma 13b).

    Args:
        noise_multiplier: The noise of one step, relative to the clip.
        bins: The number of bins, which are the steps of an epoch; with one bin there is no sampling.
        steps: The number of steps; the last epoch may be cut short.

    Returns:
        The event.

    Examples:
        >>> from tacit.privacy import events, guarantee
        >>> two_epochs = events.balls_in_bins(2.0, bins=50, steps=100)
        >>> round(guarantee(two_epochs, delta=1e-5).epsilon, 2)
        0.42
    """
    event = check(BallsInBinsDpEvent(noise_multiplier, steps, bins))
    return event if bins > 1 else gaussian(noise_multiplier, steps)


def repeat_and_select(event: DpEvent, *, mean: float, shape: float) -> DpEvent:
    """``event`` a random number of times, of which only the best outcome is released (see ``privacy.selection``).

    The number of repetitions follows the truncated negative binomial distribution of ``shape`` (1: geometric, 0:
    logarithmic) on 1, 2, ... or, with ``shape=inf``, the Poisson distribution, where it may be 0.

    Args:
        event: One repetition.
        mean: The mean number of repetitions.
        shape: The distribution's shape.

    Returns:
        The event.
    """
    return check(dp_event.RepeatAndSelectDpEvent(event, float(mean), float(shape)))


def joint(noise_multipliers: Iterable[float]) -> DpEvent:
    """Several sums of the same rows, each with its own noise: one Gaussian with 1/z^2 = sum 1/z_i^2.

    Args:
        noise_multipliers: One per sum, each relative to that sum's bound.

    Returns:
        The event.
    """
    return check(dp_event.GaussianDpEvent(joint_noise(noise_multipliers)))


def joint_noise(noise_multipliers: Iterable[float]) -> float:
    """The noise multiplier of several Gaussian releases of the same rows as one: 1/z^2 = sum 1/z_i^2.

    Args:
        noise_multipliers: One per release.

    Returns:
        The joint noise multiplier.
    """
    values = list(noise_multipliers)
    if any(value == 0 for value in values):
        return 0.0
    least = min(values, default=math.inf)
    if math.isinf(least):
        return math.inf
    return least / math.sqrt(math.fsum((least / value) ** 2 for value in values))


def schedule(noise_multipliers: Iterable[float], sample_rate: float = 1.0) -> DpEvent:
    """One release per entry, each with its own noise (AdpAlloc's decaying sigma).

    Args:
        noise_multipliers: One per step.
        sample_rate: The Poisson subsampling rate; 1 for all units in every step.

    Returns:
        The event.
    """
    return compose(poisson(sample_rate, gaussian(value)) for value in noise_multipliers)


def stream(
    noise_multiplier: float,
    steps: int,
    *,
    strategy: str = "independent",
    contributions: int = 1,
    separation: int = 1,
    blocks: int = 1,
) -> DpEvent:
    """A stream in which a unit takes part in at most ``contributions`` steps: one Gaussian release in all.

    Args:
        noise_multiplier: The noise of the equivalent single release, relative to the clip.
        steps: Steps of one block.
        strategy: How noise is correlated over steps (see ``privacy.correlated``).
        contributions: The most participations of a unit.
        separation: The least distance between two participations, in steps.
        blocks: How many blocks of ``steps`` steps.

    Returns:
        The event.
    """
    return check(StreamDpEvent(noise_multiplier, steps, strategy, contributions, separation, blocks))


def passes(
    noise_multiplier: float, steps: int, *, strategy: str = "independent", contributions: int = 1, separation: int = 1
) -> DpEvent:
    """A stream of training steps in which a unit's own id decides its participation: one Gaussian release in all.

    Args:
        noise_multiplier: The noise of the equivalent single release, relative to the clip.
        steps: The number of steps.
        strategy: How noise is correlated over steps (see ``privacy.correlated``).
        contributions: The participations of a unit.
        separation: Their distance, in steps.

    Returns:
        The event.
    """
    plain = stream(noise_multiplier, steps, strategy=strategy, contributions=contributions, separation=separation)
    return PassesDpEvent(**attr.asdict(plain, recurse=False))


def cyclic_poisson(
    noise_multiplier: float, steps: int, *, strategy: str, bands: int, sample_rate: float, momentum: float = 0.0
) -> DpEvent:
    """A stream with banded noise over units drawn from one of ``bands`` groups after the other.

    Args:
        noise_multiplier: The noise of one of the ceil(steps / bands) releases that it costs, relative to the clip.
        steps: The number of steps.
        strategy: "banded" or "toeplitz".
        bands: Of the noise, and the number of groups.
        sample_rate: The probability with which a unit of the step's group takes part.
        momentum: Of the steps that a "toeplitz" is optimised for.

    Returns:
        The event.

    Examples:
        >>> from tacit.privacy import events
        >>> events.releases(events.cyclic_poisson(1.0, 100, strategy="banded", bands=8, sample_rate=0.1))
        100
    """
    name = strategy_name(strategy, bands, momentum=momentum)
    return check(CyclicPoissonDpEvent(noise_multiplier, steps, name, 1, bands, 1, float(sample_rate)))


def compose(events: Iterable[DpEvent]) -> DpEvent:
    """Several events, one after the other.

    Args:
        events: The parts, in order.

    Returns:
        The event.
    """
    return dp_event.ComposedDpEvent(list(events))


def repeat(event: DpEvent, times: int) -> DpEvent:
    """The same event, ``times`` times, with independent noise.

    Args:
        event: The part.
        times: How often.

    Returns:
        The event.
    """
    check_count(times, "The number of releases")
    return event if times == 1 else dp_event.SelfComposedDpEvent(event, times)
