"""Steps without a learning rate to choose: distance over gradients and HyFreeDP beside the default of `tune.suggest`.

    python -m studies.linear_scaling.no_rate linear_scaling/linear-scaling-default.toml OUT
        [--seeds 20] [--steps 50] [--epsilon 0.1 0.5 1 8]

The recipe's tasks and delta: linear heads without bias on rows of norm 1, full batches. All but the default take
`--steps` steps; "HyFreeDP from the default" begins at its rate and takes twice its steps. Data are declared public.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from studies import runner, store
from studies.linear_scaling.data import Task
from tacit.finetune import DPGD, HyFreeDP, Optimizer, RowNorm, fit
from tacit.gradients import Automatic
from tacit.privacy import Budget, Ledger
from tacit.tune import suggest

BUDGETS = (0.1, 0.5, 1.0, 8.0)
ARMS = (
    "default",
    "distance over gradients",
    "the same, mean of the weights",
    "the same, normalised gradients",
    "HyFreeDP",
    "HyFreeDP from the default",
)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run."""

    task: Task
    arm: str
    epsilon: float
    delta: float
    steps: int
    seed: int

    def optimizer(self, features: int) -> Optimizer:
        if "default" in self.arm:
            budget = Budget(self.epsilon, self.delta)
            point = suggest(budget, size=self.task.private, features=features, classes=self.task.classes)
            if self.arm == "default":
                return DPGD(steps=point.steps, lr=point.lr)
            return HyFreeDP(steps=2 * point.steps, lr=point.lr)  # as fit_hyfreedp.py found
        if self.arm == "HyFreeDP":
            return HyFreeDP(steps=self.steps, lr=1.0)
        options: dict[str, Any] = {"steps": self.steps, "rule": "dog", "lr": 1.0}
        if self.arm == "the same, mean of the weights":
            return DPGD(average="swa", swa_start=0.5, **options)
        return DPGD(clip=Automatic(1.0) if self.arm == "the same, normalised gradients" else 1.0, **options)


def compute(cell: Cell) -> dict[str, Any]:
    """One run with noise of its own."""
    inputs, labels = cell.task.rows("train")
    fitted = fit(
        nn.Sequential(nn.Identity(), nn.Linear(inputs.shape[1], cell.task.classes, bias=False)),
        (inputs, labels),
        optimizer=cell.optimizer(inputs.shape[1]),
        epsilon=cell.epsilon,
        delta=cell.delta,
        ledger=Ledger("sqlite://"),
        subject="rows",
        size=cell.task.private,
        classes=cell.task.classes,
        scheme="linear",
        bias=False,
        standardise=RowNorm(),
    )
    tried, truth = cell.task.rows("test")
    with torch.inference_mode():
        right = (fitted.model(tried).argmax(1) == truth).double().mean()
    return {"accuracy": 100 * float(right), "epsilon": fitted.guarantee.epsilon}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--epsilon", type=float, nargs="*", default=BUDGETS)
    options = parser.parse_args()
    _, study = runner.read(options.recipe)
    print(f"| task | ε | {' | '.join(ARMS)} |\n|---|---:|{'---:|' * len(ARMS)}")
    for task in study.tasks.values():
        for epsilon in options.epsilon:
            row = []
            for arm in ARMS:
                same: dict[str, Any] = {"task": task, "arm": arm, "epsilon": epsilon}
                cells = [Cell(delta=study.delta, steps=options.steps, seed=s, **same) for s in range(options.seeds)]
                how: dict[str, Any] = {"workers": 1, "progress": _quiet, "name": lambda cell: cell.arm}
                found = store.outcomes(cells, compute, folder=options.out, **how).values()
                accuracies = [one["accuracy"] for one in found]
                row.append(f"{statistics.fmean(accuracies):.1f} ± {statistics.stdev(accuracies):.1f}")
            print(f"| {task.title} | {epsilon:g} | {' | '.join(row)} |", flush=True)


def _quiet(*_: Any, **__: Any) -> None:
    pass


if __name__ == "__main__":
    main()
