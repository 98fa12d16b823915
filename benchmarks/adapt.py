"""A step of test-time adaptation in each form, against its non-private twin: same loss, no filter, no clip, no noise.

    python benchmarks/adapt.py [--method NAME ...] [--rounds 40] [--quick] [--json FILE] [--markdown FILE]

A step is what a user calls: predict, learn, update. Also the run-time table of the paper (its table 4): the published
form, the clip-only form and the private form, side by side.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

from models import ViT
from paired import THREADS, Bar, Result, Row, Step, evaluator, machine, paired_ratio, peak_memory, time_rounds
from tables import markdown, save, show
from tacit import adapt
from tacit.adapt import DP, Adapter, Clip, Method
from tacit.adapt import _constructors as makers
from tacit.privacy import Ledger

ROWS = 64
METHODS: dict[str, Callable[[], Method]] = {
    "tent": makers.tent,
    "eata": makers.eata,
    "sar": makers.sar,
    "deyo": makers.deyo,
    "come": makers.come,
    "deyo-come": partial(makers.come, "deyo"),
}
TWIN, NULL = "twin, not private", "null"
ARMS = (TWIN, NULL, "as published", "clip-only", "private", "private, correlated noise")
BARS = {
    "tent": (Bar(1.05, arm="private"),),
    "eata": (Bar(1.05, arm="private"),),
    "come": (Bar(1.05, arm="private"),),
    "sar": (Bar(1.0, arm="private", against="as published", ahead=True),),
}


def adapter(name: str, arm: str, model: nn.Module) -> Adapter:
    method = METHODS[name]()
    if method.name.startswith("EATA"):
        method = replace(method, anchor=adapt.fisher(model, torch.rand(8, 3, 28, 28), public=True))
    if arm in (TWIN, NULL):
        return Adapter(model, replace(method, filters=(), filter_again=False, recovery=None), lr=1e-6)
    if arm == "as published":
        return Adapter(model, method, lr=1e-6)
    if arm == "clip-only":
        return Adapter(model, method, privacy=Clip(0.5), lr=1e-6)
    noise = "correlated" if "correlated" in arm else "independent"
    form = DP(1.0, 1e-6, clip=0.5, noise=noise, horizon=10_000 if noise == "correlated" else None)
    return Adapter(model, method, privacy=form, lr=1e-6, ledger=Ledger("sqlite://"))


def build(name: str, arm: str, rows: int = ROWS) -> Step:
    """A step on a ViT of 192 x 6 whose predictions are neither certain nor even, so that filters keep some rows."""
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    model = ViT()
    with torch.no_grad():
        model.head.weight.mul_(40)
    images = torch.rand(rows, 3, 28, 28)
    running = adapter(name, arm, model)
    return lambda: running(images)


def run(
    name: str,
    rounds: int,
    *,
    arms: Sequence[str] = ARMS,
    bars: Sequence[Bar] | None = None,
    budget: float = float("inf"),
    rows: int = ROWS,
) -> Result:
    """After `budget` seconds no further round begins, except that there are always three."""
    steps = {arm: build(name, arm, rows) for arm in arms}
    seconds = time_rounds(steps, rounds=rounds, budget=budget)
    peaks = {
        arm: peak_memory(partial(build, name, arm, rows), partial(build, name, arm, 2), preload=("torch",))
        for arm in arms
    }
    found = {
        arm: Row(
            arm, seconds[arm], paired_ratio(seconds[arm], seconds[TWIN]), peaks[arm], peaks[arm] / max(peaks[TWIN], 1)
        )
        for arm in arms
    }
    null = found[NULL].ratio
    deviation = abs(null.median - 1) if null else 0.0
    verdicts = [evaluator(bar, found, deviation) for bar in (BARS.get(name, ()) if bars is None else bars)]
    title = f"{METHODS[name]().name}, LayerNorms of a ViT 192x6, batch {rows}"
    return Result(name, title, TWIN, list(found.values()), verdicts, deviation)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", nargs="+", choices=list(METHODS), metavar="NAME", help=", ".join(METHODS))
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--quick", action="store_true", help="four rounds: a smoke test, not a measurement")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="the tables for docs/benchmarks.md")
    options, _ = parser.parse_known_args(argv)
    warnings.simplefilter("ignore")
    torch.set_num_threads(THREADS)
    console = Console(width=140)
    where = {**machine(), "torch": torch.__version__, "threads": str(THREADS)}
    results = []
    for name in options.method or METHODS:
        results.append(run(name, 4 if options.quick else options.rounds))
        show(results[-1], console)
        if options.json:
            save(options.json, results, where)
        if options.markdown:
            options.markdown.write_text(markdown(results, where))


if __name__ == "__main__":
    sys.exit(main())
