"""Training the last blocks alone: what the frozen blocks below give is computed once for each row and cached.

Activations are as private as the rows they come from: they stay in memory, or in a file that has lost its name by the
time that anything is written to it, and that is gone when nothing refers to it or the process ends, however it ends.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tacit._curator import Curator
from tacit._refusals import Refusal
from tacit.data import Records, Rows, TensorRecords, synthetic_rows
from tacit.finetune._features import LATE, Backbone, space_for
from tacit.finetune._one_pass import OnePass
from tacit.finetune._reading import Later, likeness, to, where_of
from tacit.finetune._sources import read_records
from tacit.finetune._tasks import outputs_of
from tacit.models import blocks_of
from tacit.privacy import Unit

ACTIVATIONS = "cached_activations"  # the key among a row's inputs
_OTHER = (
    "These activations were cached of another model, or for another number of blocks: cache them again with "
    "finetune.cache_blocks(model, data, last_blocks=...)."
)


class LowerBlocks(nn.Module):
    """A model up to one of its blocks: what comes into that block; nothing behind it runs.

    Args:
        model: The model.
        first: The number of the block, from 0.
    """

    def __init__(self, model: nn.Module, first: int) -> None:
        super().__init__()
        self.model, self.first = model, first

    def forward(self, inputs: Any) -> Tensor:
        def reached(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            raise _Reached(_first_argument(args, kwargs))

        hook = blocks_of(self.model)[self.first][1].register_forward_pre_hook(reached, with_kwargs=True)
        try:
            outputs_of(self.model, inputs)
        except _Reached as found:
            return found.value
        finally:
            hook.remove()
        raise Refusal("The model does not run the block from which on it is to be trained.")


class UpperBlocks(nn.Module):
    """A model from one of its blocks on: it takes rows of `CachedBlocks`, and runs none of the blocks below.

    Whatever stands before the first block runs as well, on the row (a text) or on a blank one (an image), and what it
    gives is not used.

    Args:
        model: The model.
        first: The number of the first block that runs, from 0.
        blank: One blank row, for a model that takes a tensor; None for one that takes a mapping.
    """

    def __init__(self, model: nn.Module, first: int, blank: Tensor | None) -> None:
        super().__init__()
        self.model, self.first = model, first
        self.blank: Tensor | None
        self.register_buffer("blank", blank, persistent=False)

    def forward(self, activations: Tensor | None = None, /, **inputs: Tensor) -> Any:
        cached = inputs.pop(ACTIVATIONS) if activations is None else activations
        with self._resumed(cached):
            if self.blank is None:
                return self.model(**inputs)
            return self.model(self.blank.expand(len(cached), *self.blank.shape[1:]))

    @contextmanager
    def _resumed(self, cached: Tensor) -> Iterator[None]:
        """The first block takes `cached`; those below hand on what they are given."""
        blocks = [block for _, block in blocks_of(self.model)]
        below = blocks[: self.first]
        own = [block.__dict__.get("forward") for block in below]

        def instead(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            if args:
                return (cached, *args[1:]), kwargs
            return args, {**kwargs, next(iter(kwargs)): cached}

        hook: RemovableHandle = blocks[self.first].register_forward_pre_hook(instead, with_kwargs=True)
        try:
            for block in below:
                block.forward = _handed_on
            yield
        finally:
            hook.remove()
            for block, forward in zip(below, own, strict=True):
                if forward is None:
                    del block.forward
                else:
                    block.forward = forward


class CachedBlocks:
    """Records whose rows carry what comes into the first trained block; made by `cache_blocks`.

    Args:
        records: The records that the activations are of.
        activations: One for each row.
        last_blocks: How many blocks run on them.
        probe: Activations of synthetic rows: how a cache is recognised as one of this model.
    """

    def __init__(self, records: TensorRecords, activations: Activations, last_blocks: int, probe: Tensor) -> None:
        self.records, self.last_blocks = records, last_blocks
        self._activations, self._probe = activations, probe
        self._places = records.with_inputs(torch.arange(len(records.labels())))
        self._named = _is_named(records)
        self.unit, self.uniforms, self.most_rows = records.unit, records.uniforms, records.most_rows
        self.scored_by: Literal["row", "unit"] = records.scored_by
        self.sizes: Tensor | None = getattr(records, "sizes", None)
        self.draws, self.varies = self._named and records.draws, records.varies
        self.synthetic = self._synthetic if hasattr(records, "synthetic") else None

    @property
    def unit_ids(self) -> list[int] | list[str] | None:
        return self.records.unit_ids

    def __len__(self) -> int:
        return len(self.records)

    def labels(self) -> Tensor:
        return self.records.labels()

    def rows(self, units: Tensor, uniforms: Tensor | None) -> Rows:
        places = TensorRecords.rows(self._places, units, uniforms)
        cached = self._activations.read(places.inputs)
        if not self._named:
            return places._replace(inputs=cached)
        rows = self.records.rows(units, uniforms)
        return rows._replace(inputs={**rows.inputs, ACTIVATIONS: cached})

    def blank(self, size: int | None = None) -> Rows:
        """One row that says nothing."""
        found: Rows = self.records.blank(size)  # type: ignore[attr-defined]
        return self._with(found, lambda shape: torch.zeros(shape, dtype=self._activations.dtype))

    def _synthetic(self) -> Rows:
        generator = torch.Generator().manual_seed(0)
        found: Rows = self.records.synthetic()  # type: ignore[attr-defined]
        return self._with(found, lambda shape: torch.randn(shape, generator=generator).to(self._activations.dtype))

    def _with(self, rows: Rows, make: Any) -> Rows:
        count, size = next(iter(rows.inputs.values())).shape[:2]
        return rows._replace(inputs={**rows.inputs, ACTIVATIONS: make((count, size, *self._activations.rest))})

    def fingerprint(self) -> str:
        return self.records.fingerprint()

    def check(self, probe: Tensor, last_blocks: int) -> None:
        """Refuse a model whose lower blocks give something else."""
        same = last_blocks == self.last_blocks and probe.shape == self._probe.shape
        if not same or not torch.allclose(probe, self._probe, rtol=1e-3, atol=1e-4):
            raise Refusal(_OTHER)


class Activations:
    """Activations of rows, kept size by size where rows differ in size, and padded with zeros as they are read.

    Args:
        sizes: The size of each row (the first length of its activations); None: all are of one shape.
        count: The number of rows.
        folder: Where what is larger than a gigabyte is kept; it goes when this does.
    """

    def __init__(self, sizes: Tensor | None, count: int, folder: tempfile.TemporaryDirectory[str]) -> None:
        self._sizes = torch.zeros(count, dtype=torch.long) if sizes is None else sizes
        self._sized, self._folder = sizes is not None, folder
        self._place = torch.zeros(count, dtype=torch.long)
        self._kept: dict[int, Tensor] = {}
        for size in sorted(set(self._sizes.tolist())):
            mine = torch.nonzero(self._sizes == size).flatten()
            self._place[mine] = torch.arange(len(mine))

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self._kept.values())).dtype

    @property
    def rest(self) -> tuple[int, ...]:
        """The shape of a row's activations behind its size."""
        return tuple(next(iter(self._kept.values())).shape[2:])

    def keep(self, rows: Tensor, values: Tensor) -> None:
        """Activations of some rows, which are of one size."""
        size = int(self._sizes[rows[0]])
        if self._sized and (values.dim() < 3 or values.shape[1] != size):
            raise Refusal("The blocks of this model do not keep the length of a text: leave last_blocks= out.")
        if size not in self._kept:
            shape = (int((self._sizes == size).sum()), *values.shape[1:])
            self._kept[size] = space_for(shape, values.dtype, Path(self._folder.name) / f"blocks-{size}")
        self._kept[size][self._place[rows]] = values

    def read(self, rows: Tensor) -> Tensor:
        """Those of some rows, in their order."""
        sizes = self._sizes[rows]
        if not self._sized or len(sizes) == 0 or bool((sizes == sizes[0]).all()):
            kept = next(iter(self._kept.values())) if len(sizes) == 0 else self._kept[int(sizes[0])]
            return kept[self._place[rows]]
        found = torch.zeros(len(rows), int(sizes.max()), *self.rest, dtype=self.dtype)
        for size in sorted(set(sizes.tolist())):
            mine = torch.nonzero(sizes == size).flatten()
            found[mine, :size] = self._kept[size][self._place[rows[mine]]]
        return found


