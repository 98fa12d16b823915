"""Searches over trainables with Poisson-subsampled batches: all runs fixed in advance, and composed by PLD.

sqrt(sum mu^2) says nothing of Poisson batches, and PLDs compose only what was fixed before the first release (a run
whose number of steps depends on a score was not). So the steps of every run, the final one included, are fixed first;
what the search decides is the learning rate, which releases nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeGuard

from tacit._curator import Curator
from tacit.privacy import accounting, events, mu_of
from tacit.privacy.events import DpEvent
from tacit.tune._plan import Plan
from tacit.tune._space import Hyperparameters, Space
from tacit.tune._trainable import Sampled, Trainable, event_with, sampled_at
from tacit.tune._trials import event_of


def is_sampled(trainable: Trainable, space: Space, curator: Curator | None = None) -> TypeGuard[Sampled]:
    """Whether any point of the box has Poisson-subsampled batches."""
    sizes: tuple[int | None, ...] = (None,) if space.batch_size is None else space.batch_size
    corners = (replace(space.decompose(end), batch_size=size) for end in space.ends for size in sizes)
    return any(sampled_at(trainable, corner, curator) for corner in corners)


def fixed_steps(space: Space) -> Space:
    """The box of the final run: as many steps and as large batches as there may be; the rest is still free."""
    most = space.steps[1]
    batch_size = None if space.batch_size is None else (space.batch_size[1], space.batch_size[1])
    return replace(space, steps=(most, most), batch_size=batch_size)


def plan_sampled(
    trainable: Sampled,
    plan: Plan,
    sweeps: Sequence[Sequence[Hyperparameters]],
    final: Space,
    curator: Curator | None = None,
) -> tuple[Plan, list[DpEvent]]:
    """The plan as it is by PLD, and every event of the search, to be declared to the ledger; the last is the final run.

    A trial is as private as a Gaussian release of its mu, at the budget's delta. The final run gets the least noise at
    which everything together meets the budget.
    """
    relation, budget = plan.neighbours, plan.budget
    runs = [
        event_of(trainable, point, mu, relation, curator)
        for mu, points in zip(plan.sweeps, sweeps, strict=True)
        for point in points
    ]
    scores = [events.gaussian(relation.factor / plan.mu_score)] * len(runs)
    point = final.decompose(final.ends[1])

    def everything(noise: float) -> DpEvent:
        return events.compose([*runs, *scores, event_with(trainable, point, noise, curator)])

    noise = accounting.noise_multiplier(budget, everything, neighbours=relation)
    last = event_with(trainable, point, noise, curator)
    whole = accounting.guarantee(everything(noise), delta=budget.delta, neighbours=relation, unit=plan.unit)
    alone = accounting.guarantee(last, delta=budget.delta, neighbours=relation)
    return replace(plan, mu_final=mu_of(alone.epsilon, budget.delta), composed=whole), [*runs, *scores, last]
