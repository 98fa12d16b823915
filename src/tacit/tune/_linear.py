"""Linear scaling: cheap trials find how the best total step size grows with epsilon; the final run reads it off.

After Panda et al., 2024 (paper 3, algorithms 1 to 3), with the choice of the winners paid for.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Literal

from tacit._context import IN_CONTEXT, PrivacyContext, takes_context
from tacit._curator import Curator
from tacit.privacy import Budget, Ledger, Neighbours, Unit
from tacit.privacy.events import check_count
from tacit.progress import shown
from tacit.recipes import Progress
from tacit.tune import _budget_split as equal
from tacit.tune._line import Axis, Line, fit_line
from tacit.tune._plan import SHAVE, Plan
from tacit.tune._plan import plan as make_plan
from tacit.tune._rehearsal import ends, lowest, rehearse, rehearse_search
from tacit.tune._runners import Runner, SerialRunner
from tacit.tune._sampled import fixed_steps, is_sampled, plan_sampled
from tacit.tune._search import (
    RunFailed,
    SearchSession,
    Tuned,
    best,
    chance_of,
    check_affordable,
    needed,
    open_subject,
    unit_of,
    without_model,
)
from tacit.tune._significance import blind
from tacit.tune._space import Hyperparameters, Space, Way
from tacit.tune._trainable import Score, Trainable, check_space, default_of, sampled_at, score_of, size_of
from tacit.tune._trials import Trial

Draw = Literal["following", "stratified", "uniform", "independent", "paper"]
WINDOW = 0.4  # of the box, on a logarithmic scale: where a sweep that follows another looks


@dataclass(frozen=True, kw_only=True)
class Scaled(Tuned):
    """A search by linear scaling: the plan it kept to and the line it found.

    Args:
        model: What the trainable returned in the final run.
        hyperparameters: Those of the model.
        trials: All trials.
        guarantee: Of the whole search, from the ledger.
        decisions: What was decided on the way, in sentences.
        final_run_guarantee: The final run's own.
        plan: How the budget was split.
        line: r against epsilon.
    """

    plan: Plan
    line: Line


@takes_context
def linear_scaling(
    trainable: Trainable,
    space: Space,
    budget: Budget,
    *,
    ledger: Ledger = IN_CONTEXT,
    subject: str = IN_CONTEXT,
    score: Score | None = None,
    size: int | None = None,
    plan: Plan | None = None,
    trials: int = 3,
    degree: int = 1,
    axis: Axis = "epsilon",
    way: Way = "balanced",
    draw: Draw = "following",
    default: Hyperparameters | None = None,
    unit: Unit | str | None = None,
    neighbours: Neighbours | str = Neighbours.ADD_REMOVE,
    runner: Runner | None = None,
    curator: Curator | None = None,
    draw_seed: int | None = None,
    seed: int | None = None,
    progress: Progress | bool = False,
    context: PrivacyContext | None = None,
) -> Scaled:
    """Linear scaling: search and train within `budget`, everything included (Panda et al., 2024).

    Formal guarantee: that of the plan, held to by the ledger's filter on sums of mu^2, which allows for later charges
    that depend on earlier releases. What is released: every trial's model, its noisy score, and the final model; the
    line and all decisions are made of these. Trainables that subsample their batches (`sampled`) have no single
    mu: there the steps of every run are fixed before the first, r decides the learning rate alone, and all runs and
    scores are composed by PLD in the ledger's plan mode.

    Args:
        trainable: `trainable(hyperparameters, mu, receipt)` trains a model on a receipt; `Finetuning` makes one of
            `finetune.fit`.
        space: The box of hyperparameters, fixed before anything is searched.
        budget: What the whole search may spend.
        ledger: Where everything is charged.
        subject: The data set's name in the ledger.
        score: `score(model)`: one number in [0, 1] per private unit; a `Finetuning` has its own.
        size: The public number of units; a `Finetuning` has its own.
        plan: How the budget is split (`tune.plan`); by default `trials` runs at 0.1 and at 0.2 of epsilon.
        trials: Trials in each sweep.
        degree: Of the polynomial, for at least degree + 1 sweeps.
        axis: r against "epsilon" (the paper's text and code) or "mu" (its algorithm 2).
        way: How r becomes learning rate and steps (`Space.decompose`).
        draw: Where the r of a sweep's trials lie in the box. "stratified": one in each of as many equal parts, on a
            logarithmic scale. "following": the first sweep is, and later ones look in the same way at 0.4 of the box,
            around the r that the best trial so far has in proportion to epsilon. "uniform": log-uniform. "independent":
            lr and steps each log-uniform. "paper": r itself uniform, and in later sweeps above the last winner's.
        default: What is used if the scores of a sweep do not tell its trials apart (they differ by less than three
            deviations of the noise of a difference); by default what the trainable knows (`Finetuning` for linear
            probes). Then the search stops and the rest of the budget is the final run's. Without a default it goes on.
        unit: The kind of unit; by default that of the trainable or score.
        neighbours: The neighbouring relation.
        runner: How trials run: `SerialRunner` (the default), `Processes(2)`, `RayRunner`.
        curator: Called with a `tacit.TrialEvent` for each trial.
        draw_seed: Fixes which hyperparameters are tried: public.
        seed: Reproducible noise: "seeded: not private".
        progress: True shows a bar; a function gets the same facts.
        context: A `tacit.PrivacyContext` instead of the arguments that it has: ledger, subject, unit, …

    Returns:
        The final model, the line, all trials and what the search cost.

    Raises:
        Refusal: The trainable or the score failed in a dry run; nothing was charged.
        RunFailed: All trials of a sweep failed, and the rest of the budget is left; or the final run did. The error's
            `result` has what was released until then, and `curator` knows why.
        BudgetTooSmall: The budget pays for no search that could find anything; nothing was spent.
        BudgetExceeded: The subject cannot afford it; nothing was charged.
    """
    del context  # its arguments are here; see takes_context
    unit = unit_of(trainable, unit)
    people = size_of(trainable, size)
    made = plan or make_plan(budget, trials, size=people, neighbours=neighbours, unit=unit)
    if made.budget != budget:
        raise ValueError(f"The plan is for {made.budget}, and the search is given {budget}.")
    if made.neighbours is not Neighbours(neighbours) or made.unit != Unit(unit):
        raise ValueError("The plan has another unit or neighbour relation than this search says.")
    check_count(degree, "degree")
    if len(made.sweeps) < degree + 1:
        raise ValueError(f"Degree {degree} needs at least {degree + 1} sweeps; the plan has {len(made.sweeps)}.")
    if people is None:
        raise ValueError("Give size=, the public number of units that scores are divided by.")
    evaluator = needed(score_of(trainable, score), "score")
    check_space(trainable, space)
    session = SearchSession(
        trainable=trainable,
        ledger=ledger,
        subject=subject,
        neighbours=made.neighbours,
        delta=budget.delta,
        score=evaluator,
        size=people,
        runner=runner or SerialRunner(),
        curator=curator,
        seed=seed,
    )
    rehearse_search(session, lowest(space), made.mu_final, others=ends(space))
    chance = chance_of(draw_seed)
    whole, last, fixed = space, None, None
    left = [made.left_after(number) for number in range(1, len(made.sweeps) + 1)]
    if is_sampled(trainable, space, curator):  # then nothing follows anything: a plan is made before the first score
        fixed = [_points(space, (0.0, 1.0), made.trials, draw, way, chance) for _ in made.sweeps]
        space = fixed_steps(space)
        made, planned = plan_sampled(trainable, made, fixed, space, curator)
        last, left = planned[-1], [made.mu_final] * len(left)
    known = [default_of(trainable, mu, default, curator) for mu in left]  # after each sweep, before any is paid for
    if fixed:
        ledger.subject(subject, budget, unit=unit, neighbours=neighbours, plan=planned)
    else:
        open_subject(ledger, subject, budget, unit=unit, neighbours=neighbours)
        check_affordable(ledger, subject, made.mu, budget.delta, f"{made.runs} runs and their scores")
    with shown(progress) as bar:
        session = replace(session, progress=bar)
        done: list[Trial] = []
        failed: tuple[str, ...] = ()
        notes: list[str] = []
        mu_final, point = made.mu_final, None
        for number, mu in enumerate(made.sweeps, 1):
            where = _where(done, mu, made, whole, draw)
            points = fixed[number - 1] if fixed else _points(whole, where, made.trials, draw, way, chance)
            sweep = session.trials(points, mu, made.mu_score, name=f"sweep {number}", before=len(done), of=made.runs)
            done += sweep
            if all(trial.failed for trial in sweep):
                raise without_model(
                    f"All {len(sweep)} trials of sweep {number} failed, and the search has stopped.",
                    Tuned(
                        model=None,
                        hyperparameters=None,
                        trials=tuple(done),
                        guarantee=ledger.spent(subject),
                        decisions=(f"All trials of sweep {number} failed: the search has stopped.",),
                    ),
                )
            if (said := blind(sweep, f"sweep {number}")) is None:
                continue
            notes.append(said)
            if (start := known[number - 1]) is not None:
                mu_final, point = left[number - 1], space.nearest(start)
                notes.append(f"So the default is used, and no other trial is run: {point}.")
                break
        line = fit_line(
            winners(done, made),
            space=space,
            delta=budget.delta,
            degree=degree,
            axis=axis,
            way=way,
            best=_best_point(done, made),
        )
        target = made.epsilon(mu_final)
        if point is None:
            notes += line.said(target)
            point = line.at(target)
        session.report_progress("final run", len(done), made.runs)
        try:
            model = session.train(point, mu_final, last)
        except RunFailed:  # what the trials found was paid for, too
            model, failed = None, ("The final run failed: there is no model.",)
        session.report_progress("final run", made.runs, made.runs)
    result = Scaled(
        model=model,
        hyperparameters=point,
        trials=tuple(done),
        guarantee=ledger.spent(subject),
        decisions=(*notes, *failed),
        final_run_guarantee=session.alone(mu_final, unit),
        plan=made,
        line=line,
    )
    if failed:
        raise without_model("The final run failed.", result)
    return result


@takes_context
def train(
    trainable: Trainable,
    hyperparameters: Hyperparameters,
    budget: Budget,
    *,
    ledger: Ledger = IN_CONTEXT,
    subject: str = IN_CONTEXT,
    unit: Unit | str | None = None,
    neighbours: Neighbours | str = Neighbours.ADD_REMOVE,
    curator: Curator | None = None,
    seed: int | None = None,
    context: PrivacyContext | None = None,
) -> Tuned:
    """One run with known hyperparameters, such as `line.at(epsilon)` of an earlier search: only this run is charged.

    Formal guarantee: one run of the budget's mu, charged to the subject (of Poisson batches: with the noise that meets
    the budget by PLD, in the plan mode); hyperparameters from a saved line are made of what its search released and
    paid for.

    Args:
        trainable: `trainable(hyperparameters, mu, receipt)` trains a model on a receipt; `Finetuning` makes one of
            `finetune.fit`.
        hyperparameters: Known ones, such as `line.at(epsilon)`.
        budget: What the run may spend.
        ledger: Where everything is charged.
        subject: The data set's name in the ledger.
        unit: The kind of unit; by default that of the trainable or score.
        neighbours: The neighbouring relation.
        curator: Called with a `tacit.TrialEvent` for each trial.
        seed: Reproducible noise: "seeded: not private".
        context: A `tacit.PrivacyContext` instead of the arguments that it has: ledger, subject, unit, …

    Returns:
        The model and what it cost.
    """
    del context  # its arguments are here; see takes_context
    unit = unit_of(trainable, unit)
    relation = Neighbours(neighbours)
    session = SearchSession(
        trainable=trainable,
        ledger=ledger,
        subject=subject,
        neighbours=relation,
        delta=budget.delta,
        curator=curator,
        seed=seed,
    )
    equal.check_budget(budget)
    mu = budget.mu * SHAVE
    rehearse(trainable, hyperparameters, mu, relation, curator=curator)
    sampled = sampled_at(trainable, hyperparameters, curator)
    mu = equal.declare(session, [hyperparameters], mu, None, budget, unit=unit, sampled=sampled)
    return Tuned(
        model=session.train(hyperparameters, mu, note="run"),
        hyperparameters=hyperparameters,
        trials=(),
        guarantee=ledger.spent(subject),
        final_run_guarantee=session.alone(mu, unit),
    )


def winners(trials: list[Trial], plan: Plan) -> list[tuple[float, float]]:
    """(epsilon, r) of each sweep's best trial; a sweep in which all failed has none."""
    found = [best([trial for trial in trials if trial.mu == mu]) for mu in plan.sweeps]
    return [(plan.epsilon(trial.mu), trial.hyperparameters.r) for trial in found if trial is not None]


