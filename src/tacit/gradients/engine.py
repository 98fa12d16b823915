"""The engine: one forward, one backward, and the sum over privacy units of their clipped gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tacit.gradients import learning
from tacit.gradients.batches import count_rows, leaves, row_shapes, rows_of
from tacit.gradients.clipping import Policy, as_policy
from tacit.gradients.fallback import row_gradients
from tacit.gradients.handles import plain
from tacit.gradients.isolation import Loss, wrong_shape
from tacit.gradients.losses import same_loss
from tacit.gradients.pieces import wide
from tacit.gradients.recorder import Misfit, Plan, Recorder
from tacit.gradients.result import ClippedSum, Tally
from tacit.gradients.synthetic import constant
from tacit.gradients.units import Units
from tacit.gradients.watch import Slots, refuse_live_statistics

_KEPT = 192 * 2**20  # bytes of activations and output gradients that one pass keeps on a CPU


class Engine:
    """Clipped gradient sums of one model under one loss, step after step.

    `per_sample_loss(model, batch)` returns one loss per row; `clip` is a number or a policy. `microbatch` bounds the
    rows in memory at a time; the result does not depend on it. Call the engine with a batch to get its `ClippedSum`.

    Formal guarantee: each privacy unit adds to every block of the sum a vector of L2 norm at most the block's bound,
    for any values in the batch, provided that the model and the loss keep rows apart (checked once, on synthetic rows).
    """

    def __init__(
        self, model: nn.Module, per_sample_loss: Loss, *, clip: float | Policy, microbatch: int | None = None
    ) -> None:
        if microbatch is not None and microbatch < 1:
            raise ValueError(f"microbatch must be at least 1 row, not {microbatch}.")
        self.model = model
        self.per_sample_loss = per_sample_loss
        self.clip = as_policy(clip)
        self.microbatch = microbatch
        self._slots = Slots(model)
        self._plan = learning.blank_plan(model)
        self._plans: dict[Any, Plan] = {}

    @property
    def served(self) -> dict[str, str]:
        """Which rule serves each parameter; known after `learn` or the first sum."""
        return dict(self._plan.served)

    def learn(self, batch: Any) -> None:
        """Check the model on synthetic rows shaped like this batch; the first sum does it by itself.

        So does a sum after modules were replaced or went from evaluation to training or back, and one whose integers
        (masks, labels) vary where they did not before: earlier checks say nothing of these.
        """
        circumstances = (self._slots.modes(self.model), tuple(_varies(t) for t in leaves(batch)))
        if circumstances not in self._plans:
            self._plans[circumstances] = learning.blank_plan(self.model, self._plan.said)
        self._plan = self._plans[circumstances]
        if self._plan.learning:
            learning.learn(self._plan, self.model, self.per_sample_loss, self._slots, batch, self._watch)
        if not self._plan.by_row and row_shapes(batch) not in self._plan.folds:
            learning.learn_shapes(self._plan, self.model, batch, self._watch)

    def __call__(
        self, batch: Any, *, units: Any = None, clip: float | Policy | None = None, mute: Any = None
    ) -> ClippedSum:
        """The sum over units of clip(mean gradient of the unit's rows); every row is a unit unless `units` labels them.

        `clip` replaces the engine's own for this step (a bound that follows the data). A unit with a row that `mute`
        (a bool per row) names adds exactly zero, in its place.
        """
        policy = self.clip if clip is None else as_policy(clip)
        rows = count_rows(batch)
        grouped = _group(units, rows, next(leaves(batch)).device)
        self._refuse_changes()
        tally = Tally(policy, {n: wide(p.detach()) for n, p in self._slots.parameters.items()}, grouped.count)
        if rows == 0:
            return tally.result()
        if mute is not None:
            tally._muted[grouped.of_row[mute]] = True
        self.learn(batch)
        for part, members in _parts(grouped, self._rows_at_once(rows)):
            if self._plan.by_row or not self._add(tally, batch, part, members, grouped):
                self._add_row_by_row(tally, rows_of(batch, part, rows), part, members, grouped)
        return tally.result()

    def each(self, batch: Any, *, units: Any = None) -> Iterator[dict[str, Tensor]]:
        """The mean gradient of every unit, built and not clipped, some units at a time: (units, *shape) each.

        For sums that need more of a gradient than its norm: whoever asks has to bound what it makes of these. Memory
        holds the gradients of `microbatch` rows, or of as many as fit.
        """
        rows = count_rows(batch)
        self._refuse_changes()
        if rows == 0:
            return
        grouped = _group(units, rows, next(leaves(batch)).device)
        self.learn(batch)
        size = sum(wide(p).nbytes for p in self._slots.parameters.values())
        for part, members in _parts(grouped, min(self._rows_at_once(rows), max(1, _KEPT // size))):
            built = None if self._plan.by_row else self._build(batch, part, grouped)
            yield self._build_row_by_row(batch, part, members, grouped) if built is None else built

    def nobody(self, clip: float | Policy | None = None) -> ClippedSum:
        """The sum over no unit at all: zeros, with the bounds of any other sum."""
        policy = self.clip if clip is None else as_policy(clip)
        return Tally(policy, {n: wide(p.detach()) for n, p in self._slots.parameters.items()}, 0).result()

    def outdated(self) -> bool:
        """Whether the model's trainable parameters are no longer those that the engine was made for."""
        current = {id(p) for p in self.model.parameters() if p.requires_grad}
        return current != {id(p) for p in self._slots.parameters.values()}

    def _rows_at_once(self, rows: int) -> int:
        """As the user says; else on a CPU so many that what is kept stays near the caches, which is faster as well."""
        if self.microbatch is not None:
            return self.microbatch
        if self._plan.kept_per_row == 0 or next(iter(self._slots.parameters.values())).device.type != "cpu":
            return rows
        parts = math.ceil(rows * self._plan.kept_per_row / _KEPT)
        return math.ceil(rows / max(parts, 1))

    def _watch(self, batch: Any, units: Units) -> tuple[Recorder, Tensor]:
        """One forward and one backward under watch."""
        recorder = Recorder(self._slots.parameters, units, self._plan)
        with self._slots.watched(recorder):
            with torch.enable_grad():
                losses = plain(self.per_sample_loss(self.model, batch))
            if losses.shape != (units.rows,):
                raise wrong_shape(losses.shape, units.rows)
            recorder.forward_done()
            with torch.autocast(losses.device.type, enabled=False):
                if losses.requires_grad:
                    torch.autograd.backward(losses, torch.ones_like(losses))
                with torch.no_grad():
                    recorder.backward_done()
        expected = self._plan.folds.get(row_shapes(batch), recorder.folds)
        if losses.requires_grad and recorder.folds != expected:
            odd = recorder.folds - expected if expected is not None else recorder.folds
            raise Misfit(next(iter(odd or recorder.folds))[0])
        return recorder, losses.detach()

    def _add(self, tally: Tally, batch: Any, part: Tensor, members: Tensor, grouped: Units) -> bool:
        """Clip and add some units; False, with nothing added, if these rows take a way that was not checked."""
        rows = grouped.rows
        try:
            if self.microbatch is not None and part.numel() > self.microbatch:
                self._add_large_unit(tally, batch, torch.split(part, self.microbatch), members, rows)
                return True
            local = grouped if part.numel() == rows else grouped.part(part)
            recorder, losses = self._watch(rows_of(batch, part, rows), local)
        except Misfit:  # in silence: the values of private rows must not decide what is printed
            return False
        tally.add(recorder.settled, local, members, local.mean(losses))
        return True

    def _add_large_unit(self, tally: Tally, batch: Any, chunks: tuple[Tensor, ...], members: Tensor, rows: int) -> None:
        """A unit with more rows than fit: add up its gradient chunk by chunk first, then clip it."""
        total = tally.zeros()
        losses = []
        size = sum(chunk.numel() for chunk in chunks)
        for chunk in chunks:
            local = Units(torch.zeros_like(chunk), 1)
            recorder, loss = self._watch(rows_of(batch, chunk, rows), local)
            share = torch.full((1,), chunk.numel() / size, dtype=torch.float64, device=loss.device)
            for name, piece in recorder.settled.items():
                total[name] += piece.weighted_sum(share, local, None)
            losses.append(loss)
        tally.add_built(total, members, torch.cat(losses).mean()[None])

    def _add_row_by_row(self, tally: Tally, batch: Any, part: Tensor, members: Tensor, grouped: Units) -> None:
        owner = grouped.of_row[part]
        for unit in members:
            mine = torch.nonzero(owner == unit).flatten()
            total, loss = tally.zeros(), torch.zeros(1)
            rows = rows_of(batch, mine, part.numel())
            for value, row in row_gradients(self._loss, self._slots.parameters, rows, mine.numel()):
                loss += value.cpu() / mine.numel()
                for name, gradient in row.items():
                    total[name] += wide(gradient) / mine.numel()
            tally.add_built(total, unit[None], loss)

    def _build(self, batch: Any, part: Tensor, grouped: Units) -> dict[str, Tensor] | None:
        """The gradient of each of these units; None if their rows take a way that was not checked, or are too many."""
        if self.microbatch is not None and part.numel() > self.microbatch:
            return None
        local = grouped if part.numel() == grouped.rows else grouped.part(part)
        try:
            recorder, losses = self._watch(rows_of(batch, part, grouped.rows), local)
        except Misfit:  # in silence, as in `_add`
            return None
        with torch.no_grad(), torch.autocast(losses.device.type, enabled=False):
            built = {name: piece.build(local).values for name, piece in recorder.settled.items()}
            missing = {n: p for n, p in self._slots.parameters.items() if n not in built}
            return built | {n: wide(p.detach()).new_zeros(local.count, *p.shape) for n, p in missing.items()}

    def _build_row_by_row(self, batch: Any, part: Tensor, members: Tensor, grouped: Units) -> dict[str, Tensor]:
        parameters, owner = self._slots.parameters, grouped.of_row[part]
        built = {n: wide(p.detach()).new_zeros(len(members), *p.shape) for n, p in parameters.items()}
        for place, unit in enumerate(members):
            mine = part[owner == unit]
            rows = rows_of(batch, mine, grouped.rows)
            for _, row in row_gradients(self._loss, parameters, rows, mine.numel()):
                for name, gradient in row.items():
                    built[name][place] += wide(gradient) / mine.numel()
        return built

    def _loss(self, batch: Any) -> Tensor:
        with torch.enable_grad():
            return self.per_sample_loss(self.model, batch)

    def _refuse_changes(self) -> None:
        refuse_live_statistics(self._slots.normalisers)
        if changed := self._slots.changed(self.model):
            raise ValueError(
                f"{len(changed)} trainable parameters were created, replaced or unfrozen after the engine: "
                f"{', '.join(changed[:10])}{', …' if len(changed) > 10 else ''}. Make a new Engine once the model is "
                f"complete."
            )


class _Remembered(dict[Any, Engine]):
    """The engines of a model, kept on the model so that they go when it goes; copies and files do not see them."""

    def __deepcopy__(self, memo: Any) -> _Remembered:
        del memo
        return _Remembered()

    def __reduce__(self) -> tuple[type[dict[Any, Any]], tuple[()]]:
        return dict, ()


def clipped_sum(
    model: nn.Module,
    per_sample_loss: Loss,
    batch: Any,
    *,
    clip: float | Policy,
    units: Any = None,
    microbatch: int | None = None,
) -> ClippedSum:
    """The sum over privacy units of their clipped gradients; see `Engine`, which this makes and remembers."""
    clip = as_policy(clip)
    key = (*same_loss(per_sample_loss), microbatch)
    engines: _Remembered = model.__dict__.setdefault("_tacit_engines", _Remembered())
    engine = engines.get(key)
    if engine is None or engine.outdated():
        engine = engines[key] = Engine(model, per_sample_loss, clip=clip, microbatch=microbatch)
    engine.per_sample_loss = per_sample_loss
    return engine(batch, clip=clip, units=units)


def _varies(t: Tensor) -> bool:
    """Whether integers differ; floats are drawn anew in any case."""
    return t.is_floating_point() or t.is_complex() or not constant(t)


def _group(units: Any, rows: int, device: torch.device) -> Units:
    if units is None:
        return Units.singletons(rows, device)
    try:
        labels = torch.as_tensor(units, device=device)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError("units must be integer labels, one per row: number the names first.") from None
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"units must be integer labels, one per row, not {labels.dtype}.")
    if labels.shape != (rows,):
        raise ValueError(f"units must be one label per row, of shape ({rows},), not {tuple(labels.shape)}.")
    return Units.from_labels(labels)


def _parts(units: Units, limit: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows to take together and the units they are; a unit is never split over two parts."""
    everyone = torch.arange(units.count, device=units.of_row.device)
    if units.trivial:
        yield from ((rows, rows) for rows in torch.split(everyone, limit))
        return
    if units.rows <= limit:
        yield torch.arange(units.rows, device=everyone.device), everyone
        return
    order = torch.argsort(units.of_row, stable=True)
    ends = torch.cumsum(units.sizes, 0).tolist()
    start = first = 0
    for unit, end in enumerate(ends):
        if end - start > limit and unit > first:
            previous = ends[unit - 1]
            yield order[start:previous], everyone[first:unit]
            start, first = previous, unit
    yield order[start:], everyone[first:]
