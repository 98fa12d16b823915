"""Random search and grid search, with every trial paid for.

Which points are tried is fixed before the first release, so trainables that subsample their batches are welcome:
all their runs and scores are declared first and composed by PLD.
"""

from __future__ import annotations

from dataclasses import replace

from tacit._context import IN_CONTEXT, PrivacyContext, takes_context
from tacit._curator import Curator
from tacit.privacy import Budget, Ledger, Neighbours, Unit
from tacit.privacy.events import check_count
from tacit.progress import shown
from tacit.recipes import Progress
from tacit.tune import _budget_split as equal
from tacit.tune._plan import SHAVE, score_share
from tacit.tune._rehearsal import lowest, rehearse_search
from tacit.tune._runners import Runner, SerialRunner
from tacit.tune._sampled import is_sampled
from tacit.tune._search import SearchSession, Tuned, chance_of, needed, unit_of
from tacit.tune._space import Space
from tacit.tune._trainable import Score, Trainable, check_space, score_of, size_of


@takes_context
def random_search(
    trainable: Trainable,
    space: Space,
    budget: Budget,
    *,
    ledger: Ledger = IN_CONTEXT,
    subject: str = IN_CONTEXT,
    trials: int = 1,
    score: Score | None = None,
    size: int | None = None,
    precision: float = 0.01,
    scores: float = 0.1,
    unit: Unit | str | None = None,
    neighbours: Neighbours | str = Neighbours.ADD_REMOVE,
    runner: Runner | None = None,
    curator: Curator | None = None,
    draw_seed: int | None = None,
    seed: int | None = None,
    progress: Progress | bool = False,
    context: PrivacyContext | None = None,
) -> Tuned:
    """One run with the whole budget at a random point; or the best of several that share it.

    With `trials=1` nothing is scored and nothing else is spent. With more, every trial gets an equal part of mu^2 and a
    noisy score; all models are released, so the best one is the result and there is no final run. A runner in other
    processes hands the model back pickled.

    Formal guarantee: mu^2 = trials * (mu_run^2 + mu_score^2), at most that of the budget and charged run by run; points
    are drawn without looking at anything. One trial costs mu_run alone. Poisson-subsampled batches: see `grid_search`.

    Args:
        trainable: `trainable(hyperparameters, mu, receipt)` trains a model on a receipt; `Finetuning` makes one of
            `finetune.fit`.
        space: The box of hyperparameters, fixed before anything is searched.
        budget: What the whole search may spend.
        ledger: Where everything is charged.
        subject: The data set's name in the ledger.
        trials: The number of runs.
        score: `score(model)`: one number in [0, 1] per private unit; a `Finetuning` has its own.
        size: The public number of units; a `Finetuning` has its own.
        precision: The standard deviation of a score's noise that is enough, as a share.
        scores: The largest share of mu^2 that scores may take.
        unit: The kind of unit; by default that of the trainable or score.
        neighbours: The neighbouring relation.
        runner: How trials run: `SerialRunner` (the default), `Processes(2)`, `RayRunner`.
        curator: Called with a `tacit.TrialEvent` for each trial.
        draw_seed: Fixes which points are tried: public.
        seed: Reproducible noise: "seeded: not private".
        progress: True shows a bar; a function gets the same facts.
        context: A `tacit.PrivacyContext` instead of the arguments that it has: ledger, subject, unit, …

    Returns:
        The best model, all trials and what the search cost.

    Raises:
        Refusal: The trainable or the score failed in a dry run; nothing was charged.
        BudgetExceeded: The subject cannot afford it; nothing was charged.
        RunFailed: No trial gave a model; `curator` knows why.
    """
    del context  # its arguments are here; see takes_context
    check_count(trials, "trials")
    equal.check_budget(budget)
    chance = chance_of(draw_seed)
    points = [space.draw(chance) for _ in range(trials)]
    several = trials > 1
    unit = unit_of(trainable, unit)
    session = SearchSession(
        trainable=trainable,
        ledger=ledger,
        subject=subject,
        neighbours=Neighbours(neighbours),
        delta=budget.delta,
        score=needed(score_of(trainable, score), "score") if several else None,
        size=needed(size_of(trainable, size), "size") if several else 1,
        runner=runner or SerialRunner(),
        curator=curator,
        seed=seed,
    )
    mu, mu_score = budget.mu * SHAVE, None
    check_space(trainable, space)
    rehearse_search(session, lowest(space), mu, others=points, trials=several, keep=True)
    if several:
        mu, mu_score = equal.share(budget, trials, size=session.size, precision=precision, scores=scores)
    sampled = is_sampled(trainable, space, curator)
    mu = equal.declare(session, points, mu, mu_score, budget, unit=unit, sampled=sampled)
    with shown(progress) as bar:
        session = replace(session, progress=bar)
        if mu_score is not None:
            done = session.trials(points, mu, mu_score, name="random search", keep=True)
            return equal.chosen(session, done, mu, unit=unit)
        session.report_progress("random search", 0, 1)
        model = session.train(points[0], mu, note="random search")
        session.report_progress("random search", 1, 1)
    return Tuned(
        model=model,
        hyperparameters=points[0],
        trials=(),
        guarantee=ledger.spent(subject),
        final_run_guarantee=session.alone(mu, unit),
    )


