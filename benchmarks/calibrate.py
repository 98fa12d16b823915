"""Recalibration from many sources: all trials at once, against one source after another.

    PYTHONPATH=. python benchmarks/calibrate.py [--trials 500] [--quick] [--outputs FOLDER] [--json F] [--markdown F]

Two works: 250 sources x 10 samples x 500 trials on each of 15 shifts of the embedded model's outputs, and 2,000 x 10 on
synthetic logits. The unit of work is an answer: one source's statistic at one temperature, with its noise. The loop is
what one would write first: for every trial and every source, pick its rows, sum them, add Laplace noise. It does a few
trials of the same work in the same process, right before and right after; both sides are compared as answers a second.
Also one run of the real protocol, with a ledger per source, for what a private run costs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from paired import machine
from studies.recalibration.data import Shifted, shifted
from tacit.calibrate import (
    ECET,
    NLLT,
    AccT,
    Calibrator,
    HistogramBinning,
    Method,
    Setting,
    SignedGap,
    Simulation,
    Source,
)
from tacit.calibrate._outputs import Outputs
from tacit.calibrate._search import Ask, drive
from tacit.calibrate._simulation import reference
from tacit.privacy import Budget

METHODS: tuple[Method, ...] = (HistogramBinning(), NLLT(), ECET(), AccT(), SignedGap())
BUDGET = Budget(1.0, 0.0)


@dataclass(frozen=True)
class Row:
    """One method on one work."""

    work: str
    method: str
    answers: int  # of the vectorised arm
    seconds: float
    loop_answers: int
    loop_seconds: float

    @property
    def ahead(self) -> float:
        return (self.answers / self.seconds) / (self.loop_answers / self.loop_seconds)


def loop(simulation: Simulation, method: Method, setting: Setting, trials: int) -> tuple[int, list[float]]:
    """One source after another: how many answers were given, and the temperature of each trial."""
    rng = np.random.default_rng(0)
    price = setting.price(method.queries(setting))
    answers, found = 0, []
    for trial in range(trials):
        parts = torch.tensor_split(simulation.assigned[trial], setting.sources)
        sources: list[Outputs] = [simulation.outputs.take(part) for part in parts]

        def ask(asked: Ask, sources: list[Outputs] = sources) -> torch.Tensor:
            nonlocal answers
            statistic = asked.statistic.at(float(asked.temperatures[0]))
            scale = price.scale(statistic, setting.neighbours)
            total = np.zeros(statistic.size)
            for one in sources:
                exact = statistic.contributions(one).sum(dim=0).numpy()
                total += exact + rng.laplace(0, scale, exact.shape)
                answers += 1
            return torch.from_numpy(total)[None]

        found.append(float(drive(method.search(setting, 1), ask).temperature[0]))
    return answers, found


def quietly(what: str, done: int, total: int, *, spent: tuple[float, float] | None = None) -> None:
    del what, done, total, spent


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def compare(name: str, simulations: Sequence[Simulation], loops: int) -> list[Row]:
    rows = []
    for method in METHODS:
        first = simulations[0]
        setting = Setting(sources=first.sources, samples=first.samples, budget=BUDGET, noise="laplace")
        counted: list[int] = []

        def slow(method: Method = method, setting: Setting = setting, counted: list[int] = counted) -> None:
            counted.append(loop(simulations[0], method, setting, loops)[0])

        def fast(method: Method = method) -> None:
            for simulation in simulations:
                simulation.run(method, budget=BUDGET)

        before, seconds, after = timed(slow), timed(fast), timed(slow)
        answers = method.queries(setting) * first.sources * first.trials * len(simulations)
        rows.append(Row(name, method.name, answers, seconds, sum(counted), before + after))
    return rows


def protocol(sources: int, samples: int) -> float:
    """Seconds of one private run with a ledger in memory for each source."""
    logits, labels = reference(0.1, sources * samples)
    places = [slice(i * samples, (i + 1) * samples) for i in range(sources)]
    made = [
        Source(f"s{i}", logits=logits[rows], labels=labels[rows], budget=BUDGET, size=samples)
        for i, rows in enumerate(places)
    ]
    return timed(lambda: Calibrator(budget=BUDGET, method=AccT(), cautious=False).run(made))


def show(rows: Sequence[Row], console: Console) -> None:
    table = Table("work", "method", "all at once", "answers a second", "loop: answers a second", "ahead")
    for row in rows:
        table.add_row(
            row.work,
            row.method,
            f"{row.seconds:.1f} s",
            f"{row.answers / row.seconds:,.0f}",
            f"{row.loop_answers / row.loop_seconds:,.0f}",
            f"{row.ahead:,.0f}x",
        )
    console.print(table)


def markdown(rows: Sequence[Row], private: float, where: dict[str, str]) -> str:
    lines = ["Measured on: " + ", ".join(f"{key} {value}" for key, value in where.items()) + ".", ""]
    lines += ["| work | method | all at once | answers a second | loop | ahead |", "|---|---|---|---|---|---|"]
    for row in rows:
        fast, slow = row.answers / row.seconds, row.loop_answers / row.loop_seconds
        lines.append(
            f"| {row.work} | {row.method} | {row.seconds:.1f} s | {fast:,.0f} | {slow:,.0f} | {row.ahead:,.0f}x |"
        )
    lines += ["", f"One private run of Acc-T with 250 sources, a ledger each: {private:.1f} s."]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument("--loops", type=int, default=2, help="trials of the loop, before and after")
    parser.add_argument("--quick", action="store_true", help="a few trials on made-up outputs: a smoke test")
    parser.add_argument(
        "--outputs",
        type=Path,
        default=Path("runs/recalibration/outputs"),
        help="where the outputs under shift are kept",
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    options, _ = parser.parse_known_args(argv)
    torch.set_num_threads(2)
    trials = 20 if options.quick else options.trials
    sizes = {"sources": 250, "samples": 10, "trials": trials}
    if options.quick:
        pairs = [reference(expected, 4000) for expected in (0.05, 0.1)]
        dealt = [Simulation(logits=logits, labels=labels, **sizes) for logits, labels in pairs]
    else:
        data = shifted(Shifted(), options.outputs, quietly)
        dealt = [Simulation(**one.arrays, **sizes) for one in data if one.name != "clean"]
    rows = compare(f"250 x 10, {len(dealt)} shifts", dealt, options.loops)
    del dealt
    logits, labels = reference(0.1, 40_000)
    many = Simulation(logits=logits, labels=labels, sources=2000, samples=10, trials=trials)
    rows += compare("2,000 x 10, synthetic", [many], 1)
    private = protocol(250, 10)
    console = Console(width=120)
    show(rows, console)
    console.print(f"One private run of Acc-T with 250 sources, a ledger each: {private:.1f} s.")
    where = {**machine(), "torch": torch.__version__, "trials": str(trials)}
    if options.json:
        options.json.write_text(json.dumps({"machine": where, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    if options.markdown:
        options.markdown.write_text(markdown(rows, private, where))


if __name__ == "__main__":
    sys.exit(main())
