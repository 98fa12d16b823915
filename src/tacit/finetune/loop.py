"""The loop: draw, ask, add noise, update; once for every optimiser, scheme and kind of data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tacit import checkpoints
from tacit.data.records import Records, Rows
from tacit.finetune.account import Account, Meter
from tacit.finetune.evaluation import Judge
from tacit.finetune.optimisers import Optimiser
from tacit.finetune.predictions import portions, to
from tacit.finetune.queries import Asker
from tacit.finetune.saving import Store
from tacit.finetune.updates import Updater
from tacit.privacy import BoundedSum, Receipt, leases, sampling
from tacit.recipes import Progress

Curator = Callable[[int, BoundedSum], None]


@dataclass(frozen=True, kw_only=True)
class Score:
    """What an evaluation found after so many steps: of public data, or released with its noise."""

    step: int
    scores: dict[str, float]


@dataclass(kw_only=True)
class Run:
    """Everything that one run needs; `history` is public."""

    model: nn.Module
    records: Records
    optimiser: Optimiser
    account: Account
    asker: Asker
    updater: Updater
    measure: str
    judge: Judge | None = None
    store: Store | None = None
    every: int = 100
    note: str = ""
    curator: Curator | None = None
    progress: Progress | None = None
    rows_at_once: int | None = None
    history: list[Score] = field(default_factory=list)
    receipt: Receipt = field(init=False)
    _start: int = 0
    _made: int = 0  # steps that may have been released by an earlier process
    _finished: bool = False
    _fingerprint: str = ""

    def begin(self, *, settings: str, data: Records) -> None:
        """Charge; or, if a checkpoint or a key of this very run is there, take it up."""
        if self.store is None:
            self._charge()
            return
        frozen = {name: value for name, value in self.model.state_dict().items() if name not in self.updater.names}
        shapes = {name: tuple(p.shape) for name, p in self.model.named_parameters()}
        self._fingerprint = checkpoints.digest(frozen, f"{settings} {shapes}")
        loaded = self.store.load(run=self._fingerprint)
        self._finished = loaded is not None and bool(loaded[1]["finished"])
        if loaded is not None:
            self._restore(*loaded)
        if self.store.kept is not None:
            self._take_up(self.store, data)
        elif loaded is None:
            self._charge()
            evaluation = self.judge.receipt.id if self.judge is not None and self.judge.receipt is not None else None
            self.store.begin(self.receipt, data=data.fingerprint(), run=self._fingerprint, evaluation=evaluation)
            self._save(0, finished=False)
        elif self._finished:
            self.receipt = self.account.ledger.receipt(loaded[1]["receipt"])
        else:
            raise ValueError(f"The key of the run in {self.store.path} is gone, so its steps cannot be replayed.")

    def train(self) -> int:
        """The steps that are left; returns how many were made when the run ended.

        Formal guarantee: step t is one release on the charged receipt, of the sum over the units that the receipt's
        own sampler drew, empty or not. Nothing else that depends on the rows leaves: an error in the middle of a step
        releases nothing, and the same step comes again with the same draw and the same noise.
        """
        if self._finished:
            self._close(self._start)
            return self._start
        done = self._steps()
        self.updater.hand_out()
        self._save(done, finished=True)
        self._close(done)
        return done

    def _charge(self) -> None:
        promise = self.account.promise
        if self.judge is not None:
            self.judge.charge(
                self.account.ledger,
                steps=self.optimiser.steps,
                unit=promise.unit,
                neighbours=promise.neighbours,
                seed=self.account.seed,
            )
        self.receipt = self.account.charge("finetune", self.note)

    def _take_up(self, store: Store, data: Records) -> None:
        self.receipt, self._made = store.take_up(data=data.fingerprint(), run=self._fingerprint, used=self._start)
        evaluation = store.kept.evaluation if store.kept is not None else None
        if self.judge is not None and evaluation is not None and not self._finished:
            self.judge.take_up(self.account.ledger, evaluation)

    def _steps(self) -> int:
        steps = self.optimiser.steps
        release = self.optimiser.noise.releases(self.receipt)
        meter = Meter(self.optimiser, self.account)
        leased = self._start
        for step in range(self._start, steps):
            if self.store is not None and step == leased:
                leased = leases.extend(self.account.ledger, self.receipt, self.every)
            total = self._ask()
            if self.curator is not None:
                self.curator(step, total)
            noise = self.asker.split(self.optimiser.noise.multiplier(self.account.scale, step, steps))
            self.updater.step(self.asker.gradient(release(total, noise)), step)
            done = step + 1
            if self.progress is not None:
                budget = self.account.promise.budget.epsilon
                self.progress(self.optimiser.name, done, steps, spent=(meter(done), budget))
            stop = self._evaluate(done)
            if self.store is not None and (done == steps or done % self.every == 0 or stop):
                self._save(done, finished=False)
            if stop:
                return done
        return steps

    def _close(self, done: int) -> None:
        """Return what was not used, and destroy the key."""
        ledger = self.account.ledger
        if self.receipt.live:
            ledger.settle(self.receipt, max(done, self._made, self.receipt.used))
        if self.judge is not None and self.judge.receipt is not None and self.judge.receipt.live:
            ledger.settle(self.judge.receipt)
        if self.store is not None:
            self.store.end()

    def _restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        self.updater.load(tensors, facts["updater"])
        self.asker.load({k.removeprefix("asker."): v for k, v in tensors.items() if k.startswith("asker.")})
        self.history = [Score(step=step, scores=scores) for step, scores in facts["history"]]
        self._start = int(facts["step"])

    def _ask(self) -> BoundedSum:
        """The sum over the units of the next step, in portions that fit into memory."""
        chosen = sampling.draw(self.receipt, len(self.records))
        fate = sampling.chances(self.receipt, len(chosen), self.records.chances) if self.records.chances else None
        device = next(self.model.parameters()).device
        total: Any = None
        places = torch.arange(len(chosen))
        for part in portions(self.records, places, self.rows_at_once) if len(chosen) else ():
            chances = torch.empty(len(part), 0) if fate is None else fate[part]
            rows = self.records.rows(chosen[part], chances)
            rows = Rows(to(rows.inputs, device), rows.labels.to(device), rows.owner.to(device))
            found: Any = self.asker.sum(rows)
            total = found if total is None else total + found
        return self.asker.nobody() if total is None else total

    def _evaluate(self, done: int) -> bool:
        """Evaluate if it is time to; whether to stop because it got no better."""
        if self.judge is None or not self.judge.evaluation.due(done, self.optimiser.steps):
            return False
        with self.updater.handed_out():
            scores = self.judge(self.model)
        self.history.append(Score(step=done, scores=scores))
        patience = self.judge.evaluation.patience
        if patience is None:
            return False
        told = [score.scores.get(self.measure, float("-inf")) for score in self.history]
        best = max(range(len(told)), key=told.__getitem__)
        return len(told) - 1 - best >= patience

    def _save(self, done: int, *, finished: bool) -> None:
        if self.store is None:
            return
        tensors, updater = self.updater.state()
        tensors = tensors | {f"asker.{name}": value for name, value in self.asker.state().items()}
        facts = {
            "run": self._fingerprint,
            "step": done,
            "finished": finished,
            "updater": updater,
            "history": [[score.step, score.scores] for score in self.history],
            "receipt": self.receipt.id,
            "head": self.receipt.head,
        }
        self.store.save(tensors, facts)