def cache_blocks(
    model: nn.Module,
    data: Any,
    *,
    last_blocks: int,
    unit: Unit | str | None = None,
    unit_ids: Any = None,
    rows_each: int | None = None,
    curator: Curator | None = None,
    strict: bool = False,
    workers: int = 0,
) -> CachedBlocks:
    """Run the blocks of a model below its last ones over each row, once; `fit(last_blocks=...)` goes on from there.

    `fit` does it by itself. Doing it beforehand pays where several runs share the rows: `data=` of each is what is
    returned here. Activations are private: beyond a gigabyte they lie in a temporary file, 0600, that loses its name
    before anything is written to it, so that it is gone when the process ends, also if it is killed (not on Windows,
    where a file in use keeps its name: there a killed process leaves it behind).

    Args:
        model: The model, with the weights that `fit` will get.
        data: As in `fit`; rows that are not augmented.
        last_blocks: How many blocks are to be trained.
        unit: The kind of unit, as in `fit`.
        unit_ids: One label per row, as in `fit`.
        rows_each: The most rows of a unit shown in one step.
        curator: Called with a `tacit.ErrorEvent` if rows cannot be used.
        strict: A row that cannot be read is refused (as in a run with `checkpoint=`) instead of counting as nothing.
        workers: Processes that read rows.

    Returns:
        Records to train on.

    Raises:
        RowsMixed: What comes into the first trained block for a row depends on other rows.
        ValueError: The model cannot be cut there, or its rows have no activations of their own.
    """
    named = None if unit is None else Unit(unit)
    table = read_records(data, named, unit_ids=unit_ids, rows_each=rows_each, model=model, curator=curator)
    if getattr(table, "augmented", False) or not isinstance(table, TensorRecords):
        raise Refusal("Activations are cached of tensors, data sets and texts that are not augmented.")
    model.eval()
    first = first_block(model, last_blocks)
    lower = LowerBlocks(model, first)
    probe = _check_cut(model, first, table, curator)
    over = OnePass(lower, table, curator, strict=strict, workers=workers)
    folder = tempfile.TemporaryDirectory(prefix="tacit-blocks-")  # 0700: no other user can read it
    kept = Activations(getattr(table, "row_sizes", None), len(table.labels()), folder)
    try:
        for rows, values in over:
            kept.keep(rows, values)
    except Later:
        raise Refusal(LATE) from None
    return CachedBlocks(table, kept, last_blocks, probe)


