"""A search that starts at a default and pays for trials only if their scores can be significant."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tacit._context import IN_CONTEXT, PrivacyContext, takes_context
from tacit._curator import Curator
from tacit.privacy import Budget, Ledger, Neighbours, Unit, mu_of
from tacit.privacy.events import check_count
from tacit.progress import shown
from tacit.recipes import Progress
from tacit.tune._budget_split import check_budget
from tacit.tune._plan import SHAVE
from tacit.tune._rehearsal import rehearse_search
from tacit.tune._runners import Runner, SerialRunner
from tacit.tune._search import (
    RunFailed,
    SearchSession,
    Tuned,
    check_affordable,
    needed,
    open_subject,
    unit_of,
    without_model,
)
from tacit.tune._significance import DEVIATIONS, significant_difference
from tacit.tune._space import Hyperparameters
from tacit.tune._trainable import Score, Trainable, default_of, guess_of, sampled_at, score_of, size_of
from tacit.tune._trials import Trial

_WORTH = 0.05  # scores in which no smaller difference than this is significant are not paid for


@takes_context
def default_search(
    trainable: Trainable,
    budget: Budget,
    *,
    ledger: Ledger = IN_CONTEXT,
    subject: str = IN_CONTEXT,
    default: Hyperparameters | None = None,
    factors: Sequence[float] = (0.25, 4.0),
    share: float = 0.2,
    score: Score | None = None,
    size: int | None = None,
    precision: float = 0.005,
    scores: float = 0.05,
    unit: Unit | str | None = None,
    neighbours: Neighbours | str = Neighbours.ADD_REMOVE,
    runner: Runner | None = None,
    curator: Curator | None = None,
    seed: int | None = None,
    progress: Progress | bool = False,
    context: PrivacyContext | None = None,
) -> Tuned:
    """The default, and other learning rates around it if scores can tell which is better; then one final run.

    One trial at the default and one at each of `factors` times its learning rate, all at `share` of epsilon. Another
    learning rate than the default's is used only if its trial scored better than the default's by three deviations of
    the noise. The default's trial comes first: if it is no better than a blind guess (where the trainable says what
    that scores, as `Finetuning` does by its loss), no other is run. If a score would be so noisy that nothing below
    five points can be resolved, no trial is run and the default has the whole budget: what that was decided by is
    public.

    Formal guarantee: mu^2 = trials * (mu_trial^2 + mu_score^2) + mu_final^2, at most that of the budget, in the
    ledger's filter on sums of mu^2. What is released: every trial's model, its noisy score and the final model.

    Args:
        trainable: `trainable(hyperparameters, mu, receipt)` trains a model on a receipt; `Finetuning` makes one of
            `finetune.fit`. Batches must not be Poisson-subsampled: `random_search` and `grid_search` take those.
        budget: What the whole search may spend.
        ledger: Where everything is charged.
        subject: The data set's name in the ledger.
        default: Where to start; without it the trainable's own (`Finetuning.default`, which is `suggest`), for the
            trials as for the final run.
        factors: Of the learning rate, beside 1.
        share: The epsilon of one trial, as a share of the total's.
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
        The final model, the trials if there were any, and what was decided.

    Raises:
        Refusal: The trainable or the score failed in a dry run; nothing was charged.
        ValueError: There is no default to start at, or batches are subsampled.
        BudgetExceeded: The subject cannot afford it; nothing was charged.
        RunFailed: The final run failed; its `result` has what was released until then, and `curator` knows why.
    """
    del context  # its arguments are here; see takes_context
    check_budget(budget)
    if not factors or any(not (0 < factor < math.inf) or factor == 1 for factor in factors):
        raise ValueError("factors are of the learning rate, above 0 and other than 1, at least one.")
    if not (0 < share < 1 and 0 < precision < 1 and 0 < scores < 1):
        raise ValueError("share, precision and scores are shares, between 0 and 1.")
    unit = unit_of(trainable, unit)
    people = needed(size_of(trainable, size), "size")
    check_count(people, "size")
    session = SearchSession(
        trainable=trainable,
        ledger=ledger,
        subject=subject,
        neighbours=Neighbours(neighbours),
        delta=budget.delta,
        score=needed(score_of(trainable, score), "score"),
        size=people,
        runner=runner or SerialRunner(),
        curator=curator,
        seed=seed,
    )
    count, total = 1 + len(factors), budget.mu * SHAVE
    mu_trial = mu_of(share * budget.epsilon, budget.delta)
    mu_score = min(total * math.sqrt(scores / count), 1 / (precision * people))
    price = mu_trial**2 + mu_score**2
    if total**2 - count * price <= mu_trial**2:
        raise ValueError("The trials leave less for the final run than one of them has: give a smaller share.")
    noise = 1 / (mu_score * people)
    least = significant_difference(noise)
    searched = least <= _WORTH

    def start(mu: float) -> Hyperparameters:
        found = default_of(trainable, mu, default, curator)
        if found is None:
            raise ValueError("This trainable has no default of its own: give default=, or use linear_scaling.")
        if sampled_at(trainable, found, curator):
            raise ValueError("This trainable subsamples its batches, which no single mu prices: use random_search.")
        return found

    # All that may be needed is asked of the trainable now: after a charge nothing that is wrong with it may come up.
    mus = {paid: math.sqrt(total**2 - paid * price) * SHAVE for paid in ((1, count) if searched else (0,))}
    finals = {paid: start(mu) for paid, mu in mus.items()}
    points = [_moved(start(mu_trial), factor) for factor in (1.0, *factors)] if searched else [finals[0]]
    guess = guess_of(trainable, score, curator)
    rehearse_search(session, points[0], max(mus.values()), others=[*points, *finals.values()], trials=searched)
    open_subject(ledger, subject, budget, unit=unit, neighbours=neighbours)
    check_affordable(ledger, subject, total, budget.delta, "the whole budget")
    done: list[Trial] = []
    failed: tuple[str, ...] = ()
    factor, paid = 1.0, 0
    with shown(progress) as bar:
        session = replace(session, progress=bar)
        if searched:
            paid = 1
            done = session.trials(points[:1], mu_trial, mu_score, name="the default", of=count + 1)
            said = _drowned(done[0], noise, guess) if done else None
            if said is None:
                paid = count  # also where not all end: what is stopped may have been charged
                done += session.trials(
                    points[1:], mu_trial, mu_score, name="around the default", before=1, of=count + 1
                )
                factor, said = _chosen(done, (1.0, *factors), noise)
        else:
            said = (
                f"A score would have noise of {noise:.4f}, so that differences below {least:.2f} tell "
                "nothing: no trial was run, and the default has the whole budget."
            )
        final, mu_final = _moved(finals[paid], factor), mus[paid]
        session.report_progress("final run", len(done), len(done) + 1)
        try:
            model = session.train(final, mu_final)
        except RunFailed:  # what the trials found was paid for, too
            model, failed = None, ("The final run failed: there is no model.",)
        session.report_progress("final run", len(done) + 1, len(done) + 1)
    result = Tuned(
        model=model,
        hyperparameters=final,
        trials=tuple(done),
        guarantee=ledger.spent(subject),
        decisions=(said, *failed),
        final_run_guarantee=session.alone(mu_final, unit),
    )
    if failed:
        raise without_model("The final run failed.", result)
    return result


def _moved(point: Hyperparameters, factor: float) -> Hyperparameters:
    return replace(point, lr=point.lr * factor)


def _drowned(trial: Trial, noise: float, guess: float | None) -> str | None:
    """What to say of a trial at the default that is no better than a blind guess beyond noise; None if it is better.

    Where noise drowns what a trial learns, the rate with the best loss is the one that moves least. That says nothing
    of the final run.
    """
    if guess is None or trial.score is None or trial.score >= guess + DEVIATIONS * noise:
        return None
    return (
        f"The trial at the default scored {trial.score:.4f}, no better than a blind guess ({guess:g}) by three "
        f"deviations of the noise ({noise:.4f}): others would tell nothing, and the default has the rest of the budget."
    )


def _chosen(done: Sequence[Trial], factors: Sequence[float], noise: float) -> tuple[float, str]:
    """The factor of the trial that is better than the default's beyond noise; 1 if there is none."""
    first = done[0].score if done else None
    if first is None:
        return 1.0, "The trial at the default failed: the default is used."
    gains = {factor: one.score - first for factor, one in zip(factors, done, strict=False) if one.score is not None}
    del gains[1.0]
    if not gains:
        return 1.0, "No other trial than the default's has a score: the default is used."
    factor = max(gains, key=lambda one: gains[one])
    if gains[factor] < significant_difference(noise):
        return 1.0, (
            f"No trial scored better than the default's {first:.4f} by three deviations of the noise "
            f"({noise:.4f} each): the default is used."
        )
    return factor, f"{factor:g} times the default's learning rate scored {gains[factor]:.4f} better: it is used."
