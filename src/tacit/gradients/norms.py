"""Squared norms that may be trusted: never too small, whatever the rounding, overflow or underflow."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_BUDGET = 1 << 22  # numbers in one Gram matrix stack


def square_norms(values: Tensor) -> Tensor:
    """Squared L2 norm of every row of a matrix, in float64.

    Formal guarantee: never below the true value by more than a relative 1e-6. Squares that overflow are computed again
    in float64; squares that underflow lose at most the smallest normal number each, which is added.
    """
    if values.dtype == torch.float64:
        return _scaled_square_norms(values)
    found = torch.linalg.vector_norm(values, dim=1).double().square_()
    found += values.shape[1] * torch.finfo(values.dtype).tiny
    return _repair(found, ~(found < 1e30), lambda rows: _scaled_square_norms(values[rows]))


def ghost_square_norms(u: Tensor, v: Tensor) -> Tensor:
    """Squared norm of sum_t u_t v_t^T for each n, from Gram matrices; u (n, L, m) and v (n, L, k).

    Formal guarantee: not below the true value by more than a relative 1e-5. Gram sums can cancel, so a bound of their
    rounding, in units of S = sum_t |u_t| |v_t|, is added (Higham, Accuracy and Stability, section 3.1).
    """
    if u.dtype == torch.float64 and v.dtype == torch.float64:
        return _scaled_ghost(u, v)
    length = u.shape[1]
    if length == 1:
        found = square_norms(u[:, 0].float()) * square_norms(v[:, 0].float())
    else:
        step = max(1, _BUDGET // max(length * length, 1))
        parts = [_ghost(u[i : i + step].float(), v[i : i + step].float()) for i in range(0, u.shape[0], step)]
        found = torch.cat(parts) if len(parts) != 1 else parts[0]
    return _repair(found, ~(found < 1e30), lambda rows: _scaled_ghost(u[rows].double(), v[rows].double()))


def _ghost(u: Tensor, v: Tensor) -> Tensor:
    left, right = torch.bmm(u, u.mT), torch.bmm(v, v.mT)
    largest = torch.maximum(left.diagonal(dim1=1, dim2=2).amax(1), right.diagonal(dim1=1, dim2=2).amax(1))
    found = _with_rounding(left, right, u.shape[2] + v.shape[2])
    # A large factor next to one whose square underflows: the Gram matrices cannot tell, float64 can.
    return torch.where(largest < 1e20, found, torch.inf)


def _with_rounding(left: Tensor, right: Tensor, width: int) -> Tensor:
    """The sum of products of two Gram matrices, rounded up; overwrites the first."""
    length = left.shape[1]
    sizes = left.diagonal(dim1=1, dim2=2) * right.diagonal(dim1=1, dim2=2)
    most = sizes.double().sqrt_().sum(1).square_()
    total = left.mul_(right).sum((1, 2)).double()
    return total.clamp_(min=0).add_(most, alpha=torch.finfo(left.dtype).eps * (4 + (width + length) / 16))


def _scaled_ghost(u: Tensor, v: Tensor) -> Tensor:
    u, left = _to_unit_scale(u)
    v, right = _to_unit_scale(v)
    if u.shape[2] * v.shape[2] < u.shape[1] * (u.shape[2] + v.shape[2]):
        found = torch.bmm(u.mT, v).square_().sum((1, 2))
    else:
        left_gram, right_gram = torch.bmm(u, u.mT), torch.bmm(v, v.mT)
        found = _with_rounding(left_gram, right_gram, u.shape[2] + v.shape[2])
    return found * (left * right).square_()


def _scaled_square_norms(values: Tensor) -> Tensor:
    values, scale = _to_unit_scale(values.double())
    return values.square().sum(1) * scale.square_()


def _to_unit_scale(values: Tensor) -> tuple[Tensor, Tensor]:
    """Divide each entry of the first dimension by its largest magnitude."""
    if values[0:1].numel() == 0:
        return values, values.new_ones(values.shape[0])
    scale = values.abs().flatten(1).amax(1)
    safe = torch.where(scale > 0, scale, torch.ones_like(scale))
    return values / safe.reshape(-1, *[1] * (values.dim() - 1)), safe


def _repair(found: Tensor, suspect: Tensor, again: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute the suspect rows again, slowly."""
    if bool(suspect.any()):
        rows = torch.nonzero(suspect).flatten()
        found[rows] = again(rows)
    return found
