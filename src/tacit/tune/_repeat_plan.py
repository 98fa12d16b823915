"""What a search by repeat and select charges: one event for all of it, of which one trial may spend a part."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from dp_accounting import dp_event

from tacit._curator import Curator
from tacit.privacy import Budget, Guarantee, Neighbours, Unit, accounting, events, mu_of
from tacit.privacy.events import DpEvent, gaussian_noise, same
from tacit.tune._budget_split import check_budget
from tacit.tune._plan import SHAVE, score_share
from tacit.tune._search import needed, unit_of
from tacit.tune._space import Hyperparameters, Space
from tacit.tune._trainable import Sampled, Trainable, event_with, size_of
from tacit.tune._trials import event_of


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
    curator: Curator | None = None,
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
        curator: Called with a `tacit.ErrorEvent` if the trainable cannot say what it releases.

    Returns:
        What the search charges, and what one trial may spend.
    """
    number = Number(mean=float(mean), shape=float(shape))
    return planned(trainable, space, budget, number, size, precision, scores, unit, neighbours, curator)


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
    curator: Curator | None,
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
    if any(gaussian_noise(event_of(trainable, end, mu, relation, curator)) is None for end in ends):
        training = _sampled(trainable, ends, budget, relation, whole, curator)
        alone = accounting.guarantee(training, delta=budget.delta, neighbours=relation)
        mu = mu_of(alone.epsilon, budget.delta)
    final_run_guarantee = accounting.guarantee(training, delta=budget.delta, neighbours=relation, unit=unit)
    return Repeats(
        event=whole(training), training=training, score=score, mu=mu, final_run_guarantee=final_run_guarantee
    )


def _sampled(
    trainable: Any,
    ends: list[Hyperparameters],
    budget: Budget,
    relation: Neighbours,
    whole: Any,
    curator: Curator | None,
) -> DpEvent:
    """The event of a run with Poisson batches, the same for every point, with the noise that fits the budget."""
    if not isinstance(trainable, Sampled):
        raise ValueError("This trainable releases more than Gaussian sums over everybody, and has no event_with.")
    first, last = (event_with(trainable, end, 1.0, curator) for end in ends)
    if not same(first, last):
        raise ValueError(
            "Subsampled batches cost differently with other steps or batches, and all trials of this search must "
            "cost the same: fix steps and batch_size in the space (equal ends)."
        )
    one = partial(event_with, trainable, ends[0], curator=curator)
    return one(accounting.noise_multiplier(budget, lambda noise: whole(one(noise)), neighbours=relation))


@lru_cache(maxsize=64)
def _mu_of_a_trial(budget: Budget, number: Number, neighbours: Neighbours) -> float:
    """The largest mu of one trial with which the winner of the search is within the budget."""

    def search(noise: float) -> DpEvent:
        return number.event(events.gaussian(noise), neighbours)

    return neighbours.factor / accounting.noise_multiplier(budget, search, neighbours=neighbours)
