"""The table of bars: every kind of private step over its twin without privacy, in one run, for docs/benchmarks.md.

    python benchmarks/bars.py [--row NAME ...] [--minutes 13] [--quick] [--json FILE] [--page docs/benchmarks.md]

`make bars` runs all of it and writes the page. A row begins no further round once its share of the minutes is used, so
that the number of pairs, which is shown, is below 40 where a step is long; peers take part in every n-th round. With
`--json` rows are kept as they are finished, and rows that the file has are not run again: remove it to measure anew.
Checks of the sums, peak memory in fresh processes, counts and growth come on top of the minutes, about ten more.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from torch import nn

import adapt
import finetune
import gradients
import growth
import loops
import text
from arms import Batch, Work, build
from bars_page import page, section
from counted import Count, count
from models import ViT
from paired import THREADS, Bar, Result, Step, machine
from tables import show
from tacit.gradients import _kernels

ROUNDS = 40
COUNTED = 64  # rows of a step that is counted: ratios do not change with more of them
SHAPES = {"50 positions": (64, 50, 192, 768), "128 positions": (8, 128, 384, 1536)}  # of a ViT, and of BERT
LIGHT = ("opacus hooks", "opacus ghost", "torch.func")


@dataclass(frozen=True)
class Line:
    """A row of the table: what to run, its share of the time, and the two steps to count (plain, private)."""

    name: str
    share: float
    run: Callable[[int, float, Console], Result]
    steps: Callable[[str], Step]
    arms: tuple[str, str] = ("no privacy", "tacit")


def step_of(work: Work, share: float, *, peers: Sequence[str] = LIGHT, every: int = 8) -> Line:
    kept = tuple(arm for arm in work.arms if arm in gradients.IN_RUN or arm in peers)
    bars = tuple(bar for bar in work.bars if not bar.ahead or (bar.against in kept and bar.limit == 1))
    work = replace(work, arms=kept, bars=bars, jax=False, peers_every=every)

    def run(rounds: int, budget: float, console: Console) -> Result:
        return gradients.run(work, rounds=rounds, jax_python="left out", console=console, budget=budget)

    few = partial(build, work, rows=min(work.rows, COUNTED))
    return Line(work.name, share, run, few, (work.reference, "tacit"))


def epoch_of(work: loops.Epoch, share: float, bars: tuple[Bar, ...], *, every: int = 4, name: str = "") -> Line:
    work = replace(work, name=name or work.name, bars=bars, peers_every=every)

    def run(rounds: int, budget: float, console: Console) -> Result:
        preload = (*loops.PRELOAD, "transformers.models.bert.modeling_bert", "peft")
        return loops.run(work, rounds=rounds, console=console, preload=preload, budget=budget)

    return Line(work.name, share, run, partial(loops.epoch_of, work))


def adaptation_of(method: str, share: float, examples: int) -> Line:
    arms = (adapt.TWIN, adapt.NULL, "private")

    def run(rounds: int, budget: float, console: Console) -> Result:
        with console.status(f"{method}: {rounds} rounds"):
            return adapt.run(method, rounds, arms=arms, bars=(Bar(1.05, arm="private"),), budget=budget, rows=examples)

    return Line(method, share, run, partial(adapt.build, method, rows=examples), (adapt.TWIN, "private"))


def tiny() -> nn.Module:
    """ViT-Ti/16 at 224 x 224, LayerNorms trained."""
    return gradients.norms_of(ViT(192, 12, 3, 1000, image=224, patch=16))


def large_images(rows: int) -> Batch:
    return (torch.randn(rows, 3, 224, 224),)


def smaller(work: Work) -> Work:
    """An eighth of the rows, two units at least: for a smoke test."""
    rows = max(work.rows // 8, 2 * work.unit_size)
    work = replace(work, rows=rows, check_rows=work.check_rows and min(work.check_rows, rows))
    return replace(work, expected=max(work.expected // 8, 1)) if isinstance(work, loops.Epoch) else work


def lines(*, small: bool = False) -> dict[str, Line]:
    """Every row by its name; `small` ones have an eighth of the examples."""
    everything = _lines(smaller if small else lambda work: work, adapt.ROWS // 8 if small else adapt.ROWS)
    return {line.name: line for line in everything}


def _lines(sized: Callable[[Any], Any], rows: int) -> tuple[Line, ...]:
    steps = {name: sized(work) for name, work in gradients.works().items()}
    title = "LayerNorms only, test-time entropy step, ViT-Ti/16 at 224 x 224, batch 8"
    at_224 = Work("norms-ti-8", title, tiny, large_images, gradients.entropy, 8, gradients.STANDARD, (Bar(1.06),))
    hooks = Bar(1.0, against="opacus hooks", ahead=True)
    fine, texts = sized(finetune.works()["linear"]), {n: sized(work) for n, work in text.works().items()}
    return (
        step_of(steps["vit-64"], 9),
        step_of(steps["vit-256"], 9, peers=()),
        step_of(steps["bert"], 10),
        step_of(steps["convnext"], 4),
        step_of(steps["norms-64"], 6),
        step_of(steps["norms-8"], 3, every=4),
        step_of(steps["norms-1"], 2, every=2),
        step_of(sized(at_224), 6, peers=()),
        *(adaptation_of(method, 5, rows) for method in ("tent", "eata", "sar", "deyo", "deyo-come")),
        step_of(steps["probe"], 3, peers=("opacus ghost",)),
        epoch_of(fine, 3, (Bar(1.3),), name="linear-epoch"),
        epoch_of(texts["lora"], 10, (Bar(1.08), hooks), name="lora-epoch"),
        epoch_of(texts["selective"], 8, (Bar(1.08), hooks), name="selective-epoch"),
        step_of(steps["units"], 8, peers=()),
    )


def counts(line: Line) -> tuple[Count, Count]:
    """Of the plain and of the private step."""
    plain, private = (count(line.steps(arm), steps=3) for arm in line.arms)
    return plain, private


def speeds(rounds: int = 30) -> dict[str, tuple[float, float]]:
    """How fast compiled Gram norms and sums of units multiply, next to torch's product of the same factors."""
    found = {}
    for name, (rows, positions, m, k) in SHAPES.items():
        u, v = torch.randn(rows, positions, m), torch.randn(rows, positions, k)
        weights = torch.ones(rows, dtype=torch.float64)
        taken: list[list[float]] = [[], [], []]
        works = (
            lambda u=u, v=v: u.flatten(0, 1).T @ v.flatten(0, 1),
            lambda u=u, v=v: _kernels.ghost(u, v),
            lambda u=u, v=v, w=weights, run=positions: _kernels.weighted_sum(u, v, w, None, run),
        )
        for _ in range(rounds):
            for times, work in zip(taken, works, strict=True):
                start = time.perf_counter()
                work()
                times.append(time.perf_counter() - start)
        product, gram, added = (median(times) for times in taken)
        share = positions * (m + k) / 2 / (m * k)  # multiplications of the Gram norm, each pair once, next to those
        found[name] = share * product / gram, product / added
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    known = lines()
    parser.add_argument("--row", nargs="+", choices=[*known, "growth"], metavar="NAME", help=", ".join(known))
    parser.add_argument("--minutes", type=float, default=13.0, help="of timed rounds, over all rows")
    parser.add_argument("--quick", action="store_true", help="three rounds of an eighth of the examples: a smoke test")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep rows here; what it has is not run again")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the section between its marks in this page")
    options = parser.parse_args()
    known = lines(small=options.quick)
    warnings.simplefilter("ignore")
    torch.set_num_threads(THREADS)
    console = Console(width=140)
    start = time.perf_counter()
    kept = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    where = {**machine(), "torch": torch.__version__, "threads": str(THREADS), "date": f"{date.today()}"}
    kept.setdefault("machine", where)
    kept.setdefault("rows", {})
    chosen = [known[name] for name in options.row or known if name != "growth"]
    whole = sum(line.share for line in known.values())
    for line in chosen:
        if line.name not in kept["rows"]:
            budget = 0.0 if options.quick else 60 * options.minutes * line.share / whole
            result = line.run(3 if options.quick else ROUNDS, budget, console)
            plain, private = counts(line)
            kept["rows"][line.name] = {
                "result": result.to_json(),
                "arms": line.arms,
                "counts": [asdict(plain), asdict(private)],
            }
            show(result, console)
            console.print(f"  {plain} -> {private}; {time.perf_counter() - start:.0f} s so far", markup=False)
            _keep(options.json, kept)
            _write(options.page, known, kept)
    if "speeds" not in kept:
        kept["speeds"] = speeds()
        _keep(options.json, kept)
    if "growth" not in kept and (not options.row or "growth" in options.row):
        kept["growth"] = growth.measure(quick=options.quick)
        _keep(options.json, kept)
    console.print(_write(options.page, known, kept), markup=False)
    console.print(f"{time.perf_counter() - start:.0f} s in all")


def _write(path: Path | None, known: Mapping[str, Line], kept: Mapping[str, Any]) -> str:
    """The section, also into its page: as far as rows are there."""
    written = section({name: kept["rows"][name] for name in known if name in kept["rows"]}, kept)
    if path:
        path.write_text(page(path.read_text(), written))
    return written


def _keep(path: Path | None, kept: Mapping[str, object]) -> None:
    if path:
        path.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
