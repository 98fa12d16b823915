"""The gradient of a parameter, one per privacy unit, in the form that costs least.

A rule of `layers` hands over what it saw as one of three pieces:

- `PerRow`: the gradient of every row, built (small parameters: norms, biases, tokens);
- `Factored`: outer products, one per position; the gradient of a row is sum_t u_t v_t^T and need not be built;
- `Lookup`: an embedding; position t adds g_t to line ids_t of the table.

A piece knows two things: the squared norm of each unit's gradient, and the weighted sum over units. Units are added up
in float64: in float32 the rounding would grow with the units until it exceeds what one unit contributes. What is formed
of one unit alone (a gradient that is built, a product over its positions) may be float32: its rounding depends on
no other unit, and the norms allow for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tacit.gradients import _kernels
from tacit.gradients._large_sums import zeros
from tacit.gradients._norms import built_norms, ghost_norms, repaired, square_norms
from tacit.gradients._units import Units

# What writing and reading back one number costs, in multiplications. It decides between building a unit's
# gradient and the Gram matrices; the result is the same.
TRAFFIC = 40
_CHUNK = 1 << 20  # numbers in float64 at a time
_RUN = 1 << 12  # terms in one run of additions: runs are added to each other, which rounds less than one long run
_LONGEST = 128  # positions in one product in float32
_FEWEST = 8  # positions in one, where a kernel adds it up as it goes
_FEW = 4  # rows whose products are formed together
_ADDING, _CALLING = 16, 400_000  # what adding an entry to the sum costs, and starting a product: in multiplications


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

    def square_norms(self, units: Units, *, repair: bool = True) -> Tensor:  # noqa: ARG002
        return square_norms(self.values.reshape(len(self.values), -1), repair=repair)

    def weighted_sum(self, weights: Tensor, units: Units, bad: Tensor | None) -> Tensor:  # noqa: ARG002
        values = self.values[:, None] if self.values.dim() == 1 else self.values.flatten(1)
        found = _kernels.row_sum(values, weights, bad)
        if found is not None:
            return found.reshape(self.values.shape[1:])
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
    _normed: bool = field(default=False, init=False)  # whether norms were computed that allow for float32
    _large: Tensor | None = field(default=None, init=False)  # units that float32 is too narrow for
    _built: list[tuple[Tensor, Tensor]] = field(default_factory=list, init=False)  # units, their mean gradients' sums

    @property
    def nbytes(self) -> int:
        return self.u.nbytes + self.v.nbytes

    @property
    def itemsize(self) -> int:
        return self.u.dtype.itemsize

    def settle(self, units: Units) -> Factored | PerUnit:
        """Build each unit's gradient at once where that is cheaper than keeping the factors.

        The shape of a row decides: how many rows others have must not change how a unit is computed.
        """
        positions, m, n = self.u.shape[1], self.u.shape[2], self.v.shape[2]
        smaller = m * n <= 2 * positions * (m + n)
        return self.build(units) if self._cheaper_built(positions) and smaller else self

    def _cheaper_built(self, positions: int) -> bool:
        m, n = self.u.shape[2], self.v.shape[2]
        return TRAFFIC * m * n < positions * positions * (m + n)

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

    def square_norms(self, units: Units, *, repair: bool = True) -> Tensor:
        if self.u.shape[1] == 1 and not repair and units.trivial and _kernels.serves(self.u, self.v):
            return _kernels.outer_norms(self.u, self.v)  # nothing is multiplied in float32 then: see `_run`
        run = self._run()
        out = torch.zeros(units.count, dtype=torch.float64, device=self.u.device)
        large = torch.zeros_like(out, dtype=torch.bool)
        self._built.clear()
        for members, (us, vs) in units.stacks(self.u, self.v):
            scale = max(us.shape[1] // max(self.u.shape[1], 1), 1)
            built = scale > 1 and self._cheaper_built(us.shape[1])  # by the unit's own number of rows
            places = torch.arange(units.count) if members is None else members
            if built and (formed := _formed(us, vs)) is not None:
                found, outside = self._keep(formed, us, vs, places, repair)
            else:
                found, outside = (built_norms if built else ghost_norms)(us, vs, run=run, repair=repair)
            if outside is not None:
                large[places] = outside
                self._large = large
            out[places] = found / scale**2
        self._normed = run > 0
        return out

    def _keep(
        self, formed: tuple[Tensor, Tensor], us: Tensor, vs: Tensor, places: Tensor, repair: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Keep gradients that were built, which are then added up as they are; what `ghost_norms` returns.

        Formal guarantee: what is added is the matrix whose norm this is, so no rounding of its products matters. Only
        units that float32 is too narrow for go back to their factors, whoever else is there.
        """
        values, found = formed
        if not repair:
            self._built.append((places, values))
            return torch.where(found < 1e30, found, torch.inf), None
        found, outside = repaired(found, us, vs)
        self._built.append((places, values) if outside is None else (places[~outside], values[~outside]))
        return found, outside

    def weighted_sum(self, weights: Tensor, units: Units, bad: Tensor | None) -> Tensor:
        if not self._built:
            return self._sum_of_factors(weights, units, bad)
        others = torch.ones(units.count, dtype=torch.bool)
        total = weights.new_zeros(self.shape)
        for places, values in self._built:
            others[places] = False
            share, left_out = weights[places] / units.sizes[places], None if bad is None else bad[places]
            total += PerUnit(values).weighted_sum(share, units, left_out).reshape(self.shape)
        if bool(others.any()):
            total += self._sum_of_factors(weights, units, ~others if bad is None else bad | ~others)
        return total

    def _sum_of_factors(self, weights: Tensor, units: Units, bad: Tensor | None) -> Tensor:
        if self._normed:
            return self._sum_by_row(weights, units, bad)
        u, v, per_row = self.u, self.v, units.to_rows(weights)
        if u.shape[1] == 1 and _kernels.serves(u, v):
            dropped = None if bad is None else bad[units.of_row]
            return _kernels.outer_sum(u, v, per_row, dropped).reshape(self.shape)
        per_row = per_row[:, None, None]
        if bad is not None:
            dropped = bad[units.of_row][:, None, None]
            u, v = u.masked_fill(dropped, 0), v.masked_fill(dropped, 0)
        # In chunks, because a large copy costs more to allocate than to compute.
        length = max(u.shape[1], 1)
        step = max(1, min(_CHUNK // (length * max(u.shape[2], v.shape[2], 1)), _RUN // length))
        total: Tensor | None = None
        for us, vs, ws in zip(torch.split(u, step), torch.split(v, step), torch.split(per_row, step), strict=True):
            us, vs = us.double(), vs.double()
            us, vs = (us * ws, vs) if u.shape[2] <= v.shape[2] else (us, vs * ws)
            left, right = us.flatten(0, 1).T, vs.flatten(0, 1)
            total = left @ right if total is None else total.addmm_(left, right)
        return (weights.new_zeros(u.shape[2], v.shape[2]) if total is None else total).reshape(self.shape)

    def _run(self) -> int:
        """How many positions of a row to multiply in float32 before adding in float64; 0: all in float64.

        On a CPU float64 costs twice as much as float32, and on most GPUs far more; what is saved has to pay for adding
        up. The norms have to know, because they allow for the rounding: see `ghost_norms`. Only the shapes of a row
        decide: who else is there must not change how a row is computed.
        """
        if self.u.dtype == torch.float64 or self.v.dtype == torch.float64:
            return 0
        positions, size = self.u.shape[1], self.u.shape[2] * self.v.shape[2]
        run = math.ceil(positions / max(math.ceil(positions / _LONGEST), 1))
        if _kernels.kernels_in_use() and self.u.device.type == "cpu":  # adding up costs next to nothing there
            return run if run >= _FEWEST else 0
        return run if (run - _ADDING) * size > _CALLING else 0

    def _sum_by_row(self, weights: Tensor, units: Units, bad: Tensor | None) -> Tensor:
        """Each row's product over its positions in float32, in runs that `square_norms` allowed for."""
        run, large = self._run(), self._large
        u, v, weights = wide(self.u), wide(self.v), units.to_rows(weights)
        if large is not None and bad is not None:
            large = large & ~bad
        left_out = bad if large is None else large if bad is None else large | bad
        if left_out is not None:
            left_out = left_out[units.of_row]
        add = _kernels.weighted_sum if _kernels.serves(u, v) else _few if u.device.type == "cpu" else _many
        total, step = None, max(1, _RUN // math.ceil(u.shape[1] / run))
        for i in range(0, len(u), step):
            some = slice(i, i + step)
            found = add(u[some], v[some], weights[some], None if left_out is None else left_out[some], run)
            total = found if total is None else total.add_(found)
        if total is None:
            total = weights.new_zeros(u.shape[2], v.shape[2])
        if large is not None:  # too large for float32
            for row in torch.nonzero(large[units.of_row]).flatten():
                total += (u[row].double() * weights[row]).T @ v[row].double()
        return total.reshape(self.shape)


def _formed(us: Tensor, vs: Tensor) -> tuple[Tensor, Tensor] | None:
    """The gradients of units of so many positions and their squared norms, if they are no larger than their factors."""
    (_, positions, m), k = us.shape, vs.shape[2]
    if m * k > positions * (m + k):
        return None
    return _kernels.built(us, vs, math.ceil(positions / math.ceil(positions / _LONGEST)))


def _few(u: Tensor, v: Tensor, weights: Tensor, left_out: Tensor | None, run: int) -> Tensor:
    """sum_n w_n sum_t u_nt v_nt^T: on a CPU, where a few products at a time stay in the caches and share the cores."""
    total = weights.new_zeros(u.shape[2], v.shape[2])
    dropped = set() if left_out is None else set(torch.nonzero(left_out).flatten().tolist())
    factors = weights.tolist()
    products = u.new_empty(_FEW, u.shape[2], v.shape[2])
    for first in range(0, len(u), _FEW):
        some = slice(first, min(first + _FEW, len(u)))
        for us, vs in zip(torch.split(u[some], run, dim=1), torch.split(v[some], run, dim=1), strict=True):
            formed = torch.bmm(us.mT, vs, out=products[: len(us)])
            for n, product in enumerate(formed, first):
                if n not in dropped:
                    total.add_(product, alpha=factors[n])
    return total


def _many(u: Tensor, v: Tensor, weights: Tensor, left_out: Tensor | None, run: int) -> Tensor:
    """The same for other devices, many units at a time and without waiting for the device."""
    if left_out is not None:
        u, v = u.masked_fill(left_out[:, None, None], 0), v.masked_fill(left_out[:, None, None], 0)
        weights = weights.masked_fill(left_out, 0)
    total = weights.new_zeros(u.shape[2] * v.shape[2])
    step = max(1, _CHUNK * 16 // max(total.numel(), 1))
    for us, vs, ws in zip(torch.split(u, step), torch.split(v, step), torch.split(weights, step), strict=True):
        for a, b in zip(torch.split(us, run, dim=1), torch.split(vs, run, dim=1), strict=True):
            total.addmv_(torch.bmm(a.mT, b).flatten(1).double().T, ws)
    return total.reshape(u.shape[2], v.shape[2])


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

    def square_norms(self, units: Units, *, repair: bool = True) -> Tensor:
        found = torch.zeros(units.count, dtype=torch.float64, device=self.values.device)
        return found.index_add_(0, self.owners, square_norms(self.values, repair=repair))

    def weighted_sum(self, weights: Tensor, units: Units, bad: Tensor | None) -> Tensor:  # noqa: ARG002
        values = self.values
        if bad is not None:
            values = values.masked_fill(bad[self.owners, None], 0)
        scaled = values * weights[self.owners, None]
        return zeros(self.shape, weights).index_add_(0, self.lines, scaled)


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
