"""The releases that tacit accounts for, as dp-accounting's event trees.

Compatibility promise: an event that was ever written to a ledger can be read by every later version and keeps its
meaning. Events are never removed from ``_KNOWN``; a new meaning gets a new name.

In every event the noise is relative to the bound of one unit's contribution (the clip), whatever the neighbour
relation: the accountant applies the relation's factor.

Formal guarantee: every number of an event, and of what is inside it, is checked (``check``) when it is made by a
function of this module, written, and read. Outside of its range a formula has no meaning: a negative scale of Laplace
noise would be priced below zero.
"""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Iterable, Iterator
from numbers import Integral
from typing import Any, ClassVar

import attr
from dp_accounting import dp_event
from dp_accounting.dp_event import DpEvent as DpEvent


@attr.s(frozen=True, slots=True, auto_attribs=True)
class StreamDpEvent(DpEvent):  # type: ignore[misc]
    """A stream of noisy sums that are together ONE Gaussian release of ``noise_multiplier``.

    Each unit takes part in at most ``contributions`` steps, at least ``separation`` apart. The noise of the steps is
    drawn through ``strategy`` (see ``privacy.correlated``) in ``blocks`` of ``steps`` steps each, scaled by that
    strategy's sensitivity, so that however long the stream is, it costs what one release with this noise costs.

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
class NoisyMaxDpEvent(DpEvent):  # type: ignore[misc]
    """The index of the largest of several noisy scores, and nothing else: pure epsilon 2/noise_multiplier.

    ``noise_multiplier`` is the noise's scale relative to the most that one unit can move any one score.

    Args:
        noise_multiplier: The noise's scale relative to the most that one unit moves any one score.
    """

    noise_multiplier: float


_MOST = 2**53  # releases: floats count exactly up to it
_DEEPEST = 50
_LARGEST = sys.float_info.max
STRATEGIES, SIZED = ("independent", "full", "banded", "buffered"), ("banded", "buffered")
_KNOWN: dict[str, type[DpEvent]] = {
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
        NoisyMaxDpEvent,
    )
}


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


def check_count(value: int, what: str) -> None:
    """Validate a count: a positive integer.

    Args:
        value: The count.
        what: Its name, for the message.

    Raises:
        ValueError: An invalid value.
    """
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{what} must be whole and at least 1; got {value!r}.")
    if value > _MOST:
        raise ValueError(f"{what} must be at most 2^53, up to where they can be counted; got {value!r}.")


def check(event: DpEvent, *, finite: bool = False, depth: int = 0) -> DpEvent:
    """Validate an event tree: every number of it must be in its range.

    Args:
        event: The event tree.
        finite: Noise must be finite, too. An accountant may be asked about infinite noise, but no mechanism draws it.
        depth: How deep in the tree this call is.

    Returns:
        The event itself.

    Raises:
        ValueError: An invalid value.
    """
    if depth > _DEEPEST:
        raise ValueError(f"An event is nested at most {_DEEPEST} deep.")
    match event:
        case dp_event.GaussianDpEvent() | dp_event.LaplaceDpEvent() | NoisyMaxDpEvent() | StreamDpEvent():
            most = _LARGEST if finite else math.inf
            _within(event.noise_multiplier, "A noise multiplier is a number, not negative and not infinite", 0, most)
            if isinstance(event, StreamDpEvent):
                for value in (event.steps, event.contributions, event.separation, event.blocks):
                    check_count(value, "A stream's steps, contributions, separation and blocks")
                _check_strategy(event.strategy)
        case dp_event.DiscreteLaplaceDpEvent():
            _within(event.noise_parameter, "The parameter of discrete Laplace noise is finite and not negative")
            check_count(event.sensitivity, "The sensitivity of a query with discrete Laplace noise")
        case dp_event.RandomizedResponseDpEvent():
            _within(event.noise_parameter, "The parameter of randomized response is a probability", 0, 1)
            check_count(event.num_buckets, "The number of answers of randomized response")
            _within(event.num_buckets, "Randomized response chooses among at least 2 answers", 2)
        case dp_event.ZCDpEvent():
            _within(event.rho, "The rho of zero-concentrated privacy is finite and not negative")
            _within(event.xi, "The xi of zero-concentrated privacy is finite and not negative")
        case dp_event.SelfComposedDpEvent():
            check_count(event.count, "The number of releases")
            check(event.event, finite=finite, depth=depth + 1)
        case dp_event.ComposedDpEvent():
            for part in event.events:
                check(part, finite=finite, depth=depth + 1)
        case dp_event.PoissonSampledDpEvent():
            _within(event.sampling_probability, "A sample rate is a probability", 0, 1)
            _check_inside(event.event, finite, depth)
        case dp_event.SampledWithoutReplacementDpEvent():
            check_count(event.source_dataset_size, "The size of a data set")
            check_count(event.sample_size, "The size of a sample")
            most = event.source_dataset_size
            _within(event.sample_size, "A sample without replacement is not larger than its data set", 1, most)
            _check_inside(event.event, finite, depth)
        case dp_event.RepeatAndSelectDpEvent():
            _within(event.mean, "A search has at least one trial in the mean, and finitely many", 1)
            shapes = "The shape is 0 (logarithmic), above it (1: geometric) or inf (Poisson)"
            _within(event.shape, shapes, 0, math.inf)
            _check_inside(event.event, finite, depth)
            if any(
                isinstance(leaf, StreamDpEvent | dp_event.RepeatAndSelectDpEvent) for leaf, _ in leaves(event.event)
            ):
                raise ValueError(
                    "A trial is made of single releases: there is no stream and no other search inside it."
                )
        case dp_event.NoOpDpEvent() | dp_event.NonPrivateDpEvent():
            pass
        case _:
            name = type(event).__name__
            raise ValueError(
                f"A {name} cannot be charged: make an event with tacit.privacy.events, such as gaussian(2.0)."
            )
    return event


def _check_inside(event: DpEvent, finite: bool, depth: int) -> None:
    """What is sampled or selected releases something."""
    check(event, finite=finite, depth=depth + 1)
    if next(leaves(event), None) is None:
        raise ValueError("A draw or a trial that releases nothing cannot be charged: give the event of its releases.")


def _within(value: Any, sentence: str, low: float = 0.0, high: float = _LARGEST) -> None:
    try:
        number = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
    except OverflowError:  # a whole number beyond all floats
        number = math.nan
    if not low <= number <= high:
        raise ValueError(f"{sentence}; got {value!r}.")


def _check_strategy(strategy: str) -> None:
    name, _, size = str(strategy).partition(":")
    if name not in STRATEGIES or (size and not (name in SIZED and size.isdigit() and int(size) > 0)):
        raise ValueError(
            f"There is no noise called {strategy!r}; choose one of {', '.join(STRATEGIES)}, "
            "or banded:BANDS and buffered:BUFFERS with their size."
        )


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


def leaves(event: DpEvent, times: int = 1) -> Iterator[tuple[DpEvent, int]]:
    """The single releases of a tree in their order, each with how often it happens in a row.

    Args:
        event: The event tree.
        times: How often the whole tree is repeated.

    Returns:
        Pairs of a single release and its count.
    """
    if isinstance(event, dp_event.SelfComposedDpEvent):
        check_count(event.count, "The number of releases")
        inner = list(leaves(event.event))
        if len(inner) == 1:
            yield inner[0][0], inner[0][1] * event.count * times
        else:
            for _ in range(event.count * times):
                yield from inner
    elif isinstance(event, dp_event.ComposedDpEvent):
        for _ in range(times):
            for part in event.events:
                yield from leaves(part)
    elif not isinstance(event, dp_event.NoOpDpEvent):
        if isinstance(event, StreamDpEvent):
            check(event)
        yield event, times


def releases(event: DpEvent) -> int:
    """How often a mechanism may be called on a tree: once per leaf, and once per step of a stream.

    Args:
        event: The event tree.

    Returns:
        The number of mechanism calls.
    """
    parts = leaves(event)
    return sum(n * (e.steps * e.blocks if isinstance(e, StreamDpEvent) else 1) for e, n in parts)


def same(one: DpEvent, other: DpEvent, *, within: float = 1e-12) -> bool:
    """Whether two trees release the same in the same order, their noises equal up to rounding.

    Args:
        one: An event tree.
        other: Another.
        within: The relative tolerance of noise multipliers.

    Returns:
        True if they are the same.
    """
    mine, its = list(leaves(one)), list(leaves(other))
    return len(mine) == len(its) and all(
        times == again and _alike(to_json(a), to_json(b), within)
        for (a, times), (b, again) in zip(mine, its, strict=True)
    )


def _alike(one: Any, other: Any, within: float) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key], within) for key in one)
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=within)
    return bool(one == other)


def gaussian_noise(event: DpEvent) -> float | None:
    """The noise of a tree of Gaussians as one joint release; None if there is anything else in it.

    Args:
        event: The event tree.

    Returns:
        The noise multiplier, or None.
    """
    parts = list(leaves(event))
    if not all(isinstance(leaf, dp_event.GaussianDpEvent) for leaf, _ in parts):
        return None
    return joint_noise(leaf.noise_multiplier / math.sqrt(times) for leaf, times in parts)


def is_sampled(event: DpEvent) -> bool:
    """Whether an event tree has Poisson subsampling in it.

    Args:
        event: The event tree.

    Returns:
        True if it has.
    """
    sampled = dp_event.PoissonSampledDpEvent | dp_event.SampledWithoutReplacementDpEvent
    return any(isinstance(leaf, sampled) for leaf, _ in leaves(event))


def to_json(event: DpEvent) -> dict[str, Any]:
    """A tree as plain data, the form in which the ledger keeps it; refused if a number of it is out of its range.

    Args:
        event: The event tree.

    Returns:
        Plain data for JSON.

    Raises:
        ValueError: An invalid value.
    """
    return _tree(check(event))


def _tree(event: DpEvent) -> dict[str, Any]:
    fields = {field.name: getattr(event, field.name) for field in attr.fields(type(event))}
    return {"type": type(event).__name__} | {key: _plain(value) for key, value in fields.items()}


def from_json(data: dict[str, Any]) -> DpEvent:
    """The tree that ``to_json`` wrote; refused if a number of it is out of its range.

    Args:
        data: What ``to_json`` returned.

    Returns:
        The event tree.

    Raises:
        ValueError: An unknown event or an invalid value.
    """
    return check(_event(data))


def _plain(value: Any) -> Any:
    if isinstance(value, DpEvent):
        return _tree(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str) else int(value) if isinstance(value, numbers.Integral) else float(value)


def _event(value: Any) -> Any:
    if isinstance(value, list):
        return [_event(item) for item in value]
    if not isinstance(value, dict):
        return value
    fields = dict(value)
    name = fields.pop("type", None)
    if name not in _KNOWN:
        raise ValueError(f"Unknown event {name!r}: it was written by a newer tacit, or the file is damaged.")
    made = {key: _event(inner) for key, inner in fields.items()}
    if set(made) - {field.name for field in attr.fields(_KNOWN[name])}:
        raise ValueError(f"A {name} has other fields than these: it was written by a newer tacit, or it is damaged.")
    try:
        return _KNOWN[name](**made)
    except TypeError:
        raise ValueError(f"A {name} lacks a field: the file is damaged.") from None
