"""The gradient of a parameter, one per privacy unit, in the form that costs least.

A rule of `layers` hands over what it saw as one of three pieces:

- `PerRow`: the gradient of every row, built (small parameters: norms, biases, tokens);
- `Factored`: outer products, one per position; the gradient of a row is sum_t u_t v_t^T and need not be built;
- `Lookup`: an embedding; position t adds g_t to line ids_t of the table.

A piece knows two things: the squared norm of each unit's gradient, and the weighted sum over units. The weighted sum is
in float64, products and all: in float32 its rounding would grow with the units and positions until it exceeds what one
unit contributes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tacit.gradients._norms import ghost_square_norms, square_norms
from tacit.gradients._units import Units

# What writing and reading back one number costs, in multiplications. It decides between building a unit's
# gradient and the Gram matrices; the result is the same.
TRAFFIC = 40
_CHUNK = 1 << 20  # numbers in float64 at a time
_RUN = (
    1 << 12
)  # outer products in one run of additions: runs are added to each other, which rounds less than one long run


def wide(values: Tensor) -> Tensor:
    """At least float32: in bfloat16, rounding alone would break the clip bound."""
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values


@dataclass
class PerRow:
    """The gradient of each row, built: (rows, *shape)."""

    values: Tensor

    @property
    def itemsize(self) -> int:
        return self.values.dtype.itemsize

    def settle(self, units: Units) -> PerUnit:
        return PerUnit(units.mean(wide(self.values)))


@dataclass
class PerUnit:
    """The mean gradient of each unit, built: (units, *shape)."""

    values: Tensor

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    @property
    def itemsize(self) -> int:
        return self.values.dtype.itemsize

    def settle(self, units: Units) -> PerUnit:  # noqa: ARG002
        return self

    def build(self, units: Units) -> PerUnit:  # noqa: ARG002
        return self

    def square_norms(self, units: Units) -> Tensor:  # noqa: ARG002
        return square_norms(self.values.reshape(len(self.values), -1))

    def weighted_sum(self, weights: Tensor, units: Units, bad: Tensor | None) -> Tensor:  # noqa: ARG002
        values = self.values[:, None] if self.values.dim() == 1 else self.values.flatten(1)
        total = weights.new_empty(values.shape[1])
        step = max(1, _CHUNK // max(len(values), 1))
        for part, columns in zip(torch.split(total, step), torch.split(values, step, dim=1), strict=True):
            if bad is not None:
                columns = columns.masked_fill(bad[:, None], 0)
            torch.mv(columns.double().T, weights, out=part)
        return total.reshape(self.values.shape[1:])


@dataclass
class Factored:
    """sum_t u_t v_t^T over positions: u (rows, positions, m) and v (rows, positions, n), for a weight of `shape`."""

    u: Tensor
    v: Tensor
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.u.nbytes + self.v.nbytes

    @property
    def itemsize(self) -> int:
        return self.u.dtype.itemsize

    def settle(self, units: Units) -> Factored | PerUnit:
        """Build each unit's gradient at once where that is cheaper than keeping the factors."""
        positions = self.u.shape[1] * units.rows / max(units.count, 1)
        m, n = self.u.shape[2], self.v.shape[2]
        cheaper = TRAFFIC * m * n < positions * positions * (m + n)
        smaller = m * n <= 2 * positions * (m + n)
        return self.build(units) if cheaper and smaller else self

    def build(self, units: Units) -> PerUnit:
        u, v = wide(self.u), wide(self.v)
        out = u.new_empty(units.count, u.shape[2], v.shape[2])
        for members, (us, vs) in units.stacks(u, v):
            scale = us.shape[1] // max(self.u.shape[1], 1)
            built = torch.bmm(us.mT, vs)
            if scale > 1:
                built /= scale
            if members is None:
                out = built
            else:
                out[members] = built
        return PerUnit(out.reshape(units.count, *self.shape))

    def square_norms(self, units: Units) -> Tensor:
        out = torch.zeros(units.count, dtype=torch.float64, device=self.u.device)
        for members, (us, vs) in units.stacks(self.u, self.v):
            scale = max(us.shape[1] // max(self.u.shape[1], 1), 1)
            found = ghost_square_norms(us, vs) / scale**2
            if members is None:
                out = found
            else:
                out[members] = found
        return out

    def weighted_sum(self, weights: Tensor, units: Units, bad: Tensor | None) -> Tensor:
        u, v = self.u, self.v
        per_row = units.to_rows(weights)[:, None, None]
        if bad is not None:
            dropped = bad[units.of_row][:, None, None]
            u, v = u.masked_fill(dropped, 0), v.masked_fill(dropped, 0)
        # In chunks, because a large copy costs more to allocate than to compute.
        length = max(u.shape[1], 1)
        step = max(1, min(_CHUNK // (length * max(u.shape[2], v.shape[2], 1)), _RUN // length))
        total = weights.new_zeros(u.shape[2], v.shape[2])
        for us, vs, ws in zip(torch.split(u, step), torch.split(v, step), torch.split(per_row, step), strict=True):
            us, vs = us.double(), vs.double()
            us, vs = (us * ws, vs) if u.shape[2] <= v.shape[2] else (us, vs * ws)
            total.addmm_(us.flatten(0, 1).T, vs.flatten(0, 1))
        return total.reshape(self.shape)


@dataclass
class Lookup:
    """Line ids_t of the table receives g_t: ids (rows, positions), g (rows, positions, width), table of `shape`."""

    ids: Tensor
    g: Tensor
    shape: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        return self.g.dtype.itemsize

    def settle(self, units: Units) -> Lines:
        """Add up what each unit sends to each line."""
        lines, width = self.shape
        g = wide(self.g).reshape(-1, width)
        owner = units.of_row[:, None].expand_as(self.ids).reshape(-1)
        keys, where = torch.unique(owner * lines + self.ids.reshape(-1), return_inverse=True)
        values = g.new_zeros(keys.shape[0], width).index_add_(0, where, g)
        owners = keys // lines
        if not units.trivial:
            values = values / units.sizes[owners, None].to(values.dtype)
        return Lines(owners, keys % lines, values, self.shape)

    def build(self, units: Units) -> PerUnit:
        return self.settle(units).build(units)


@dataclass
class Lines:
    """The lines of a table that each unit touches: unit `owners[k]` sends `values[k]` to line `lines[k]`."""

    owners: Tensor
    lines: Tensor
    values: Tensor
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    @property
    def itemsize(self) -> int:
        return self.values.dtype.itemsize

    def settle(self, units: Units) -> Lines:  # noqa: ARG002
        return self

    def build(self, units: Units) -> PerUnit:
        table = self.values.new_zeros(units.count, *self.shape)
        table[self.owners, self.lines] = self.values
        return PerUnit(table)

    def square_norms(self, units: Units) -> Tensor:
        found = torch.zeros(units.count, dtype=torch.float64, device=self.values.device)
        return found.index_add_(0, self.owners, square_norms(self.values))

    def weighted_sum(self, weights: Tensor, units: Units, bad: Tensor | None) -> Tensor:  # noqa: ARG002
        values = self.values
        if bad is not None:
            values = values.masked_fill(bad[self.owners, None], 0)
        scaled = values * weights[self.owners, None]
        return weights.new_zeros(self.shape).index_add_(0, self.lines, scaled)


Piece = PerRow | Factored | Lookup | PerUnit | Lines
Settled = PerUnit | Factored | Lines


def join(pieces: Sequence[Piece], units: Units) -> Settled:
    """The gradient of a parameter used several times: the sum of its uses, so that the norm is the joint one."""
    first = pieces[0]
    if len(pieces) == 1:
        return first.settle(units)
    if isinstance(first, Factored) and all(isinstance(p, Factored) for p in pieces):
        factored = [p for p in pieces if isinstance(p, Factored)]
        u, v = torch.cat([p.u for p in factored], 1), torch.cat([p.v for p in factored], 1)
        return Factored(u, v, first.shape).settle(units)
    if isinstance(first, Lookup) and all(isinstance(p, Lookup) for p in pieces):
        looked = [p for p in pieces if isinstance(p, Lookup)]
        return Lookup(torch.cat([p.ids for p in looked], 1), torch.cat([p.g for p in looked], 1), first.shape).settle(
            units
        )
    built = [(p.settle(units) if isinstance(p, PerRow) else p.build(units)).values for p in pieces]
    return PerUnit(torch.stack(built).sum(0))