@takes_context
def grid_search(
    trainable: Trainable,
    space: Space,
    budget: Budget | None = None,
    *,
    ledger: Ledger = IN_CONTEXT,
    subject: str = IN_CONTEXT,
    points: int = 3,
    each: Budget | None = None,
    score: Score | None = None,
    size: int | None = None,
    precision: float = 0.01,
    scores: float = 0.1,
    unit: Unit | str | None = None,
    neighbours: Neighbours | str = Neighbours.ADD_REMOVE,
    runner: Runner | None = None,
    curator: Curator | None = None,
    seed: int | None = None,
    progress: Progress | bool = False,
    context: PrivacyContext | None = None,
) -> Tuned:
    """A run at every point of `space.grid(points)`; the best by its noisy score is the result.

    Within a `budget` the k points share it: each run gets about mu/sqrt(k). With `each`, every run gets that much, as
    people do it who report the winner's epsilon; then the subject has to afford all of them, or nothing is charged.
    `guarantee` is what the search cost, and `final_run_guarantee` is the winner's own.

    Formal guarantee: mu^2 = k * (mu_run^2 + mu_score^2), charged run by run. Where batches are Poisson-subsampled, each
    run is (epsilon, delta)-private where a Gaussian release of mu_run is; all k and their scores are declared before
    the first in the ledger's plan mode and composed by PLD, with mu_run lowered until they fit (or, with `each`,
    refused if they do not).

    Args:
        trainable: `trainable(hyperparameters, mu, receipt)` trains a model on a receipt; `Finetuning` makes one of
            `finetune.fit`.
        space: The box of hyperparameters, fixed before anything is searched.
        budget: What the search may spend; with `each`, the budget of a new subject (by default exactly what the runs
            cost).
        ledger: Where everything is charged.
        subject: The data set's name in the ledger.
        points: Values of each hyperparameter.
        each: What every single run gets.
        score: `score(model)`: one number in [0, 1] per private unit; a `Finetuning` has its own.
        size: The public number of units; a `Finetuning` has its own.
        precision: The standard deviation of a score's noise that is enough, as a share.
        scores: The largest share of mu^2 that scores may take.
        unit: The kind of unit; by default that of the trainable or score.
        neighbours: The neighbouring relation.
        runner: How trials run: `SerialRunner` (the default), `Processes(2)`, `RayRunner`.
        curator: Called with a `tacit.TrialEvent` for each trial.
        seed: Reproducible noise: "seeded: not private".
        progress: True shows a bar; a function gets the same facts.
        context: A `tacit.PrivacyContext` instead of the arguments that it has: ledger, subject, unit, …

    Returns:
        The best model, all trials and what the search cost.

    Raises:
        Refusal: The trainable or the score failed in a dry run; nothing was charged.
        BudgetExceeded: The subject cannot afford it; nothing was charged.
        RunFailed: No trial gave a model; `curator` knows why.
    """
    del context  # its arguments are here; see takes_context
    own = each or budget
    if own is None:
        raise ValueError("Give budget=, what all points share, or each=, what every one of them gets.")
    equal.check_budget(own)
    places = list(space.grid(points))
    unit = unit_of(trainable, unit)
    session = SearchSession(
        trainable=trainable,
        ledger=ledger,
        subject=subject,
        neighbours=Neighbours(neighbours),
        delta=own.delta,
        score=needed(score_of(trainable, score), "score"),
        size=needed(size_of(trainable, size), "size"),
        runner=runner or SerialRunner(),
        curator=curator,
        seed=seed,
    )
    check_space(trainable, space)
    rehearse_search(session, lowest(space), own.mu, others=places, keep=True)
    if each is None:
        mu, mu_score = equal.share(own, len(places), size=session.size, precision=precision, scores=scores)
    else:
        mu = each.mu
        mu_score = score_share(each, mu, 1, size=session.size, precision=precision, scores=scores)
    sampled = is_sampled(trainable, space, curator)
    mu = equal.declare(session, places, mu, mu_score, budget, unit=unit, sampled=sampled, fixed=each is not None)
    with shown(progress) as bar:
        session = replace(session, progress=bar)
        done = session.trials(places, mu, mu_score, name="grid search", keep=True)
        return equal.chosen(session, done, mu, unit=unit)
