"""Repeat and select (Papernot & Steinke, 2022): a secret number of full trials, of which only the winner leaves.

Its price is two to three times that of one trial, however many there were, provided that nothing else is released.
See `privacy.selection` for the mechanism.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

from tacit._context import IN_CONTEXT, PrivacyContext, takes_context
from tacit._curator import Curator, TrialEvent, report_event
from tacit._refusals import ENDING
from tacit.privacy import Budget, Ledger, Neighbours, Unit, selection
from tacit.privacy.events import DpEvent, gaussian_noise
from tacit.tune._quiet import quiet
from tacit.tune._rehearsal import ends, lowest, rehearse
from tacit.tune._repeat_plan import Repeats, plan_repeats
from tacit.tune._search import Tuned, check_score, needed, unit_of, without_model
from tacit.tune._space import Hyperparameters, Space
from tacit.tune._trainable import Score, Trainable, check_space, score_of, size_of
from tacit.tune._trials import Trial, event_within, released, trained

Outcome = tuple[float, tuple[Any, Hyperparameters]]  # a noisy score, and what it is of
RunTrial = Callable[[selection.SelectionTrial, Hyperparameters], Outcome]


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
        curator=curator,
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
    with quiet():
        check_space(trainable, space)
        rehearse(
            trainable,
            lowest(space),
            plan.mu,
            neighbours,
            score=evaluator,
            size=people,
            curator=curator,
            others=ends(space),
        )
    ledger.open_subject(subject, budget, unit=unit, neighbours=neighbours, plan=[plan.event])
    receipt = ledger.charge(subject, plan.event, stage="tune", note=note, seed=seed)

    def run(trial: selection.SelectionTrial, point: Hyperparameters) -> Outcome:
        model, found, wrong = None, -math.inf, ""
        with quiet():
            try:
                paid = trial.pay(_training(trainable, point, plan, receipt.neighbours))
            except ENDING:
                raise
            except BaseException as error:  # a point that costs more than was planned, or has no price, loses
                wrong = f"{type(error).__name__}: {error}"
            else:
                model, wrong = trained(trainable, point, plan.mu, paid)
            if not wrong:
                try:
                    found = released(evaluator(model), trial.pay(plan.score), people)
                except ENDING:
                    raise
                except BaseException as error:  # whatever a score can do with rows
                    wrong = f"{type(error).__name__}: {error}"
        score_of_trial = None if wrong else found
        report_event(curator, TrialEvent(Trial(hyperparameters=point, mu=plan.mu, score=score_of_trial), wrong))
        return found, (model, point)

    try:
        winner = selection.best(trials(selection.SelectionTrials(receipt), run))
    finally:
        receipt.close()  # here, not in the ledger: an entry now would reveal how long it took
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
    return event_within(trainable, point, plan.mu, neighbours)


class Numbers(random.Random):
    """Random numbers that were drawn elsewhere."""

    def __init__(self, numbers: list[float]) -> None:
        super().__init__(0)
        self._left = iter(numbers)

    def random(self) -> float:
        return next(self._left)
