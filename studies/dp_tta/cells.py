"""A cell of a study: one arm along one stream, from nothing to its accuracies; and many of them, several at a time."""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from studies.dp_tta.arms import Arm
from tacit.adapt.adapter import Adapter
from tacit.adapt.fisher import Fisher, fisher
from tacit.adapt.follow import follow
from tacit.data import Stream, fashion_mnist, shifts, streams
from tacit.data.arrays import read_images
from tacit.gradients import ClippedSum
from tacit.models import ConvNet, embedded
from tacit.models.embedded import load_convnet
from tacit.privacy import Ledger
from tacit.recipes import Progress

Setting = Literal["episodic", "continual", "mixed"]
FORMAT = 1  # of a cell's file; raised when the same recipe would give other numbers


@dataclass(frozen=True, kw_only=True)
class Data:
    """Which images, under which shifts. `images` is a split of Fashion-MNIST or an .npz with `images` and `labels`."""

    images: str = "unseen"
    anchor: str = "seen"  # public images for EATA's anchor
    shifts: Literal["test", "extra", "clean"] = "test"
    severity: int = 3
    per_shift: int = 1000


@dataclass(frozen=True, kw_only=True)
class Model:
    """The embedded model, or a convolutional net from a file of weights."""

    weights: str = "embedded"
    widths: tuple[int, ...] = (32, 64)
    depths: tuple[int, ...] = (4, 4)
    channels: int = 1
    classes: int = 10

    def load(self) -> ConvNet:
        if self.weights == "embedded":
            return embedded()
        model = ConvNet(
            channels=self.channels,
            classes=self.classes,
            widths=self.widths,
            depths=self.depths,
            mean=(0.0,) * self.channels,
            std=(1.0,) * self.channels,
        )
        return load_convnet(model, Path(self.weights))


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One arm, once."""

    arm: Arm
    setting: Setting
    seed: int
    data: Data
    model: Model
    seeded_noise: bool
    format: int = FORMAT


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a cell came to. `touched` is the share of rows clipped or filtered, of data declared public."""

    accuracy: dict[str, float]
    seconds: float
    steps: int
    touched: float | None
    epsilon: float | None
    promise: str

    @property
    def mean(self) -> float:
        return statistics.fmean(self.accuracy.values())


Work = tuple[Cell, Path | None]  # a cell, and where its ledger is kept


def computed(work: list[Work], workers: int, progress: Progress) -> Iterator[tuple[Cell, Outcome]]:
    """Compute cells, several at a time; `progress` is told of every batch."""
    total = sum(_rows(cell) for cell, _ in work)
    if workers <= 1 or len(work) <= 1:
        ticks = _Ticks()
        for cell, ledger in work:
            ticks.then = lambda done, cell=cell: progress(cell.arm.name, done, total)
            yield cell, compute(cell, ledger, ticks)
        return
    context = multiprocessing.get_context("spawn")
    shared = context.Value("q", 0)
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start, initargs=(shared,)) as pool:
        jobs = {pool.submit(_work, *each): each[0] for each in work}
        try:
            while jobs:
                ready, _ = wait(jobs, timeout=0.5, return_when=FIRST_COMPLETED)
                running = next((cell for job, cell in jobs.items() if job.running()), next(iter(jobs.values())))
                progress(running.arm.name, shared.value, total)
                for job in ready:
                    yield jobs.pop(job), job.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


class _Ticks:
    """Counts rows, and says so."""

    def __init__(self) -> None:
        self.done = 0
        self.then: Callable[[int], None] | None = None

    def __call__(self, rows: int) -> None:
        self.done += rows
        if self.then is not None:
            self.then(self.done)


_shared: Any = None  # a worker's view of the count of all rows


def _start(shared: Any) -> None:
    global _shared
    _shared = shared
    torch.set_num_threads(1)


def _work(cell: Cell, ledger: Path | None) -> Outcome:
    def tick(rows: int) -> None:
        with _shared.get_lock():
            _shared.value += rows

    return compute(cell, ledger, tick)


def compute(cell: Cell, ledger: Path | None = None, tick: Callable[[int], None] | None = None) -> Outcome:
    """Run one cell from nothing; its ledger is in memory unless it is to be kept."""
    stream = _stream(cell.data, cell.setting, cell.seed)
    model, arm = cell.model.load(), cell.arm
    touched = _Touched()
    predictor: ConvNet | Adapter = model
    if arm.method != "source":
        episodes = len(stream.shifts) if cell.setting == "episodic" else 1
        if ledger is not None:
            ledger.unlink(missing_ok=True)  # of a cell that was stopped half way: this one starts from nothing
        predictor = arm.adapter(
            model,
            anchor=_anchor(cell.model, cell.data.anchor),
            classes=model.head.out_features,
            horizon=stream.steps(arm.batch_size) // episodes,
            ledger=Ledger(ledger or "sqlite://") if arm.private else None,
            seed=cell.seed if cell.seeded_noise else None,
            curator=touched if arm.form == "clip" else None,
        )
    scores = follow(predictor, stream, batch_size=arm.batch_size, public=True, on_rows=tick)
    guarantee = predictor.guarantee if isinstance(predictor, Adapter) else None
    return Outcome(
        accuracy=scores.accuracy,
        seconds=scores.seconds,
        steps=scores.steps,
        touched=touched.share,
        epsilon=None if guarantee is None else guarantee.epsilon,
        promise="not private" if guarantee is None else str(guarantee),
    )


class _Touched:
    """The share of rows that were scaled down or left out; a curator's view, here of public data."""

    def __init__(self) -> None:
        self._rows = self._touched = 0

    def __call__(self, total: ClippedSum) -> None:
        norms, factors = total.private.norms, total.private.factors
        self._rows += len(norms)
        self._touched += int(((factors < 1) | (norms == 0)).sum())

    @property
    def share(self) -> float | None:
        return self._touched / self._rows if self._rows else None


@lru_cache(maxsize=4)
def _images(name: str) -> tuple[Tensor, Tensor]:
    return read_images(name) if name.endswith(".npz") else fashion_mnist(name)  # type: ignore[arg-type]


@lru_cache(maxsize=4)
def _stream(data: Data, setting: Setting, seed: int) -> Stream:
    images, labels = _images(data.images)
    names = {"test": shifts.TEST, "extra": shifts.EXTRA, "clean": (streams.CLEAN,)}[data.shifts]
    return streams.corrupted(
        images,
        labels,
        shifts=names,
        severity=data.severity,
        setting=setting,
        per_shift=data.per_shift,
        seed=seed,
    )


@lru_cache(maxsize=4)
def _anchor(model: Model, name: str) -> Fisher:
    images = _images(name)[0][:500]
    return fisher(model.load(), images.float() / 255, public=True)


def _rows(cell: Cell) -> int:
    return len(_stream(cell.data, cell.setting, cell.seed))
