"""A clipped sum, its bounds, and what only the curator may see."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tacit.gradients._clipping import Policy
from tacit.gradients._grad_factors import PerUnit, Settled
from tacit.gradients._norms import full_precision, square_norms
from tacit.gradients._units import Units

_SMALL = 1 << 12  # gradients per unit below this size are handled together


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Switches autocast off where it is on: the switch itself costs as much as a small layer."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


@dataclass(frozen=True, repr=False)
class RowOutputs:
    """What the loss function returned beside the losses, one entry per row of the batch."""

    values: Tensor
    known: Tensor  # for each row, whether its entry was computed; it was not where the row failed, or went alone

    def put(self, rows: Tensor, values: Tensor, good: Tensor) -> None:
        """Note the entries of some rows, those that are good."""
        if not bool(good.all()):
            rows, values = rows[good], values[good]
        self.values.index_copy_(0, rows, values)
        self.known[rows] = True


@dataclass(frozen=True, repr=False)
class Private:
    """Facts about private rows, for the curator alone."""

    norms: Tensor  # one per unit, in the order of the labels; rounded up, never down
    factors: Tensor
    outputs: RowOutputs | None = None  # if the loss function returned a pair, and rows were computed together

    @property
    def clipped(self) -> float:
        """The share of units that were scaled down."""
        return float((self.factors < 1).double().mean()) if self.factors.numel() else 0.0

    @property
    def nonfinite(self) -> int:
        """How many units had a gradient that was not finite; they contributed nothing."""
        return int((~torch.isfinite(self.norms)).sum())

    def __repr__(self) -> str:
        return "Private(…)"


@dataclass(frozen=True)
class ClippedSum:
    """The sum over units of their clipped gradients.

    Formal guarantee: what one unit adds to the entries `blocks[b]` of `sum`, taken together, has L2 norm at most
    `bounds[b]`. A sum without bounds is not private and must not be released as such.

    Rounding: a unit's contribution may be formed in float32, where that depends on no other unit (a gradient that is
    built, a product over its own positions): norms allow for its rounding (`square_norms`, `ghost_norms`). Everything
    that several units share is float64, until it is released. Each entry rounds at most R times on its way (a run of
    4,096 terms, outer products or rows, or a unit's positions, then the runs, then the parts of a batch: R <= 2^13), so
    the sum of n units is off by at most E = R 2^-53 n k bound, where k = max_u f_u S_u / bound, f_u is unit u's factor
    and S_u = sum_t |a_t| |b_t| over the outer products a_t b_t^T of its gradient. k is 1 where gradients are built or
    have one position; else Gram norms in float32 are at least 2^-9.4 S_u, so that k <= 650; in float64, and of matrices
    that are built for units of several rows, they are at least 2^-22 S_u, and k <= 4.2e6. Two neighbouring sums differ
    by their rounding, too, by 2E at most. Factors stay below the bound by `clipping.MARGIN` = 1e-5, which covers 2E for
    n k <= 5.5 million: 170,000 units whose positions cancel 32-fold, 8,500 of which every one cancels as far as float32
    can tell. Beyond that the worst case exceeds the bound by 2E - 1e-5, in proportion to n; nothing is refused, for the
    number of units in a batch is private.

    What is not covered: a row's gradient is computed by the model, in the model's own dtype, and a kernel may give a
    row other last bits in a batch of another size (see `Engine`).

    Args:
        sum: Parameter name -> sum of clipped gradients. Private until released.
        bounds: Block name -> L2 bound of one unit's contribution. Public.
        blocks: Block name -> the names in it.
        private: Norms, share clipped, non-finite count and the loss function's other outputs: for the curator only.
    """

    sum: dict[str, Tensor] = field(repr=False)
    bounds: dict[str, float]
    blocks: dict[str, tuple[str, ...]] = field(repr=False)
    private: Private = field(repr=False)

    def __add__(self, other: ClippedSum) -> ClippedSum:
        """The sum over the units of both; no unit may be in both, or it would count twice."""
        if (self.bounds, self.blocks) != (other.bounds, other.blocks):
            raise ValueError("Sums of different parameters, or with different bounds, cannot be added.")
        norms, factors = (
            torch.cat([getattr(self.private, each), getattr(other.private, each)]) for each in ("norms", "factors")
        )
        total = {name: value + other.sum[name] for name, value in self.sum.items()}
        return ClippedSum(total, self.bounds, self.blocks, Private(norms, factors))


class ClippedSumAccumulator:
    """Adds up parts of a batch under one policy."""

    def __init__(self, policy: Policy, like: Mapping[str, Tensor], units: int) -> None:
        self._policy = policy
        self._like = dict(like)
        self._blocks = policy.blocks(tuple(like))
        self._total: dict[str, Tensor] = {}
        self._extra: dict[str, Tensor] = {}
        self._extra_bounds: dict[str, float] = {}
        device = next(iter(like.values())).device
        self._norms = torch.zeros(units, dtype=torch.float64, device=device)
        self._factors = torch.ones(units, dtype=torch.float64, device=device)
        self._units = units
        self._outputs: RowOutputs | None = None
        self._note_extra(dict.fromkeys(self._blocks, self._norms[:0]), None)

    def zeros(self) -> dict[str, Tensor]:
        """A gradient of nothing, in float64."""
        return {name: torch.zeros_like(value, dtype=torch.float64) for name, value in self._like.items()}

    def add(
        self,
        settled: dict[str, Settled],
        units: Units,
        members: Tensor,
        losses: Tensor,
        silent: Tensor | None = None,
    ) -> None:
        """Clip and add the units of one pass, those that are `silent` as zeros in place; empties `settled`."""
        # sums in bfloat16 would break the bound, and so would products in TF32
        with torch.no_grad(), without_autocast(losses.device), full_precision():
            self._add(settled, units, members, losses, silent)

    def note_outputs(self, outputs: Tensor | None, rows: Tensor, good: Tensor, count: int) -> None:
        """Keep what the loss function returned beside the losses for some of the `count` rows of the batch."""
        if outputs is None:
            return
        if self._outputs is None:
            known = torch.zeros(count, dtype=torch.bool, device=rows.device)
            self._outputs = RowOutputs(outputs.new_zeros(count, *outputs.shape[1:]), known)
        self._outputs.put(rows, outputs, good)

    def another(self, units: int) -> ClippedSumAccumulator:
        """An empty tally of the same parameters under the same policy."""
        return ClippedSumAccumulator(self._policy, self._like, units)

    def leave_out(self, members: Tensor) -> None:
        """Units that contribute nothing."""
        self._norms[members], self._factors[members] = torch.inf, 0.0

    def _add(
        self, settled: dict[str, Settled], units: Units, members: Tensor, losses: Tensor, silent: Tensor | None
    ) -> None:
        packs = {block: _Pack(names, settled, units) for block, names in self._blocks.items()}
        norms = {block: pack.square_norms.sqrt() for block, pack in packs.items()}
        certain = silent is None and len(packs) == 1 and all(pack.finite for pack in packs.values())
        factors, bad = self._decide(norms, members, losses, silent, certain=certain)
        for block, pack in packs.items():
            for name, value in pack.weighted_sums(factors[block], bad):
                if name in self._total:
                    self._total[name] += value
                else:
                    self._total[name] = value

    def add_built(self, gradient: dict[str, Tensor], member: Tensor, loss: Tensor) -> None:
        """Clip and add one unit whose gradient was built."""
        one = Units.singletons(1, loss.device)
        self.add({name: PerUnit(value[None]) for name, value in gradient.items()}, one, member, loss)

    def result(self) -> ClippedSum:
        missing = {name: value for name, value in self._like.items() if name not in self._total}
        total = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in missing.items()} | self._total
        total = self._policy.finish({name: total[name] for name in self._like}, self._units)
        bounds = self._policy.bounds(self._blocks)
        blocks = dict(self._blocks)
        if bounds:
            bounds |= self._extra_bounds
        for name, value in self._extra.items():
            if name in total:
                raise ValueError(
                    f"A parameter is called {name!r}, like a block of the clip policy: rename the parameter."
                )
            total[name], blocks[name] = value, (name,)
        return ClippedSum(total, bounds, blocks, Private(self._norms, self._factors, self._outputs))

    def _decide(
        self, norms: dict[str, Tensor], members: Tensor, losses: Tensor, silent: Tensor | None, *, certain: bool
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """The factor of each unit and block; zero for a unit with a gradient that is not finite.

        `certain`: nobody is silent, and all norms are known to be finite.
        """
        each = list(norms.values())
        overall = torch.stack(each).square().sum(0).sqrt() if len(each) > 1 else each[0]
        if silent is not None:
            overall = overall.masked_fill(silent, torch.inf)
        bad = None if certain else ~torch.isfinite(overall)
        if bad is not None and not bool(bad.any()):
            bad = None
        factors = {
            block: factor
            if _suits(factor, norms[block])
            else torch.as_tensor(factor).to(norms[block]).expand_as(norms[block])
            for block, factor in self._policy.factors(norms, losses.double()).items()
        }
        if bad is not None:
            factors = {block: factor.masked_fill(bad, 0) for block, factor in factors.items()}
        every = list(factors.values())
        least = every[0] if len(every) == 1 else torch.stack(every).amin(0)
        if len(members) == self._units:  # all of them, in order
            self._norms, self._factors = overall, least
        else:
            self._norms[members], self._factors[members] = overall, least
        self._note_extra(norms, bad)
        return factors, bad

    def _note_extra(self, norms: dict[str, Tensor], bad: Tensor | None) -> None:
        for name, (values, bound) in self._policy.extra(norms).items():
            found = (values if bad is None else values.masked_fill(bad, 0)).sum()
            self._extra[name] = self._extra.get(name, torch.zeros_like(found)) + found
            self._extra_bounds[name] = bound


def _suits(factor: Any, norms: Tensor) -> bool:
    """Whether a policy's factors are one float64 for each unit: compiled kernels would read others as if they were."""
    return isinstance(factor, Tensor) and factor.dtype == norms.dtype and factor.shape == norms.shape


class _Pack:
    """The gradients of one block; the small ones side by side in one matrix: one sum instead of many."""

    def __init__(self, names: tuple[str, ...], settled: dict[str, Settled], units: Units) -> None:
        self._units = units
        self._large: dict[str, Settled] = {}
        small: dict[str, Tensor] = {}
        for name in names:
            piece = settled.pop(name, None)
            if isinstance(piece, PerUnit) and piece.values.numel() <= _SMALL * len(piece.values):
                small[name] = piece.values
            elif piece is not None:
                self._large[name] = piece
        self._shapes = {name: value.shape[1:] for name, value in small.items()}
        flat = [value if value.dim() == 2 else value.reshape(units.count, -1) for value in small.values()]
        self._small = None if not flat else flat[0] if len(flat) == 1 else torch.cat(flat, 1)
        self.square_norms = self._square_norms(repair=False)
        self.finite = not units.count or float(self.square_norms.max()) < math.inf  # a maximum with NaN is NaN
        if not self.finite:  # asked once, not for each layer: a GPU would wait
            self.square_norms = self._square_norms(repair=True)

    def _square_norms(self, *, repair: bool) -> Tensor:
        squares = [piece.square_norms(self._units, repair=repair) for piece in self._large.values()]
        if self._small is not None:
            squares.append(square_norms(self._small, repair=repair))
        if not squares:
            return torch.zeros(self._units.count, dtype=torch.float64, device=self._units.of_row.device)
        for each in squares[1:]:  # one after another: how torch adds up columns depends on how many there are
            squares[0] += each
        return squares[0]

    def weighted_sums(self, factors: Tensor, bad: Tensor | None) -> list[tuple[str, Tensor]]:
        found = [(name, self._large.pop(name).weighted_sum(factors, self._units, bad)) for name in list(self._large)]
        if self._small is not None:
            flat = PerUnit(self._small).weighted_sum(factors, self._units, bad)
            sizes = [shape.numel() for shape in self._shapes.values()]
            parts = zip(self._shapes.items(), torch.split(flat, sizes), strict=True)
            found += [(name, part if len(shape) == 1 else part.reshape(shape)) for (name, shape), part in parts]
        return found
