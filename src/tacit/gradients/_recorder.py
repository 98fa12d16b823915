"""The recorder: collects, during one forward and one backward, what each parameter's rule saw."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from tacit.gradients._grad_factors import Factored, Lookup, PerRow, PerUnit, Piece, Settled, join, wide
from tacit.gradients._traced_parameter import Target, TracedParameter
from tacit.gradients._traced_parameter import UnsupportedPattern as UnsupportedPattern
from tacit.gradients._units import Units
from tacit.gradients._zero_positions import Live, ZeroPositions, chooses

T = TypeVar("T")
STACKED = -1  # in place of a dimension: all rows come one after another, once for each view, as from torch.cat
# A kind of call: the function, the parameters, and how many dimensions the other tensors have.
Call = tuple[Any, tuple[str, ...], tuple[int, ...]]


@dataclass
class Plan:
    """What was determined once, on synthetic rows, and holds for every batch."""

    batch_dim: dict[str, int] = field(default_factory=dict)  # where the rows are; 0 unless found otherwise
    enters: dict[Call, bool] = field(default_factory=dict)
    rowed: dict[Call, tuple[bool, ...]] = field(default_factory=dict)  # slow path: which arguments have rows
    folds: dict[Any, Counter[tuple[str, int]] | None] = field(default_factory=dict)  # by the shapes of a row
    checked: dict[Any, int] = field(default_factory=dict)  # how many rows at a time, by the shapes of a row
    specimens: dict[Any, Any] = field(default_factory=dict)  # synthetic rows that passed, by the shapes of a row
    served: dict[str, str] = field(default_factory=dict)  # parameter -> rule
    constants: frozenset[int] = frozenset()  # storages of buffers and frozen parameters
    said: set[tuple[str, str]] = field(default_factory=set)  # slow paths of which a warning was given
    reached: set[str] = field(default_factory=set)  # parameters that the loss was seen to reach, in any circumstances
    coarse: bool = False  # whether the rules saw bfloat16 or float16
    kept: dict[Any, float] = field(
        default_factory=dict
    )  # bytes per row until the sum is formed, by the shapes of a row
    zeros: ZeroPositions = field(default_factory=ZeroPositions)  # positions without a gradient, by structure
    largest: float = 0.0  # numbers in the largest batch that was checked
    numbers: set[int] = field(default_factory=set)  # what the model and the loss could decide by, as hashes
    by_row: bool = False  # nothing but plain autograd, row by row, serves this model
    quiet: bool = False  # no warnings: what is checked now was chosen by private rows
    looked: set[Any] = field(
        default_factory=set
    )  # private batches, by shapes and which integers vary, that were checked
    learning: bool = True

    def forget(self) -> None:
        """Start again with another number of rows."""
        for learnt in (self.batch_dim, self.enters, self.rowed, self.folds, self.served, self.kept):
            learnt.clear()
        self.zeros.forget()


class Recorder:
    """Watches one pass. Rules call `record` from inside the backward."""

    def __init__(self, parameters: dict[str, Tensor], units: Units, plan: Plan) -> None:
        self.parameters = parameters
        self.units = units
        self.plan = plan
        self.anchor = torch.zeros((), requires_grad=True)  # makes every watched output part of the graph
        self.settled: dict[str, Settled] = {}
        self._pieces: dict[str, list[Piece]] = defaultdict(list)
        self._computed: list[tuple[Target, Piece]] = []
        self._leaves: dict[str, Tensor] = {}
        self.folds: Counter[tuple[str, int]] = Counter()
        self._uses: Counter[str] = Counter()
        self._forward = True
        self.outputs: Tensor | None = None  # what the loss function returned beside the losses
        self._fixed = False  # while looking for zero positions: no place is chosen by values
        self._left_out: list[Tensor] = []  # how much of what was left out as zero is not
        self.closed = False  # after the pass: a handle that the model kept is a plain value

    def handle(self, name: str) -> TracedParameter:
        return TracedParameter.of(self.parameters[name], self, (name,))

    def leaf(self, name: str) -> Tensor:
        """A copy of the parameter that starts a graph, for what is computed from parameters alone."""
        if name not in self._leaves:
            self._leaves[name] = self.parameters[name].detach().requires_grad_()
        return self._leaves[name]

    # -- during the forward

    def enters(self, func: Any, args: Any, kwargs: Any, handles: list[TracedParameter], others: list[Tensor]) -> bool:
        """Whether here the parameter meets the rows of the batch (otherwise it is computed on alone)."""
        call = call_of(func, others, handles)
        if self.plan.learning:
            found = any(self._has_rows(t) for t in others) or _expands(func, args, kwargs, handles, self.units.rows)
            self.learns(self.plan.enters, call, found)
        elif call not in self.plan.enters:  # a branch that no synthetic row took: shapes alone would be a guess
            raise UnsupportedPattern(call[1][0])
        return self.plan.enters[call]

    def learns(self, known: dict[Call, T], call: Call, found: T) -> None:
        """Note what a kind of call does; two calls of a kind that do different things cannot be distinguished later."""
        if known.setdefault(call, found) != found:
            raise UnsupportedPattern(call[1][0])

    def uses(self, value: Any, rule: str) -> Target | None:
        """Note that a rule serves this argument; None if it is not a trainable one."""
        if not isinstance(value, TracedParameter):
            return None
        target = value.target
        if self._forward:
            self._uses.update(target.names)
        if self.plan.learning:
            for name in target.names:
                self.plan.served.setdefault(name, rule)
        return target

    def count_uses(self, names: tuple[str, ...]) -> None:
        """As `uses`, once everything is determined."""
        if self._forward:
            for name in names:
                self._uses[name] += 1

    def without_rule(self, func: Any, args: Any, kwargs: Any, handles: list[TracedParameter]) -> Any:
        from tacit.gradients._fallback import per_row_by_vmap

        return per_row_by_vmap(self, func, args, kwargs, handles)

    def _has_rows(self, tensor: Tensor) -> bool:
        if tensor.dim() == 0 or tensor.numel() == 0:
            return False
        rows = self.units.rows
        if rows > 1 and tensor.shape[0] == rows and tensor.stride(0) == 0:  # a constant, repeated for every row
            return True
        fits = tensor.shape[0] % rows == 0 or rows in tensor.shape[1:2]
        folded = tensor.requires_grad and tensor.dim() > 1 and tensor.shape[1] % rows == 0  # computed from rows
        return (fits or folded) and tensor.untyped_storage().data_ptr() not in self.plan.constants

    def forward_done(self, losses: Tensor) -> None:
        self._forward = False
        self._fixed = self.plan.zeros.looking and not chooses(losses)

    # -- during the backward

    def rows_first(self, target: Target, tensor: Tensor) -> Tensor:
        """(…rows…) -> (rows, rest of that dimension, …)."""
        self.learns_rows(target, tensor)
        dim = self.plan.batch_dim[target.names[0]]
        rows = self.units.rows
        if dim == STACKED:
            tensor, dim = self.whole_rows(target, tensor), 0
        if dim >= tensor.dim() or tensor.shape[dim] % rows or tensor.shape[dim] == 0:
            raise UnsupportedPattern(target.names[0])
        if dim:
            tensor = tensor.movedim(dim, 0)
        self.folds[target.names[0], tensor.shape[0] // rows] += 1
        return tensor.reshape(rows, tensor.shape[0] // rows, *tensor.shape[1:])

    def in_front(self, target: Target, tensor: Tensor) -> bool:
        """Whether rows are known to be in the first dimension, each in one piece: then nothing needs to be moved."""
        known = not self.plan.learning and self.plan.batch_dim.get(target.names[0], 1) == 0
        return known and tensor.shape[0] % self.units.rows == 0 and tensor.shape[0] > 0

    def whole_rows(self, target: Target, tensor: Tensor) -> Tensor:
        """What belongs to a row side by side in the first dimension, where all rows may come once for each view."""
        dim, rows = self.plan.batch_dim.get(target.names[0], 0), self.units.rows
        if dim not in (0, STACKED) or tensor.dim() == 0 or tensor.shape[0] % rows:
            raise UnsupportedPattern(target.names[0])
        if dim == 0 or tensor.shape[0] == rows:
            return tensor
        return tensor.reshape(-1, rows, *tensor.shape[1:]).transpose(0, 1).flatten(0, 1)

    def live(self, target: Target, g: Tensor) -> Live | None:
        """Which positions of an output gradient (rows, positions, features) can be other than zero; None: any."""
        if g.dim() != 3 or g.shape[0] != self.units.rows or target.origin is not None:
            return None
        name, zeros = target.names[0], self.plan.zeros
        if self.plan.batch_dim.get(name, 0) or self._uses[name] != 1:
            return None
        if zeros.looking:
            zeros.look(name, g, self._fixed)
            return None
        found = zeros.live(name, g.shape[1], g.device)
        if found is not None:
            self._left_out += found.left_out(g)
        return found

    def learns_rows(self, target: Target, tensor: Tensor) -> None:
        """While learning: find the dimension that the rows are in."""
        if not self.plan.learning:
            return
        name, rows = target.names[0], self.units.rows
        dim = self.plan.batch_dim.setdefault(name, 0)
        if dim == 0 and tensor.shape[0] % rows and rows in tensor.shape[1:3]:
            self.plan.batch_dim[name] = 1 + tensor.shape[1:3].index(rows)

    def saw(self, itemsize: int) -> None:
        """While learning: note in how many bytes a number the model computes, also where a rule goes on in more."""
        if self.plan.learning:
            self.plan.coarse |= itemsize < 4

    def record(self, target: Target, piece: Piece) -> None:
        """Keep what one use of a parameter contributes, in its cheapest form."""
        self.saw(piece.itemsize)
        if target.origin is not None:
            self._computed.append((target, piece))
            return
        name = target.names[0]
        if self._uses[name] == 1 and name not in self.settled:
            self.settled[name] = piece.settle(self.units)
        else:
            self._pieces[name].append(piece)

    # -- afterwards

    def backward_done(self) -> None:
        """Join the uses of each parameter."""
        if self._left_out and not bool((torch.stack(self._left_out) == 0).all()):
            raise UnsupportedPattern(next(iter(self._uses)))
        for target, piece in self._computed:
            self._pull_back(target, piece)
        for name, pieces in self._pieces.items():
            pieces += [self.settled[name]] if name in self.settled else []
            self.settled[name] = join(pieces, self.units)
        self._computed.clear()
        self._pieces.clear()
        self._leaves.clear()

    def forget(self) -> None:
        """Let go of what was recorded: the graph holds this recorder, and factors hold the graph."""
        self.settled.clear()
        self._pieces.clear()
        self._computed.clear()

    @contextmanager
    def forgotten_on_error(self) -> Iterator[None]:
        """A pass that raises leaves nothing in memory."""
        try:
            yield
        except BaseException:
            self.forget()
            raise

    def _pull_back(self, target: Target, piece: Piece) -> None:
        """From the gradient of a computed value to those of its parameters, unit by unit."""
        if target.origin is None:
            raise ValueError(f"{target.names[0]} was not computed from parameters: there is nothing to pull back to.")
        if target.lines is not None and isinstance(piece, PerRow):
            self._pieces[target.names[0]].append(self._at_lines(target, target.lines, piece))
            return
        whole = len(target.names) == 1 and _same_entries(target.origin, self.parameters[target.names[0]])
        if whole and isinstance(piece, Factored | PerRow | PerUnit):
            self._pieces[target.names[0]].append(_reshaped(piece, self.parameters[target.names[0]].shape))
            return
        values = piece.settle(self.units).build(self.units).values
        leaves = [self.leaf(name) for name in target.names]
        values = values.reshape(-1, *target.origin.shape).to(target.origin.dtype)
        found = torch.autograd.grad(
            target.origin, leaves, values, retain_graph=True, allow_unused=True, is_grads_batched=True
        )
        for name, grad in zip(target.names, found, strict=True):
            if grad is not None:
                self._pieces[name].append(PerUnit(wide(grad)))

    def _at_lines(self, target: Target, lines: Tensor, piece: PerRow) -> Piece:
        rows, table = self.units.rows, self.parameters[target.names[0]]
        ids = lines.reshape(1, -1).expand(rows, -1)
        return Lookup(ids, piece.values.reshape(rows, ids.shape[1], -1), tuple(table.shape))


def _same_entries(origin: Tensor, parameter: Tensor) -> bool:
    """Whether a computed value is the parameter itself in another shape: all entries, in the same order."""
    same_place = origin.data_ptr() == parameter.data_ptr() and origin.dtype == parameter.dtype
    return same_place and origin.numel() == parameter.numel() and origin.is_contiguous() and parameter.is_contiguous()


def _reshaped(piece: Factored | PerRow | PerUnit, shape: torch.Size) -> Piece:
    """The same gradient in the shape of the parameter."""
    if isinstance(piece, Factored):
        return Factored(piece.u, piece.v, tuple(shape))
    return type(piece)(piece.values.reshape(-1, *shape))


def call_of(func: Any, others: list[Tensor], handles: list[TracedParameter]) -> Call:
    if len(handles) == 1:
        names = handles[0].__dict__["target"].names
    else:
        names = tuple(name for h in handles for name in h.target.names)
    return func, names, tuple([t.dim() for t in others])


def _expands(func: Any, args: Any, kwargs: Any, handles: list[TracedParameter], rows: int) -> bool:
    """Whether the function repeats the parameter once per row (a class token)."""
    if func not in EXPANDING:
        return False
    before = handles[0].plain
    after = func(*[a.plain if isinstance(a, TracedParameter) else a for a in args], **kwargs)
    if after.dim() == 0 or after.shape[0] % rows:
        return False
    return bool(after.dim() > before.dim() or before.shape[0] == 1)


EXPANDING = {
    torch.Tensor.expand,
    torch.Tensor.expand_as,
    torch.Tensor.repeat,
    torch.Tensor.broadcast_to,
    torch.broadcast_to,
    torch.Tensor.tile,
    torch.tile,
}
