"""What every search is made of: a subject that pays, trials that are charged one by one, and a final run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from tacit._curator import Curator, TrialEvent, report_event
from tacit._guard_rails import warn_of_delta
from tacit._refusals import Refusal, attempt
from tacit._saving import save_result
from tacit.models import WeightFormat
from tacit.privacy import Budget, BudgetExceeded, Guarantee, Ledger, Mode, Neighbours, Unit, epsilon_of
from tacit.privacy.events import DpEvent
from tacit.recipes import Progress
from tacit.tune._runners import Runner, SerialRunner
from tacit.tune._space import Hyperparameters
from tacit.tune._trainable import Score, Trainable, own_unit
from tacit.tune._trials import Job, Trial, event_within, trained

T = TypeVar("T")
ENOUGH = 3  # trials that all failed, and a search stops


class RunFailed(RuntimeError):
    """A charged run or search that ended without a model; `curator` received the reason.

    Args:
        message: What recipients see.
        result: What a search found until then, and what it cost: trials, guarantee, decisions, and no model.
    """

    def __init__(self, message: str, result: Tuned | None = None) -> None:
        super().__init__(message)
        self.result = result


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What a search found, and what it cost; everything here is public or was released.

    Args:
        model: What the trainable returned in the final run.
        hyperparameters: Those of the model.
        trials: All trials.
        guarantee: Of the whole search, from the ledger.
        decisions: What was decided on the way, in sentences.
        final_run_guarantee: The winner's own, which is not what the search promises.
    """

    model: Any = field(repr=False)  # what the trainable returned in the final run
    hyperparameters: Hyperparameters | None
    trials: tuple[Trial, ...] = field(repr=False)
    guarantee: Guarantee  # of the whole search, from the ledger
    decisions: tuple[str, ...] = ()
    final_run_guarantee: Guarantee | None = None  # the winner's own, where people like to report that

    def save(
        self, folder: str | Path, *, format: WeightFormat = "plain", tokenizer: Any = None, title: str | None = None
    ) -> Path:
        """Weights that timm and transformers load, with the card and the guarantee of the whole search beside them.

        Args:
            folder: Made if there is none; see `finetune.Fitted.save`.
            format: `"plain"`, `"peft"` or `"state_dict"`.
            tokenizer: Saved too, if given.
            title: What stands above the card.

        Returns:
            The folder.

        Raises:
            ValueError: There is no torch model, or it has no plain form.
        """
        if not isinstance(self.model, nn.Module):
            raise ValueError(f"There is no torch model to save, but {self.model!r}: save what you have of it yourself.")
        how: dict[str, Any] = {"format": format, "tokenizer": tokenizer, "title": title}
        return save_result(folder, self.model, self, stage="tune", **how)


@dataclass(frozen=True, kw_only=True)
class SearchSession:
    """Who pays for a search, and where its trials run."""

    trainable: Trainable
    ledger: Ledger
    subject: str
    neighbours: Neighbours
    delta: float
    score: Score | None = None
    size: int = 1
    runner: Runner = field(default_factory=SerialRunner)
    curator: Curator | None = None
    seed: int | None = None
    progress: Progress | None = None

    def __post_init__(self) -> None:
        if isinstance(self.runner, type) or not callable(self.runner):
            raise TypeError("runner is tune.SerialRunner(), tune.Processes(2) or tune.RayRunner(): one that was made.")
        if self.score is not None:
            check_score(self.score, unit_of(self.trainable, None))
            warn_of_delta(self.delta, self.size, str(unit_of(self.trainable, None)), stacklevel=6)

    def trials(
        self,
        points: Sequence[Hyperparameters],
        mu: float,
        mu_score: float,
        *,
        name: str,
        before: int = 0,
        of: int = 0,
        keep: bool = False,
    ) -> list[Trial]:
        """Run a trial of `mu` at each point; each is charged by whoever runs it, with its score.

        With `keep` the best trial has its model. If the first three to end have all failed, no more are run.
        """
        score = needed(self.score, "score")
        jobs = [
            Job(
                trainable=self.trainable,
                score=score,
                hyperparameters=point,
                mu=mu,
                mu_score=mu_score,
                size=self.size,
                subject=self.subject,
                ledger=self.ledger.url,
                note=f"{name}, trial {number}",
                seed=None if self.seed is None else self.seed + before + number,
                keep=keep,
            )
            for number, point in enumerate(points, 1)
        ]
        found: dict[int, Trial] = {}
        self.report_progress(name, before, of or len(jobs))
        for number, trial, wrong in self.runner(jobs, self.ledger):
            found[number] = trial
            found = _without_losing_models(found) if keep else found
            report_event(self.curator, TrialEvent(trial, wrong))
            self.report_progress(name, before + len(found), of or len(jobs))
            if len(found) == ENOUGH and all(trial.failed for trial in found.values()):
                break  # what is not charged yet is kept
        return [found[number] for number in sorted(found)]

    def train(self, point: Hyperparameters, mu: float, event: DpEvent | None = None, *, note: str = "final run") -> Any:
        """One charged run without a score; of `event`, if that was planned."""
        if event is None:
            what = "The trainable's `event` failed: the run was not made, nor charged. See curator=."
            options: dict[str, Any] = {"sentence": what, "curator": self.curator}
            try:
                event = attempt(event_within, self.trainable, point, mu, self.neighbours, **options)
            except Refusal as refusal:
                raise RunFailed(str(refusal)) from None
        receipt = self.ledger.charge(self.subject, event, stage="tune", note=note, seed=self.seed)
        model, said = trained(self.trainable, point, mu, receipt)
        if not said:
            return model
        failed = Trial(hyperparameters=point, mu=mu, score=None, receipt=receipt.id)
        report_event(self.curator, TrialEvent(failed, said))
        raise RunFailed(
            f"The run on {receipt} failed, and stays charged. What went wrong may reveal rows: see curator=."
        )

    def report_progress(self, what: str, done: int, total: int) -> None:
        if self.progress is not None:
            known = self.ledger.get_subject(self.subject)
            spent = self.ledger.spent(self.subject).epsilon
            self.progress(what, done, total, spent=None if known is None else (spent, known.terms.budget.epsilon))

    def alone(self, mu: float, unit: Unit | str) -> Guarantee:
        """What one run of `mu` would promise if nothing else had been looked at."""
        return Guarantee(
            epsilon=epsilon_of(mu, self.delta), delta=self.delta, mu=mu, neighbours=self.neighbours, unit=unit
        )