def first_block(model: nn.Module, last_blocks: int) -> int:
    """The number of the first of the last blocks."""
    there = len(blocks_of(model))
    if not isinstance(last_blocks, Integral) or isinstance(last_blocks, bool) or not 1 <= last_blocks < there:
        raise Refusal(f"last_blocks is whole, at least 1 and below the number of blocks, {there}; got {last_blocks!r}.")
    return there - last_blocks


def freeze_below(model: nn.Module, first: int, inputs: Any) -> None:
    """Freeze every parameter that what comes into a block depends on: found in the graph, not by name."""
    each = {name: p for name, p in model.named_parameters() if p.is_floating_point()}
    wanted = {name: p.requires_grad for name, p in each.items()}
    with torch.enable_grad():
        for p in each.values():
            p.requires_grad_(True)
        found = LowerBlocks(model, first)(inputs)
        reached = torch.autograd.grad(found.sum(), list(each.values()), allow_unused=True)
    inside = {id(p) for _, block in blocks_of(model)[:first] for p in block.parameters()}
    for (name, p), gradient in zip(each.items(), reached, strict=True):
        p.requires_grad_(wanted[name] and gradient is None and id(p) not in inside)
    if not any(p.requires_grad for p in model.parameters()):
        raise Refusal("The scheme trains nothing in the last blocks of this model: give more of them.")


