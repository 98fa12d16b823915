"""How near the training loss that a run estimates from its own released gradients comes to the true one.

    python -m studies.finetune.loss_curve OUT FEATURES.npz... [--seeds 20] [--private 3000] [--lr 3]

FEATURES are files of studies/prepare (`vit_features`, `tune_features`). A linear head on rows of norm 1, unit clip,
delta 1e-5, momentum 0.9: full batches in 30 steps, and Poisson batches of a tenth in 60, each at ε = 0.1, 0.5, 1, 8 and
without noise. Printed are the true change of the mean cross entropy from the start to the last release, the estimate,
its stated deviation by noise, and the root mean square of their difference, over the seeds. Data are declared public.
"""

from __future__ import annotations

import argparse
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from studies import loaders, store
from tacit.finetune import DPGD, DPSGD, Optimizer, RowNorm, fit
from tacit.models import head_of
from tacit.privacy import Ledger

BUDGETS = (0.1, 0.5, 1.0, 8.0, math.inf)
ARMS = {"full batches": 30, "Poisson": 60}  # steps
DELTA = 1e-5


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run."""

    file: str
    private: int
    arm: str
    lr: float
    epsilon: float
    seed: int

    def optimizer(self) -> Optimizer:
        steps = ARMS[self.arm]
        if self.arm == "Poisson":
            return DPSGD(batch_size=self.private // 10, steps=steps, lr=self.lr)
        return DPGD(steps=steps, lr=self.lr, free_step=False)


def compute(cell: Cell) -> dict[str, Any]:
    """One run with noise and draws of its own; the true loss is taken where the last gradient was."""
    inputs, labels = loaders.features(cell.file, "train")
    inputs, labels = inputs[: cell.private], labels[: cell.private].long().flatten()
    classes = int(labels.max()) + 1
    model = nn.Sequential(nn.Identity(), nn.Linear(inputs.shape[1], classes, bias=False))
    rows, losses = nn.functional.normalize(inputs, dim=1), []

    def look(_: Any) -> None:
        with torch.no_grad():
            losses.append(float(cross_entropy(rows @ head_of(model)[1].weight.T, labels)))

    fitted = fit(
        model,
        (inputs, labels),
        optimizer=cell.optimizer(),
        epsilon=cell.epsilon,
        delta=DELTA,
        ledger=Ledger("sqlite://"),
        subject="rows",
        size=len(labels),
        classes=classes,
        scheme="linear",
        bias=False,
        standardise=RowNorm(),
        track_loss=True,
        curator=look,
    )
    last = fitted.loss_curve[-1]
    return {"true": losses[-1] - losses[0], "estimate": last.change, "noise": last.noise}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("features", nargs="+")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--private", type=int, default=3_000)
    parser.add_argument("--lr", type=float, default=3.0)
    options = parser.parse_args()
    print("| features | batches | ε | true change | estimate | stated noise | root mean square of the difference |")
    print("|---|---|---:|---:|---:|---:|---:|")
    common = {"private": options.private, "lr": options.lr}
    for file in options.features:
        for arm in ARMS:
            for epsilon in BUDGETS:
                cells = [Cell(file=file, arm=arm, epsilon=epsilon, seed=s, **common) for s in range(options.seeds)]
                found = store.outcomes(
                    cells,
                    compute,
                    folder=options.out,
                    workers=1,
                    progress=_quiet,
                    name=lambda one: one.arm,
                ).values()
                means = {key: statistics.fmean(one[key] for one in found) for key in ("true", "estimate", "noise")}
                off = math.sqrt(statistics.fmean((one["estimate"] - one["true"]) ** 2 for one in found))
                name = Path(file).name.removesuffix("-features.npz")
                numbers = " | ".join(f"{value:.2f}" for value in (*means.values(), off))
                print(f"| {name} | {arm} | {epsilon:g} | {numbers} |", flush=True)


def _quiet(*_: Any, **__: Any) -> None:
    pass


if __name__ == "__main__":
    main()
