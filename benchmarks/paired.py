"""A protocol for comparing step functions on a noisy machine.

Every arm is timed once per round, in an order shuffled anew for each round, and is compared with the reference step of
the *same* round, so that a slow minute of the machine slows both sides of a ratio. The reported number is the median of
these paired ratios with a bootstrap 95% interval. The null arm is a second copy of the reference: its median says how
far from 1 a ratio strays when there is nothing to see, and every bar is widened by exactly that much.

Peak memory is measured in a fresh process per arm: the high-water mark of the resident set over a few steps, above the
resident set once model and data are there (Linux: `VmHWM`, reset through `/proc/self/clear_refs`).

This module needs numpy only, so that peers which live in an environment of their own can share it.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import platform
import random
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

Step = Callable[[], object]
Build = Callable[[], Step]
Seconds = list[float | None]  # one entry per round; None where the arm sat the round out

GIB = 2**30
THREADS = min(2, len(os.sched_getaffinity(0)))  # of torch: two, where there are two cores to be had


class RefusedError(Exception):
    """An arm that cannot do a work; the message is the reason shown in its row."""


@dataclass(frozen=True)
class Interval:
    """A median and its bootstrap 95% interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3g} [{self.low:.3g}, {self.high:.3g}]"


@dataclass(frozen=True)
class Row:
    """What one arm did on one work; `note` is empty, or says why there are no numbers."""

    arm: str
    seconds: Seconds = field(default_factory=list)
    ratio: Interval | None = None
    memory: int | None = None
    memory_ratio: float | None = None
    note: str = ""
    own_process: bool = False  # timed elsewhere, as a ratio to a reference of its own

    @property
    def pairs(self) -> int:
        return sum(taken is not None for taken in self.seconds)

    @property
    def median_seconds(self) -> float:
        return float(np.median([taken for taken in self.seconds if taken is not None]))


@dataclass(frozen=True)
class Bar:
    """A limit on the ratio of `arm` to `against` (to the reference when `against` is None).

    `ahead` marks a comparison with a peer: there the interval has to stay below the limit without any allowance.
    """

    limit: float
    arm: str = "tacit"
    against: str | None = None
    measure: str = "time"
    ahead: bool = False

    def __str__(self) -> str:
        if self.ahead and self.limit == 1:
            return f"ahead of {self.against}"
        if self.ahead:
            return f"at least {1 / self.limit:.3g}x ahead of {self.against}"
        return f"{self.measure} <= {self.limit:g}x {self.against or 'the reference'}"


@dataclass(frozen=True)
class Verdict:
    """Whether a bar was met; `met` is None when it could not be measured."""

    bar: str
    met: bool | None
    found: str


@dataclass(frozen=True)
class Result:
    """One work: its rows in the order of the arms, and the verdict on each bar."""

    work: str
    title: str
    reference: str
    rows: list[Row]
    verdicts: list[Verdict]
    null_deviation: float

    def row(self, arm: str) -> Row | None:
        return next((row for row in self.rows if row.arm == arm), None)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Result:
        rows = [Row(**{**row, "ratio": row["ratio"] and Interval(**row["ratio"])}) for row in data["rows"]]
        return cls(**{**data, "rows": rows, "verdicts": [Verdict(**verdict) for verdict in data["verdicts"]]})


def time_rounds(
    steps: Mapping[str, Step],
    *,
    rounds: int,
    warmups: int = 2,
    every: Mapping[str, int] | None = None,
    budget: float = float("inf"),
    seed: int = 0,
    tick: Callable[[], object] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Seconds]:
    """Seconds of every step in every round, by `clock`; the order of the steps is shuffled for each round.

    `every` lets a slow arm take part in every n-th round only; after `budget` seconds no further round begins, except
    that there are always three.
    """
    order = list(steps)
    shuffle = random.Random(seed).shuffle
    seconds: dict[str, Seconds] = {name: [] for name in order}
    for name in order * warmups:
        steps[name]()
    start_of_rounds = time.perf_counter()
    for number in range(rounds):
        if number >= 3 and time.perf_counter() - start_of_rounds > budget:
            break
        shuffle(order)
        for name in order:
            taken = None
            if number % (every or {}).get(name, 1) == 0:
                start = clock()
                steps[name]()
                taken = clock() - start
            seconds[name].append(taken)
        if tick is not None:
            tick()
    return seconds


