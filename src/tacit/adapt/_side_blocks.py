"""What rides on a step's release beside the gradient: one bounded vector per unit, its sum, its share of the noise."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tacit.gradients import AdaptiveQuantile, ClippedSum, PerUnit, Units, square_norms

_MARGIN = 1e-5  # that the sums' rounding stays below the bound, as for gradients
_COUNT = "count"  # the block in which AdaptiveQuantile tells how many were below the bound


def bounded_total(values: Tensor, bound: float, units: Tensor | None, mute: Tensor | None) -> Tensor:
    """The sum over units of their mean row, each scaled down to L2 norm `bound`.

    Formal guarantee: each unit adds a vector of norm at most `bound`, whatever its rows hold, and changes nothing of
    what others add: rows that are muted or not finite are zeros in their place, and the sum is float64. Norms are never
    below the true ones (`gradients.square_norms`); a unit whose norm float64 cannot square adds zero. Rounding is that
    of `gradients.ClippedSum`: factors stay 1e-5 below the bound.

    Args:
        values: One row each.
        bound: The L2 bound.
        units: Whose each row is; by default each row is a unit.
        mute: Rows that contribute nothing.

    Returns:
        The sum, float64.
    """
    rows = values.detach()
    if units is not None:
        rows, mute = _mean_rows(rows, units, mute), None
    factors = (bound * (1 - _MARGIN) / square_norms(rows).sqrt_()).clamp_(max=1)
    heard = factors > 0  # not where the norm is infinite, or not a number
    if mute is not None:
        heard = heard & ~mute.to(heard.device)
    silent = None if bool(heard.all()) else ~heard
    if silent is not None:
        factors = factors.masked_fill(silent, 0.0)
    return PerUnit(rows).weighted_sum(factors, Units.singletons(len(rows), rows.device), silent)


def _mean_rows(rows: Tensor, units: Tensor, mute: Tensor | None) -> Tensor:
    """Every unit's mean row, in float64, over those of its rows that are finite and take part; zeros if none does."""
    rows = rows.double()
    there = torch.isfinite(rows).all(1)
    if mute is not None:
        there = there & ~mute.to(there.device)
    rows = torch.where(there[:, None], rows, 0.0)
    index: Tensor = torch.unique(units.to(rows.device), return_inverse=True)[1]
    count = int(index.max()) + 1 if len(index) else 0
    sums = rows.new_zeros(count, rows.shape[1]).index_add_(0, index, rows)
    present = rows.new_zeros(count).index_add_(0, index, there.double())
    return sums / present.clamp(min=1)[:, None]


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
