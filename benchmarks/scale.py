"""How cost grows: with parameters, units in a step, sources, steps of a stream and entries of a ledger.

Seconds of processor time of one thread, so that other work on the machine matters little.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from tacit import Ledger, adapt, models
from tacit.calibrate import Calibrator, Source
from tacit.gradients import Engine
from tacit.privacy import Budget, events, mechanisms


def seconds(action: Callable[[], Any], times: int = 3) -> float:
    """The median of a few calls, in processor time."""
    found = []
    for _ in range(times):
        start = time.process_time()
        action()
        found.append(time.process_time() - start)
    return statistics.median(found)


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def parameters(count: int) -> float:
    """The noise of one release of so many numbers."""
    total = Engine(nn.Linear(count // 10, 10, bias=False), loss, clip=1.0).zero_sum()
    ledger = Ledger("sqlite://")
    ledger.subject("x", Budget(9.0, 1e-6))
    receipt = ledger.charge("x", events.gaussian(9.0, steps=3), stage="x")
    return seconds(lambda: mechanisms.gaussian(total, receipt))


def units(count: int) -> float:
    """The clipped sum of a step with so many units."""
    torch.manual_seed(0)
    model = models.embedded()
    engine = Engine(model, loss, clip=1.0)
    batch = torch.rand(count, 1, 28, 28), torch.arange(count) % 10
    engine(batch)
    return seconds(lambda: engine(batch))


def sources(count: int) -> float:
    """A recalibration over so many sources of 100 rows in one process."""
    torch.manual_seed(0)
    made = []
    for number in range(count):
        logits = 3 * torch.randn(100, 4)
        labels = torch.distributions.Categorical(logits=logits / 2).sample()
        paid = {"budget": Budget(5.0, 0.0), "ledger": Ledger("sqlite://"), "size": 100}
        made.append(Source(f"source {number}", logits=logits, labels=labels, **paid))  # type: ignore[arg-type]
    return seconds(lambda: Calibrator(budget=Budget(5.0, 0.0)).run(made), 1)


def stream(steps: int) -> float:
    """A step of a private adapter after so many others."""
    privacy = adapt.DP(epsilon=1.0, delta=1e-6, clip=0.5)
    paid = {"privacy": privacy, "ledger": Ledger("sqlite://"), "unit": "patient"}
    adapter = adapt.Tent(models.embedded(), batch_size=4, lr=0.001, **paid)  # type: ignore[arg-type]
    images, new = torch.rand(4, 1, 28, 28), itertools.count()
    for _ in range(steps):
        adapter(images, unit_ids=[next(new) for _ in images])
    return seconds(lambda: adapter(images, unit_ids=[next(new) for _ in images]), 5)


def entries(count: int) -> float:
    """Checking the chain of a ledger with so many entries."""
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(f"sqlite:///{folder}/ledger.db")
        ledger.subject("x", Budget(9.0, 1e-6))
        event = events.gaussian(1e6)
        for _ in range(count):
            ledger.charge("x", event, stage="x")
        return seconds(ledger.verify)


SUITES: dict[str, tuple[Callable[[int], float], list[int]]] = {
    "numbers in a release": (parameters, [100_000, 1_000_000, 10_000_000]),
    "units in a step": (units, [64, 256, 1024]),
    "sources": (sources, [10, 100, 500]),
    "steps of a stream so far": (stream, [10, 100, 500]),
    "entries of a ledger, verified": (entries, [100, 1000, 3000]),
}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="scale", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    table, results = Table("what grows", "seconds of one processor at each size", "slope of the logarithms"), {}
    for name, (measure, sizes) in SUITES.items():
        found = {size: measure(size) for size in sizes}
        slope = torch.tensor([found[sizes[-1]] / found[sizes[0]]]).log() / torch.tensor([sizes[-1] / sizes[0]]).log()
        results[name] = found
        table.add_row(name, ", ".join(f"{size:,}: {each:.4f}" for size, each in found.items()), f"{float(slope):.2f}")
        Console().print(name, found)
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main(sys.argv[1:])
