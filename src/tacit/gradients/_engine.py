"""The engine: one forward, one backward, and the sum over privacy units of their clipped gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tacit._deprecation import renamed_argument
from tacit._malloc import keep_freed_memory
from tacit._refusals import ENDING, of_the_machine
from tacit.gradients._batches import change, count_rows, leaves, row_shapes, rows_of
from tacit.gradients._checks import KEPT, Checks
from tacit.gradients._clipping import Policy, as_policy
from tacit.gradients._closed_form import Found, closed_form
from tacit.gradients._fallback import OF_THE_MACHINE, mean_gradient, row_gradients
from tacit.gradients._grad_factors import wide
from tacit.gradients._grouping import group, muted, parts
from tacit.gradients._isolation import Loss, RowsMixed, buffers_of, put_back, undisturbed, with_outputs, wrong_shape
from tacit.gradients._parameter_swap import refuse_live_statistics
from tacit.gradients._recorder import Recorder, UnsupportedPattern
from tacit.gradients._result import ClippedSum, ClippedSumAccumulator, without_autocast
from tacit.gradients._spot import check_unit, due
from tacit.gradients._synthetic import Domains, above_zero, integers_of, united, widened
from tacit.gradients._traced_parameter import plain
from tacit.gradients._units import Units

Bound = float | Policy  # what clip= takes


class Engine(Checks):
    """Clipped per-example (or per-unit) gradient sums of one model under one loss, step after step.

    Call the engine with a batch to get its `ClippedSum`.

    Formal guarantee: each privacy unit adds to every block of the sum a vector of L2 norm at most the block's bound,
    for any values in the batch, provided that the model and the loss keep rows apart (checked on synthetic rows, see
    `validate`, and now and then on a real unit, see `spot`: that may stop a run, before its step is released).
    Who is present changes no other unit's arithmetic: sums are float64, a unit whose rows fail or take an unchecked way
    is found by running it alone, its rows are replaced in place, and it is added by itself or is exactly zero. What
    remains: the model computes in its own dtype, and a kernel may give a row other last bits in a batch of another
    size. On CPUs it was measured, with MKL's switch set (`_rounding`), that rows in passes of four and more have the
    same bits whatever the size and place; in smaller ones, and the last three rows of recurrent layers, they differ by
    some 1e-6 of a gradient in float32, and behind a kink (a ReLU at zero) by as much as that decides.

    Args:
        model: Its trainable parameters are summed over. They must exist and be trainable now.
        per_sample_loss: `per_sample_loss(model, batch)` returns one loss per row, or a pair of these and a tensor with
            one entry per row (the logits, say), which is found in `total.private.outputs`.
        clip: The L2 bound of a unit's gradient, or a clip policy.
        microbatch: The most rows in memory at a time; the result does not depend on it.

    Raises:
        ValueError: Nothing is trainable, or a layer keeps running statistics.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from tacit.gradients import Engine
        >>> loss = lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
        >>> engine = Engine(nn.Linear(4, 2), loss, clip=1.0)
        >>> total = engine((torch.randn(6, 4), torch.tensor([0, 1, 0, 1, 0, 1])))
        >>> sorted(engine.served)
        ['bias', 'weight']
    """

    def __init__(self, model: nn.Module, per_sample_loss: Loss, *, clip: Bound, microbatch: int | None = None) -> None:
        if microbatch is not None and microbatch < 1:
            raise ValueError(f"microbatch must be at least 1 row, not {microbatch}.")
        super().__init__(model, per_sample_loss, microbatch)
        self.clip = as_policy(clip)
        self._calls = 0
        keep_freed_memory()

    @property
    def served(self) -> dict[str, str]:
        """Which rule serves each parameter; known after `validate` or the first sum."""
        return dict(self._plan.served)

    @property
    def by_row(self) -> bool:
        """Whether only plain autograd, one row at a time, serves this model; known like `served`."""
        return self._plan.by_row

    def validate(self, batch: Any, *, rows: int | None = None) -> None:
        """Check the model on synthetic rows shaped like this batch; the first sum does it by itself.

        As many rows at a time as the batch has (or as it will have: `rows`) and as fit. Sums check again by themselves
        for rows of another shape, for more rows than ever before, when modules were replaced or went from evaluation
        to training or back, and when a number changed that the loss or the model could decide by: earlier checks say
        nothing of these. Integers (labels, tokens, masks) are always drawn from those of the batches given here, and
        from 0 and 1 where these have one only: which path is taken never depends on the integers of private rows.
        Without this call the first batch stands for all later ones.

        Args:
            batch: Public or blank rows of the real shape; of their values only the integers are used.
            rows: How many rows a real batch will have.

        Raises:
            RowsMixed: A layer or the loss mixes rows.
            ValueError: The model or loss cannot be served; the message names the parameter or layer.
        """
        self._domains = domains = united(self._domains, integers_of(batch))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")  # the user's own filters are asked below
            self._check(batch, domains, rows)
        slow = not self._fast(batch)
        tries = (widened(domains), *(above_zero(domains) if slow else ()))
        if any(self._widen(batch, domains, wider, rows) for wider in tries) and slow:
            return  # of a path that is not taken nothing is said
        for each in said:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)

    def _widen(self, batch: Any, domains: Domains, wider: Domains, rows: int | None) -> bool:
        """Draw from other integers than those of the rows that were given, if rows with them go together."""
        circumstances = self._circumstances(batch, wider)
        tried = circumstances, row_shapes(batch), str(wider)
        if wider is domains or tried in self._narrow:
            return False
        narrow, quiet = self._plan, self._plan.quiet
        narrow.quiet = True
        try:
            self._check(batch, wider, rows)
            if self._fast(batch):
                self._domains, self._plan.quiet = wider, quiet
                return True
        except (RowsMixed, *OF_THE_MACHINE):
            raise
        except Exception:  # integers that this model does not take
            pass
        finally:
            narrow.quiet = quiet
        self._plans.pop(circumstances, None)
        self._narrow.add(tried)
        self._plan = narrow
        return False

    def __call__(
        self, batch: Any, *, unit_ids: Any = None, clip: Bound | None = None, mute: Any = None, units: Any = None
    ) -> ClippedSum:
        """The sum over units of clip(mean gradient of the unit's rows); every row is a unit unless `unit_ids` says so.

        `clip` replaces the engine's own for this step (a bound that follows the data). `mute` is one boolean per row: a
        unit with a muted row contributes exactly zero, while its rows keep their places, so that shapes and sums are
        those of a batch in which no row is muted. What stands in such rows does not matter, if the shape is right.

        Args:
            batch: As in `clipped_sum`.
            unit_ids: One integer or string per row; by default each row is a unit.
            clip: Replaces the engine's own for this step.
            mute: One boolean per row.

        Returns:
            The sum with its bounds.
        """
        unit_ids = renamed_argument("units", units, "unit_ids", unit_ids, where="Engine")
        rows = count_rows(batch)
        grouped = group(unit_ids, rows, next(leaves(batch)).device)
        silent = muted(mute, grouped)
        self._refuse_changes()
        tally = self._tally(self.clip if clip is None else as_policy(clip), grouped.count)
        if rows == 0:
            return tally.result()
        self._validate_private(batch, grouped)
        state, spot = buffers_of(self.model), self._spot(grouped.count)
        for part, members in parts(grouped, self._rows_at_once(batch)):
            put_back(self.model, state)  # what a forward advances (a power iteration) is the same for every part
            quiet = None if silent is None else silent[members]
            odd = self._add(tally, batch, part, members, grouped, quiet)
            if odd is None or not bool(odd.any()):
                self._look_at(spot, members, tally, batch, part, grouped, state)
                continue
            for unit in members[odd].tolist():
                put_back(self.model, state)
                self._add_odd(tally, batch, torch.nonzero(grouped.of_row == unit).flatten(), unit, rows)
        return tally.result()

    def each(
        self, batch: Any, *, unit_ids: Any = None, public: bool = False, units: Any = None
    ) -> Iterator[dict[str, Tensor]]:
        """The mean gradient of every unit, built and not clipped, some units at a time: (units, *shape) each.

        For sums that need more of a gradient than its norm: the caller has to bound what it makes of these. A unit
        that cannot be computed has a gradient that is not a number. Memory holds the gradients of `microbatch` rows, or
        of as many as fit. The checks are those of a sum; no unit of `public` rows is checked during the run (see
        `spot`).

        Args:
            batch: As in `clipped_sum`.
            unit_ids: One integer or string per row.
            public: Whether the rows are public.

        Returns:
            Name -> per-unit gradients, some units at a time. Private.
        """
        unit_ids = renamed_argument("units", units, "unit_ids", unit_ids, where="Engine.each")
        rows = count_rows(batch)
        self._refuse_changes()
        if not rows:
            return
        grouped = group(unit_ids, rows, next(leaves(batch)).device)
        self._validate_private(batch, grouped)
        state, spot = buffers_of(self.model), -1 if public else self._spot(grouped.count)
        tally = self._tally(self.clip, 0)
        size = sum(wide(p).nbytes for p in self._slots.parameters.values())
        for part, members in parts(grouped, min(self._rows_at_once(batch), max(1, KEPT // size))):
            put_back(self.model, state)
            built, odd = self._build(batch, part, members, grouped)
            if odd is None or not bool(odd.any()):
                self._look_at(spot, members, tally, batch, part, grouped, state)
                yield built
                continue
            for place in torch.nonzero(odd).flatten().tolist():
                mine = torch.nonzero(grouped.of_row == members[place]).flatten()
                put_back(self.model, state)
                found = self._row_by_row(batch, mine, rows)
                for name, value in built.items():
                    value[place] = torch.nan if found is None else found[0][name].to(value.dtype)
            yield built

    def zero_sum(self, clip: Bound | None = None) -> ClippedSum:
        """The sum over no unit at all: zeros, with the bounds of any other sum.

        Args:
            clip: Replaces the engine's own.

        Returns:
            Zeros with the bounds.
        """
        return self._tally(self.clip if clip is None else as_policy(clip), 0).result()

    def outdated(self) -> bool:
        """Whether the model's trainable parameters are no longer those that the engine was made for."""
        current = {id(p) for p in self.model.parameters() if p.requires_grad}
        return current != {id(p) for p in self._slots.parameters.values()}

    def _tally(self, policy: Policy, units: int) -> ClippedSumAccumulator:
        return ClippedSumAccumulator(policy, self._slots.parameters, units)

    def _watch(self, batch: Any, units: Units) -> tuple[Recorder, Tensor]:
        """One forward and one backward under watch."""
        recorder = Recorder(self._slots.parameters, units, self._plan)
        with recorder.forgotten_on_error(), self._slots.watched(recorder):
            with torch.enable_grad():
                losses, outputs = with_outputs(self.per_sample_loss(self.model, batch))
            losses = plain(losses)
            if losses.shape != (units.rows,):
                raise wrong_shape(losses.shape, units.rows)
            if outputs is not None:
                recorder.outputs = plain(outputs).detach()
            recorder.forward_done(losses)
            with without_autocast(losses.device):
                if losses.requires_grad:
                    torch.autograd.backward(losses, torch.ones_like(losses))
                with torch.no_grad():
                    recorder.backward_done()
        expected = self._plan.folds.get(row_shapes(batch), recorder.folds)
        if losses.requires_grad and recorder.folds != expected:
            odd = recorder.folds - expected if expected is not None else recorder.folds
            raise UnsupportedPattern(next(iter(odd or recorder.folds))[0])
        return recorder, losses.detach()

    def _pass(
        self, batch: Any, part: Tensor, grouped: Units
    ) -> tuple[Recorder | Found | None, Tensor, Units, Tensor | None]:
        """One pass over some units: what the rules saw, the losses, the units, and which of them are odd (None: none).

        A unit is odd if its rows, alone, take a way that was not checked or raise. Its rows are then replaced in place
        by those of a unit that is not, so that the pass has the same shapes and everybody else the same arithmetic.
        """
        local = grouped if part.numel() == grouped.rows else grouped.part(part)
        if self._plan.by_row or self._plan.folds.get(row_shapes(batch)) is None:
            return None, part, local, torch.ones(local.count, dtype=torch.bool, device=part.device)
        try:
            whole = grouped.trivial and part.numel() == grouped.rows  # in order, then
            given = batch if whole else rows_of(batch, part, grouped.rows)
            found = closed_form(self.model, self.per_sample_loss, self._slots.parameters, given, local)
            if found is not None:
                return found, found.losses, local, muted(found.failing, local)
            recorder, losses = self._watch(given, local)
            return recorder, losses, local, None
        except ENDING:
            raise
        except BaseException as error:  # in silence: the values of private rows must not decide what is printed
            failed = error
        self._blame_the_code(batch, failed, part)
        odd = torch.zeros(local.count, dtype=torch.bool, device=part.device)
        for unit in range(local.count):
            mine = part[local.of_row == unit]
            odd[unit] = not self._fits(rows_of(batch, torch.cat([mine, mine]), grouped.rows), 2 * mine.numel())
        if not bool(odd.all()):
            replaced = odd[local.of_row]
            index = torch.where(replaced, part[torch.nonzero(~replaced)[0, 0]], part)
            try:
                recorder, losses = self._watch(rows_of(batch, index, grouped.rows), local)
                return recorder, losses, local, odd
            except ENDING:
                raise
            except BaseException:  # only together: the model decides by the whole batch
                pass
        return None, part, local, torch.ones_like(odd)

    def _spot(self, units: int) -> int:
        """The unit that is checked in this call; -1: none."""
        found, self._calls = due(self._calls, units), self._calls + 1
        return -1 if found is None else found

    def _look_at(
        self,
        spot: int,
        members: Tensor,
        tally: ClippedSumAccumulator,
        batch: Any,
        part: Tensor,
        grouped: Units,
        state: Any,
    ) -> None:
        """The check during the run, see `spot`, of the unit that was chosen, if one was and it is among these."""
        if spot < 0 or (self.microbatch and part.numel() > self.microbatch) or not bool((members == spot).any()):
            return
        unit = int(torch.nonzero(members == spot)[0, 0])
        local = grouped if part.numel() == grouped.rows else grouped.part(part)
        with undisturbed(self.model):
            put_back(self.model, state)
            try:
                check_unit(self._watch, tally, batch, part, local, unit, self._plan.coarse)
            except (RowsMixed, *ENDING):
                raise
            except BaseException:  # rows that fail say nothing about mixing
                return

    def _fits(self, batch: Any, rows: int, *, raising: Callable[[BaseException], bool] = lambda _: False) -> bool:
        """Whether these rows take a way that was checked; `raising` are errors that are passed on."""
        try:
            recorder, _ = self._watch(batch, Units.singletons(rows, next(leaves(batch)).device))
            recorder.forget()
        except ENDING:
            raise
        except BaseException as error:  # whatever rows can do
            if raising(error):
                raise
            return False
        return True

    def _blame_the_code(self, batch: Any, error: BaseException, part: Tensor) -> None:
        """Raise if it is not the values of private rows: if rows that passed the checks fail as well.

        Of memory a row may ask for any amount; if as many blank rows find none either, it is the machine's failure.
        The first error's message may quote private values, so the second one is raised. Call it outside of `except`:
        a traceback prints the first as the context of the second.
        """
        if of_the_machine(error):
            blank = change(batch, lambda t: torch.zeros_like(t[: part.numel()]))
            with undisturbed(self.model):
                self._fits(blank, part.numel(), raising=of_the_machine)
            return
        specimen = self._plan.specimens.get(row_shapes(batch))
        if isinstance(error, UnsupportedPattern) or specimen is None:
            return
        with undisturbed(self.model):
            given = change(specimen, Tensor.clone)
            list(row_gradients(self.model, self._loss, self._slots.parameters, given, torch.arange(1), 2))

    def _add(
        self,
        tally: ClippedSumAccumulator,
        batch: Any,
        part: Tensor,
        members: Tensor,
        grouped: Units,
        quiet: Tensor | None,
    ) -> Tensor | None:
        """Clip and add some units; returns which of them have to be added one by one, as they are odd (None: none)."""
        if self.microbatch is not None and part.numel() > self.microbatch and not self._plan.by_row:
            added = self._add_large_unit(tally, batch, part, members, grouped.rows, quiet)
            return torch.full((1,), not added, dtype=torch.bool, device=part.device)
        recorder, losses, local, odd = self._pass(batch, part, grouped)
        silent = quiet if odd is None else odd if quiet is None else odd | quiet
        if recorder is not None:
            if recorder.outputs is not None:
                good = torch.ones_like(part, dtype=torch.bool) if odd is None else ~odd[local.of_row]
                tally.note_outputs(recorder.outputs, part, good, grouped.rows)
            muted_units = silent if silent is not None and bool(silent.any()) else None
            tally.add(recorder.settled, local, members, local.mean(losses), muted_units)
        elif silent is not None:
            tally.leave_out(members[silent])
        return odd if odd is None or quiet is None else odd & ~quiet

    def _add_large_unit(
        self, tally: ClippedSumAccumulator, batch: Any, part: Tensor, members: Tensor, rows: int, quiet: Tensor | None
    ) -> bool:
        """A unit with more rows than fit: add up its gradient chunk by chunk first, then clip it."""
        if quiet is not None and bool(quiet.all()):
            tally.leave_out(members)
            return True
        total = tally.zeros()
        losses = []
        for chunk in torch.split(part, self.microbatch or part.numel()):
            local = Units(torch.zeros_like(chunk), 1)
            failed: BaseException | None = None
            try:
                recorder, loss = self._watch(rows_of(batch, chunk, rows), local)
            except ENDING:
                raise
            except BaseException as error:
                failed = error
            if failed is not None:
                self._blame_the_code(batch, failed, chunk)
                return False
            tally.note_outputs(recorder.outputs, chunk, torch.ones_like(chunk, dtype=torch.bool), rows)
            share = torch.full((1,), chunk.numel() / part.numel(), dtype=torch.float64, device=loss.device)
            for name in list(recorder.settled):
                total[name] += recorder.settled.pop(name).weighted_sum(share, local, None)
            losses.append(loss)
        tally.add_built(total, members, torch.cat(losses).mean()[None])
        return True

    def _add_odd(self, tally: ClippedSumAccumulator, batch: Any, mine: Tensor, unit: int, rows: int) -> None:
        """A unit by plain autograd, row by row; if that fails as well, it contributes nothing."""
        member = torch.tensor([unit], device=mine.device)
        found = self._row_by_row(batch, mine, rows)
        if found is None:
            tally.leave_out(member)
        else:
            tally.add_built(found[0], member, found[1])

    def _row_by_row(self, batch: Any, mine: Tensor, rows: int) -> tuple[dict[str, Tensor], Tensor] | None:
        """The mean gradient and loss of these rows in float64; None if they cannot be computed."""
        try:
            return mean_gradient(row_gradients(self.model, self._loss, self._slots.parameters, batch, mine, rows))
        except ENDING:
            raise
        except BaseException as error:
            failed = error
        self._blame_the_code(batch, failed, mine[:1])
        return None

    def _build(
        self, batch: Any, part: Tensor, members: Tensor, grouped: Units
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """The gradient of each of these units, and which of them are odd."""
        parameters = self._slots.parameters
        built: dict[str, Tensor] = {}
        odd: Tensor | None = torch.ones(len(members), dtype=torch.bool, device=part.device)
        if self.microbatch is None or part.numel() <= self.microbatch:
            recorder, losses, local, odd = self._pass(batch, part, grouped)
            if recorder is not None:
                with torch.no_grad(), torch.autocast(losses.device.type, enabled=False):
                    built = {n: recorder.settled.pop(n).build(local).values for n in list(recorder.settled)}
        missing = {n: p for n, p in parameters.items() if n not in built}
        built |= {n: wide(p.detach()).new_zeros(len(members), *p.shape) for n, p in missing.items()}
        return built, odd

    def _refuse_changes(self) -> None:
        refuse_live_statistics(self._slots.normalisers)
        self._slots.refuse_changes(self.model)
