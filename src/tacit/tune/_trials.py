"""One trial of a search: charged, trained, scored."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tacit._curator import Curator
from tacit._refusals import ENDING, Refusal, attempt, of_the_machine, text_of
from tacit.distributed import Team, team
from tacit.privacy import Ledger, LedgerError, Neighbours, Receipt, check_used, events, grid_sum, mechanisms
from tacit.privacy.events import DpEvent
from tacit.tune._space import Hyperparameters
from tacit.tune._trainable import FAILED, Priced, Score, Trainable, own_sampled

GRID = 2.0**-10  # of scores: what one unit adds is rounded to it
_ROUNDING = 1 + 1e-9


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What a trial came to: everything here is public or was released.

    Args:
        hyperparameters: What was tried.
        mu: What it was worth.
        score: As released, with its noise; None: the trial failed.
        receipt: The receipt's id.
        model: Released as well; kept only if it is asked for.
        score_noise: The standard deviation of the score's noise. Public.
    """

    hyperparameters: Hyperparameters
    mu: float
    score: float | None  # as released, with its noise; None: the trial failed
    receipt: str = ""
    model: Any = field(default=None, repr=False, compare=False)  # released as well; kept only if it is asked for
    score_noise: float | None = None

    def __str__(self) -> str:
        noise = "" if self.score_noise is None else f" ± {self.score_noise:.4f} of noise"
        said = "failed" if self.score is None else f"score {self.score:.4f}{noise}"
        return f"{self.hyperparameters}, mu {self.mu:.4g}: {said}"

    @property
    def failed(self) -> bool:
        return self.score is None


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """A trial to be run, wherever it is run; `ledger` is an address, for a receipt lives where it was charged."""

    trainable: Trainable = field(repr=False)
    score: Score = field(repr=False)
    hyperparameters: Hyperparameters
    mu: float
    mu_score: float
    size: int
    subject: str
    ledger: str = field(repr=False)  # it may have a password
    note: str
    seed: int | None = None
    keep: bool = False  # hand back the model, too

    def run(self, ledger: Ledger | None = None) -> tuple[Trial, str]:
        """Charge, train, score; the text is what went wrong, for the curator alone. A trial that fails stays charged.

        Formal guarantee: both charges come before anything is looked at. The training is what its event says. The
        score is the sum over units of a number in [0, 1] on a public grid, which one unit moves by at most 1 under
        every relation; it leaves through the discrete Gaussian that was charged, divided by the public size.
        """
        ledger = ledger or Ledger(self.ledger)
        known = ledger.get_subject(self.subject)
        if known is None:
            raise LedgerError(f"There is no subject {self.subject!r} in this ledger.")
        relation = known.terms.neighbours
        try:
            event = event_within(self.trainable, self.hyperparameters, self.mu, relation)
        except ENDING:
            raise
        except BaseException as error:  # whatever a trainable says of itself: this trial is not charged
            if (ranks := team()) is not None:
                ranks.share("")  # those that wait for a receipt get none
            return self.lost, text_of(error)
        paid = ledger.charge(self.subject, event, stage="tune", note=self.note, seed=self.seed)
        marked = ledger.charge(
            self.subject,
            events.gaussian(relation.factor / self.mu_score),
            stage="tune",
            note=f"{self.note}: score",
            seed=self.seed,
        )
        ranks = team()
        if ranks is not None:
            ranks.share(paid.id)
        score = None
        model, wrong = trained(self.trainable, self.hyperparameters, self.mu, paid)
        if not wrong:
            try:
                score = released(self.score(model), marked, self.size)
            except ENDING:
                raise
            except BaseException as error:  # whatever a score can do with rows; its text is private
                wrong = f"{type(error).__name__}: {error}"
        kept = model if self.keep and score is not None else None
        found = Trial(
            hyperparameters=self.hyperparameters,
            mu=self.mu,
            score=score,
            receipt=paid.id,
            model=kept,
            score_noise=1 / (self.mu_score * self.size),
        )
        return found, wrong

    @property
    def lost(self) -> Trial:
        """The trial without a result."""
        return Trial(hyperparameters=self.hyperparameters, mu=self.mu, score=None)

    def help(self, ranks: Team) -> None:
        """On a rank that does not lead: the same training, on a receipt without a key, of what the leader charged."""
        receipt = Ledger(self.ledger).receipt(ranks.share())
        self.trainable(self.hyperparameters, self.mu, receipt)


