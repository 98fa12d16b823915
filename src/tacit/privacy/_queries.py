"""Bounded sums: what leaves the packages that see private values, on the way to ``mechanisms``.

A gradient-sized sum carries its bounds beside it (``BoundedSum``, which ``tacit.gradients.ClippedSum`` is). A scalar or
a small vector is a ``GridSum``: each unit's contribution is clamped and rounded to a public grid, and the sum is exact
in integers, so that no floating-point residue of anyone's value is left for the noise to miss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from tacit.privacy._budget import Neighbours

_MOST = 2**53  # grid steps in one contribution: whole numbers that float64 holds exactly
_SNAP = 1e-9  # in grid steps: 0.3 is three steps of 0.1, though not in binary

Norm = Literal["l1", "l2", "linf"]


@runtime_checkable
class BoundedSum(Protocol):
    """A sum over units of which each contributes at most ``bounds[block]`` (L2) to each block."""

    @property
    def sum(self) -> Mapping[str, Tensor]: ...
    @property
    def bounds(self) -> Mapping[str, float]: ...
    @property
    def blocks(self) -> Mapping[str, tuple[str, ...]]: ...


@dataclass(frozen=True, kw_only=True)
class GridSum:
    """The exact sum of contributions that lie in [low, high] on a grid; its value is private, its bounds are not.

    Args:
        total: The exact sums in grid steps. Private.
        grid: The public grid's step.
        low: The least contribution of one unit to one value.
        high: The greatest.
        l1: Enforced L1 bound of one unit's contribution.
        l2: Enforced L2 bound of one unit's contribution.
    """

    total: tuple[int, ...] = field(repr=False)
    grid: float
    low: float
    high: float
    l1: float = math.inf  # enforced limits of one unit's contribution, beyond what [low, high] gives
    l2: float = math.inf

    def bound(self, norm: Norm, neighbours: Neighbours) -> float:
        """How large a contribution counts as: the relation's factor times this is the sensitivity.

        Under REPLACE_ONE the number of units is the same in both data sets, so contributions may be measured from the
        middle of [low, high]: half its width, twice, is its width. And where no value is negative, two contributions x
        and y have |x - y|^2 = |x|^2 + |y|^2 - 2 x y <= 2 l2^2: in L2 they are sqrt(2) l2 apart, not 2 l2.

        Args:
            norm: Which norm the mechanism needs.
            neighbours: The neighbouring relation.

        Returns:
            The bound; the sensitivity is ``neighbours.factor`` times it.
        """
        largest = max(abs(self.low), abs(self.high))
        if neighbours is Neighbours.REPLACE_ONE:
            largest = (self.high - self.low) / 2
        size = len(self.total)
        l1 = min(size * largest, self.l1)
        apart = neighbours is Neighbours.REPLACE_ONE and self.low >= 0
        l2 = min(math.sqrt(size) * largest, min(self.l1, self.l2) / (math.sqrt(2) if apart else 1.0), l1)
        return {"l1": l1, "l2": l2, "linf": min(largest, self.l2, self.l1)}[norm]


def grid_sum(
    rows: Tensor, *, low: float, high: float, grid: float | None = None, l1: float = math.inf, l2: float = math.inf
) -> GridSum:
    """Sum one contribution per unit (``rows``: units, or units x values), each forced into its bounds.

    ``grid`` is public: by default 2^-20 of the largest contribution. A row with a value that is not a number counts as
    zero (as the nearest bound, if zero is outside). A row longer than ``l1`` or ``l2`` is shortened to it.

    Formal guarantee: every contribution, after clamping, shortening and rounding, is a whole number of grid steps
    between the result's ``low`` and ``high`` (the outermost grid points of [low, high]) and within ``l1`` and ``l2``;
    these are added exactly, however many there are; nothing else about a row enters the sum.

    Args:
        rows: One contribution per unit: units, or units x values.
        low: The least value of a contribution; values below are clamped.
        high: The greatest value.
        grid: The public grid's step; by default 2^-20 of the largest contribution.
        l1: Contributions with a larger L1 norm are scaled down to it.
        l2: Contributions with a larger L2 norm are scaled down to it.

    Returns:
        The exact sum with its bounds, for ``mechanisms.laplace``, ``gaussian_query`` or ``noisy_max``.

    Raises:
        ValueError: Bounds or grid that no contribution could satisfy.

    Examples:
        >>> import torch
        >>> from tacit.privacy import grid_sum
        >>> ages = torch.tensor([31.0, 47.0, 150.0])
        >>> grid_sum(ages, low=0.0, high=100.0, grid=1.0)  # 150 counts as 100; the sum itself is not shown
        GridSum(grid=1.0, low=0.0, high=100.0, l1=inf, l2=inf)
    """
    low, high, l1, l2 = (float(bound) for bound in (low, high, l1, l2))  # 16 and 32 bits would round them anew
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"Contributions need finite bounds with low < high; got [{low:g}, {high:g}].")
    grid = float(grid) if grid is not None else 2.0 ** (math.ceil(math.log2(max(abs(low), abs(high)))) - 20)
    if not grid > 0 or not (l1 > 0 and l2 > 0):
        raise ValueError("The grid and the limits l1 and l2 are above 0.")
    if not low <= 0 <= high and min(l1, l2) < math.inf:
        raise ValueError("The limits l1 and l2 shorten a row towards zero, so zero must lie in [low, high].")
    if max(abs(low), abs(high)) / grid > _MOST:
        raise ValueError(f"A grid of {grid:g} is too fine for [{low:g}, {high:g}]: at most 2^53 steps.")
    lowest, highest = math.ceil(low / grid - _SNAP), math.floor(high / grid + _SNAP)
    if not lowest < highest:
        raise ValueError(f"A grid of {grid:g} is too coarse for [{low:g}, {high:g}]: it needs two points in there.")
    if rows.dim() not in (1, 2):
        raise ValueError(
            f"Contributions are one row per unit (units, or units x values); got shape {tuple(rows.shape)}."
        )
    values = rows.detach().to("cpu", torch.float64)
    values = values[:, None] if values.dim() == 1 else values
    bad = ~torch.isfinite(values).all(dim=1, keepdim=True)
    steps = (torch.where(bad, 0.0, values) / grid).round().clamp(lowest, highest)
    steps = _shortened(steps, l1 / grid, 1) if math.isfinite(l1) else steps
    steps = _shortened(steps, l2 / grid, 2) if math.isfinite(l2) else steps
    return GridSum(total=_exact_sum(steps), grid=grid, low=lowest * grid, high=highest * grid, l1=l1, l2=l2)


def _exact_sum(steps: Tensor) -> tuple[int, ...]:
    """The sum over rows of whole numbers up to 2^53, in two halves of 32 bits so that int64 cannot overflow."""
    whole = steps.to(torch.int64)
    upper, lower = (whole >> 32).sum(dim=0), (whole & 0xFFFFFFFF).sum(dim=0)
    return tuple((high << 32) + low for high, low in zip(upper.tolist(), lower.tolist(), strict=True))


def _shortened(steps: Tensor, limit: float, order: int) -> Tensor:
    """Rows beyond the limit, scaled down and truncated towards zero (which only shortens)."""
    norm = torch.linalg.vector_norm(steps, ord=order, dim=1, keepdim=True)
    scaled = torch.trunc(steps * (limit * (1 - 1e-12) / norm.clamp_min(1.0)))
    return torch.where(norm > limit, scaled, steps)
