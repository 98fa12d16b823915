"""Event trees: their numbers in range, and the single releases that they are made of.

Formal guarantee: every number of an event, and of what is inside it, is checked (``check``) when it is made by a
function of ``events``, written, and read. Outside of its range a formula has no meaning: a negative scale of Laplace
noise would be priced below zero.
"""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Iterator
from numbers import Integral
from typing import Any

from dp_accounting import dp_event

from tacit.privacy.events._strategy_names import strategy_parts
from tacit.privacy.events._types import (
    BallsInBinsDpEvent,
    CyclicPoissonDpEvent,
    DpEvent,
    NoisyMaxDpEvent,
    SharedNoiseDpEvent,
    StreamDpEvent,
)

_MOST = 2**53  # releases: floats count exactly up to it
_DEEPEST = 50
_LARGEST = sys.float_info.max


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
                strategy_parts(event.strategy)
            if isinstance(event, CyclicPoissonDpEvent):
                _check_cyclic(event)
        case BallsInBinsDpEvent():
            most = _LARGEST if finite else math.inf
            _within(event.noise_multiplier, "A noise multiplier is a number, not negative and not infinite", 0, most)
            check_count(event.steps, "steps")
            check_count(event.bins, "bins")
        case SharedNoiseDpEvent():
            if event.kind not in ("laplace", "gaussian"):
                raise ValueError(f"Noise is shared as laplace or gaussian; got {event.kind!r}.")
            most = _LARGEST if finite else math.inf
            _within(event.noise_multiplier, "A noise multiplier is a number, not negative and not infinite", 0, most)
            check_count(event.honest, "The number of honest parties")
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
                isinstance(leaf, StreamDpEvent | BallsInBinsDpEvent | dp_event.RepeatAndSelectDpEvent)
                for leaf, _ in leaves(event.event)
            ):
                raise ValueError(
                    "A trial is made of single releases: there is no stream, no balls-in-bins sampling and no other "
                    "search inside it."
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


def _check_cyclic(event: CyclicPoissonDpEvent) -> None:
    _within(event.sample_rate, "A sample rate is a probability above 0", 5e-324, 1)
    kind, bands, _ = strategy_parts(event.strategy)
    found = (bands, 1, 1) == (event.separation, event.contributions, event.blocks)
    if kind not in ("banded", "toeplitz") or not found:
        raise ValueError(
            "Cyclic sampling has as many groups as its noise has bands: a strategy such as banded:8 with separation 8, "
            "one contribution per column and one block."
        )


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
