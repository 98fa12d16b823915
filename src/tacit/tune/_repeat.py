"""Repeat and select (Papernot & Steinke, 2022): a secret number of full trials, of which only the winner leaves.

Its price is two to three times that of one trial, however many there were, provided that nothing else is released.
See `privacy.selection` for the mechanism.
"""

from __future__ import annotations

import logging
import math
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TextIO

from dp_accounting import dp_event

from tacit._context import IN_CONTEXT, PrivacyContext, takes_context
from tacit._curator import Curator, TrialEvent
from tacit.privacy import Budget, Guarantee, Ledger, Neighbours, Unit, accounting, events, mu_of, selection
from tacit.privacy.events import DpEvent, gaussian_noise, same
from tacit.tune._budget_split import check_budget
from tacit.tune._plan import SHAVE, score_share
from tacit.tune._rehearsal import lowest, rehearse
from tacit.tune._search import Tuned, check_score, needed, unit_of, without_model
from tacit.tune._space import Hyperparameters, Space
from tacit.tune._trainable import Sampled, Score, Trainable, check_space, score_of, size_of
from tacit.tune._trials import Trial, event_of, released, trained

Outcome = tuple[float, tuple[Any, Hyperparameters]]  # a noisy score, and what it is of
RunTrial = Callable[[selection.SelectionTrial, Hyperparameters], Outcome]


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """What a search by repeat and select charges, and what one trial of it may spend.

    Args:
        event: The whole search, for a subject in the plan mode.
        training: What one trial pays for its training.
        score: What one trial pays for its score.
        mu: Of one trial.
        final_run_guarantee: The winner's own, which is not what the search promises.
    """

    event: DpEvent  # the whole search, for a subject in the plan mode
    training: DpEvent  # what one trial pays for its training; T steps at this joint noise, whatever T is
    score: DpEvent  # and for its score
    mu: float
    final_run_guarantee: Guarantee  # the winner's own


def plan_repeats(
    trainable: Trainable,
    space: Space,
    budget: Budget,
    *,
    mean: float = 10.0,
    shape: float = 1.0,
    size: int | None = None,
    precision: float = 0.01,
    scores: float = 0.1,
    unit: Unit | str | None = None,
    neighbours: Neighbours | str = Neighbours.ADD_REMOVE,
) -> Repeats:
    """What `repeat_and_select` will charge with these arguments: one event that meets the budget.

    A trial (training and score together) gets the largest mu at which the winner of the whole search is within the
    budget by RDP; the score takes what `precision` asks for, and at most the share `scores` of it.

    Args:
        trainable: `trainable(hyperparameters, mu, receipt)` trains a model on a receipt; `Finetuning` makes one of
            `finetune.fit`.
        space: The box of hyperparameters, fixed before anything is searched.
        budget: What the whole search may spend.
        mean: The mean number of trials.
        shape: Of the number of trials.
        size: The public number of units; a `Finetuning` has its own.
        precision: The standard deviation of a score's noise that is enough, as a share.
        scores: The largest share of mu^2 that scores may take.
        unit: The kind of unit; by default that of the trainable or score.
        neighbours: The neighbouring relation.

    Returns:
        What the search charges, and what one trial may spend.
    """
    number = Number(mean=float(mean), shape=float(shape))
    return planned(trainable, space, budget, number, size, precision, scores, unit, neighbours)


@dataclass(frozen=True, kw_only=True)
class Number:
    """How many trials are charged, and what else one of them is charged for.

    Args:
        mean: Of the charged number.
        shape: Of its distribution.
        tilt: A Renyi divergence of every order that a trial has besides its releases.
    """

    mean: float
    shape: float
    tilt: float = 0.0

    def event(self, trial: DpEvent, neighbours: Neighbours) -> DpEvent:
        """The whole search. Under replace-one the accountant counts a constant divergence at least twice."""
        if self.tilt:
            twice = 2.0 if neighbours is Neighbours.REPLACE_ONE else 1.0
            trial = events.compose([trial, dp_event.ZCDpEvent(rho=0.0, xi=self.tilt / twice)])
        return events.repeat_and_select(trial, mean=self.mean, shape=self.shape)


def planned(
    trainable: Trainable,
    space: Space,
    budget: Budget,
    number: Number,
    size: int | None,
    precision: float,
    scores: float,
    unit: Unit | str | None,
    neighbours: Neighbours | str,
) -> Repeats:
    """The largest trial with which the winner is within the budget."""
    check_budget(budget)
    unit = unit_of(trainable, unit)
    relation, people = Neighbours(neighbours), needed(size_of(trainable, size), "size")
    mu = _mu_of_a_trial(budget, number, relation) * SHAVE
    mu_score = score_share(budget, mu, 1, size=people, precision=precision, scores=scores)
    score = events.gaussian(relation.factor / mu_score)

    def whole(training: DpEvent) -> DpEvent:
        return number.event(events.compose([training, score]), relation)

    mu = math.sqrt(mu**2 - mu_score**2)
    ends = [space.decompose(end) for end in space.ends]
    training = events.gaussian(relation.factor / mu)
    if any(gaussian_noise(event_of(trainable, end, mu, relation)) is None for end in ends):
        training = _sampled(trainable, ends, budget, relation, whole)
        alone = accounting.guarantee(training, delta=budget.delta, neighbours=relation)
        mu = mu_of(alone.epsilon, budget.delta)
    final_run_guarantee = accounting.guarantee(training, delta=budget.delta, neighbours=relation, unit=unit)
    return Repeats(
        event=whole(training), training=training, score=score, mu=mu, final_run_guarantee=final_run_guarantee
    )