def trained(trainable: Trainable, point: Hyperparameters, mu: float, receipt: Receipt) -> tuple[Any, str]:
    """What a trainable returns, and what went wrong, for the curator alone.

    Raises `ReceiptError` if it returned without a release: its result would be labelled private and is not. That is a
    property of the trainable's code, so the error reveals nothing about any row.
    """
    model, wrong = None, ""
    try:
        model = trainable(point, mu, receipt)
    except ENDING:
        raise
    except BaseException as error:  # whatever a trainable can do with rows; its text is private
        wrong = f"{type(error).__name__}: {error}"
    if not wrong:
        check_used(receipt)
    return model, wrong


@dataclass(frozen=True, eq=False)
class ByUnit:
    """A score that is computed unit by unit; see `by_unit`."""

    units: Sequence[Any] = field(repr=False)
    one: Callable[[Any, Any], Any] = field(repr=False)
    unit: str | None = None

    def __call__(self, model: Any) -> Tensor:
        found = [self._of(model, place) for place in range(len(self.units))]
        if found and all(each is None for each in found):  # no single unit's failure
            raise MemoryError("There was not enough memory to score any unit.")
        return torch.tensor([0.0 if each is None else each for each in found], dtype=torch.float64)

    def _of(self, model: Any, place: int) -> float | None:
        """The unit's number; None if it asks for more memory than there is."""
        try:
            return float(self.one(model, self.units[place]))
        except ENDING:
            raise
        except BaseException as error:  # of this unit alone; its text is private
            return None if of_the_machine(error) else 0.0


def by_unit(units: Sequence[Any], one: Callable[[Any, Any], Any], *, unit: str | None = None) -> Score:
    """A score from a function of one unit: `one(model, unit)` is a number in [0, 1], higher is better.

    `units[i]` is what the function needs to know of unit i: its rows, say, or its number. `unit` says what one of them
    is: "patient", if each item has all rows of a patient.

    Formal guarantee: number i is computed from the model and unit i alone, and a unit whose number cannot be computed,
    or is none, counts as zero. So one unit moves the sum by at most 1, whatever it does to the function. A score that
    is given as a function of the model instead has to see to that by itself.

    Args:
        units: `units[i]` is what the function needs to know of unit i: its rows, say, or its number.
        one: `one(model, units[i])` is a number in [0, 1], higher is better.
        unit: What one item is: "patient", if each has all rows of a patient.

    Returns:
        A score for any search of `tune`.
    """
    return ByUnit(units, one, unit)


def event_of(
    trainable: Trainable, point: Hyperparameters, mu: float, neighbours: Neighbours, curator: Curator | None = None
) -> DpEvent:
    """What a run releases (see `_own_event`), asked before anything is charged."""
    return attempt(_own_event, trainable, point, mu, neighbours, sentence=FAILED.format("event"), curator=curator)


def _own_event(trainable: Trainable, point: Hyperparameters, mu: float, neighbours: Neighbours) -> DpEvent:
    """As the trainable says itself, or `steps` Gaussian sums over everybody that are together worth mu."""
    if isinstance(trainable, Priced):
        return trainable.event(point, mu, neighbours)
    return events.gaussian(neighbours.factor * math.sqrt(point.steps) / mu, steps=point.steps)


def event_within(trainable: Trainable, point: Hyperparameters, mu: float, neighbours: Neighbours) -> DpEvent:
    """What a run releases, if it is worth no more than it may be.

    Args:
        trainable: What is tuned.
        point: Where.
        mu: What the run may cost; of subsampled batches no single mu says that.
        neighbours: The neighbouring relation.

    Returns:
        The event to charge.

    Raises:
        Refusal: The Gaussian releases of the trainable's `event` are worth more.
        Exception: Whatever the trainable raises; its text may be private.
    """
    event = _own_event(trainable, point, mu, neighbours)
    noise = None if own_sampled(trainable, point) else events.gaussian_noise(event)
    if noise is not None and neighbours.factor > mu * noise * _ROUNDING:
        raise Refusal(
            f"A run of mu {mu:.4g} at {point} would cost more than that by the trainable's `event`. Of `steps` sums "
            f"over everybody each needs the noise multiplier {neighbours.factor:g} * sqrt(steps) / mu. Nothing was "
            "charged for it."
        )
    return event


def released(values: Tensor, receipt: Receipt, size: int) -> float:
    """The mean of the units' numbers, noised: their sum on a receipt, over the public size. NaN counts as 0.

    Raises:
        Refusal: There are several numbers per unit: their sums would have more noise than a trial says.
    """
    if not isinstance(values, Tensor) or values.dim() != 1:
        raise Refusal("A score is one number per unit, in a tensor of one dimension.")
    noisy = mechanisms.gaussian_query(grid_sum(values.detach().cpu(), low=0.0, high=1.0, grid=GRID), receipt)
    return float(noisy[0]) / size
