"""What a robust step costs: DPAdapter and SAM against a standard step on the same rows.

    python benchmarks/pretrain.py [--rounds 20] [--quick] [--json FILE] [--markdown FILE]

A step is all that training does: forward, backward, perturb, forward, backward, revert, update. A DPAdapter step reads
m1 rows to perturb and m2 to step; with reuse r it reads the m1 rows in every r-th step only, so each arm does ten steps
in a row. Arms take turns in random order, and each ratio is to the standard steps of the same round. An arm's name says
what the number of rows alone would give.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional

from paired import Result, Row, Step, machine, paired_ratio, time_rounds
from tables import markdown, save, show
from tacit.models import ConvNet
from tacit.pretrain import Robust

BATCH = 50  # m2
MICROBATCH = 500
REFERENCE = "standard"
NULL = "null"


@dataclass(frozen=True)
class Arm:
    """One way to step; `ratio` is m1 / m2 (0: the rows of the step itself, as SAM does)."""

    ratio: int = 0
    reuse: int = 1

    @property
    def name(self) -> str:
        """With the ratio that the number of rows alone would give."""
        rows = 1 + max(self.ratio, 1) / self.reuse
        return f"{f'DPAdapter, reuse {self.reuse}' if self.ratio else 'SAM'} (rows: {rows:g})"


def arms(ratio: int) -> list[Arm]:
    return [Arm(), *(Arm(ratio, reuse) for reuse in (1, 5, 10))]


def net() -> nn.Module:
    torch.manual_seed(0)
    return ConvNet(channels=1, classes=10, widths=(8, 32, 64), depths=(0, 1, 2))


def rows(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(count, 1, 28, 28, generator=generator), torch.randint(10, (count,), generator=generator)


def gradient(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    """Of the mean loss, a microbatch at a time."""
    for some, their in zip(images.split(MICROBATCH), labels.split(MICROBATCH), strict=True):
        (functional.cross_entropy(model(some), their, reduction="sum") / len(labels)).backward()


def steps_of(arm: Arm | None, *, cycle: int) -> Step:
    """`cycle` steps in a row of an arm; None: standard ones."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    images, labels = rows(BATCH)
    if arm is None:
        robust, large = Robust(optimizer, method="standard"), (images, labels)
    elif arm.ratio == 0:
        robust, large = Robust(optimizer, method="sam", radius=0.1), (images, labels)
    else:
        robust, large = Robust(optimizer, radius=0.1, reuse=arm.reuse), rows(arm.ratio * BATCH)

    def step() -> None:
        for _ in range(cycle):
            robust.zero_grad()
            if robust.due:
                gradient(model, *large)
            robust.perturb()
            gradient(model, images, labels)
            robust.step()

    return step


def run(ratio: int, *, rounds: int, console: Console) -> Result:
    """All arms at one m1 / m2, ten steps at a time."""
    cycle = 10
    steps = {REFERENCE: steps_of(None, cycle=cycle), NULL: steps_of(None, cycle=cycle)}
    steps |= {arm.name: steps_of(arm, cycle=cycle) for arm in arms(ratio)}
    with console.status(f"m1/m2 = {ratio}: {rounds} rounds of {len(steps)} arms"):
        seconds = time_rounds(steps, rounds=rounds, warmups=1)
    found = [Row(name, taken, paired_ratio(taken, seconds[REFERENCE])) for name, taken in seconds.items()]
    null = next(row.ratio.median for row in found if row.arm == NULL and row.ratio)
    title = f"Ten robust steps, m1/m2 = {ratio} (m2 = {BATCH}), ConvNet of 52,000 weights on 28 x 28 images"
    return Result(f"ratio-{ratio}", title, REFERENCE, found, [], abs(null - 1))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="three rounds without m1/m2 = 100: a smoke test")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="the tables for docs/benchmarks.md")
    options, _ = parser.parse_known_args(argv)
    torch.set_num_threads(2)
    console = Console(width=140)
    where = {**machine(), "torch": torch.__version__, "threads": "2"}
    results = []
    for ratio in (1, 10) if options.quick else (1, 10, 100):
        rounds = 3 if options.quick else max(3, options.rounds // (4 if ratio == 100 else 1))
        results.append(run(ratio, rounds=rounds, console=console))
        show(results[-1], console)
        if options.json:
            save(options.json, results, where)
        if options.markdown:
            options.markdown.write_text(markdown(results, where))


if __name__ == "__main__":
    sys.exit(main())
