"""How one budget is split between the stages, so that together they never spend more.

Formal guarantee. Each data set is a subject of one ledger with a cap of its own, and the caps add up to the budget in
one filter: in the gaussian mode sums of mu^2 (Dong et al., 2022), and where a Poisson-subsampled stage is among several
sums of the Renyi divergence at one order, fixed beforehand. A Poisson-subsampled stage that is alone is composed by
PLD (the plan mode). Later stages may depend on what earlier ones released: that is what filters are for. Somebody who
is in every data set is covered by the total; the sources of [calibrate] are declared disjoint, so that one of them
counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tacit.pipeline._schema import Pipeline, Spending
from tacit.privacy import Budget, Ledger, Mode, accounting, epsilon_of, mu_of

SHAVE = 1 - 1e-9  # so that no rounding in a ledger's sum goes over the total
TRAIN, STREAM = "train", "stream"


class DoesNotFit(ValueError):
    """The stages ask for more than the budget; nothing was charged."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one stage may spend on each of its data sets."""

    stage: str
    subjects: tuple[str, ...]  # of the ledger; more than one are disjoint
    budget: Budget  # the cap of each subject
    spend: Budget  # what the stage's noise is computed for: at most the cap, in the subject's mode
    share: float  # of the whole budget
    mode: Mode
    order: float | None = None

    def declare(self, ledger: Ledger, recipe: Pipeline) -> None:
        """Open the subjects; in the plan mode the stage does so itself, for the plan is its own list of events."""
        if self.mode is Mode.PLAN:
            return
        terms = recipe.budget
        for place, name in enumerate(self.subjects):
            ledger.subject(
                name,
                self.budget,
                unit=terms.unit,
                neighbours=terms.neighbours,
                mode=self.mode,
                order=self.order,
                disjoint_from=self.subjects[:place],
            )


def split(recipe: Pipeline) -> list[Part]:
    """The part of each stage that charges, in their order.

    Raises:
        DoesNotFit: The stages together ask for more than the budget.
    """
    stages, total = _stages(recipe), recipe.budget.total
    sampled = recipe.finetune is not None and recipe.finetune.optimizer != "dpgd"
    mode = Mode.GAUSSIAN if not sampled else Mode.PLAN if len(stages) == 1 else Mode.RENYI
    order = accounting.best_order(total) if mode is Mode.RENYI else None
    shares = _shares(stages, total, mode, order)
    return [_part(recipe, name, shares[name], total, mode, order, alone=len(stages) == 1) for name in stages]


def _stages(recipe: Pipeline) -> dict[str, Spending]:
    named = {"tune": recipe.tune, "finetune": recipe.finetune, "adapt": recipe.adapt, "calibrate": recipe.calibrate}
    if recipe.tune is not None:
        del named["finetune"]  # its last run is the fine-tuning
    return {name: stage for name, stage in named.items() if stage is not None}


def _shares(stages: dict[str, Spending], total: Budget, mode: Mode, order: float | None) -> dict[str, float]:
    """Which share of the cap each stage gets; those that say nothing divide what is left."""
    said: dict[str, float] = {}
    for name, stage in stages.items():
        if stage.share is not None:
            said[name] = stage.share
        elif stage.epsilon is not None:
            said[name] = _worth(Budget(stage.epsilon, total.delta), total, mode, order)
    left, silent = 1 - math.fsum(said.values()), [name for name in stages if name not in said]
    if left < -1e-9 or (silent and left <= 1e-9):
        asked = ", ".join(f"[{name}] {100 * share:.3g}%" for name, share in said.items())
        more = f", which leaves nothing for [{silent[0]}]" if silent and left >= -1e-9 else ""
        raise DoesNotFit(
            f"The stages do not fit into epsilon {total.epsilon:g}, delta {total.delta:g}: {asked} of it{more}. "
            "Nothing was charged."
        )
    return {name: min(said.get(name, left / max(1, len(silent))), 1.0) for name in stages}


def _worth(budget: Budget, total: Budget, mode: Mode, order: float | None) -> float:
    """Which share of the total an epsilon is."""
    if mode is Mode.GAUSSIAN:
        return (mu_of(budget.epsilon, budget.delta) / total.mu) ** 2
    if mode is Mode.RENYI and order is not None:
        return accounting.renyi_of_epsilon(order, budget) / accounting.renyi_of_epsilon(order, total)
    return budget.epsilon / total.epsilon


def _part(
    recipe: Pipeline, name: str, share: float, total: Budget, mode: Mode, order: float | None, *, alone: bool
) -> Part:
    whole = alone and share > 1 - 1e-9
    budget = spend = total
    if mode is Mode.PLAN:
        budget = spend = Budget(total.epsilon * share, total.delta)
    elif mode is Mode.GAUSSIAN and not whole:
        budget = spend = Budget(epsilon_of(math.sqrt(share) * total.mu * SHAVE, total.delta), total.delta)
    elif order is not None:
        cap = share * accounting.renyi_of_epsilon(order, total) * SHAVE
        budget = Budget(accounting.epsilon_of_renyi(order, cap, total.delta), total.delta)
        spend = budget
        if name != "finetune":  # Gaussian noise: its divergence at the order is order mu^2 / 2
            spend = Budget(epsilon_of(math.sqrt(2 * cap / order) * SHAVE, total.delta), total.delta)
    sources = recipe.calibrate.sources if recipe.calibrate is not None else ()
    subjects = {"adapt": (STREAM,), "calibrate": tuple(f"source {source}" for source in sources)}.get(name, (TRAIN,))
    return Part(stage=name, subjects=subjects, budget=budget, spend=spend, share=share, mode=mode, order=order)
