"""Clipped sums side by side: tacit, opacus, torch.func and jax-privacy, each against the same step without privacy.

    python benchmarks/gradients.py [--work NAME ...] [--rounds 40] [--quick] [--device cuda] [--no-peers]
                                   [--json FILE] [--markdown FILE]

Before anything is timed, every arm's sum is compared with a gradient per unit, one by one; an arm that is wrong is
reported, not timed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

import arms
from arms import Batch, Work, build, device_peak, difference, one_by_one
from models import Bert, ConvNeXt, ViT
from paired import (
    THREADS,
    Bar,
    RefusedError,
    Result,
    Row,
    Seconds,
    Step,
    evaluator,
    explain,
    machine,
    paired_ratio,
    peak_memory,
    time_rounds,
)
from tables import markdown, save, show

HERE = Path(__file__).resolve().parent
JAX_HOME = HERE / ".cache" / "venv-jax"
JAX = "jax-privacy==2.0.0"
JAX_SECONDS = 240  # a jax process that takes longer is stopped, and its row says so
TOLERANCE = 2e-4  # float32 sums in another order; the factors of tacit and opacus differ by 1e-5 and 1e-6
STANDARD = ("no privacy", "null", "tacit", "opacus hooks", "opacus ghost", "torch.func")
PRELOAD = ("torch", "opacus", "transformers.models.bert.modeling_bert")
IN_RUN = {"no privacy", "null", "tacit", "tacit without units"}
PEERS = ("opacus hooks", "opacus ghost", "torch.func", "jax-privacy")
AHEAD = tuple(Bar(1.0, against=peer, ahead=True) for peer in PEERS)


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    *inputs, labels = batch
    return F.cross_entropy(model(*inputs), labels, reduction="none")


def entropy(model: nn.Module, batch: Batch) -> Tensor:
    scores = model(*batch).log_softmax(dim=1)
    return -(scores.exp() * scores).sum(dim=1)


def images(rows: int, channels: int = 3) -> Batch:
    return torch.randn(rows, channels, 28, 28), torch.randint(10, (rows,))


def unlabelled(rows: int) -> Batch:
    return images(rows)[:1]


def sentences(rows: int, length: int = 128) -> Batch:
    return torch.randint(1, 30522, (rows, length)), torch.arange(length).repeat(rows, 1), torch.randint(2, (rows,))


def features(rows: int) -> Batch:
    return torch.randn(rows, 768), torch.randint(100, (rows,))


def norms_only() -> nn.Module:
    return norms_of(ViT())


def norms_of(model: nn.Module) -> nn.Module:
    """The same model with its LayerNorms trained and nothing else."""
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.requires_grad_(True)
    return model


def fine_tuning(rows: int, every: int) -> Work:
    bars = (Bar(1.12), Bar(1.0, measure="memory"), *AHEAD)
    title = f"Full fine-tuning, ViT 192 x 6, 50 tokens, batch {rows}"
    return Work(f"vit-{rows}", title, ViT, images, cross_entropy, rows, STANDARD, bars, peers_every=every)


def adaptation(rows: int, limit: float, every: int = 1) -> Work:
    title = f"LayerNorms only, test-time entropy step, ViT 192 x 6, batch {rows}"
    return Work(
        f"norms-{rows}", title, norms_only, unlabelled, entropy, rows, STANDARD, (Bar(limit),), peers_every=every
    )


def works() -> dict[str, Work]:
    linear = Work(
        "probe",
        "Linear probe, 50,000 x 768 features, 100 classes, full batch",
        partial(nn.Linear, 768, 100),
        features,
        cross_entropy,
        50_000,
        STANDARD,
        (Bar(1.05), *(Bar(0.1, against=peer, ahead=True) for peer in ("opacus hooks", "opacus ghost"))),
        rows_at_once=5_000,
        check_rows=6_000,
        peers_every=10,
    )
    units = Work(
        "units",
        "8 clips per unit, 32 videos, ViT 192 x 6",
        ViT,
        images,
        cross_entropy,
        256,
        ("tacit without units", "null", "tacit", "opacus hooks", "torch.func", "no privacy"),
        (Bar(1.0),),
        reference="tacit without units",
        unit_size=8,
        peers_every=10,
    )
    grey = partial(images, channels=1)
    everything = (
        fine_tuning(64, every=4),
        fine_tuning(256, every=10),
        Work(
            "convnext",
            "Full fine-tuning, ConvNeXt-like net, batch 64",
            ConvNeXt,
            grey,
            cross_entropy,
            64,
            STANDARD,
            (Bar(1.10), *AHEAD),
            peers_every=4,
        ),
        Work(
            "bert",
            "Full fine-tuning, BERT 384 x 6, 128 tokens, batch 8",
            Bert,
            sentences,
            cross_entropy,
            8,
            STANDARD,
            (Bar(1.15), Bar(1.3, measure="memory"), *AHEAD),
            peers_every=4,
        ),
        adaptation(1, limit=1.10),
        adaptation(8, limit=1.06),
        adaptation(64, limit=1.03, every=4),
        adaptation(256, limit=1.03, every=10),
        linear,
        units,
    )
    return {work.name: work for work in everything}


def run(work: Work, *, rounds: int, jax_python: Path | str, console: Console, budget: float = float("inf")) -> Result:
    """Peak memory of every arm in its own process, then the check of every sum, then the rounds.

    After `budget` seconds no further round begins, except that there are always three.
    """
    peaks, notes, steps = {}, {}, {}
    with console.status("") as status:
        for arm in work.arms:
            status.update(f"{work.name}: memory of {arm}")
            try:
                if arms.DEVICE == "cpu":
                    small = partial(build, work, arm, rows=2 * work.unit_size)
                    peaks[arm] = peak_memory(partial(build, work, arm), small, preload=PRELOAD)
                else:
                    peaks[arm] = device_peak(build(work, arm)) if arms.DEVICE == "cuda" else 0
            except RefusedError as refusal:
                notes[arm] = str(refusal)
        status.update(f"{work.name}: the right answer, one unit at a time")
        clip, expected = one_by_one(work)
        for arm in (arm for arm in work.arms if arm not in notes):
            status.update(f"{work.name}: check of {arm}")
            try:
                steps[arm] = checked(work, arm, clip, expected)
            except RefusedError as refusal:
                notes[arm] = str(refusal)
        seconds = {}
        if work.reference in steps:
            every = {arm: work.peers_every for arm in steps if arm not in IN_RUN}
            status.update(f"{work.name}: {rounds} rounds of {len(steps)} arms")
            seconds = time_rounds(steps, rounds=rounds, warmups=1, every=every, budget=budget)
    rows = [row(arm, work, seconds, peaks, notes) for arm in work.arms]
    if work.jax:
        with console.status(f"{work.name}: jax-privacy"):
            rows.append(jax_row(work, rounds, jax_python))
    null = next(row for row in rows if row.arm == "null")
    deviation = abs(null.ratio.median - 1) if null.ratio else float("nan")
    verdicts = [evaluator(bar, {row.arm: row for row in rows}, deviation) for bar in work.bars]
    return Result(work.name, work.title, work.reference, rows, verdicts, deviation)


def checked(work: Work, arm: str, clip: float, expected: dict[str, Tensor]) -> Step:
    """The step of an arm, once its sum has been found right; the reference answers another question."""
    try:
        step = build(work, arm, clip, rows=work.check_rows)
        found = step()
        if arm not in (work.reference, "null", "no privacy"):
            error = difference(found, expected)
            if not error < TOLERANCE:
                raise RefusedError(f"wrong: the sum is off by {error:.1e}")
    except RefusedError:
        raise
    except Exception as error:
        raise RefusedError(explain(error)) from error
    return build(work, arm, clip) if work.check_rows else step


def row(
    arm: str, work: Work, seconds: Mapping[str, Seconds], peaks: Mapping[str, int], notes: Mapping[str, str]
) -> Row:
    if arm not in seconds:
        return Row(arm, note=notes.get(arm, f"not timed: {work.reference} did not run"))
    return Row(
        arm,
        seconds[arm],
        paired_ratio(seconds[arm], seconds[work.reference]),
        peaks[arm],
        peaks[arm] / max(peaks[work.reference], 1),
    )


def jax_environment() -> Path | str:
    """The interpreter that has jax-privacy, made on first use; or the note that says why there is none."""
    python = JAX_HOME / "bin" / "python"
    if (JAX_HOME / "complete").exists():
        return python
    venv.create(JAX_HOME, with_pip=True, clear=True)
    install = subprocess.run(
        [python, "-m", "pip", "install", "--quiet", JAX], capture_output=True, text=True, check=False
    )
    if install.returncode:
        return f"refused: {JAX} could not be installed"
    (JAX_HOME / "complete").touch()
    return python


def jax_row(work: Work, rounds: int, python: Path | str) -> Row:
    """jax-privacy's ratio to its own step without privacy (for units: to its own step without units)."""
    if isinstance(python, str):
        return Row("jax-privacy", note=python)
    try:
        times = ask_jax(python, work.name, "time", str(rounds))
        private, plain = (ask_jax(python, work.name, "memory", arm)["memory"] for arm in ("private", "plain"))
    except RefusedError as refusal:
        return Row("jax-privacy", note=str(refusal))
    ratio = paired_ratio(times["private"], times["plain"])
    return Row("jax-privacy", times["private"], ratio, private, private / max(plain, 1), own_process=True)