@takes_context
def repeat_and_select(
    trainable: Trainable,
    space: Space,
    budget: Budget,
    *,
    ledger: Ledger = IN_CONTEXT,
    subject: str = IN_CONTEXT,
    mean: float = 10.0,
    shape: float = 1.0,
    score: Score | None = None,
    size: int | None = None,
    precision: float = 0.01,
    scores: float = 0.1,
    unit: Unit | str | None = None,
    neighbours: Neighbours | str = Neighbours.ADD_REMOVE,
    curator: Curator | None = None,
    seed: int | None = None,
    context: PrivacyContext | None = None,
) -> Tuned:
    """Train a secret number of models at random points, `mean` on average, and release the best one (Papernot &
    Steinke, 2022).

    - The subject, if it is new, is declared in the plan mode with exactly this search (`plan_repeats(...).event`); one
      that exists pays in the plan or the renyi mode.
    - Trials run here, one after the other, on parts of one receipt. What they print, warn or log is discarded, a trial
      that fails loses, and there is no progress: all of these would reveal how many trials there were. `curator`
      receives every trial.
    - The time that the call takes reveals something about the number, too: only the curator may time it. Times in the
      ledger are the curator's as well: that of the next charge says when this search was over.
    - Poisson-subsampled runs: fix the steps and the batch size (equal ends), for no trial may cost more than another.

    Formal guarantee: (epsilon, delta) of the budget for what is returned: the winner's model and hyperparameters. One
    trial draws its point at random from the box, trains, and releases a noisy score; whatever the point, that is RDP as
    the inner event is. The best of a truncated negative binomial or Poisson number of independent trials is then RDP by
    theorems 2 and 6 of Papernot & Steinke, which is what the one charge of the ledger says. It does not hold for who
    sees the number of trials, their timing, or anything of a trial that lost. A trainable that returns without a
    release ends the search with a `ReceiptError` and no result: that depends on its code, the drawn points and the
    number of trials, which no row decides.

    Args:
        trainable: `trainable(hyperparameters, mu, receipt)` trains a model on a receipt; `Finetuning` makes one of
            `finetune.fit`.
        space: The box of hyperparameters, fixed before anything is searched.
        budget: What the whole search may spend.
        ledger: Where everything is charged.
        subject: The data set's name in the ledger.
        mean: The mean number of trials.
        shape: Of the number of trials: 1 geometric, 0 logarithmic, in between and above truncated negative binomial,
            inf Poisson (which may be none at all: then there is no model).
        score: `score(model)`: one number in [0, 1] per private unit; a `Finetuning` has its own.
        size: The public number of units; a `Finetuning` has its own.
        precision: The standard deviation of a score's noise that is enough, as a share.
        scores: The largest share of mu^2 that scores may take.
        unit: The kind of unit; by default that of the trainable or score.
        neighbours: The neighbouring relation.
        curator: Called with a `tacit.TrialEvent` for each trial.
        seed: Reproducible noise: "seeded: not private".
        context: A `tacit.PrivacyContext` instead of the arguments that it has: ledger, subject, unit, …

    Returns:
        The winner's model and hyperparameters, and what the search cost.

    Raises:
        Refusal: The trainable or the score failed in a dry run; nothing was charged.
        BudgetExceeded: The subject cannot afford it; nothing was charged.
        RunFailed: No trial has won.
    """
    del context  # its arguments are here; see takes_context
    unit = unit_of(trainable, unit)
    plan = plan_repeats(
        trainable,
        space,
        budget,
        mean=mean,
        shape=shape,
        size=size,
        precision=precision,
        scores=scores,
        unit=unit,
        neighbours=neighbours,
    )

    def trials(each: Iterator[selection.SelectionTrial], run: RunTrial) -> Iterator[Outcome]:
        for trial in each:
            yield run(trial, space.draw(Numbers(trial.uniforms(len(space.ranges)).tolist())))

    return carried_out(
        trainable,
        space,
        budget,
        plan,
        trials,
        ledger=ledger,
        subject=subject,
        score=score,
        size=size,
        unit=unit,
        neighbours=neighbours,
        curator=curator,
        seed=seed,
        note="repeat and select",
    )


