"""Banded noise with cyclic Poisson sampling against DP-SGD at the same epsilon: one pass over features of a frozen net.

    python -m studies.finetune.banded FEATURES.npz OUT [--epsilon 1] [--steps 60] [--tries 2] [--seeds 5]

FEATURES.npz is what studies/prepare makes (`vit_features --train 7000 --only cifar10`); OUT keeps every run, so that a
second call goes on where the first ended. A linear head on rows of norm 1, batches of private / steps rows, no
momentum, unit clip, delta 1e-5, zero-out. Each arm (`--arms`) has the same six learning rates: `tries` runs of each on
as many other rows, tried on the training rows after these, choose one. The chosen one gets `seeds` runs on the first
`private` rows, tried on the test rows; it is marked if it lies at the edge. HyFreeDP begins at three rates, with as
many seeds of each. Data are declared public. The epsilon of each noise is derived again with dp_accounting alone.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from torch import Tensor, nn

from studies import loaders, store
from tacit.finetune import DPSGD, BandMF, HyFreeDP, Optimizer, RowNorm, fit
from tacit.privacy import Ledger

RATES = (2.0, 5.0, 12.0, 30.0, 75.0, 190.0)
ARMS = ("DP-SGD", "4 bands", "8 bands")
STARTS = (0.05, 1.0, 20.0)  # where HyFreeDP begins
DELTA = 1e-5


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run."""

    file: str
    private: int
    steps: int
    epsilon: float
    arm: str
    lr: float
    seed: int
    split: Literal["private", "tuning"]

    @property
    def batch_size(self) -> int:
        return self.private // self.steps

    @property
    def bands(self) -> int:
        return int(self.arm.split()[0]) if self.arm.endswith("bands") else 1

    def optimizer(self) -> Optimizer:
        if self.arm == "HyFreeDP":
            return HyFreeDP(batch_size=self.batch_size, steps=self.steps, lr=self.lr, momentum=0.0)
        if self.bands == 1:
            return DPSGD(batch_size=self.batch_size, steps=self.steps, lr=self.lr, momentum=0.0)
        return BandMF(batch_size=self.batch_size, steps=self.steps, bands=self.bands, lr=self.lr, momentum=0.0)


def rows(cell: Cell) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """What is trained on and what is tried: private and test rows, or other training rows for both."""
    inputs, labels = loaders.features(cell.file, "train")
    labels = labels.long().flatten()
    here, other = slice(cell.private), slice(cell.private, 2 * cell.private)
    if cell.split == "tuning":
        held_out = slice(2 * cell.private, None)
        if len(labels) < 2 * cell.private + 500:
            raise ValueError(
                f"{cell.file} has too few training rows to choose learning rates on others: {len(labels)}."
            )
        return (inputs[other], labels[other]), (inputs[held_out], labels[held_out])
    tested, truth = loaders.features(cell.file, "test")
    return (inputs[here], labels[here]), (tested, truth.long().flatten())


def compute(cell: Cell) -> dict[str, Any]:
    """One run with noise and draws of its own."""
    trained_on, tried_on = rows(cell)
    inputs, labels = trained_on
    classes = int(labels.max()) + 1
    model = nn.Sequential(nn.Identity(), nn.Linear(inputs.shape[1], classes, bias=False))
    fitted = fit(
        model,
        (inputs, labels),
        optimizer=cell.optimizer(),
        epsilon=cell.epsilon,
        delta=DELTA,
        ledger=Ledger("sqlite://"),
        subject="rows",
        size=cell.private,
        classes=classes,
        scheme="linear",
        neighbours="zero-out",
        standardise=RowNorm(),
    )
    inputs, labels = tried_on
    with torch.inference_mode():
        right = (fitted.model(inputs).argmax(1) == labels).double().mean()
    return {"accuracy": 100 * float(right), "noise": fitted.noise_multiplier, "epsilon": fitted.guarantee.epsilon}


@functools.cache
def derived(noise: float, steps: int, bands: int, rate: float) -> float:
    """Epsilon with dp_accounting alone: every unit is in one step of `bands`, at `bands` times the rate."""
    accountant = PLDAccountant()
    one = dp_event.PoissonSampledDpEvent(bands * rate, dp_event.GaussianDpEvent(noise))
    accountant.compose(dp_event.SelfComposedDpEvent(one, math.ceil(steps / bands)))
    return float(accountant.get_epsilon(DELTA))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("features")
    parser.add_argument("out", type=Path)
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--private", type=int, default=3_000)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--tries", type=int, default=2, help="runs of each learning rate, by which it is chosen")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--arms", nargs="*", default=[*ARMS, "HyFreeDP"])
    options = parser.parse_args()

    def cell(split: Literal["private", "tuning"], arm: str, lr: float, seed: int) -> Cell:
        return Cell(
            file=options.features,
            private=options.private,
            steps=options.steps,
            epsilon=options.epsilon,
            arm=arm,
            lr=lr,
            seed=seed,
            split=split,
        )

    def run(cells: list[Cell]) -> dict[Cell, dict[str, Any]]:
        return store.outcomes(
            cells, compute, folder=options.out, workers=1, progress=lambda *_, **__: None, name=lambda one: one.arm
        )

    def mean(found: dict[Cell, dict[str, Any]], arm: str, lr: float) -> float:
        return statistics.fmean(found[one]["accuracy"] for one in found if (one.arm, one.lr) == (arm, lr))

    print("| arm | learning rate | accuracy | noise multiplier | epsilon, derived again |")
    print("|---|---:|---:|---:|---:|")
    for arm in options.arms:
        rates = STARTS if arm == "HyFreeDP" else RATES
        chosen: tuple[float, ...] = rates
        if arm != "HyFreeDP":
            seen = run([cell("tuning", arm, lr, seed) for seed in range(options.tries) for lr in rates])
            chosen = (max(rates, key=functools.partial(mean, seen, arm)),)
            scores = ", ".join(f"{lr:g}: {mean(seen, arm, lr):.1f}" for lr in rates)
            print(f"{arm}, tuning rows: {scores}", file=sys.stderr, flush=True)
        for lr in chosen:
            more = run([cell("private", arm, lr, seed) for seed in range(options.seeds)])
            accuracies = [one["accuracy"] for one in more.values()]
            any_one = next(iter(more.items()))
            checked = derived(any_one[1]["noise"], options.steps, any_one[0].bands, 1 / options.steps)
            edge = " (edge)" if arm != "HyFreeDP" and lr in (rates[0], rates[-1]) else ""
            print(
                f"| {arm} | {lr:g}{edge} | {statistics.fmean(accuracies):.1f} ± {statistics.stdev(accuracies):.1f} | "
                f"{any_one[1]['noise']:.3f} | {checked:.4f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