def ask_jax(python: Path, *arguments: str) -> dict:
    try:
        command = [python, HERE / "jax_peer.py", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=JAX_SECONDS)
        answer = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired as error:
        raise RefusedError(f"skipped: took longer than {JAX_SECONDS} s") from error
    except (IndexError, json.JSONDecodeError) as error:
        raise RefusedError(f"refused: the process ended with code {done.returncode} and no answer") from error
    if "note" in answer:
        raise RefusedError(answer["note"])
    return answer


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", nargs="+", choices=list(works()), metavar="NAME", help=", ".join(works()))
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--quick", action="store_true", help="four rounds: a smoke test, not a measurement")
    parser.add_argument("--no-jax", action="store_true", help="leave jax-privacy out")
    parser.add_argument("--no-peers", action="store_true", help="tacit and the step without privacy alone")
    parser.add_argument("--device", default=arms.DEVICE, help="where to run: cpu, cuda, mps")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="the tables for docs/benchmarks.md")
    options = parser.parse_args(argv)
    arms.DEVICE = options.device
    torch.set_num_threads(THREADS)
    console = Console(width=140)
    where = {**machine(), "torch": torch.__version__, "threads": str(THREADS)}
    jax_python: Path | str = "left out" if options.no_jax or options.no_peers else jax_environment()
    if options.quick:
        console.print("A smoke test of four rounds: the ratios are rough and the verdicts mean nothing.")
    results = []
    for name in options.work or works():
        rounds = 4 if options.quick else options.rounds
        work = works()[name]
        if options.no_peers:
            mine = tuple(arm for arm in work.arms if arm in IN_RUN)
            work = replace(work, arms=mine, bars=tuple(b for b in work.bars if not b.ahead), jax=False)
        results.append(run(work, rounds=rounds, jax_python=jax_python, console=console))
        show(results[-1], console)
        if options.json:
            save(options.json, results, where)
        if options.markdown:
            options.markdown.write_text(markdown(results, where))


if __name__ == "__main__":
    sys.exit(main())
