"""Clip policies: from the norm of each unit's gradient to the factor that it is multiplied by. None draws noise.

What a policy with bounds clips may be released with noise. One without (`bounds` empty) exists for comparisons and is
refused there.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Kept free below the bound for the rounding of the sum itself, see `ClippedSum`; norms are never too small.
MARGIN = 1e-5
# A factor below this could not be represented in float32 with full precision: such a unit contributes nothing.
SMALLEST_FACTOR = 1e-30

Blocks = dict[str, tuple[str, ...]]


def _positive(value: float, what: str) -> float:
    """The value as a float: in a scalar of 16 bits the margin below the bound would be lost."""
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{what} must be a positive number, not {value!r}.")
    return float(value)


@dataclass(frozen=True)
class Policy(ABC):
    """A clip policy: how each unit's gradient is bounded. The defaults are those of one block over all parameters."""

    def blocks(self, names: tuple[str, ...]) -> Blocks:
        """Which parameters are clipped together.

        Args:
            names: The trainable parameters.

        Returns:
            Block name -> parameter names.
        """
        return {"gradient": names}

    @abstractmethod
    def bounds(self, blocks: Blocks) -> dict[str, float]:
        """The L2 bound of one unit's contribution to each block; empty if there is none.

        Args:
            blocks: What `blocks` returned.

        Returns:
            Block name -> L2 bound.
        """

    @abstractmethod
    def factors(self, norms: Mapping[str, Tensor], losses: Tensor) -> dict[str, Tensor]:
        """One factor per block and unit, from the norms (float64) and the mean loss of each unit.

        Args:
            norms: Block name -> gradient norm of each unit. Private.
            losses: The mean loss of each unit. Private.

        Returns:
            Block name -> factor of each unit.
        """

    def extra(self, norms: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, float]]:
        """Further sums that leave with the gradient: name -> (one number per unit, its bound).

        Args:
            norms: Block name -> gradient norm of each unit. Private.

        Returns:
            Name -> (one number per unit, its bound).
        """
        del norms
        return {}

    def finish(self, total: dict[str, Tensor], units: int) -> dict[str, Tensor]:
        """A last change of the whole sum; only for policies without bounds.

        Args:
            total: The sum.
            units: The number of units. Private.

        Returns:
            The changed sum.
        """
        del units
        return total


def shrink(norms: Tensor, bound: float) -> Tensor:
    """min(1, bound (1 - margin) / norm)."""
    factor = torch.clamp(bound * (1 - MARGIN) / norms, max=1.0)
    return torch.where(factor < SMALLEST_FACTOR, 0.0, factor)


@dataclass(frozen=True)
class Flat(Policy):
    """Clip the whole gradient of a unit to `bound` (Abadi et al., 2016).

    Args:
        bound: The L2 bound.

    Examples:
        >>> from tacit.gradients import Flat
        >>> Flat(0.5).bounds({"gradient": ("weight", "bias")})
        {'gradient': 0.5}
    """

    bound: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "bound", _positive(self.bound, "The clip bound"))

    def bounds(self, blocks: Blocks) -> dict[str, float]:
        return dict.fromkeys(blocks, self.bound)

    def factors(self, norms: Mapping[str, Tensor], losses: Tensor) -> dict[str, Tensor]:  # noqa: ARG002
        return {block: shrink(norm, self.bound) for block, norm in norms.items()}


@dataclass(frozen=True)
class Automatic(Policy):
    """Normalise each unit's gradient to about `bound`: g * bound / (norm + stability) (Bu et al., 2023, eq. 4.1).

    Args:
        bound: The norm approached.
        stability: Keeps small gradients small (gamma).
    """

    bound: float = 1.0
    stability: float = 0.01

    def __post_init__(self) -> None:
        object.__setattr__(self, "bound", _positive(self.bound, "The clip bound"))
        object.__setattr__(self, "stability", _positive(self.stability, "The stability constant"))

    def bounds(self, blocks: Blocks) -> dict[str, float]:
        return dict.fromkeys(blocks, self.bound)

    def factors(self, norms: Mapping[str, Tensor], losses: Tensor) -> dict[str, Tensor]:  # noqa: ARG002
        factors = {block: self.bound * (1 - MARGIN) / (norm + self.stability) for block, norm in norms.items()}
        return {block: torch.where(f < SMALLEST_FACTOR, 0.0, f) for block, f in factors.items()}


