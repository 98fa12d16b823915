"""How good a model is on people who were held out. They are people, too: their data is declared public, or charged."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tacit.data import Records, Rows
from tacit.finetune._predictions import kept, predictions, worths
from tacit.finetune._reading import likeness
from tacit.finetune._sources import agree
from tacit.finetune._tasks import Task
from tacit.privacy import (
    Budget,
    Ledger,
    Neighbours,
    Receipt,
    ReceiptError,
    Unit,
    events,
    grid_sum,
    leases,
    mechanisms,
    noise_multiplier,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """Data to evaluate the model on: at the end, and every `every` steps if given.

    Either `public=True`, or a budget of its own.

    Args:
        data: As in `fit`.
        every: Steps between evaluations.
        public: The data need no protection: scores are exact.
        subject: Another data set of the same ledger, which pays for all evaluations together.
        epsilon: What they may spend.
        delta: What they may spend.
        size: The public number of units that the noisy count is divided by.
        patience: Stop after so many evaluations in a row without a better score.
    """

    data: Any = field(repr=False)
    every: int | None = None
    public: bool = False
    subject: str | None = None
    epsilon: float | None = None
    delta: float = 1e-5
    size: int | None = None
    patience: int | None = None

    def __post_init__(self) -> None:
        if self.public == (self.epsilon is not None):
            raise ValueError(
                "Evaluation data is public (public=True) or charged (subject=, epsilon=, size=): say which."
            )
        if self.epsilon is not None and (self.subject is None or self.size is None):
            raise ValueError("A charged evaluation needs subject= (who pays) and size= (the public number of units).")
        for value in (self.every, self.patience):
            if value is not None and value < 1:
                raise ValueError("every and patience are at least 1.")
        if self.patience is not None and self.every is None:
            raise ValueError("patience counts evaluations: say how often with every=.")

    def times(self, steps: int) -> int:
        """How many evaluations a run of so many steps makes, at most."""
        return 1 if self.every is None else math.ceil(steps / self.every)

    def due(self, done: int, steps: int) -> bool:
        return done == steps or (self.every is not None and done % self.every == 0)


class Evaluator:
    """Carries out a run's evaluations; those of private data on a receipt of their own."""

    def __init__(self, evaluation: Evaluation, records: Records, task: Task, curator: object = None) -> None:
        task.check(records.labels())
        self.evaluation = evaluation
        self.receipt: Receipt | None = None
        self._records, self._task = records, task
        self._ledger: Ledger | None = None
        self._like = None if evaluation.public else likeness(records, training=False, curator=curator)

    def charge(self, ledger: Ledger, *, steps: int, unit: Unit, neighbours: Neighbours, seed: int | None) -> None:
        """Pay for all evaluations of the run at once; public ones cost nothing."""
        told = self.evaluation
        if told.epsilon is None:
            return
        agree(self._records, unit)
        budget, times, name = Budget(told.epsilon, told.delta), told.times(steps), str(told.subject)
        noise = noise_multiplier(budget, lambda z: events.gaussian(z, steps=times), neighbours=neighbours)
        ledger.open_subject(name, budget, unit=unit, neighbours=neighbours)
        event = events.gaussian(noise, steps=times)
        self.receipt = ledger.charge(name, event, stage="finetune", note="evaluation", seed=seed)
        leases.begin(ledger, self.receipt)
        self._ledger = ledger

    def resume(self, ledger: Ledger, receipt_id: str) -> None:
        """Go on with the evaluations of a run that was killed; one that was under way then counts as made."""
        self.receipt, self._ledger = leases.resume_after_lease(ledger, receipt_id), ledger

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """The scores, in percent: those of private data with their noise, and none if a kill has used them up.

        Formal guarantee of the charged form: each unit adds the mean over its rows of a number in [0, 1], so the sum
        moves by at most 1 (add-remove); it leaves through the discrete Gaussian that was charged, and is divided by a
        public constant.
        """
        if self.evaluation.public:
            said = predictions(model, self._records, self._task)
            return self._task.scores(said.probs, said.labels)
        if self.receipt is None or self._ledger is None:
            raise ReceiptError("An evaluation of private data is charged before it looks at them.")
        if self.receipt.used == self.receipt.releases:
            return {}
        leases.extend(self._ledger, self.receipt, 1)
        mean = right_by_unit(model, self._records, self._task, like=self._like)
        noisy = mechanisms.gaussian_query(grid_sum(mean, low=0.0, high=1.0, grid=2.0**-10), self.receipt)
        return {"accuracy": 100 * float(noisy[0]) / float(self.evaluation.size or 1)}


def right_by_unit(
    model: nn.Module, records: Records, task: Task, *, confidence: bool = False, like: Rows | None = None
) -> Tensor:
    """How right (or `confidence` of the right answer) the model is about each unit: the mean over its rows. Private.

    All within [0, 1]; a unit whose rows cannot be read, or make the model raise, counts as wrong, and changes nobody
    else's number. Number i is computed from the rows of unit i alone, given that the model and the task look at rows
    one by one (see `check_rows_alone`).
    """
    worth = task.confidence if confidence else task.right
    right = torch.zeros(len(records), dtype=torch.float64)
    lines = torch.zeros(len(records), dtype=torch.long)
    for owner, values in worths(model, records, task, worth, like):
        right.index_add_(0, owner, values.double())
        lines += torch.bincount(owner, minlength=len(records))
    return right.div_(lines.clamp_min(1))


def check_rows_alone(task: Task, labels: Tensor, *, confidence: bool = False) -> None:
    """Refuse a task that scores a row by looking at other rows: on made-up rows, before anything is charged.

    Formal guarantee of a charged score: one unit moves the sum of scores by at most 1. That holds only if the score of
    a row depends on nothing but its own outputs and label.
    """
    generator = torch.Generator().manual_seed(0)
    count, places = 6, labels.shape[1:2] if labels.dim() == 2 and not labels.is_floating_point() else ()
    outputs = torch.randn(count, *(min(n, 4) for n in places), task.outputs, generator=generator)
    shape = (count, *(min(n, 4) for n in places)) if places else (count, *labels.shape[1:])
    if labels.is_floating_point():
        made_up = torch.randint(2, shape, generator=generator).to(labels.dtype)
    else:
        made_up = torch.randint(max(task.outputs, 1), shape, generator=generator).to(labels.dtype)

    def worth(rows: slice) -> Tensor:
        probs, truth = kept(task, outputs[rows], made_up[rows])
        return (task.confidence if confidence else task.right)(probs, truth).double()

    try:
        together = worth(slice(count))
        alone = torch.cat([worth(slice(i, i + 1)) for i in range(count)])
    except Exception as error:  # nothing here is anybody's
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"The task cannot score made-up rows ({type(error).__name__}: {reason}).") from None
    if together.shape != (count,) or alone.shape != (count,) or not torch.allclose(together, alone, atol=1e-5):
        raise ValueError(
            "The task scores a row by what other rows there are, so that one unit could move everybody's score: number "
            "i must be computed from row i alone."
        )