def paired_ratio(seconds: Seconds, reference: Seconds, *, resamples: int = 4000) -> Interval:
    """Median of the round-by-round ratios, with a percentile bootstrap over the rounds that both took part in."""
    both = [(a, b) for a, b in zip(seconds, reference, strict=True) if a is not None and b is not None]
    ratios = np.array([a / b for a, b in both])
    draws = np.random.default_rng(0).integers(len(ratios), size=(resamples, len(ratios)))
    low, high = np.quantile(np.median(ratios[draws], axis=1), [0.025, 0.975])
    return Interval(float(np.median(ratios)), float(low), float(high))


def evaluator(bar: Bar, rows: Mapping[str, Row], null_deviation: float) -> Verdict:
    """A bar is met when the interval's upper end is below the bar plus the null's deviation from 1.

    Peaks of memory are not noisy and get no allowance, nor does a claim to be ahead of a peer. A peer that was timed in
    another process has no paired rounds with the arm: then the two ratios, each to its own reference, are compared,
    and the intervals must not overlap.
    """
    arm, other = rows.get(bar.arm), rows.get(bar.against or "")
    if arm is None or arm.ratio is None:
        return Verdict(str(bar), None, arm.note if arm else f"{bar.arm} did not run")
    if bar.measure == "memory":
        if arm.memory_ratio is None:
            return Verdict(str(bar), None, "peak memory was not measured")
        return Verdict(str(bar), arm.memory_ratio <= bar.limit, f"{arm.memory_ratio:.3g}")
    if bar.against is None:
        return Verdict(str(bar), arm.ratio.high < bar.limit + null_deviation, str(arm.ratio))
    if other is None or other.ratio is None:
        return Verdict(str(bar), None, other.note if other else f"{bar.against} did not run")
    if other.own_process:
        return Verdict(str(bar), arm.ratio.high < bar.limit * other.ratio.low, f"{arm.ratio} against {other.ratio}")
    ratio = paired_ratio(arm.seconds, other.seconds)
    allowance = 0.0 if bar.ahead else null_deviation
    return Verdict(str(bar), ratio.high < bar.limit + allowance, str(ratio))


def peak_memory(build: Build, rehearsal: Build, *, limit: int = 12 * GIB, preload: Sequence[str] = ()) -> int:
    """Bytes that the step from `build` needs at its peak beyond its model and data, in a fresh process.

    `rehearsal` builds the same step on a few rows; it runs first, so that libraries and threads that load on first use
    do not count. `preload` names modules that the process server imports once. A step that asks for more than `limit`
    bytes is refused.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure_peak, args=(build, rehearsal, limit, sender))
    process.start()
    sender.close()
    try:
        answer = receiver.recv()
    except EOFError:
        answer = f"skipped: the process died, probably for want of memory (limit {limit / GIB:.0f} GB)"
    process.join()
    if isinstance(answer, str):
        raise RefusedError(answer)
    return int(answer)


def _measure_peak(build: Build, rehearsal: Build, limit: int, sender: Connection) -> None:
    try:
        rehearsal()()
        step = build()
        sender.send(peak_of(step, limit))
    except RefusedError as refusal:
        sender.send(str(refusal))
    except Exception as error:
        sender.send(explain(error, limit))


def peak_of(step: Step, limit: int, repeats: int = 2) -> int:
    """Growth of the resident set's high-water mark over a few steps in this process, which may grow by `limit`."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_status("VmSize") + limit, hard))
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    for _ in range(repeats):
        step()
    return _status("VmHWM") - before


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RefusedError(f"refused: this system does not report {key}")


def explain(error: Exception, limit: int = 12 * GIB) -> str:
    """An exception as the note of a row: one line, without addresses."""
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError) or "allocate memory" in text or "Out of memory" in text:
        return f"skipped: needs more than {limit / GIB:.0f} GB"
    return f"refused: {type(error).__name__}: {text[:160]}"


def machine() -> dict[str, str]:
    """What a reader needs to know about where the numbers come from."""
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in cpuinfo if line.startswith("model name")), "unknown")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    return {
        "processor": model,
        "cores": str(os.cpu_count()),
        "memory": f"{memory:.0f} GB",
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "load at start": f"{os.getloadavg()[0]:.2f}",
    }
