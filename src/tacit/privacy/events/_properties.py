"""Questions about an event tree: how many releases, of which kind, the same as another?"""

from __future__ import annotations

import math
from typing import Any

from dp_accounting import dp_event

from tacit.privacy.events._constructors import joint_noise
from tacit.privacy.events._json import to_json
from tacit.privacy.events._tree import leaves
from tacit.privacy.events._types import BallsInBinsDpEvent, CyclicPoissonDpEvent, DpEvent, StreamDpEvent


def releases(event: DpEvent) -> int:
    """How often a mechanism may be called on a tree: once per leaf, and once per step of a stream.

    Args:
        event: The event tree.

    Returns:
        The number of mechanism calls.
    """
    return sum(times * calls(leaf) for leaf, times in leaves(event))


def calls(leaf: DpEvent) -> int:
    """How often a mechanism is called on one leaf of a tree."""
    if isinstance(leaf, StreamDpEvent):
        return leaf.steps * leaf.blocks
    return leaf.steps if isinstance(leaf, BallsInBinsDpEvent) else 1


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
    """Whether an event tree has random sampling of units in it.

    Args:
        event: The event tree.

    Returns:
        True if it has.
    """
    drawn = dp_event.PoissonSampledDpEvent | dp_event.SampledWithoutReplacementDpEvent
    return any(isinstance(leaf, drawn | CyclicPoissonDpEvent | BallsInBinsDpEvent) for leaf, _ in leaves(event))
