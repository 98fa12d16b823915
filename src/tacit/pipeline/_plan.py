"""What a recipe will charge, computed without a look at any data: the same charges on a ledger in memory."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from tacit import adapt, finetune, tune
from tacit.pipeline._budget import Part, split
from tacit.pipeline._optimizers import optimizer_of
from tacit.pipeline._schema import Adapt, Finetune, Pipeline, Tune
from tacit.privacy import Budget, Guarantee, Ledger, Mode, accounting, events, mu_of
from tacit.privacy.events import DpEvent


@dataclass(frozen=True, kw_only=True)
class PlanLine:
    """What one stage will charge: `epsilon` is what it promises by itself, at the budget's delta."""

    stage: str
    data: str
    what: str
    epsilon: float
    share: float


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """Everything that a recipe will charge, and what it comes to for somebody who is in all of its data."""

    budget: Budget
    lines: tuple[PlanLine, ...]
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


def plan(recipe: Pipeline) -> PipelinePlan:
    """What each stage will charge and the total; nothing of the data is read.

    Raises:
        DoesNotFit: The stages ask for more than the budget.
        ValueError: A stage cannot be planned as it is (a batch larger than the data, too small a budget).
    """
    ledger, lines = _charged(recipe)
    return PipelinePlan(budget=recipe.budget.total, lines=tuple(lines), total=ledger.total(recipe.budget.delta))


def planned_ledger(recipe: Pipeline) -> Ledger:
    """The ledger in memory on which `plan` makes the charges of a recipe; for `tacit audit`, which attacks them."""
    return _charged(recipe)[0]


def _charged(recipe: Pipeline) -> tuple[Ledger, list[PlanLine]]:
    parts, lines = split(recipe), []
    ledger = Ledger("sqlite://")
    for part in parts:
        what, event = _stage(recipe, part)
        if part.mode is Mode.PLAN:
            settings = recipe.budget
            ledger.subject(
                part.subjects[0], part.budget, unit=settings.unit, neighbours=settings.neighbours, plan=[event]
            )
        part.declare(ledger, recipe)
        for subject in part.subjects:
            ledger.charge(subject, event, stage=part.stage)
        each = " (each)" if len(part.subjects) > 1 else ""
        data = ", ".join(part.subjects) + each
        epsilon = ledger.spent(part.subjects[0]).epsilon
        lines.append(PlanLine(stage=part.stage, data=data, what=what, epsilon=epsilon, share=part.share))
    return ledger, lines


def _stage(recipe: Pipeline, part: Part) -> tuple[str, DpEvent]:
    """What a stage releases, in words and as an event that costs all that it may spend."""
    settings, spend = recipe.budget, part.spend
    whole = events.gaussian(settings.neighbours.factor / mu_of(spend.epsilon, spend.delta))
    if part.stage == "finetune" and recipe.finetune is not None:
        return _finetune(recipe, recipe.finetune, part, whole)
    if part.stage == "tune" and recipe.tune is not None:
        return _tune(recipe, recipe.tune, part, whole)
    if part.stage == "adapt" and recipe.adapt is not None:
        form = form_of(recipe, recipe.adapt, part)
        noise = form.noise_multiplier()
        said = (
            f"{recipe.adapt.method} on a stream of any length, batches of {recipe.adapt.batch_size}, noise {noise:.4g}"
        )
        return said, form.event(noise)
    method = recipe.calibrate.method if recipe.calibrate is not None else ""
    return f"the answers of {method}, all together", whole


def _finetune(recipe: Pipeline, settings: Finetune, part: Part, whole: DpEvent) -> tuple[str, DpEvent]:
    optimizer, budget = optimizer_of(settings), recipe.budget
    _check_batch(recipe, settings)
    size = budget.size or 1
    who = f"batches of {settings.batch_size} of {size:,}" if settings.batch_size is not None else f"every {budget.unit}"
    said = f"{settings.steps} steps of {settings.optimizer} over {who}, {settings.scheme}"
    if part.mode is Mode.RENYI:  # at one order the noise is found when the run starts
        cap = math.sqrt(2 * _cap(part) / (part.order or 2))
        return said, events.gaussian(budget.neighbours.factor / cap)
    event = finetune.plan(
        optimizer, epsilon=part.spend.epsilon, delta=part.spend.delta, size=size, neighbours=budget.neighbours
    )
    noise = optimizer.scale_of(event, size)
    said = said if noise is None else f"{said}, noise {noise:.4g}"
    return said, event if part.mode is Mode.PLAN else whole


def _check_batch(recipe: Pipeline, settings: Finetune | None) -> None:
    """Batches need the public number of units, and are not larger than that."""
    size = recipe.budget.size
    if settings is None or settings.batch_size is None:
        return
    if size is None:
        raise ValueError(
            f"budget.size is missing: it is the public number of units, from which {settings.optimizer} computes how "
            "often each is drawn."
        )
    if settings.batch_size > size:
        raise ValueError(f"finetune.batch_size is {settings.batch_size}, more than the {size} units of budget.size.")


def _cap(part: Part) -> float:
    return accounting.renyi_of_epsilon(part.order or 2, part.budget) * (1 - 1e-9)


def _tune(recipe: Pipeline, settings: Tune, part: Part, whole: DpEvent) -> tuple[str, DpEvent]:
    made = search_plan(recipe, settings, part, recipe.budget.size)
    said = f"{made.runs - 1} trials with their scores, and a final run"
    if part.mode is not Mode.PLAN:
        return f"{said} of epsilon {made.epsilon(made.mu_final):.4g}", whole
    _check_batch(recipe, recipe.finetune)
    noise = accounting.noise_multiplier(part.spend, events.gaussian, neighbours=recipe.budget.neighbours)
    return f"{said} of {settings.steps[1]} steps, composed by PLD", events.gaussian(noise)


def search_plan(recipe: Pipeline, settings: Tune, part: Part, size: int | None) -> tune.Plan:
    """How the search splits its part."""
    budget = recipe.budget
    return tune.plan(part.spend, settings.trials, size=size, neighbours=budget.neighbours, unit=budget.unit)


def form_of(recipe: Pipeline, settings: Adapt, part: Part) -> adapt.DP:
    """The private form of an adaptation."""
    horizon = None if settings.size is None else math.ceil(settings.size / settings.batch_size)
    return adapt.DP(
        part.spend.epsilon,
        part.spend.delta,
        clip=settings.clip,
        noise=settings.noise,
        horizon=horizon,
        filters=settings.filters,
        contributions=settings.contributions,
        separation=settings.separation,
        neighbours=recipe.budget.neighbours,
    )