def open_subject(
    ledger: Ledger, subject: str, budget: Budget, *, unit: Unit | str, neighbours: Neighbours | str
) -> None:
    """Declare who pays, if that was not done; a subject with more to spend may pay as well."""
    known = ledger.open_subject(subject, budget, unit=unit, neighbours=neighbours)
    if known.terms.mode is not Mode.GAUSSIAN:
        raise ValueError(
            f"The subject {subject} composes in the mode {known.terms.mode.value}: trials that depend on earlier ones "
            "need the gaussian mode."
        )


def unit_of(whose: object, unit: Unit | str | None, what: str = "trainable") -> Unit:
    """Whom a search promises something to: the units of the trainable (or the score), as it says by `unit`.

    What says nothing has one sample per unit. Another unit than that is refused: it would be promised something, and
    the contributions of somebody else be bounded.
    """
    stated = own_unit(whose)
    own = Unit.SAMPLE if stated is None else Unit(stated)
    if unit is None or own == Unit(unit):
        return own
    if stated is None:
        raise ValueError(
            f"This {what} does not say what its units are, so that nothing is known about a {unit}: give it an "
            f"attribute `unit`, and all that is a {unit}'s into one contribution."
        )
    raise ValueError(f"The units of this {what} are of the kind {str(own)!r}: give unit={str(own)!r}.")


def check_score(score: object, unit: Unit) -> None:
    """Refuse a score that has one number for each of other units, or does not say of what where rows are no units."""
    if own_unit(score) is not None:
        unit_of(score, unit, "score")
    elif str(unit) != "sample":
        raise ValueError(
            f"This trainable protects each {unit}, and the score does not say that it has one number per {unit} (a "
            f"number per row would be protected too little): give tune.by_unit(units, one, unit={str(unit)!r}), or say "
            f"score.unit = {str(unit)!r} of a function that has."
        )


def check_affordable(ledger: Ledger, subject: str, mu: float, delta: float, what: str) -> None:
    """Refuse what a subject in the gaussian mode cannot pay for, before the first charge."""
    left = ledger.remaining(subject)
    if left.mu is not None and mu > left.mu * (1 + 1e-12):
        raise BudgetExceeded(
            f"{subject} cannot afford {what}: they cost epsilon {epsilon_of(mu, delta):.6g}, and what is left is "
            f"{left}. Nothing was charged.",
            left,
        )


def best(trials: Sequence[Trial]) -> Trial | None:
    """The trial with the highest released score; the first of equals; None if all have failed."""
    scored = [trial for trial in trials if trial.score is not None]
    return max(scored, key=lambda trial: trial.score or 0.0) if scored else None


def _without_losing_models(trials: dict[int, Trial]) -> dict[int, Trial]:
    leader = best(list(trials.values()))
    top = leader.score if leader is not None else None
    return {number: trial if trial.score == top else replace(trial, model=None) for number, trial in trials.items()}


def without_model(what: str, result: Tuned) -> RunFailed:
    """The error of a search that has no model to return; what it found until then goes with it."""
    return RunFailed(
        f"{what} What was run stays charged; the rest of the budget is left. What went wrong may reveal rows: see "
        "curator=. What was released until then is this error's `result`.",
        result,
    )


def needed(value: T | None, what: str) -> T:
    """A part that the trainable or the caller must give."""
    if value is None:
        raise ValueError(f"Give {what}=: this trainable has none of its own.")
    return value


def chance_of(draw_seed: int | None) -> random.Random:
    """Where hyperparameters are drawn from: public, so a seed does no harm."""
    return random.Random(draw_seed) if draw_seed is not None else random.SystemRandom()