@dataclass(frozen=True)
class PerLayer(Policy):
    """Clip the parameters of each layer on their own.

    `bound` is the bound of the whole gradient: with n layers each gets bound / sqrt(n). A mapping from layer name to
    bound sets them one by one.

    Args:
        bound: The bound of the whole gradient, or one per layer name.
    """

    bound: float | Mapping[str, float]

    def __post_init__(self) -> None:
        what = "A layer's clip bound"
        if isinstance(self.bound, Mapping):
            bound: Any = {name: _positive(value, what) for name, value in self.bound.items()}
        else:
            bound = _positive(self.bound, what)
        object.__setattr__(self, "bound", bound)

    def blocks(self, names: tuple[str, ...]) -> Blocks:
        layers: dict[str, list[str]] = {}
        for name in names:
            layers.setdefault(name.rpartition(".")[0] or name, []).append(name)
        if isinstance(self.bound, Mapping) and (missing := sorted(set(layers) - set(self.bound))):
            raise ValueError(
                f"No clip bound for the layers {', '.join(missing)}: add one for each, or give one number for all."
            )
        return {layer: tuple(members) for layer, members in layers.items()}

    def bounds(self, blocks: Blocks) -> dict[str, float]:
        if isinstance(self.bound, Mapping):
            return {block: float(self.bound[block]) for block in blocks}
        return dict.fromkeys(blocks, self.bound / math.sqrt(max(len(blocks), 1)))

    def factors(self, norms: Mapping[str, Tensor], losses: Tensor) -> dict[str, Tensor]:  # noqa: ARG002
        bounds = self.bounds(dict.fromkeys(norms, ()))
        return {block: shrink(norm, bounds[block]) for block, norm in norms.items()}


@dataclass(frozen=True)
class AdaptiveQuantile(Flat):
    """Clip to a bound that follows a quantile of the norms (Andrew et al., 2021, algorithm 1).

    The sum carries a block `count`: the sum over units of b - 1/2, where b says whether the unit was below the bound.
    It is noised in the same call as the gradient; `updated` takes what came out.

    Args:
        bound: The bound to start from.
        quantile: The share of units whose gradient should be below the bound.
        rate: The step size of the update, in the logarithm of the bound.
    """

    quantile: float = 0.5
    rate: float = 0.2

    def extra(self, norms: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, float]]:
        below = (norms["gradient"] <= self.bound).double()
        return {"count": (below - 0.5, 0.5)}

    def updated(self, count: float, units: float) -> AdaptiveQuantile:
        """The policy of the next step, from the released count and the public (expected) number of units.

        Args:
            count: The released sum of b - 1/2.
            units: The public (expected) number of units.

        Returns:
            The policy of the next step.
        """
        share = min(max(count / units + 0.5, 0.0), 1.0)
        bound = self.bound * math.exp(-self.rate * (share - self.quantile))
        return AdaptiveQuantile(bound, self.quantile, self.rate)


@dataclass(frozen=True)
class Unbounded(Policy):
    """Policies of the papers' ablations: no bound, hence never private."""

    def bounds(self, blocks: Blocks) -> dict[str, float]:  # noqa: ARG002
        return {}

    def factors(self, norms: Mapping[str, Tensor], losses: Tensor) -> dict[str, Tensor]:
        kept = torch.logical_not(self.drops(norms, losses)).double()
        return dict.fromkeys(norms, kept)

    def drops(self, norms: Mapping[str, Tensor], losses: Tensor) -> Tensor:
        """Which units are left out."""
        del norms
        return torch.zeros_like(losses, dtype=torch.bool)


@dataclass(frozen=True)
class BatchClip(Unbounded):
    """Scale the mean over units to norm at most `bound`. Not private.

    Args:
        bound: The norm.
    """

    bound: float

    def finish(self, total: dict[str, Tensor], units: int) -> dict[str, Tensor]:
        norm = math.sqrt(sum(float(t.double().square().sum()) for t in total.values())) / max(units, 1)
        factor = min(1.0, self.bound / norm) if norm else 1.0
        return {name: t * factor for name, t in total.items()}


class _Filter(Unbounded):
    """A policy that leaves units out; filters combine on the sets that they leave out."""

    def __and__(self, other: _Filter) -> FilterByBoth:
        return FilterByBoth(self, other, "intersection")

    def __or__(self, other: _Filter) -> FilterByBoth:
        return FilterByBoth(self, other, "union")


@dataclass(frozen=True)
class FilterByNorm(_Filter):
    """Leave out units whose gradient norm exceeds `threshold`. Not private.

    Args:
        threshold: The largest norm that is kept.
    """

    threshold: float

    def drops(self, norms: Mapping[str, Tensor], losses: Tensor) -> Tensor:  # noqa: ARG002
        return norms["gradient"] > self.threshold


@dataclass(frozen=True)
class FilterByLoss(_Filter):
    """Leave out units whose mean loss exceeds `threshold`. Not private.

    Args:
        threshold: The largest loss that is kept.
    """

    threshold: float

    def drops(self, norms: Mapping[str, Tensor], losses: Tensor) -> Tensor:  # noqa: ARG002
        return losses > self.threshold


@dataclass(frozen=True)
class FilterByBoth(_Filter):
    """Leave out what both filters leave out (`a & b`), or what either does (`a | b`). Not private.

    Args:
        first: A filter.
        second: Another.
        how: "intersection" or "union".
    """

    first: _Filter
    second: _Filter
    how: str

    def drops(self, norms: Mapping[str, Tensor], losses: Tensor) -> Tensor:
        a, b = self.first.drops(norms, losses), self.second.drops(norms, losses)
        return a & b if self.how == "intersection" else a | b


def as_policy(clip: float | Policy) -> Policy:
    if not isinstance(clip, Policy | int | float):
        raise TypeError(f"clip must be a number or a clip policy, not {type(clip).__name__}.")
    return clip if isinstance(clip, Policy) else Flat(float(clip))