def upper_of(
    model: nn.Module, records: Records, *, last_blocks: int, curator: Curator | None = None, **how: Any
) -> tuple[UpperBlocks, CachedBlocks]:
    """The trained part of a model, with all below it frozen, and the rows that it takes; a cache that fits is used."""
    if not isinstance(records, CachedBlocks):
        records = cache_blocks(model, records, last_blocks=last_blocks, curator=curator, **how)
    freeze_below(model, first_block(model, last_blocks), _tried(model, records.records, curator))
    return _upper(model, records, last_blocks, curator).eval(), records


@contextmanager
def upper_part(model: nn.Module, records: CachedBlocks, last_blocks: int) -> Iterator[UpperBlocks]:
    """The same part of a model in evaluation mode, with nothing frozen; afterwards the model is as it was."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield _upper(model.eval(), records, last_blocks, None).eval()
    finally:
        for module, mode in modes:
            module.training = mode


@torch.no_grad()
def _upper(model: nn.Module, records: CachedBlocks, last_blocks: int, curator: Curator | None) -> UpperBlocks:
    first = first_block(model, last_blocks)
    records.check(LowerBlocks(model, first)(_tried(model, records.records, curator)), last_blocks)
    blank = None if _is_named(records.records) else to(_blank(records.records, curator), where_of(model))
    return UpperBlocks(model, first, blank)


def _check_cut(model: nn.Module, first: int, records: TensorRecords, curator: Curator | None) -> Tensor:
    """Refuse a model of which the upper blocks do not say the same as the whole; the activations of synthetic rows."""
    inputs = _tried(model, records, curator)
    with torch.no_grad():
        whole = Backbone(model).both(inputs)
        activations: Tensor = LowerBlocks(model, first)(inputs)
        named = isinstance(inputs, Mapping)
        upper = UpperBlocks(model, first, None if named else torch.zeros_like(inputs[:1]))
        given = {**inputs, ACTIVATIONS: activations} if named else activations
        try:
            cut = Backbone(upper).both(given)
        except (RuntimeError, TypeError, IndexError):
            cut = None
    if cut is None or not all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(whole, cut, strict=True)):
        raise Refusal(
            "The last blocks of this model do not follow from what comes into the first of them (other paths lead "
            "around it): leave last_blocks= out."
        )
    return activations


def _tried(model: nn.Module, records: TensorRecords, curator: Curator | None) -> Any:
    """Synthetic rows, the same every time."""
    made = synthetic_rows(records)
    if made is not None:
        return to(made.inputs, where_of(model))
    generator = torch.Generator().manual_seed(0)
    like = _blank(records, curator)
    return to(torch.randn(4, *like.shape[1:], generator=generator).to(like), where_of(model))


def _blank(records: TensorRecords, curator: Curator | None) -> Any:
    return likeness(records, training=False, curator=curator).inputs


def _is_named(records: TensorRecords) -> bool:
    """Whether rows are mappings (texts), of which the model reads more than the activations: masks."""
    return getattr(records, "row_sizes", None) is not None or isinstance(records.inputs, Mapping)


class _Reached(Exception):
    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value


def _first_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    found: Tensor = args[0] if args else next(iter(kwargs.values()))
    return found


def _handed_on(*args: Any, **kwargs: Any) -> Tensor:
    return _first_argument(args, kwargs)
