"""Where HyFreeDP begins, and for how many steps: chosen on the public tasks of fit_default.py.

    python -m studies.linear_scaling.fit_hyfreedp FOLDER OUT [--seeds 2] [--epsilon 0.1 0.5 1 3]

FOLDER has the features of studies/prepare/public_tasks.py and the X-rays of studies/prepare/vit_features.py. Linear
heads without bias on rows of norm 1, full batches. Each form begins at a rate, or at the default's (`tune.suggest`),
and takes a number of steps, or a multiple of the default's. What is printed is its accuracy less that of the default,
averaged over tasks and sizes, for each epsilon and for all. No study evaluates these tasks.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from studies import loaders, store
from studies.linear_scaling import no_rate
from studies.linear_scaling.data import Task
from studies.linear_scaling.fit_default import EPSILONS, TASKS, TRIED
from tacit.finetune import HyFreeDP, Optimizer
from tacit.privacy import Budget
from tacit.tune import suggest

RATES, STEPS = (1.0, "default"), (50, 100, "default", "twice")


@dataclass(frozen=True, kw_only=True)
class Form(no_rate.Cell):
    """A run of HyFreeDP that begins at `lr`, for `length` steps; "default" and "twice" are as `tune.suggest` says."""

    lr: float | str
    length: int | str

    def optimizer(self, features: int) -> Optimizer:
        point = suggest(
            Budget(self.epsilon, self.delta), size=self.task.private, features=features, classes=self.task.classes
        )
        steps = self.length if isinstance(self.length, int) else point.steps * (2 if self.length == "twice" else 1)
        return HyFreeDP(steps=steps, lr=point.lr if isinstance(self.lr, str) else self.lr)


def tasks(folder: Path) -> list[Task]:
    found = []
    for name, sizes in TASKS.items():
        file = str(folder / f"{name}-features.npz")
        (x, y), (_, tried) = (loaders.features(file, "train"), loaders.features(file, "test"))
        classes = int(torch.cat([y.flatten(), tried.flatten()]).max()) + 1
        for size in sizes:
            private, tested = min(size, len(x)), min(TRIED, len(tried))
            found.append(Task(title=f"{name} {private}", file=file, private=private, tested=tested, classes=classes))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--epsilon", type=float, nargs="*", default=EPSILONS)
    options = parser.parse_args()

    def mean(cell: no_rate.Cell) -> float:
        cells = [replace(cell, seed=seed) for seed in range(options.seeds)]
        how: dict[str, Any] = {"workers": 1, "progress": _quiet, "name": lambda one: one.arm}
        found = store.outcomes(cells, no_rate.compute, folder=options.out, **how).values()
        return statistics.fmean(one["accuracy"] for one in found)

    gains: dict[tuple[float | str, int | str], dict[float, list[float]]] = {}
    for epsilon in options.epsilon:
        for task in tasks(options.folder):
            same: dict[str, Any] = {"task": task, "epsilon": epsilon, "delta": 1e-5, "steps": 0, "seed": 0}
            default = mean(no_rate.Cell(arm="default", **same))
            said = [f"{task.title}, ε = {epsilon:g}: default {default:.1f}"]
            for lr in RATES:
                for length in STEPS:
                    found = mean(Form(arm="HyFreeDP", lr=lr, length=length, **same))
                    gains.setdefault((lr, length), {}).setdefault(epsilon, []).append(found - default)
                    said.append(f"{lr}, {length}: {found:.1f}")
            print("; ".join(said), flush=True)
    print(f"| begins at | steps | {' | '.join(f'ε = {epsilon:g}' for epsilon in options.epsilon)} | all | worst |")
    print(f"|---|---|{'---:|' * (len(options.epsilon) + 2)}")
    every = {form: list(itertools.chain.from_iterable(by.values())) for form, by in gains.items()}
    for form in sorted(gains, key=lambda one: -statistics.fmean(every[one])):
        columns = " | ".join(f"{statistics.fmean(values):+.1f}" for values in gains[form].values())
        print(f"| {form[0]} | {form[1]} | {columns} | {statistics.fmean(every[form]):+.2f} | {min(every[form]):+.1f} |")


def _quiet(*_: Any, **__: Any) -> None:
    pass


if __name__ == "__main__":
    main()
