"""What watching costs: a private step of Tent with monitor and private statistics, against the plain private step.

    python benchmarks/monitor.py [--work NAME ...] [--rounds 40] [--quick] [--cpu] [--json FILE] [--markdown FILE]

A step is what a user calls: predict, learn, release, update. `layer-norm` has nothing but the monitor to add;
`batch-norm` has the monitor and the private statistics of nine BatchNorm layers. `--cpu` counts the processor time of
one thread instead of wall time on two: for machines that others use.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from models import ViT
from paired import Bar, Result, Row, Step, evaluator, machine, paired_ratio, time_rounds
from tables import markdown, save, show
from tacit import adapt
from tacit.privacy import Ledger

ROWS = 64
PLAIN, NULL = "private", "null"
ARMS: dict[str, dict[str, dict[str, Any]]] = {
    "layer-norm": {PLAIN: {}, NULL: {}, "monitor": {"monitor": True}},
    "batch-norm": {
        PLAIN: {},
        NULL: {},
        "monitor": {"monitor": True},
        "statistics": {"statistics": "private"},
        "monitor and statistics": {"monitor": True, "statistics": "private"},
    },
}
BARS = {"layer-norm": Bar(1.05, arm="monitor"), "batch-norm": Bar(1.05, arm="monitor and statistics")}
TITLES = {
    "layer-norm": f"LayerNorms of a ViT 192x6, 28 x 28 pixels, batch {ROWS}",
    "batch-norm": f"Nine BatchNorms of a convolutional net 64-128-256, 32 x 32 pixels, batch {ROWS}",
}


def convolutions() -> nn.Sequential:
    """Three stages of three 3 x 3 convolutions, each with BatchNorm."""
    blocks: list[nn.Module] = []
    before = 3
    for width in (64, 128, 256):
        for stride in (2, 1, 1):
            blocks += [nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            before = width
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10))


def build(work: str, options: dict[str, Any]) -> Step:
    torch.manual_seed(0)
    model, side = (ViT(), 28) if work == "layer-norm" else (convolutions(), 32)
    images = torch.rand(ROWS, 3, side, side)
    form = adapt.DP(1.0, 1e-6, clip=0.5)
    running = adapt.Tent(model.eval(), privacy=form, batch_size=ROWS, lr=1e-6, ledger=Ledger("sqlite://"), **options)
    return lambda: running(images)


def run(work: str, rounds: int, *, cpu: bool = False) -> Result:
    steps = {arm: build(work, options) for arm, options in ARMS[work].items()}
    clock = time.process_time if cpu else time.perf_counter
    seconds = time_rounds(steps, rounds=rounds, warmups=3, clock=clock)
    found = {arm: Row(arm, seconds[arm], paired_ratio(seconds[arm], seconds[PLAIN])) for arm in ARMS[work]}
    null = found[NULL].ratio
    deviation = abs(null.median - 1) if null else 0.0
    return Result(work, TITLES[work], PLAIN, list(found.values()), [evaluator(BARS[work], found, deviation)], deviation)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", nargs="+", choices=list(ARMS), metavar="NAME", help=", ".join(ARMS))
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--quick", action="store_true", help="four rounds: a smoke test, not a measurement")
    parser.add_argument("--cpu", action="store_true", help="processor time of one thread")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="the tables for docs/benchmarks.md")
    options, _ = parser.parse_known_args(argv)
    warnings.simplefilter("ignore")
    threads = 1 if options.cpu else 2
    torch.set_num_threads(threads)
    console = Console(width=140)
    where = {
        **machine(),
        "torch": torch.__version__,
        "threads": str(threads),
        "clock": "processor time" if options.cpu else "wall time",
    }
    results = []
    for work in options.work or ARMS:
        results.append(run(work, 4 if options.quick else options.rounds, cpu=options.cpu))
        show(results[-1], console)
        if options.json:
            save(options.json, results, where)
        if options.markdown:
            options.markdown.write_text(markdown(results, where))


if __name__ == "__main__":
    sys.exit(main())
