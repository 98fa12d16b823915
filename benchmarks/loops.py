"""Private epochs from end to end: the arms, their checks, and the suites that are made of them.

An epoch is all that a user waits for: draw the rows, forward and backward, clip, noise, update, account. What happens
once per run (checking the model, calibrating the noise, charging the ledger) is set-up. Rows lie in memory, and every
arm takes a batch of them with one index, opacus' loader included. Without privacy an epoch is one shuffled pass in
batches of the expected size; private ones are as many Poisson draws of it. Noise multiplier, clip and update are the
same. Tacit's noise is of cryptographic strength; opacus' is torch's, because its secure mode needs torchcsprng.

Before anything is timed, every private arm's clipped sum of one batch is compared with a gradient per unit, one by one.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import opacus
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from arms import Batch, Problem, Sum, Work, difference, one_by_one
from gradients import TOLERANCE, row
from paired import THREADS, Bar, RefusedError, Result, Step, evaluator, explain, machine, peak_memory, time_rounds
from tables import markdown, save, show
from tacit.data import TensorRecords
from tacit.data._records import Records
from tacit.finetune import DPSGD
from tacit.finetune._account import Account, Promise, open_account
from tacit.finetune._dry_run import dry_run
from tacit.finetune._loop import Run
from tacit.finetune._optimizers import Optimizer
from tacit.finetune._tasks import Classes, loss_of
from tacit.finetune._updates import Updater
from tacit.privacy import Budget, Ledger, Neighbours, Unit

EPSILON, DELTA = 8.0, 1e-5
EPOCHS = 500  # that are charged; as many as are run at most
EARLY = 32  # steps that are not timed: at the start of a run units are checked often, later in one step of 128
LR, MOMENTUM = 1e-3, 0.9
PLAIN, NULL = "no privacy", "null"
BY_CLIP = ", by clip"
STANDARD = (PLAIN, NULL, "tacit", "opacus hooks", "opacus ghost")
BARS = (Bar(1.3), *(Bar(1.0, against=f"opacus {mode}", ahead=True) for mode in ("hooks", "ghost")))
PRELOAD = ("torch", "opacus")


def table(batch: Batch, unit_size: int) -> Records:
    """Inputs and labels as tacit's records, the rows of a unit side by side."""
    inputs, labels = batch
    return TensorRecords(inputs, labels, torch.arange(len(labels)) // unit_size if unit_size > 1 else None)


@dataclass(frozen=True)
class Epoch(Work):
    """A work whose rows are those of one epoch, with `expected` units in a step; the last of a batch are its labels."""

    expected: int = 64
    records: Callable[[Batch, int], Records] = table
    row_size: int = 1  # what a row counts for in the table of speeds


class Trainer(NamedTuple):
    """What an arm is: an epoch to be timed, and its clipped sum of some rows, to be checked."""

    epoch: Step
    clipped: Callable[[Batch], Sum] | None = None


@dataclass(frozen=True)
class Terms:
    """How many units there are and how many a step has: fewer than the work says if there are only a few rows."""

    units: int
    expected: int

    @classmethod
    def of(cls, problem: Problem) -> Terms:
        units = len(problem.batch[0]) // problem.work.unit_size
        return cls(units, min(problem.work.expected, units // 2))

    @property
    def steps(self) -> int:
        return self.units // self.expected


def account(problem: Problem) -> tuple[Optimizer, Account]:
    """An optimiser and who pays for all its epochs; what is charged decides the noise of every arm."""
    terms = Terms.of(problem)
    optimizer = DPSGD(
        batch_size=terms.expected, steps=EPOCHS * terms.steps, clip=problem.clip, lr=LR, momentum=MOMENTUM
    )
    unit = Unit.VIDEO if problem.work.unit_size > 1 else Unit.SAMPLE
    promise = Promise(budget=Budget(EPSILON, DELTA), unit=unit, neighbours=Neighbours.ADD_REMOVE, size=terms.units)
    return optimizer, open_account(optimizer, promise, Ledger("sqlite://"), None)


def sgd(problem: Problem) -> torch.optim.Optimizer:
    return torch.optim.SGD(problem.parameters.values(), lr=LR, momentum=MOMENTUM, foreach=True)


def no_privacy(problem: Problem) -> Trainer:
    """One shuffled pass in batches of the expected size."""
    model, terms = problem.model, Terms.of(problem)
    optimizer, within = sgd(problem), torch.arange(problem.work.unit_size)

    def epoch() -> None:
        for units in torch.randperm(terms.units).split(terms.expected):
            rows = (units[:, None] * len(within) + within).flatten()
            optimizer.zero_grad()
            problem.work.loss(model, tuple(column[rows] for column in problem.batch)).mean().backward()
            optimizer.step()

    return Trainer(epoch)


def tacit(problem: Problem) -> Trainer:
    """The loop of `fit`, made as `fit` makes it, an epoch at a time."""
    size = problem.work.unit_size
    records = problem.work.records(problem.batch, size)
    optimizer, paying = account(problem)
    model, terms = problem.model.eval(), Terms.of(problem)
    loss = loss_of(Classes(int(problem.batch[-1].max()) + 1))
    expected = optimizer.sampler.expected(terms.units)
    query = optimizer.query.open(model, loss, expected=expected, microbatch=None)
    run = Run(
        model=model,
        records=records,
        optimizer=optimizer,
        account=paying,
        query=query,
        updater=Updater(optimizer.update, problem.parameters, optimizer.steps),
        measure="accuracy",
        like=dry_run(model, records, query),
        expected=expected,
    )
    run.begin(settings="", data=records, whole=model)

    def epoch() -> None:
        for _ in range(terms.steps):
            run.step()

    def clipped(batch: Batch) -> Sum:
        some = problem.work.records(batch, size)
        return dict(query.sum(some.rows(torch.arange(len(some)), None)).sum)

    return Trainer(epoch, clipped)


class Indexed(TensorDataset):
    """Tensors whose batches are taken with one index rather than row by row."""

    def __getitems__(self, index: list[int]) -> tuple[Tensor, ...]:
        return tuple(column[index] for column in self.tensors)


def with_opacus(problem: Problem, mode: str) -> Trainer:
    """Opacus' PrivacyEngine: its Poisson loader, per-row gradients or ghost norms, and its optimiser."""
    terms, size = Terms.of(problem), problem.work.unit_size
    _, paying = account(problem)
    private = opacus.PrivacyEngine().make_private(
        module=problem.model.train(),
        optimizer=sgd(problem),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(Indexed(*problem.batch), batch_size=terms.expected * size, collate_fn=tuple),
        noise_multiplier=paying.scale,
        max_grad_norm=problem.clip,
        poisson_sampling=True,
        grad_sample_mode=mode,
    )
    model, optimizer, loader = private[0], private[1], private[-1]
    loss = private[2] if mode == "ghost" else nn.CrossEntropyLoss()

    def epoch() -> None:
        for *inputs, labels in loader:
            optimizer.zero_grad()
            loss(model(*inputs), labels).backward()
            optimizer.step()

    def clipped(batch: Batch) -> Sum:
        *inputs, labels = batch
        optimizer.zero_grad()
        loss(model(*inputs), labels).backward()
        if mode == "hooks":
            optimizer.clip_and_accumulate()
        found = {name: p.summed_grad if mode == "hooks" else p.grad for name, p in problem.parameters.items()}
        optimizer.zero_grad(set_to_none=True)
        return {name: value.clone() for name, value in found.items()}

    return Trainer(epoch, clipped)


def by_video(problem: Problem) -> Trainer:
    del problem
    raise RefusedError("refused: opacus clips rows, not units of several rows")


ARMS: dict[str, Callable[[Problem], Trainer]] = {
    PLAIN: no_privacy,
    NULL: no_privacy,
    "tacit": tacit,
    "opacus hooks": partial(with_opacus, mode="hooks"),
    "opacus ghost": partial(with_opacus, mode="ghost"),
    "opacus, by video": by_video,
    f"opacus hooks{BY_CLIP}": partial(with_opacus, mode="hooks"),
    f"opacus ghost{BY_CLIP}": partial(with_opacus, mode="ghost"),
}


def build(work: Epoch, arm: str, clip: float = 1.0, rows: int | None = None) -> Trainer:
    """An arm, on a model and data of its own."""
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    warnings.filterwarnings("ignore", message="Secure RNG turned off")
    return ARMS[arm](Problem(work, clip, rows=rows))


def epoch_of(work: Epoch, arm: str, rows: int | None = None) -> Step:
    return build(work, arm, rows=rows).epoch


def run(
    work: Epoch, *, rounds: int, console: Console, preload: Sequence[str] = PRELOAD, budget: float = float("inf")
) -> Result:
    """Peak memory of every arm in its own process, then the check of every sum, then the rounds.

    After `budget` seconds no further round begins, except that there are always three.
    """
    peaks: dict[str, int] = {}
    notes: dict[str, str] = {}
    steps: dict[str, Step] = {}
    with console.status("") as status:
        for arm in work.arms:
            status.update(f"{work.name}: memory of {arm}")
            try:
                small = partial(epoch_of, work, arm, rows=16 * work.unit_size)
                peaks[arm] = peak_memory(partial(epoch_of, work, arm), small, preload=preload)
            except RefusedError as refusal:
                notes[arm] = str(refusal)
        status.update(f"{work.name}: the right answer, one unit at a time")
        right = {size: one_by_one(replace(work, unit_size=size)) for size in {1, work.unit_size}}
        for arm in (arm for arm in work.arms if arm not in notes):
            status.update(f"{work.name}: check of {arm}")
            try:
                steps[arm] = checked(work, arm, *right[1 if arm.endswith(BY_CLIP) else work.unit_size])
            except RefusedError as refusal:
                notes[arm] = str(refusal)
        status.update(f"{work.name}: {rounds} rounds of {len(steps)} arms")
        every = {arm: work.peers_every for arm in steps if arm.startswith("opacus")}
        warmups = math.ceil(EARLY / max(1, work.rows // work.unit_size // work.expected))
        seconds = (
            time_rounds(steps, rounds=rounds, warmups=warmups, every=every, budget=budget) if PLAIN in steps else {}
        )
    rows = [row(arm, work, seconds, peaks, notes) for arm in work.arms]
    found = {each.arm: each for each in rows}
    null = found[NULL].ratio
    deviation = abs(null.median - 1) if null else float("nan")
    verdicts = [evaluator(bar, found, deviation) for bar in work.bars]
    return Result(work.name, work.title, PLAIN, rows, verdicts, deviation)


def checked(work: Epoch, arm: str, clip: float, expected: Sum) -> Step:
    """The epoch of an arm, once its clipped sum of one batch has been found right."""
    try:
        trainer = build(work, arm, clip)
        if trainer.clipped is not None:
            error = difference(trainer.clipped(Problem(work, clip, rows=work.check_rows).batch), expected)
            if not error < TOLERANCE:
                raise RefusedError(f"wrong: the sum is off by {error:.1e}")
    except RefusedError:
        raise
    except Exception as error:
        raise RefusedError(explain(error)) from error
    return trainer.epoch


def speeds(results: Sequence[Result], known: Mapping[str, Epoch], what: str = "Rows") -> str:
    """Rows, or what they are made of, per second, the expected number for Poisson draws: a Markdown table."""
    lines = [f"### {what} per second", ""]
    lines += ["| work | " + " | ".join(STANDARD) + " |", "|---" * (1 + len(STANDARD)) + "|"]
    for result in results:
        total = known[result.work].rows * known[result.work].row_size
        found = (result.row(arm) or result.row(f"{arm}{BY_CLIP}") for arm in STANDARD)
        speed = (f"{total / row.median_seconds:,.0f}" if row and row.pairs else "" for row in found)
        lines.append(f"| {result.work} | " + " | ".join(speed) + " |")
    return "\n".join(lines) + "\n"


def suite(
    known: Mapping[str, Epoch],
    argv: Sequence[str] | None,
    *,
    description: str,
    what: str = "Rows",
    preload: Sequence[str] = PRELOAD,
    versions: Mapping[str, str] | None = None,
) -> None:
    """The command line of a suite of such works; `versions` are those of further libraries that it uses."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--work", nargs="+", choices=list(known), metavar="NAME", help=", ".join(known))
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--quick", action="store_true", help="four rounds: a smoke test, not a measurement")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="the tables for docs/benchmarks.md")
    options, _ = parser.parse_known_args(argv)
    rounds = 4 if options.quick else options.rounds
    if rounds > EPOCHS - 10:
        parser.error(f"at most {EPOCHS - 10} rounds: the noise is that of {EPOCHS} epochs.")
    torch.set_num_threads(THREADS)
    console = Console(width=140)
    where = {
        **machine(),
        "torch": torch.__version__,
        "opacus": opacus.__version__,
        **(versions or {}),
        "threads": str(THREADS),
    }
    if options.quick:
        console.print("A smoke test of four rounds: the ratios are rough and the verdicts mean nothing.")
    results = []
    for name in options.work or known:
        results.append(run(known[name], rounds=rounds, console=console, preload=preload))
        show(results[-1], console)
        if options.json:
            save(options.json, results, where)
        if options.markdown:
            options.markdown.write_text(markdown(results, where) + "\n" + speeds(results, known, what))
    console.print(speeds(results, known, what), markup=False)
