"""A run over several ranks: the leader draws, charges and releases; all of them compute, and have the same model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from tacit.data import Records
from tacit.distributed import MOST_UNITS, Team
from tacit.finetune._loop import Run
from tacit.finetune._predictions import SHARES
from tacit.finetune._reading import Portion
from tacit.privacy import BoundedSum, mechanisms, sampling

_EVALUATE = "evaluate"
Parts = list[tuple[Portion, str]]  # with the key of what the model itself draws


@dataclass(kw_only=True)
class TeamRun(Run):
    """One rank of a run.

    Formal guarantee: that of `Run.step`, on the leader, which alone has the receipt and its key; sums of portions are
    added as `Team.add_up` says. The others get the portions that they compute, and what was released.
    """

    team: Team
    _receipt_id: str = ""

    def __post_init__(self) -> None:
        if self.evaluator is not None:
            self.evaluator.team = self.team
            if self.leads:
                self.evaluator.call_others = lambda: self.team.share(_EVALUATE)

    @property
    def leads(self) -> bool:
        return self.team.leads

    @property
    def receipt_id(self) -> str:
        return self._receipt_id

    @property
    def begun(self) -> bool:
        return super().begun if self.leads else self.done > 0

    def begin(self, *, settings: str, data: Records, whole: nn.Module) -> None:
        """The leader charges, or resumes; then every rank is where the run stands."""
        self.team.alone(lambda: Run.begin(self, settings=settings, data=data, whole=whole))
        self._agree_on_weights()

        def stands() -> tuple[Any, ...]:
            return self.done, self._finished, self.receipt.id, self.account.scale, self.account.guarantee

        done, finished, self._receipt_id, scale, guarantee = self.team.lead(stands)
        if not self.leads:
            self.done, self._finished = done, finished
            self.account = replace(self.account, scale=scale, charged=guarantee)  # type: ignore[call-arg]

    def train(self) -> int:
        if not self.leads:
            while self._follow():
                pass
            return self.end()
        if not self._finished:
            self._steps()
        self.team.share(None)
        return self.end()

    def step(self) -> None:
        """The next step, on every rank."""
        if self.leads:
            super().step()
        else:
            self._follow()

    def end(self) -> int:
        if self.leads:
            return super().end()
        self.updater.apply_averaged_weights()
        self._finished = True
        return self.done

    def _follow(self) -> bool:
        """One step on a rank that does not lead; False if there is none left."""
        order: tuple[int, Parts] | str | None = self.team.share()
        if order is None:
            return False
        if order == _EVALUATE and self.evaluator is not None:
            with self.updater.averaged_weights():
                self.evaluator.help(self.model)
            return True
        assert isinstance(order, tuple)
        step, parts = order
        self._update(self._add_up(parts), step)
        self.done = step + 1
        return True

    def _ask(self, step: int) -> BoundedSum:
        """The sum of the next step, whose portions are on all ranks."""
        parts = self._portions(step)
        if sum(len(portion.units) for portion in parts) > MOST_UNITS:
            raise ValueError(f"A step over several ranks takes up to {MOST_UNITS:,} units: use smaller batches.")
        keyed = [(portion, sampling.model_key(self.receipt, place)) for place, portion in enumerate(parts)]
        self.team.share((step, keyed))
        return self._add_up(keyed)

    def _sums(self, parts: Parts) -> Iterator[BoundedSum]:
        """Of this rank's portions; every portion's own randomness goes by a key of its own."""
        for portion, key in self.team.mine(parts):
            rows, mute = self._reader(portion)
            with sampling.reading_randomness(key):
                yield self.query.sum(rows, mute)

    def _add_up(self, parts: Parts) -> BoundedSum:
        """The sum over all ranks, on the leader, who draws the noise while it is on its way."""
        return self.team.add_up(  # type: ignore[no-any-return]
            self._sums(parts), self.query.zero_sum(), meanwhile=lambda count: mechanisms.prepare(self.receipt, count)
        )

    def _released(self, total: BoundedSum, noise: Any) -> dict[str, Tensor]:
        """What the leader releases, on every rank."""
        return self.team.lead_tensors(lambda: Run._released(self, total, noise))

    @property
    def _shares(self) -> int:
        """Enough portions for every rank to have some, and as much; as many whatever the number of ranks."""
        return SHARES

    def _agree_on_weights(self) -> None:
        tensors, facts = self.updater.state() if self.leads else (None, None)
        tensors, facts = self.team.share_tensors(tensors), self.team.share(facts)
        query = self.team.share_tensors(self.query.state() if self.leads else None)
        if not self.leads:
            self.updater.load(tensors, facts)
            self.query.load(query)

    def _save(self, done: int, *, finished: bool) -> None:
        if self.leads:
            super()._save(done, finished=finished)