def _best_point(trials: list[Trial], plan: Plan) -> tuple[float, float] | None:
    """(epsilon, r) of the best trial of all."""
    found = best(trials)
    return None if found is None else (plan.epsilon(found.mu), found.hyperparameters.r)


def _where(done: list[Trial], mu: float, plan: Plan, space: Space, draw: Draw) -> tuple[float, float]:
    """The part of the box in which a sweep looks: all of it, or a window around what the trials so far suggest."""
    if draw == "paper" and done:
        return space.share(winners(done, plan)[-1][1]), 1.0
    found = _best_point(done, plan) if draw == "following" else None
    if found is None:
        return 0.0, 1.0
    epsilon, r = found
    middle = space.share(r * plan.epsilon(mu) / epsilon)
    low = min(max(middle - WINDOW / 2, 0.0), 1 - WINDOW)
    return low, low + WINDOW


def _points(
    space: Space, ends: tuple[float, float], count: int, draw: Draw, way: Way, chance: random.Random
) -> list[Hyperparameters]:
    """Where the trials of a sweep are, between two shares of the box."""
    if draw == "independent":
        return [space.draw(chance) for _ in range(count)]
    shares = [chance.random() for _ in range(count)]
    if draw == "paper":
        first, last = (space.at(end) for end in ends)
        return [space.decompose(first + (last - first) * share, way, chance) for share in shares]
    if draw != "uniform":
        shares = [(place + share) / count for place, share in enumerate(shares)]
    low, high = ends
    return [space.decompose(space.at(low + (high - low) * share), way, chance) for share in shares]
