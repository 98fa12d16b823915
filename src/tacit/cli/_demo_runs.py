"""The runs of `tacit demo`: one stream of shifted images and five ways to meet it, in two processes."""

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
from torch import nn

from tacit.adapt import DP, Adapter, Clip, Privacy, Tent, follow
from tacit.data import Stream, fashion_mnist, shifts, streams
from tacit.gradients import ClippedSum
from tacit.models import embedded
from tacit.privacy import Ledger
from tacit.recipes import Progress

BATCH_SIZE, DELTA, WORKERS = 64, 1e-6, 2


@dataclass(frozen=True, kw_only=True)
class Arm:
    """The source model as it is (no `lr`), Tent as published, Tent with a clip, or DP-Tent (with an `epsilon`)."""

    lr: float | None = None
    clip: float | None = None
    epsilon: float | None = None

    @property
    def name(self) -> str:
        if self.lr is None:
            return "source"
        if self.epsilon is not None:
            return f"DP-Tent (eps {self.epsilon:g})"
        return "Tent" if self.clip is None else "Tent + clip"

    @property
    def form(self) -> str:
        return "dp" if self.epsilon is not None else "original" if self.clip is None else "clip"

    @property
    def privacy(self) -> Privacy:
        if self.clip is None:
            return None
        return Clip(self.clip) if self.epsilon is None else DP(self.epsilon, DELTA, clip=self.clip)


# Learning rates and clip were chosen on other shifts and other images (studies/dp_tta/dp-tta-tuning.toml).
ARMS = (
    Arm(),
    Arm(lr=0.01),
    Arm(lr=0.03, clip=0.3),
    Arm(lr=0.1, clip=0.3, epsilon=10.0),
    Arm(lr=0.03, clip=0.3, epsilon=1.0),
)


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Images that the source model has not seen, each once, under fifteen shifts, and the arms that meet them."""

    images: Literal["unseen"] = "unseen"
    severity: int = 3
    per_shift: int = 1000
    seed: int = 0  # of the order of the images; noise is fresh
    arms: tuple[Arm, ...] = ARMS


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What an arm came to. `touched` is the share of rows that were clipped, of data declared public."""

    accuracy: dict[str, float]  # in percent, by shift
    touched: float | None
    promise: str

    @property
    def mean(self) -> float:
        return statistics.fmean(self.accuracy.values())


def outcomes(demo: Demo, ledgers: Path, progress: Progress) -> dict[Arm, Outcome]:
    """Run every arm, each with a model and noise of its own; a private one with a ledger in the folder."""
    ledgers.mkdir(parents=True)
    found = dict(_computed(demo, ledgers, progress))
    return {arm: found[arm] for arm in demo.arms}


def ledger_of(arm: Arm, ledgers: Path) -> Path:
    return ledgers / f"dp-tent-eps-{arm.epsilon:g}.db"


def _computed(demo: Demo, ledgers: Path, progress: Progress) -> Iterator[tuple[Arm, Outcome]]:
    """Several at a time; `progress` is told of every batch."""
    total = len(demo.arms) * len(_stream(demo))
    context = multiprocessing.get_context("spawn")
    shared = context.Value("q", 0)
    with ProcessPoolExecutor(WORKERS, mp_context=context, initializer=_start, initargs=(shared,)) as pool:
        jobs = {pool.submit(_work, arm, demo, ledgers): arm for arm in demo.arms}
        try:
            while jobs:
                ready, _ = wait(jobs, timeout=0.5, return_when=FIRST_COMPLETED)
                running = next((arm for job, arm in jobs.items() if job.running()), next(iter(jobs.values())))
                progress(running.name, shared.value, total)
                for job in ready:
                    yield jobs.pop(job), job.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


_shared: Any = None  # a worker's view of the count of all rows


def _start(shared: Any) -> None:
    global _shared
    _shared = shared
    torch.set_num_threads(1)


def _work(arm: Arm, demo: Demo, ledgers: Path) -> Outcome:
    def tick(rows: int) -> None:
        with _shared.get_lock():
            _shared.value += rows

    return compute(arm, demo, ledgers, tick)


def compute(arm: Arm, demo: Demo, ledgers: Path, tick: Callable[[int], None] | None = None) -> Outcome:
    """One arm along the stream."""
    touched = _Touched()
    predictor: nn.Module | Adapter = embedded()
    if arm.lr is not None:
        private = arm.epsilon is not None
        predictor = Tent(
            embedded(),
            privacy=arm.privacy,
            batch_size=BATCH_SIZE,
            lr=arm.lr,
            ledger=Ledger(ledger_of(arm, ledgers)) if private else None,
            subject="stream" if private else None,
            curator=touched if arm.form == "clip" else None,
        )
    scores = follow(predictor, _stream(demo), batch_size=BATCH_SIZE, public=True, on_rows=tick)
    guarantee = predictor.guarantee if isinstance(predictor, Adapter) else None
    return Outcome(
        accuracy=scores.accuracy,
        touched=touched.share,
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


@lru_cache(maxsize=1)
def _stream(demo: Demo) -> Stream:
    pictures, labels = fashion_mnist(demo.images)
    return streams.corrupted(
        pictures,
        labels,
        shifts=shifts.TEST,
        severity=demo.severity,
        setting="continual",
        per_shift=demo.per_shift,
        seed=demo.seed,
    )
