"""What rides on a step's release beside the gradient: one bounded vector per unit, its sum, its share of the noise."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tacit.gradients import AdaptiveQuantile, ClippedSum

_MARGIN = 1e-5  # that the sums' rounding stays below the bound, as for gradients
_COUNT = "count"  # the block in which AdaptiveQuantile tells how many were below the bound


def bounded_total(values: Tensor, bound: float, units: Tensor | None, mute: Tensor | None) -> Tensor:
    """The sum over units of their mean row, each scaled down to L2 norm `bound`.

    Formal guarantee: each unit adds a vector of norm at most `bound`, whatever its rows hold, and changes nothing of
    what others add: rows that are muted or not finite are zeros in their place, and the sum is float64. Rounding is
    that of `gradients.ClippedSum`: factors stay 1e-5 below the bound.

    Args:
        values: One row each.
        bound: The L2 bound.
        units: Whose each row is; by default each row is a unit.
        mute: Rows that contribute nothing.

    Returns:
        The sum, float64.
    """
    rows = values.detach().double()
    there = torch.isfinite(rows).all(1)
    if mute is not None:
        there = there & ~mute.to(there.device)
    rows = torch.where(there[:, None], rows, 0.0)
    if units is not None:
        index: Tensor = torch.unique(units.to(rows.device), return_inverse=True)[1]
        count = int(index.max()) + 1 if len(index) else 0
        sums = rows.new_zeros(count, rows.shape[1]).index_add_(0, index, rows)
        present = rows.new_zeros(count).index_add_(0, index, there.double())
        rows = sums / present.clamp(min=1)[:, None]
    largest = rows.abs().amax(1, keepdim=True).clamp(min=1e-300)  # so that squares neither over- nor underflow
    norms = largest * torch.linalg.vector_norm(rows / largest, dim=1, keepdim=True)
    factors: Tensor = (bound * (1 - _MARGIN) / norms).clamp(max=1)
    return (rows * factors).sum(0)


def joined(total: ClippedSum, sides: dict[str, tuple[Tensor, float]]) -> ClippedSum:
    """The sum with further blocks: of each, its total and the bound of one unit's part in it."""
    if not sides:
        return total
    return replace(
        total,
        sum=total.sum | {name: value for name, (value, _) in sides.items()},
        bounds=total.bounds | {name: bound for name, (_, bound) in sides.items()},
        blocks=total.blocks | {name: (name,) for name in sides},
    )


def split(
    paid: float, bounds: dict[str, float], shares: dict[str, float], policy: object, units: int
) -> dict[str, float] | None:
    """The noise of each block, relative to its bound, that together is what was paid for: sum 1/z_i^2 = 1/paid^2.

    A block with the share rho of the budget (of mu^2) has z = paid / sqrt(rho). The gradient has what is left; its own
    blocks have the same noise in every coordinate. The count of an adaptive clip (Andrew et al., 2021) has a standard
    deviation of a twentieth of the units, which is a tenth of them relative to its bound of 1/2, and at least twice the
    gradient's multiplier, so that the latter grows by 15% at most.
    """
    if not shares and not isinstance(policy, AdaptiveQuantile):
        return None
    rest = paid / (1 - sum(shares.values())) ** 0.5
    found = {name: paid / share**0.5 for name, share in shares.items()}
    if isinstance(policy, AdaptiveQuantile):
        found[_COUNT] = max(units / 10, 2 * rest)
        rest = (rest**-2 - found[_COUNT] ** -2) ** -0.5
    own = {name: bound for name, bound in bounds.items() if name not in found}
    together = sum(bound**2 for bound in own.values()) ** 0.5
    return found | {name: rest * together / bound for name, bound in own.items()}
