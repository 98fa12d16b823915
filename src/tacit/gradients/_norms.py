"""Squared norms that may be trusted: never too small, whatever the rounding, overflow or underflow.

Sums in float32 are kept short (a few dozen terms) and the short sums are added in float64, so that errors do not grow
with the number of entries. Where float32 rounds, its worst case in any order of summation is added (Higham, Accuracy
and Stability of Numerical Algorithms, section 3.1: n terms are off by at most n u of the sum of their magnitudes).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tacit._locks import ForkSafeLock
from tacit.gradients import _kernels

_PRECISIONS: list[Any] = [  # of matrix products, on GPUs and in oneDNN
    backend.matmul
    for backend in (torch.backends.cuda, torch.backends.mkldnn)
    if hasattr(getattr(backend, "matmul", None), "fp32_precision")
]
_BUDGET = 1 << 22  # numbers in one Gram matrix stack, or in one copy in float64
_SHORT = 32  # terms of a sum in float32
_WIDTH = 128  # terms of a scalar product in float32
_UNIT = 2.0**-24  # the rounding of one operation in float32
# So much of (sum_t |u_t| |v_t|)^2 is added in float64: it limits how far positions may cancel (see `ClippedSum`).
_FLOOR = 2.0**-44
_GRAM_FLOOR = 40 * _UNIT  # and so much in float32, at least, where a unit has several positions


_inside: list[list[str]] = []  # for each thread inside `full_precision` what the first of them has found
_deciding = ForkSafeLock()


@contextmanager
def full_precision() -> Iterator[None]:
    """Products of float32 in float32, whatever the user has allowed for speed (TF32, bfloat16): bounds rest on it.

    The switches are the process's: of several threads inside, the last one to leave puts back what the first has found.
    In a forked child those threads never leave, and it stays precise.
    """
    with _deciding.held():
        _inside.append(_inside[0] if _inside else [each.fp32_precision for each in _PRECISIONS])
        _set(["ieee"] * len(_PRECISIONS))
    try:
        yield
    finally:
        with _deciding.held():
            before = _inside.pop()
            if not _inside:
                _set(before)


def _set(precisions: list[str]) -> None:
    for each, value in zip(_PRECISIONS, precisions, strict=True):
        if each.fp32_precision != value:
            each.fp32_precision = value


def square_norms(values: Tensor, *, repair: bool = True) -> Tensor:
    """Squared L2 norm of every row of a matrix, in float64.

    Without `repair`, rows that float32 is too narrow for are infinite, and nothing waits for the device.

    Formal guarantee: never below the true value (above it by at most a relative 5e-6), for any number of entries.
    Squares that overflow are computed again in float64; squares that underflow lose at most the smallest normal number
    each, which is added.
    """
    if values.dtype == torch.float64:
        return _scaled_square_norms(values)
    values = _kernels.in_lines(values.float())  # in 16 bits sums of squares would round by more than is allowed for
    exact = _kernels.square_norms(values)
    if exact is not None:  # float64 from the start: nothing to repair
        return _kernels.trusted(exact, values.shape[1])
    whole = values.shape[1] // _SHORT * _SHORT
    found = values.new_zeros(values.shape[0], dtype=torch.float64)
    if whole and values.shape[0]:
        short = values[:, :whole].reshape(values.shape[0], -1, _SHORT)
        for part in torch.split(short, max(1, _BUDGET // values.shape[0]), dim=1):
            found += torch.linalg.vector_norm(part, dim=2).double().square_().sum(1)
    if whole < values.shape[1]:
        found += torch.linalg.vector_norm(values[:, whole:], dim=1).double().square_()
    found *= 1 + (_SHORT + 4) * _UNIT  # squares, their sums, the root
    found += values.shape[1] * torch.finfo(values.dtype).tiny
    if not repair:
        return torch.where(found < 1e30, found, torch.inf)
    suspect = ~(found < 1e30)
    if not bool(suspect.any()):
        return found
    return _again(found, suspect, lambda rows: _scaled_square_norms(values[rows]))


def ghost_square_norms(u: Tensor, v: Tensor) -> Tensor:
    """Squared norm of sum_t u_t v_t^T for each n, from Gram matrices; u (n, L, m) and v (n, L, k).

    Formal guarantee: not below the true value, and at least 40 * 2^-24 of S^2 in float32 (2^-44 in
    float64) for S = sum_t |u_t| |v_t|. Gram sums can cancel, so the bound of their rounding, in units of S^2, is added.
    """
    return ghost_norms(u, v, run=0)[0]


def ghost_norms(u: Tensor, v: Tensor, *, run: int, repair: bool = True) -> tuple[Tensor, Tensor | None]:
    """`ghost_square_norms`, and which n were too large for float32 and computed in float64 (None: none).

    Without `repair` these are infinite, and nothing waits for the device.

    Formal guarantee: for every other n the root is also not below the norm of the matrix that is formed in float32, in
    runs of at most `run` positions that are then added up exactly. Such a matrix is off by at most r S, r = run 2^-24
    / (1 - run 2^-24) (Higham, section 3.5, for any order of summation), and (true + r S)^2 <= true^2 + (2 r + r^2) S^2.
    """
    if u.dtype == torch.float64 and v.dtype == torch.float64:
        return _scaled_ghost(u, v), None
    length = u.shape[1]
    if length == 1 and _kernels.serves(u, v):  # as without `repair`, or one large row would change others' last bits
        found = _kernels.outer_norms(u, v)
    elif length == 1:
        found = torch.mul(*(square_norms(t[:, 0].float(), repair=repair) for t in (u, v)))
    elif _kernels.serves(u, v):
        found = _ghost_in_place(u, v, run)
    else:
        step = max(1, _BUDGET // max(length * length, 1))
        parts = [_ghost(u[i : i + step].float(), v[i : i + step].float(), run) for i in range(0, u.shape[0], step)]
        found = torch.cat(parts) if len(parts) != 1 else parts[0]
    if not repair:
        return torch.where(found < 1e30, found, torch.inf), None
    return repaired(found, u, v)


def built_norms(u: Tensor, v: Tensor, *, run: int, repair: bool = True) -> tuple[Tensor, Tensor | None]:
    """What `ghost_norms` computes, from the matrices themselves: cheaper than Gram matrices of very many positions.

    Formal guarantee: as that of `ghost_norms`. A matrix of L positions that is formed in float32 is off by at most
    g S, g = L 2^-24 / (1 - L 2^-24), so its norm + (g + r) S is not below the true norm + r S; and 40 * 2^-24 of S^2
    is added, as where norms come from Gram matrices, which limits how far positions may cancel. L products and their
    sums lose at most 2 L 2^-126 of an entry by underflow, also where denormals are flushed to zero, in this matrix and
    in those of runs.
    """
    length, size = u.shape[1], u.shape[2] * v.shape[2]
    if torch.float64 in (u.dtype, v.dtype) or length * _UNIT > 0.1:
        return ghost_norms(u, v, run=run, repair=repair)
    error = sum(terms * _UNIT / (1 - terms * _UNIT) for terms in (length + 2, run + 2))
    lost = 4.04 * length * math.sqrt(size) * torch.finfo(torch.float32).tiny
    parts = []
    for us, vs in zip(*(torch.split(t, max(1, _BUDGET // max(size, 1))) for t in (u, v)), strict=True):
        us, vs = us.float(), vs.float()
        norms = square_norms(torch.bmm(us.mT, vs).flatten(1), repair=False).sqrt_()
        lengths = (torch.linalg.vector_norm(t, dim=2, dtype=torch.float64) for t in (us, vs))
        most = torch.mul(*lengths).sum(1)
        parts.append(norms.add_(most, alpha=1.01 * error).add_(lost).square_().add_(most.square_(), alpha=_GRAM_FLOOR))
    found = torch.cat(parts) if parts else u.new_zeros(0, dtype=torch.float64)
    return repaired(found, u, v) if repair else (torch.where(found < 1e30, found, torch.inf), None)


def repaired(found: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
    """Squared norms with those n in float64 that were too large for float32, and which these are (None: none)."""
    suspect = ~(found < 1e30)
    if not bool(suspect.any()):
        return found, None
    floor = _FLOOR if u.shape[1] == 1 else _GRAM_FLOOR
    return _again(found, suspect, lambda rows: _scaled_ghost(u[rows].double(), v[rows].double(), floor)), suspect


def _ghost(u: Tensor, v: Tensor, run: int) -> Tensor:
    left, right = _gram(u), _gram(v)
    largest = torch.maximum(left.diagonal(dim1=1, dim2=2).amax(1), right.diagonal(dim1=1, dim2=2).amax(1))
    most = _cauchy(left, right)
    total = _long_sum(left.mul_(right).flatten(1))
    roundings = _terms(u) + _terms(v) + _SHORT + 4 + 2 * run
    found = total.clamp_(min=0).add_(most, alpha=1.01 * _UNIT * roundings)
    # A large factor next to one whose square underflows: the Gram matrices cannot tell, float64 can.
    return torch.where(largest < 1e20, found + _underflow(u, v, largest), torch.inf)


def _ghost_in_place(u: Tensor, v: Tensor, run: int) -> Tensor:
    """As `_ghost`, with no Gram matrix in memory: scalar products round less often, everything else is float64."""
    total, most, largest = _kernels.ghost(u, v)
    roundings = _kernels.roundings(u.shape[2]) + _kernels.roundings(v.shape[2]) + _SHORT + 4 + 2 * run
    found = total.clamp_(min=0).add_(most, alpha=1.01 * _UNIT * roundings)
    return torch.where(largest < 1e20, found + _underflow(u, v, largest), torch.inf)


def _underflow(u: Tensor, v: Tensor, largest: Tensor) -> Tensor:
    """What Gram matrices can lose below the smallest normal number, also where denormals are flushed to zero.

    A scalar product of w terms, with its partial sums, loses at most 2 w 2^-126; it is multiplied by one that is at
    most `largest`, or by what that one has lost itself, and there are L^2 of each; their product may underflow, too.
    """
    terms, least = 2 * (u.shape[2] + v.shape[2] + 1), torch.finfo(torch.float32).tiny
    return (
        (largest.double() + terms * least)
        .mul_(1.01 * u.shape[1] ** 2 * terms * least)
        .add_(2 * u.shape[1] ** 2 * least)
    )


def _gram(t: Tensor) -> Tensor:
    """Every scalar product of two positions, added up in short runs: that keeps the worst case of its rounding low."""
    first, *others = torch.split(t, _WIDTH, dim=2)
    total = torch.bmm(first, first.mT)
    for part in others:
        total += torch.bmm(part, part.mT)
    return total


def _terms(t: Tensor) -> int:
    """How often `_gram` rounds on the way to one entry."""
    return min(t.shape[2], _WIDTH) + math.ceil(t.shape[2] / _WIDTH)


def _cauchy(left: Tensor, right: Tensor) -> Tensor:
    """(sum_t |u_t| |v_t|)^2, which is all that the products of two Gram matrices can add up to."""
    sizes = left.diagonal(dim1=1, dim2=2) * right.diagonal(dim1=1, dim2=2)
    return sizes.double().sqrt_().sum(1).square_()


def _long_sum(values: Tensor) -> Tensor:
    """The sum of every row, short runs in float32 and these in float64."""
    whole = values.shape[1] // _SHORT * _SHORT
    found = values[:, whole:].double().sum(1)
    return found + values[:, :whole].reshape(values.shape[0], -1, _SHORT).sum(2).double().sum(1) if whole else found


def _scaled_ghost(u: Tensor, v: Tensor, floor: float = _FLOOR) -> Tensor:
    u, left = _to_unit_scale(u)
    v, right = _to_unit_scale(v)
    most = (u.norm(dim=2) * v.norm(dim=2)).sum(1).square_()
    if u.shape[2] * v.shape[2] < u.shape[1] * (u.shape[2] + v.shape[2]):
        found = torch.bmm(u.mT, v).square_().sum((1, 2))
    else:
        found = torch.bmm(u, u.mT).mul_(torch.bmm(v, v.mT)).sum((1, 2)).clamp_(min=0)
    rounding = 2.0**-53 * (u.shape[1] + u.shape[2] + v.shape[2] + 4)
    return found.add_(most, alpha=floor + rounding) * (left * right).square_()


def _scaled_square_norms(values: Tensor) -> Tensor:
    """In float64, whatever the magnitudes; some columns at a time, because a copy is twice as large."""
    if values.shape[1] == 0:
        return values.new_zeros(values.shape[0], dtype=torch.float64)
    scale = values.abs().amax(1).double()
    safe = torch.where(scale > 0, scale, torch.ones_like(scale))
    found = torch.zeros_like(safe)
    for part in torch.split(values, max(1, _BUDGET // max(values.shape[0], 1)), dim=1):
        found += (part.double() / safe[:, None]).square_().sum(1)
    return found * safe.square_()


def _to_unit_scale(values: Tensor) -> tuple[Tensor, Tensor]:
    """Divide each entry of the first dimension by its largest magnitude."""
    if values[0:1].numel() == 0:
        return values, values.new_ones(values.shape[0])
    scale = values.abs().flatten(1).amax(1)
    safe = torch.where(scale > 0, scale, torch.ones_like(scale))
    return values / safe.reshape(-1, *[1] * (values.dim() - 1)), safe


def _again(found: Tensor, suspect: Tensor, again: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute the suspect rows again, slowly."""
    rows = torch.nonzero(suspect).flatten()
    found[rows] = again(rows)
    return found
