"""How good a model is on people who were held out. They are people, too: their data is declared public, or charged."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tacit._curator import Curator
from tacit._guard_rails import GuardRailWarning
from tacit.data import Records, Rows
from tacit.distributed import Team
from tacit.finetune._predictions import Predictions, kept, predictions, worths
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

_FEW = 64  # units that show whether public data can be scored


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """Data to evaluate the model on: at the end, where a run stops by its loss, and every `every` steps if given.

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

    def __init__(
        self, evaluation: Evaluation, records: Records, task: Task, curator: Curator | None = None, workers: int = 0
    ) -> None:
        task.check(records.labels())
        self.evaluation = evaluation
        self.receipt: Receipt | None = None
        self._records, self._task, self._workers, self._curator = records, task, workers, curator
        self._ledger: Ledger | None = None
        self._like = None if evaluation.public else likeness(records, training=False, curator=curator)
        self.team: Team | None = None  # the ranks that look at the data together
        self.call_others: Callable[[], object] = lambda: None  # made by the leader just before

    def charge(self, ledger: Ledger, *, steps: int, unit: Unit, neighbours: Neighbours, seed: int | None) -> None:
        """Pay for all evaluations of the run at once; public ones cost nothing."""
        evaluation = self.evaluation
        if evaluation.epsilon is None:
            return
        agree(self._records, unit)
        budget, times, name = (
            Budget(evaluation.epsilon, evaluation.delta),
            evaluation.times(steps),
            str(evaluation.subject),
        )
        noise = noise_multiplier(budget, lambda z: events.gaussian(z, steps=times), neighbours=neighbours)
        ledger.open_subject(name, budget, unit=unit, neighbours=neighbours)
        event = events.gaussian(noise, steps=times)
        self.receipt = ledger.charge(name, event, stage="finetune", note="evaluation", seed=seed)
        leases.begin(ledger, self.receipt)
        self._ledger = ledger

    def resume(self, ledger: Ledger, receipt_id: str) -> None:
        """Go on with the evaluations of a run that was killed; one that was under way then counts as made."""
        self.receipt, self._ledger = leases.resume_after_lease(ledger, receipt_id), ledger

    @property
    def used_up(self) -> bool:
        """Whether all evaluations that were paid for were made; public ones are not counted."""
        return self.receipt is not None and self.receipt.used == self.receipt.releases

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """The scores, in percent: those of private data with their noise, and none if a kill has used them up.

        Formal guarantee of the charged form: each unit adds the mean over its rows of a number in [0, 1], or, for
        several labels, of a histogram of scores whose L2 norm is at most 1 (and is shortened to it, after rounding to
        the grid), so the sum moves by at most 1 in L2 (add-remove); it leaves through the discrete Gaussian that was
        charged. What is computed from it is post-processing: divided by a public constant, or an area under a curve.
        """
        if self.evaluation.public:
            self.call_others()
            if self.team is None:
                return _or_none(lambda: self._scored(model))
            said = self._predictions(model)  # a rank that fails alone would leave the others waiting
            return _or_none(lambda: self._task.scores(said.probs, said.labels))
        if self.receipt is None or self._ledger is None:
            raise ReceiptError("An evaluation of private data is charged before it looks at them.")
        if self.used_up:
            return {}
        leases.extend(self._ledger, self.receipt, 1)
        histogram = getattr(self._task, "histogram", None)
        self.call_others()
        mean = self._mean(model)
        limit = math.inf if histogram is None else 1.0
        total = grid_sum(mean, low=0.0, high=1.0, grid=2.0**-10 if histogram is None else 2.0**-20, l2=limit)
        noisy = mechanisms.gaussian_query(total, self.receipt)
        if histogram is not None:
            return _or_none(lambda: self._task.scores_of(torch.as_tensor(noisy)))  # type: ignore[attr-defined]
        return {"accuracy": 100 * float(noisy[0]) / float(self.evaluation.size or 1)}

    def rehearse(self, model: nn.Module, *, few: bool = True) -> dict[str, float]:
        """Scores of public data before anything is charged: a task that cannot score them has then cost nothing.

        Of a few units, unless these are too few for the task's scores.

        Raises:
            ValueError: The model or the task raised, or scores are no numbers.
        """
        try:
            units = torch.arange(min(len(self._records), _FEW if few else len(self._records)))
            said = predictions(model, self._records, self._task, units, workers=self._workers, curator=self._curator)
            return _numbers(self._task.scores(said.probs, said.labels))
        except Exception as error:  # the data are public, and so is what an error says of them
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if few and len(self._records) > _FEW:
            return self.rehearse(model, few=False)
        raise ValueError(f"The public evaluation fails. Nothing was charged ({reason}).")

    def help(self, model: nn.Module) -> None:
        """On a rank that does not lead: look at this rank's part of the data."""
        if self.evaluation.public:
            self._predictions(model)
        else:
            self._mean(model)

    def _scored(self, model: nn.Module) -> Any:
        said = self._predictions(model)
        return self._task.scores(said.probs, said.labels)

    def _predictions(self, model: nn.Module) -> Predictions:
        return predictions(
            model, self._records, self._task, workers=self._workers, curator=self._curator, team=self.team
        )

    def _mean(self, model: nn.Module) -> Tensor:
        """What each unit adds, before the noise. Private."""
        worth = getattr(self._task, "histogram", None) or self._task.right
        return mean_by_unit(
            model, self._records, self._task, worth, like=self._like, workers=self._workers, team=self.team
        )


