"""The loop: draw, ask, add noise, update; once for every optimizer, scheme and kind of data."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tacit import _checkpoints as checkpoints
from tacit._curator import Curator, StepEvent, report_event
from tacit._refusals import attempt
from tacit.data import Records, Rows
from tacit.finetune._account import Account, Meter
from tacit.finetune._evaluation import Evaluator
from tacit.finetune._loss_curve import LossTracker
from tacit.finetune._optimizers import Optimizer
from tacit.finetune._predictions import portions, rows_that_fit, units_at_once
from tacit.finetune._queries import GradientAsker, GradientQuery
from tacit.finetune._reading import Portion, Reader, draws, kind_of, where_of
from tacit.finetune._saving import Store
from tacit.finetune._silent import silent
from tacit.finetune._updates import Updates
from tacit.privacy import BoundedSum, Receipt, check_used, leases, sampling
from tacit.recipes import Progress

_UNREADABLE = (
    "Some rows cannot be read, or not together with others: with checkpoint= every row must be readable before the "
    "charge, so that steps can be replayed. Nothing was charged or released. Details may reveal rows: see "
    "curator=."
)


@dataclass(frozen=True, kw_only=True)
class Score:
    """What an evaluation found after so many steps: of public data, or released with its noise.

    Args:
        step: Steps done.
        scores: Measure -> value.
    """

    step: int
    scores: dict[str, float]


@dataclass(kw_only=True)
class Run:
    """Everything that one run needs; `history` is public."""

    sharded: ClassVar[bool] = False  # whether every rank holds a part of the model only
    model: nn.Module
    records: Records
    optimizer: Optimizer
    account: Account
    query: GradientQuery
    updater: Updates
    measure: str
    evaluator: Evaluator | None = None
    losses: LossTracker | None = None
    store: Store | None = None
    every: int = 100
    note: str = ""
    curator: Curator | None = None
    progress: Progress | None = None
    like: Rows  # a blank row, as agreed on before the charge
    expected: float  # the public number of units in a step
    rows_at_once: int | None = None
    workers: int = 0
    history: list[Score] = field(default_factory=list)
    receipt: Receipt = field(init=False)
    done: int = 0  # steps made, those before a resumption included
    _leased: int | None = None  # the step up to which this process may release; None: it has no lease yet
    _made: int = 0  # steps that may have been released by an earlier process
    _finished: bool = False
    _fingerprint: str = ""
    _reading: ExitStack = field(default_factory=ExitStack)
    _ahead: Iterator[tuple[Portion, Rows, Tensor | None]] | None = None  # None: rows are read when they are needed

    def begin(self, *, settings: str, data: Records, whole: nn.Module) -> None:
        """Charge; or, if a checkpoint or a key of this very run is there, resume it.

        `data` are the records as they were given and `whole` is the model that `self.model` may be a part of: features
        depend on both.
        """
        if self.store is None:
            self._charge()
            return
        start = checkpoints.digest({name: p for name, p in self.model.named_parameters() if p.requires_grad})
        self._fingerprint = _fingerprint(whole, f"{settings} {kind_of(self.like)}")
        loaded = self.store.load(run=self._fingerprint)
        if loaded is not None:
            self._restore(*loaded)
        if self._finished:
            self._wind_up(self.store, data)
        elif self.store.kept is not None:
            self._resume(self.store, data, None if loaded is not None else start)
        elif loaded is None:
            content = self._content(data)  # first, for it takes long, and a kill after the charge loses the charge
            self._charge()
            evaluation = (
                self.evaluator.receipt.id if self.evaluator is not None and self.evaluator.receipt is not None else None
            )
            self.store.begin(
                self.receipt,
                data=content,
                run=self._fingerprint,
                start=start,
                scale=self.account.scale,
                evaluation=evaluation,
            )
            self._save(0, finished=False)
        else:
            raise ValueError(f"The key of the run in {self.store.path} is gone, so its steps cannot be replayed.")

    def train(self) -> int:
        """The steps that are left; returns how many were made when the run ended. See `step` for the guarantee."""
        if not self._finished:
            self._steps()
        return self.end()

    def step(self) -> None:
        """The next step: its units drawn, their bounded sum released, an update made of that.

        Formal guarantee: step t is one release on the charged receipt, of the sum over the units that the receipt's
        own sampler drew, empty or not. Nothing else that depends on the rows leaves: an error in the middle of a step
        releases nothing, and the same step comes again with the same draw and the same noise. With a checkpoint, a step
        that was computed before of another sum is refused (`StepRecord`).

        In floating point: the sum of a step is added up in float64, unit after unit of a portion and portion after
        portion. Where one unit is blanked or replaced, shapes and order stay, so no other unit's terms change, and the
        sum moves by the clip (twice it, if replaced) and by what float64 additions round: at most n^2 2^-53 of the clip
        for n drawn units (1e-10 for a thousand, 4e-7 for 60,000). Where one is added or removed (or is drawn where it
        was not), others move by a place and a portion may have a row more: the additions round no more than before, but
        matrix products of both passes may round a row differently at another place or batch size. That is the one
        residual which nothing bounds strictly: some 1e-7 of the clip per unit for float32 models, of either sign, and
        1e-16 for float64 ones; none where the library computes rows alike at every place. The number of rows that the
        largest unit has decides how portions are cut: declare it (`rows_each`) where it may be odd.
        """
        step, steps = self.done, self.optimizer.steps
        if self.store is not None and (self._leased is None or step == self._leased):
            self._leased = leases.extend(self.account.ledger, self.receipt, self.every)
        if self.workers and self._ahead is None:
            self._ahead = self._reading.enter_context(self._reader.ahead(self._upcoming()))
        try:
            with nullcontext() if self._silent else sampling.randomness(self.receipt):
                total = self._ask(step)
        except BaseException:  # the same step may come again, and its rows from the first portion on
            self._stop_reading()
            raise
        report_event(self.curator, StepEvent("finetune", step, total))
        self._update(total, step)
        self.done = step + 1
        if self.progress is not None:
            budget = self.account.promise.budget.epsilon
            self.progress(self.optimizer.name, self.done, steps, spent=(self._meter(self.done), budget))

    def _update(self, total: BoundedSum, step: int) -> None:
        """Release the sum of a step and move the weights."""
        noise = self.query.split(self.optimizer.noise.multiplier(self.account.scale, step, self.optimizer.steps))
        gradient = self.query.gradient(self._released(total, noise))
        if self.losses is not None:
            self.losses.note(gradient, bound=math.hypot(*total.bounds.values()), scale=self.account.scale)
        self.updater.step(gradient, step, self.query.factor)

    def save(self) -> None:
        """Write a checkpoint of the steps made so far, if this run keeps any."""
        self._save(self.done, finished=False)

    @property
    def save_is_due(self) -> bool:
        """Whether the steps made so far should be kept."""
        return self.store is not None and (self.done == self.optimizer.steps or self.done % self.every == 0)

    @property
    def leads(self) -> bool:
        """Whether this process has the receipt."""
        return True

    @property
    def receipt_id(self) -> str:
        """Of the receipt that pays."""
        return self.receipt.id

    @property
    def begun(self) -> bool:
        """Whether any step was released."""
        return self.receipt.used > 0

    @property
    def finished(self) -> bool:
        """Whether the run has ended, here or in an earlier process."""
        return self._finished

    def end(self) -> int:
        """End the run: the last weights are kept, unused steps returned and the key destroyed. Returns steps made."""
        if not self._finished:
            check_used(self.receipt)
            self.updater.apply_averaged_weights()
            self._save(self.done, finished=True)
            self._finished = True
        self._stop_reading()
        self._close(self.done)
        return self.done

    def _charge(self) -> None:
        promise = self.account.promise
        if self.evaluator is not None:
            self.evaluator.charge(
                self.account.ledger,
                steps=self.optimizer.steps,
                unit=promise.unit,
                neighbours=promise.neighbours,
                seed=self.account.seed,
            )
        try:
            self.receipt = self.account.charge("finetune", self.note)
        except BaseException:
            self._settle_evaluations()
            raise

    def _resume(self, store: Store, data: Records, start: str | None) -> None:
        self.receipt, self._made = store.resume(
            data=self._content(data), run=self._fingerprint, start=start, used=self.done
        )
        if store.kept is None:
            return
        self.account = replace(self.account, scale=store.kept.scale, event=self.receipt.event)
        evaluation = store.kept.evaluation
        if (
            self.evaluator is not None
            and evaluation is not None
            and not leases.settled(self.account.ledger, evaluation)
        ):
            self.evaluator.resume(self.account.ledger, evaluation)

    def _content(self, data: Records) -> str:
        """The data's fingerprint; what their transforms draw is drawn alike each time, or nothing could be resumed."""
        with sampling.reading_randomness("0" * 64) if draws(data) else nullcontext():
            return attempt(data.fingerprint, sentence=_UNREADABLE, curator=self.curator)

    def _wind_up(self, store: Store, data: Records) -> None:
        """A finished run: nothing is left to do but what a kill at the very end has left, to settle."""
        if store.kept is not None and not leases.settled(self.account.ledger, self.receipt.id):
            self._resume(store, data, None)

    def _steps(self) -> None:
        stop = self._stopped()  # killed between that decision and the end
        try:
            while not stop and self.done < self.optimizer.steps:
                self.step()
                self._evaluate(self.done)
                stop = self._stopped()
                if stop or self.save_is_due:
                    self.save()
        finally:
            self._stop_reading()

    def _stop_reading(self) -> None:
        """End the worker processes; the next step starts new ones."""
        self._ahead = None
        self._reading.close()

    def _released(self, total: BoundedSum, noise: Any) -> dict[str, Tensor]:
        """The sum of a step with its noise."""
        if self.store is not None:
            self.store.steps.check(self.done, total, self.expected)
        return self._release(total, noise)  # type: ignore[no-any-return]

    @property
    def _silent(self) -> bool:
        """Whether nothing draws from global generators while a sum is computed; asked at every step, for hooks."""
        return type(self.query) is GradientAsker and silent(self.model, self.query.engine.per_sample_loss)

    @property
    def _shares(self) -> int:
        """Into how many equal portions a step is cut, for ranks to share; 0: into as few as fit."""
        return 0

    @cached_property
    def _release(self) -> Callable[..., Any]:
        return self.optimizer.noise.releases(self.receipt)

    @cached_property
    def _meter(self) -> Meter:
        return Meter(self.optimizer, self.account)

    def _close(self, done: int) -> None:
        """Return what was not used, and destroy the key."""
        self._settle_evaluations()
        if self.receipt.live:
            self.account.settle(self.receipt, max(done, self._made, self.receipt.used))
        if self.store is not None:
            self.store.end()

    def _settle_evaluations(self) -> None:
        if self.evaluator is not None and self.evaluator.receipt is not None and self.evaluator.receipt.live:
            self.account.ledger.settle(self.evaluator.receipt)

    def _restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        self.updater.load(tensors, facts["updater"])
        self.query.load({k.removeprefix("asker."): v for k, v in tensors.items() if k.startswith("asker.")})
        if self.losses is not None:
            kept = {k.removeprefix("loss."): v for k, v in tensors.items() if k.startswith("loss.")}
            self.losses.load(kept, facts.get("loss"), done=int(facts["step"]))
        self.history = [Score(step=step, scores=scores) for step, scores in facts["history"]]
        self.done = int(facts["step"])
        self._finished = bool(facts["finished"])
        self.receipt = self.account.ledger.receipt(facts["receipt"])

    def _ask(self, step: int) -> BoundedSum:
        """The sum over the units of the next step, in portions that fit into memory.

        Formal guarantee: see `step`. A unit whose rows cannot be read, are of another kind than was agreed on before
        the charge, or make model or loss raise adds exactly zero in its place (`reading`, `gradients.Engine`).
        """
        total: Any = None
        for portion in self._portions(step):
            found = self.query.sum(*self._rows(portion))
            total = found if total is None else total + found
        return self.query.zero_sum() if total is None else total

    def _rows(self, portion: Portion) -> tuple[Rows, Tensor | None]:
        """The rows of a portion: read now, or by a worker, ahead of time."""
        if self._ahead is None:
            return self._reader(portion)
        read, rows, mute = next(self._ahead)
        if not (torch.equal(read.units, portion.units) and read.key == portion.key):
            raise RuntimeError("Rows were read ahead of another draw than this step's: nothing of it was released.")
        return rows, mute

    def _upcoming(self) -> Iterator[Portion]:
        """All portions of the steps that are left, drawn ahead of the releases that they are for."""
        for step in range(self.done, self.optimizer.steps):
            yield from self._portions(step, ahead=True)

    def _portions(self, step: int, *, ahead: bool = False) -> list[Portion]:
        """Who takes part in a step, in portions that fit into memory."""
        later = step - self.done if ahead else 0
        chosen = self.optimizer.sampler.draw(self.receipt, step, len(self.records), ahead=later)
        if not len(chosen):
            return []
        each = self.records.uniforms
        drawn_uniforms = sampling.uniforms(self.receipt, len(chosen), each, ahead=later) if each else None
        rows = self.rows_at_once or rows_that_fit(self.like)
        parts = portions(self.records, chosen, rows, units_at_once(self.expected), shares=self._shares)
        keyed = draws(self.records)
        return [
            Portion(
                chosen if len(parts) == 1 else chosen[part],  # one portion has all of them, in order
                torch.empty(len(part), 0) if drawn_uniforms is None else drawn_uniforms[part],
                sampling.reading_key(self.receipt, number, ahead=later) if keyed else None,
            )
            for number, part in enumerate(parts)
        ]

    @cached_property
    def _reader(self) -> Reader:
        """If steps may be replayed, all rows were read before the charge, and one that cannot be read now stops it."""
        return Reader(
            self.records,
            self.like,
            where_of(self.model),
            strict=self.store is not None,
            curator=self.curator,
            workers=self.workers,
        )

    def _evaluate(self, done: int) -> None:
        """Evaluate if it is time to, or if the run stops here by its loss and an evaluation is left."""
        if self.evaluator is None:
            return
        stops = self.losses is not None and self.losses.rises and not self.evaluator.used_up
        if not stops and not self.evaluator.evaluation.due(done, self.optimizer.steps):
            return
        with self.updater.averaged_weights():
            scores = self.evaluator(self.model)
        self.history.append(Score(step=done, scores=scores))

    def _stopped(self) -> bool:
        """Whether evaluations or released gradients say to stop; an evaluation without a score says nothing."""
        if self.losses is not None and self.losses.rises:
            return True
        patience = None if self.evaluator is None else self.evaluator.evaluation.patience
        scores = [score.scores.get(self.measure, math.nan) for score in self.history]
        scores = [value for value in scores if not math.isnan(value)]
        if patience is None or not scores:
            return False
        return len(scores) - 1 - scores.index(max(scores)) >= patience

    def _save(self, done: int, *, finished: bool) -> None:
        if self.store is None:
            return
        leases.check_holder(self.account.ledger, self.receipt)  # a process that was superseded overwrites no checkpoint
        tensors, updater = self.updater.state()
        tensors = tensors | {f"asker.{name}": value for name, value in self.query.state().items()}
        facts: dict[str, Any] = {
            "run": self._fingerprint,
            "step": done,
            "finished": finished,
            "updater": updater,
            "history": [[score.step, score.scores] for score in self.history],
            "receipt": self.receipt.id,
            "head": self.receipt.head,
            "guarantee": self.account.guarantee.to_json(),
        }
        if self.losses is not None:
            kept, facts["loss"] = self.losses.state()
            tensors |= {f"loss.{name}": value for name, value in kept.items()}
        self.store.save(tensors, facts)


def _fingerprint(whole: nn.Module, settings: str) -> str:
    """A name for a run that recipients may see: its settings, its model's make and all that is not trained.

    And all that decides how numbers are rounded: types of parameters and rows, torch's version and its switches. A step
    that is replayed in another precision would be another sum under the same noise.
    """
    frozen = {name: p for name, p in whole.named_parameters() if not p.requires_grad} | dict(whole.named_buffers())
    shapes = {name: (tuple(p.shape), str(p.dtype)) for name, p in whole.named_parameters()}
    make = re.sub(r" at 0x[0-9a-f]+", "", repr(whole))  # where in memory something lies is another matter
    return checkpoints.digest(frozen, f"{settings} {shapes} {make} {checkpoints.precision()}")