def carried_out(
    trainable: Trainable,
    space: Space,
    budget: Budget,
    plan: Repeats,
    trials: Callable[[Iterator[selection.SelectionTrial], RunTrial], Iterator[Outcome]],
    *,
    ledger: Ledger,
    subject: str,
    score: Score | None,
    size: int | None,
    unit: Unit,
    neighbours: Neighbours | str,
    curator: Curator | None,
    seed: int | None,
    note: str,
) -> Tuned:
    """Charge the plan, run the trials that `trials` makes on the receipt, and return the best."""
    evaluator, people = needed(score_of(trainable, score), "score"), needed(size_of(trainable, size), "size")
    check_score(evaluator, unit)
    with _quiet():
        check_space(trainable, space)
        rehearse(trainable, lowest(space), plan.mu, neighbours, score=evaluator, size=people, curator=curator)
    ledger.open_subject(subject, budget, unit=unit, neighbours=neighbours, plan=[plan.event])
    receipt = ledger.charge(subject, plan.event, stage="tune", note=note, seed=seed)

    def run(trial: selection.SelectionTrial, point: Hyperparameters) -> Outcome:
        model, found, wrong = None, -math.inf, ""
        with _quiet():
            try:
                paid = trial.pay(_training(trainable, point, plan, receipt.neighbours))
            except Exception as error:  # a point that costs more than was planned loses
                wrong = f"{type(error).__name__}: {error}"
            else:
                model, wrong = trained(trainable, point, plan.mu, paid)
            if not wrong:
                try:
                    found = released(evaluator(model), trial.pay(plan.score), people)
                except Exception as error:  # whatever a score can do with rows
                    wrong = f"{type(error).__name__}: {error}"
        if curator is not None:
            curator(TrialEvent(Trial(hyperparameters=point, mu=plan.mu, score=None if wrong else found), wrong))
        return found, (model, point)

    try:
        winner = selection.best(trials(selection.SelectionTrials(receipt), run))
    finally:
        receipt.close()  # here, not in the ledger: an entry now would tell how long it took
    model, point = (None, None) if winner is None else winner[1]
    lost = winner is None or winner[0] == -math.inf
    result = Tuned(
        model=model,
        hyperparameters=None if lost else point,
        trials=(),
        guarantee=ledger.spent(subject),
        decisions=("No trial has won: there is no model.",) if lost else (),
        final_run_guarantee=plan.final_run_guarantee,
    )
    if lost:
        raise without_model("No trial has won.", result)
    return result


def _training(trainable: Trainable, point: Hyperparameters, plan: Repeats, neighbours: Neighbours) -> DpEvent:
    """What a trial at this point releases: no more than was planned, or it is refused when it asks for a receipt."""
    if gaussian_noise(plan.training) is None:
        return plan.training
    return event_of(trainable, point, plan.mu, neighbours)


def _sampled(trainable: Any, ends: list[Hyperparameters], budget: Budget, relation: Neighbours, whole: Any) -> DpEvent:
    """The event of a run with Poisson batches, the same for every point, with the noise that fits the budget."""
    if not isinstance(trainable, Sampled):
        raise ValueError("This trainable releases more than Gaussian sums over everybody, and has no event_with.")
    first, last = (trainable.event_with(end, 1.0) for end in ends)
    if not same(first, last):
        raise ValueError(
            "Subsampled batches cost differently with other steps or batches, and all trials of this search must "
            "cost the same: fix steps and batch_size in the space (equal ends)."
        )
    one = partial(trainable.event_with, ends[0])
    return one(accounting.noise_multiplier(budget, lambda noise: whole(one(noise)), neighbours=relation))


@lru_cache(maxsize=64)
def _mu_of_a_trial(budget: Budget, number: Number, neighbours: Neighbours) -> float:
    """The largest mu of one trial with which the winner of the search is within the budget."""

    def search(noise: float) -> DpEvent:
        return number.event(events.gaussian(noise), neighbours)

    return neighbours.factor / accounting.noise_multiplier(budget, search, neighbours=neighbours)


class Numbers(random.Random):
    """Random numbers that were drawn elsewhere."""

    def __init__(self, numbers: list[float]) -> None:
        super().__init__(0)
        self._left = iter(numbers)

    def random(self) -> float:
        return next(self._left)


@contextmanager
def _quiet() -> Iterator[None]:
    """Nothing is printed, warned or logged: not by other languages and not by processes that are started, either."""
    before = logging.root.manager.disable
    with ExitStack() as stack:
        nowhere = stack.enter_context(open(os.devnull, "w"))
        for number, stream in ((1, sys.__stdout__), (2, sys.__stderr__)):
            _divert(number, stream, nowhere, stack)
        stack.enter_context(redirect_stdout(nowhere))
        stack.enter_context(redirect_stderr(nowhere))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(before)


def _divert(number: int, stream: TextIO | None, nowhere: TextIO, stack: ExitStack) -> None:
    """Send a file descriptor nowhere until the stack unwinds; one that is closed has nothing to tell."""

    def flush() -> None:
        with suppress(OSError, ValueError):
            if stream is not None:
                stream.flush()

    try:
        kept = os.dup(number)
    except OSError:
        return
    stack.callback(os.close, kept)
    flush()
    os.dup2(nowhere.fileno(), number)
    stack.callback(os.dup2, kept, number)
    stack.callback(flush)  # first of the three: what is still in a buffer goes nowhere as well