def right_by_unit(
    model: nn.Module,
    records: Records,
    task: Task,
    *,
    confidence: bool = False,
    like: Rows | None = None,
    workers: int = 0,
) -> Tensor:
    """How right (or `confidence` of the right answer) the model is about each unit: the mean over its rows. Private.

    All within [0, 1]; a unit whose rows cannot be read, or make the model raise, counts as wrong, and changes no
    other unit's number. Number i is computed from the rows of unit i alone, given that the model and the task look at
    rows one by one (see `check_rows_alone`).
    """
    worth = task.confidence if confidence else task.right
    return mean_by_unit(model, records, task, worth, like=like, workers=workers)


def mean_by_unit(
    model: nn.Module,
    records: Records,
    task: Task,
    worth: Callable[[Tensor, Tensor], Tensor],
    *,
    like: Rows | None = None,
    workers: int = 0,
    team: Team | None = None,
) -> Tensor:
    """The mean over each unit's rows of a number, or a vector, per row; zero for a unit without rows. Private."""
    total: Tensor | None = None
    lines = torch.zeros(len(records), dtype=torch.long)
    for owner, values in worths(model, records, task, worth, like, workers=workers, team=team):
        total = torch.zeros(len(records), *values.shape[1:], dtype=torch.float64) if total is None else total
        total.index_add_(0, owner, values.double())
        lines += torch.bincount(owner, minlength=len(records))
    if total is None:
        return torch.zeros(len(records), dtype=torch.float64)
    return total.div_(lines.clamp_min(1).view(-1, *[1] * (total.dim() - 1)))


def _numbers(scores: Any) -> dict[str, float]:
    """A task's scores as plain numbers, which a checkpoint can keep.

    Raises:
        TypeError: They are none.
    """
    if not isinstance(scores, Mapping):
        raise TypeError(f"scores are a dictionary of names and numbers, not {type(scores).__name__}")
    return {str(name): float(value) for name, value in scores.items()}


def _or_none(scores: Callable[[], Any]) -> dict[str, float]:
    """The scores of what is public or was released; none, with a warning, if model or task fail on them.

    The run is paid for by then, and an error would end it.
    """
    try:
        return _numbers(scores())
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        text = f"The model or the task could not score an evaluation, which has no scores now ({reason})."
        warnings.warn(text, GuardRailWarning, stacklevel=2)
        return {}


def check_rows_alone(task: Task, labels: Tensor, *, confidence: bool = False) -> None:
    """Refuse a task that scores a row by looking at other rows: on synthetic rows, before anything is charged.

    Formal guarantee of a charged score: one unit moves the sum of scores by at most 1. That holds only if the score of
    a row depends on nothing but its own outputs and label.
    """
    generator = torch.Generator().manual_seed(0)
    count, places = 6, labels.shape[1:2] if labels.dim() == 2 and not labels.is_floating_point() else ()
    outputs = torch.randn(count, *(min(n, 4) for n in places), task.outputs, generator=generator)
    shape = (count, *(min(n, 4) for n in places)) if places else (count, *labels.shape[1:])
    if labels.is_floating_point():
        drawn = torch.randint(2, shape, generator=generator).to(labels.dtype)
    else:
        drawn = torch.randint(max(task.outputs, 1), shape, generator=generator).to(labels.dtype)

    def worth(rows: slice) -> Tensor:
        probs, truth = kept(task, outputs[rows], drawn[rows])
        return (task.confidence if confidence else task.right)(probs, truth).double()

    histogram = None if confidence else getattr(task, "histogram", None)

    def all_of(rows: slice) -> Tensor:
        """What each row is worth, beside its histogram where there is one."""
        if histogram is None:
            return worth(rows)
        return torch.cat([worth(rows)[:, None], histogram(*kept(task, outputs[rows], drawn[rows])).double()], 1)

    try:
        together = all_of(slice(count))
        alone = torch.cat([all_of(slice(i, i + 1)) for i in range(count)])
        if histogram is not None:
            _numbers(task.scores_of(together[:, 1:].sum(0)))  # type: ignore[attr-defined]
    except Exception as error:  # nothing here is anybody's
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"The task cannot score synthetic rows ({type(error).__name__}: {reason}).") from None
    shaped = len(together) == len(alone) == count and together.dim() == alone.dim() == (1 if histogram is None else 2)
    if not shaped or not torch.allclose(together, alone, atol=1e-5):
        raise ValueError(
            "The task scores a row by what other rows there are, so that one unit could move everybody's score: number "
            "i must be computed from row i alone."
        )
