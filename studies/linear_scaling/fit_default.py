"""How the rule of `tune.suggest` was fitted: grids of private probes on public tasks that no study evaluates.

    python -m studies.linear_scaling.fit_default FOLDER

FOLDER has the features of studies/prepare/public_tasks.py and the X-rays of studies/prepare/vit_features.py. Every task
is trained at four epsilons on a grid of twelve learning rates and five numbers of steps, one seed each, rows of norm 1,
by a loop of a dozen lines (no ledger: these data are public). Then, for each scale c, power a and share s, the rule
r = c (mu n)^a with s sqrt(r) steps is looked up in the grids, and the loss against the mean of the best three points is
averaged over all of them. What is printed first is what `tune.suggest` has.
"""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from studies import loaders
from tacit.privacy import mu_of

TASKS = {
    "digits-vit": (2000, 8000),
    "turned-vit": (8000,),
    "docstrings": (5000,),
    "pneumonia-vit": (1000, 4708),
    "digits-pixels": (4000,),
}
EPSILONS, DELTA, TRIED = (0.1, 0.5, 1.0, 3.0), 1e-5, 3000
STEPS, RATES = (5, 10, 20, 40, 80), tuple(2.0**power for power in range(-4, 8))
SCALES, POWERS, SHARES = (0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0), (0.5, 0.6, 0.7, 0.77, 0.85, 1.0), (0.5, 0.7, 1.0, 1.4)

Grid = dict[tuple[int, float], float]


def unit(rows: Tensor) -> Tensor:
    scaled: Tensor = rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-12)
    return scaled


def trained(x: Tensor, y: Tensor, classes: int, *, lr: float, steps: int, mu: float) -> Tensor:
    """Full-batch private descent: unit clip, momentum 0.9, one free step more."""
    weight, momentum = torch.zeros(classes, x.shape[1]), torch.zeros(classes, x.shape[1])
    targets, lengths, noise = one_hot(y, classes).float(), x.norm(dim=1), math.sqrt(steps) / mu
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        error = (x @ weight.T).softmax(1) - targets
        factor = (1 / (error.norm(dim=1) * lengths).clamp_min(1e-9)).clamp_max(1.0)
        total = (error * factor[:, None]).T @ x + noise * torch.randn(weight.shape, generator=generator)
        momentum = 0.9 * momentum + total / len(x)
        weight = weight - lr * momentum
    return weight - lr * momentum


def grids(folder: Path) -> dict[tuple[str, int, float], Grid]:
    found: dict[tuple[str, int, float], Grid] = {}
    for task, sizes in TASKS.items():
        (x, y), (tx, ty) = (loaders.features(str(folder / f"{task}-features.npz"), part) for part in ("train", "test"))
        classes = int(torch.cat([y, ty]).max()) + 1
        tried, truth = unit(tx[:TRIED]), ty[:TRIED].long()
        for size, epsilon in itertools.product(sizes, EPSILONS):
            rows, labels, mu = unit(x[:size]), y[:size].long(), mu_of(epsilon, DELTA)
            grid: Grid = {}
            for steps, lr in itertools.product(STEPS, RATES):
                weight = trained(rows, labels, classes, lr=lr, steps=steps, mu=mu)
                grid[steps, lr] = 100 * float(((tried @ weight.T).argmax(1) == truth).double().mean())
            found[task, len(rows), epsilon] = grid
            print(f"{task} {len(rows)} {epsilon}: best {max(grid.values()):.1f}", flush=True)
    return found


def looked_up(grid: Grid, steps: int, lr: float) -> float:
    """The nearest number of steps; between two learning rates, the straight line."""
    near = min(STEPS, key=lambda one: abs(math.log(one / steps)))
    place = min(max(math.log2(lr), -4.0), 7.0)
    low = math.floor(place)
    return (1 - place + low) * grid[near, 2.0**low] + (place - low) * grid[near, 2.0 ** min(low + 1, 7)]


def loss(found: dict[tuple[str, int, float], Grid], scale: float, power: float, share: float) -> float:
    """Points below the best three, on average."""
    lost = []
    for (_, size, epsilon), grid in found.items():
        r = scale * (mu_of(epsilon, DELTA) * size) ** power
        steps = min(max(round(share * math.sqrt(r)), 5), 80)
        lost.append(sum(sorted(grid.values())[-3:]) / 3 - looked_up(grid, steps, r / steps))
    return sum(lost) / len(lost)


def main() -> None:
    found = grids(Path(sys.argv[1]))
    rules = sorted((loss(found, *rule), rule) for rule in itertools.product(SCALES, POWERS, SHARES))
    for lost, (scale, power, share) in rules[:8]:
        print(f"r = {scale:g} (mu n)^{power:g}, {share:g} sqrt(r) steps: {lost:.2f} points below the best")


if __name__ == "__main__":
    main()
