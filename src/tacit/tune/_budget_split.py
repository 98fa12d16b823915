"""Trials that share a budget equally: their parts, who pays for all of them, and the best one as the result."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from tacit.privacy import Budget, Guarantee, Unit, accounting, epsilon_of, events
from tacit.privacy.events import DpEvent
from tacit.tune._plan import SHAVE, score_share
from tacit.tune._search import SearchSession, Tuned, best, check_affordable, open_subject, unit_of, without_model
from tacit.tune._space import Hyperparameters
from tacit.tune._trials import Trial, event_of

_ROUNDS = 4  # of looking for the mu at which sampled runs fill a budget
_CLOSE = 0.995  # and how full is full enough


def check_budget(budget: Budget) -> None:
    """Refuse what no Gaussian release fits in."""
    if budget.pure or not budget.private:
        raise ValueError(f"A search needs a finite epsilon and a delta above 0, not {budget}.")


def share(budget: Budget, count: int, *, size: int, precision: float, scores: float) -> tuple[float, float]:
    """The mu of each of `count` runs that share a budget with their scores, and that of each score (see `plan`)."""
    check_budget(budget)
    mu_score = score_share(budget, budget.mu, count, size=size, precision=precision, scores=scores)
    return math.sqrt(budget.mu**2 / count - mu_score**2) * SHAVE, mu_score


def declare(
    session: SearchSession,
    points: Sequence[Hyperparameters],
    mu: float,
    mu_score: float | None,
    budget: Budget | None,
    *,
    unit: Unit | str,
    sampled: bool,
    fixed: bool = False,
) -> float:
    """See to it that the subject can pay for a run of `mu` at every point, and its score; returns the mu of a run.

    Refused before anything is charged if it cannot. Where batches are subsampled, all events are declared in the
    plan mode, and unless it is `fixed` the mu is lowered until they fit. No `budget`: exactly what they cost.
    """
    unit_of(session.trainable, unit)
    relation = session.neighbours
    if not sampled:
        total = math.sqrt(len(points) * (mu**2 + (mu_score or 0.0) ** 2))
        wanted = budget or Budget(epsilon_of(total, session.delta) * (1 + 1e-9), session.delta)
        open_subject(session.ledger, session.subject, wanted, unit=unit, neighbours=relation)
        what = f"{len(points)} runs and their scores"
        check_affordable(session.ledger, session.subject, total, session.delta, what)
        return mu
    scores = [] if mu_score is None else [events.gaussian(relation.factor / mu_score)] * len(points)

    def everything(mu: float) -> list[DpEvent]:
        return [event_of(session.trainable, point, mu, relation, session.curator) for point in points] + scores

    def cost(mu: float) -> Guarantee:
        return accounting.guarantee(events.compose(everything(mu)), delta=session.delta, neighbours=relation)

    if budget is not None and not fixed:
        mu = _filled(lambda mu: cost(mu).epsilon / budget.epsilon, mu)
    wanted = budget or Budget(cost(mu).epsilon, session.delta)
    session.ledger.subject(session.subject, wanted, unit=unit, neighbours=relation, plan=everything(mu))
    return mu


def chosen(
    session: SearchSession, done: Sequence[Trial], mu: float, *, unit: Unit | str, decisions: tuple[str, ...] = ()
) -> Tuned:
    """The best of some trials as the result of a search. All models were released, so its own needs no other run.

    Raises `RunFailed` if none has a score: a search without a model must not look like a success.
    """
    winner = best(done)
    if winner is None:
        decisions = (*decisions, "No trial gave a score: there is no model.")
    result = Tuned(
        model=None if winner is None else winner.model,
        hyperparameters=None if winner is None else winner.hyperparameters,
        trials=tuple(replace(trial, model=None) for trial in done),
        guarantee=session.ledger.spent(session.subject),
        decisions=decisions,
        final_run_guarantee=session.alone(mu, unit),
    )
    if winner is None:
        raise without_model(f"All {len(done)} trials failed." if done else "No trial was run.", result)
    return result


def _filled(used: Callable[[float], float], mu: float) -> float:
    """A mu at which `used` (which grows about in proportion) is at most 1, and nearly 1 after a few rounds."""
    fits, share = 0.0, used(mu)
    for _ in range(_ROUNDS):
        fits = max(fits, mu) if share <= 1 else fits
        if _CLOSE <= share <= 1:
            break
        mu *= (1 + _CLOSE) / 2 / share
        share = used(mu)
    while share > 1 and not fits:
        mu *= _CLOSE / share
        share = used(mu)
    return max(fits, mu) if share <= 1 else fits
