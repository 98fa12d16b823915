"""How far `track_loss=` can be trusted where steps are long, and which runs `finetune.TrackLoss` ends.

    python -m studies.finetune.long_steps OUT [--seeds 20] [--steps 60]

Synthetic rows: 32 features scaled to norm 1, two or three classes that are nearly linear in them, 2,000 rows. A linear
head from zero, full batches, unit clip, delta 1e-5, momentum 0 and 0.9, learning rates from 0.3 to 100, ε = 2, 8 and
without noise. Each run is made to its end once, for the true change of the loss and its estimates, and once more with
`patience=10`, alone and with `start=`. OUT keeps every run, so that a second call goes on where the first ended.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from studies import store
from tacit.finetune import DPGD, RowNorm, TrackLoss, fit
from tacit.privacy import Ledger

BUDGETS, RATES, MOMENTA, CLASSES = (2.0, 8.0, math.inf), (0.3, 1.0, 3.0, 10.0, 30.0, 100.0), (0.0, 0.9), (2, 3)
ROWS, WIDTH, PATIENCE = 2_000, 32, 10
Stop = Literal["none", "patience", "start"]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run."""

    classes: int
    epsilon: float
    lr: float
    momentum: float
    steps: int
    stop: Stop
    seed: int

    def how(self) -> TrackLoss:
        start = math.log(self.classes) if self.stop == "start" else None
        return TrackLoss() if self.stop == "none" else TrackLoss(patience=PATIENCE, start=start)


def rows(cell: Cell) -> tuple[Tensor, Tensor]:
    """Features, and the class with the highest of noisy linear scores."""
    generator = torch.Generator().manual_seed(cell.seed)
    directions = torch.randn(WIDTH, 3, generator=generator)
    inputs = torch.randn(ROWS, WIDTH, generator=generator)
    labels = (inputs @ directions + 0.5 * torch.randn(ROWS, 3, generator=generator)).argmax(1)
    return nn.functional.normalize(inputs), labels if cell.classes == 3 else (labels > 0).long()


def compute(cell: Cell) -> dict[str, Any]:
    """One run with noise of its own; the true loss is that of the weights of the last estimate."""
    inputs, labels = rows(cell)
    losses: list[float] = []
    model = nn.Sequential(nn.Identity(), nn.Linear(WIDTH, cell.classes))

    def look(_: Any) -> None:
        with torch.no_grad():
            losses.append(float(cross_entropy(model[1](inputs), labels)))

    fitted = fit(
        model,
        (inputs, labels),
        scheme="linear",
        optimizer=DPGD(steps=cell.steps, lr=cell.lr, momentum=cell.momentum, free_step=False),
        standardise=RowNorm(),
        track_loss=cell.how(),
        classes=cell.classes,
        size=ROWS,
        epsilon=cell.epsilon,
        delta=1e-5,
        ledger=Ledger("sqlite://"),
        subject="rows",
        curator=look,
    )
    last = fitted.loss_curve[-1]
    return {
        "steps": fitted.steps,
        "true": losses[-1] - losses[0],
        "change": last.change,
        "most": last.most,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()

    def run(stop: Stop, epsilon: float, lr: float, **fixed: Any) -> list[dict[str, Any]]:
        each = itertools.product(CLASSES, MOMENTA, range(options.seeds))
        cells = [
            Cell(classes=k, epsilon=epsilon, lr=lr, momentum=m, steps=options.steps, stop=stop, seed=seed)
            for k, m, seed in each
        ]
        cells = [cell for cell in cells if all(getattr(cell, name) == value for name, value in fixed.items())]
        how: dict[str, Any] = {"workers": 1, "progress": lambda *_, **__: None, "name": lambda cell: cell.stop}
        return list(store.outcomes(cells, compute, folder=options.out, **how).values())

    print("Runs that end early, with patience alone and with start=, both momenta and numbers of classes:\n")
    print("| learning rate | " + " | ".join(f"ε = {e:g}".replace("inf", "∞") for e in BUDGETS) + " |")
    print("|---|" + "---:|" * len(BUDGETS))
    for lr in RATES:
        counts = []
        for epsilon in BUDGETS:
            found = {stop: run(stop, epsilon, lr) for stop in ("patience", "start")}
            ended = [sum(one["steps"] < options.steps for one in runs) for runs in found.values()]
            counts.append(f"{ended[0]}, {ended[1]} of {len(found['start'])}")
        print(f"| {lr:g} | " + " | ".join(counts) + " |", flush=True)
    print("\nTwo classes, no momentum, ε = 8: true change, estimate, `most`:\n")
    for lr in RATES:
        ends = run("none", 8.0, lr, classes=2, momentum=0.0)
        means = [statistics.fmean(one[name] for one in ends) for name in ("true", "change", "most")]
        print(f"lr {lr:g}: " + ", ".join(f"{value:.2f}" for value in means), flush=True)


if __name__ == "__main__":
    main()
