"""What a recipe will charge, computed without a look at any data: the same charges on a ledger in memory."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from tacit import adapt, finetune, tune
from tacit.pipeline._budget import Part, split
from tacit.pipeline._optimizers import optimizer_of
from tacit.pipeline._schema import Adapt, Finetune, Pipeline, Tune
from tacit.privacy import Budget, Guarantee, Ledger, Mode, events, mu_of
from tacit.privacy.events import DpEvent


@dataclass(frozen=True, kw_only=True)
class Line:
    """What one stage will charge: `epsilon` is what it promises by itself, at the budget's delta."""

    stage: str
    data: str
    what: str
    epsilon: float
    share: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that a recipe will charge, and what it comes to for somebody who is in all of its data."""

    budget: Budget
    lines: tuple[Line, ...]
    total: Guarantee

    def to_json(self) -> dict[str, Any]:
        """Plain data for a program."""
        return {
            "epsilon": self.budget.epsilon,
            "delta": self.budget.delta,
            "stages": [asdict(line) for line in self.lines],
            "total": {"epsilon": self.total.epsilon, "delta": self.total.delta, "sentence": str(self.total)},
        }

    def __str__(self) -> str:
        rows = [("stage", "data", "epsilon", "share", "what is released")]
        rows += [
            (line.stage, line.data, f"{line.epsilon:.4g}", f"{100 * line.share:.1f}%", line.what) for line in self.lines
        ]
        wide = [max(len(row[place]) for row in rows) for place in range(4)]
        table = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, wide, strict=False)), row[4]]) for row in rows]
        return "\n".join([*table, f"Total: {self.total}", f"The budget is {self.budget}."])


def plan(recipe: Pipeline) -> Plan:
    """What each stage will charge and the total; nothing of the data is read.

    Raises:
        DoesNotFit: The stages ask for more than the budget.
        ValueError: A stage cannot be planned as it is (a batch larger than the data, too small a budget).
    """
    ledger, lines = _charged(recipe)
    return Plan(budget=recipe.budget.total, lines=tuple(lines), total=ledger.total(recipe.budget.delta))


def planned_ledger(recipe: Pipeline) -> Ledger:
    """The ledger in memory on which `plan` makes the charges of a recipe; for `tacit audit`, which attacks them."""
    return _charged(recipe)[0]


def _charged(recipe: Pipeline) -> tuple[Ledger, list[Line]]:
    parts, lines = split(recipe), []
    ledger = Ledger("sqlite://")
    for part in parts:
        what, event = _stage(recipe, part)
        if part.mode is Mode.PLAN:
            told = recipe.budget
            ledger.subject(part.subjects[0], part.budget, unit=told.unit, neighbours=told.neighbours, plan=[event])
        part.declare(ledger, recipe)
        for subject in part.subjects:
            ledger.charge(subject, event, stage=part.stage)
        each = " (each)" if len(part.subjects) > 1 else ""
        data = ", ".join(part.subjects) + each
        epsilon = ledger.spent(part.subjects[0]).epsilon
        lines.append(Line(stage=part.stage, data=data, what=what, epsilon=epsilon, share=part.share))
    return ledger, lines


def _stage(recipe: Pipeline, part: Part) -> tuple[str, DpEvent]:
    """What a stage releases, in words and as an event that costs all that it may spend."""
    told, spend = recipe.budget, part.spend
    whole = events.gaussian(told.neighbours.factor / mu_of(spend.epsilon, spend.delta))
    if part.stage == "finetune" and recipe.finetune is not None:
        return _finetune(recipe, recipe.finetune, part, whole)
    if part.stage == "tune" and recipe.tune is not None:
        return _tune(recipe, recipe.tune, part, whole)
    if part.stage == "adapt" and recipe.adapt is not None:
        form = form_of(recipe, recipe.adapt, part)
        noise = form.noise_multiplier()
        said = f"{recipe.adapt.method} on a stream of any length, batches of {recipe.adapt.batch}, noise {noise:.4g}"
        return said, form.event(noise)
    method = recipe.calibrate.method if recipe.calibrate is not None else ""
    return f"the answers of {method}, all together", whole


def _finetune(recipe: Pipeline, told: Finetune, part: Part, whole: DpEvent) -> tuple[str, DpEvent]:
    optimizer, budget = optimizer_of(told), recipe.budget
    if told.batch is not None and budget.size is None:
        raise ValueError(
            f"budget.size is missing: it is the public number of units, from which {told.optimizer} computes how often "
            "each is drawn."
        )
    size = budget.size or 1
    if told.batch is not None and told.batch > size:
        raise ValueError(f"finetune.batch is {told.batch}, more than the {size} units of budget.size.")
    who = f"batches of {told.batch} of {size:,}" if told.batch is not None else f"every {budget.unit}"
    said = f"{told.steps} steps of {told.optimizer} over {who}, {told.scheme}"
    if part.mode is Mode.RENYI:  # at one order the noise is found when the run starts
        cap = math.sqrt(2 * _cap(part) / (part.order or 2))
        return said, events.gaussian(budget.neighbours.factor / cap)
    event = finetune.plan(
        optimizer, epsilon=part.spend.epsilon, delta=part.spend.delta, size=size, neighbours=budget.neighbours
    )
    return said, event if part.mode is Mode.PLAN else whole


def _cap(part: Part) -> float:
    from tacit.privacy import accounting

    return accounting.renyi_of_epsilon(part.order or 2, part.budget) * (1 - 1e-9)


def _tune(recipe: Pipeline, told: Tune, part: Part, whole: DpEvent) -> tuple[str, DpEvent]:
    made = search_plan(recipe, told, part, recipe.budget.size)
    said = f"{made.runs - 1} trials with their scores, and a final run of epsilon {made.epsilon(made.mu_final):.4g}"
    return said, whole


def search_plan(recipe: Pipeline, told: Tune, part: Part, size: int | None) -> tune.Plan:
    """How the search splits its part."""
    budget = recipe.budget
    return tune.plan(part.spend, told.trials, size=size, neighbours=budget.neighbours, unit=budget.unit)


def form_of(recipe: Pipeline, told: Adapt, part: Part) -> adapt.DP:
    """The private form of an adaptation."""
    horizon = None if told.size is None else math.ceil(told.size / told.batch)
    return adapt.DP(
        part.spend.epsilon,
        part.spend.delta,
        clip=told.clip,
        noise=told.noise,
        horizon=horizon,
        filters=told.filters,
        contributions=told.contributions,
        separation=told.separation,
        neighbours=recipe.budget.neighbours,
    )
