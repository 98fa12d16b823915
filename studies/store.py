"""Studies: many small computations ("cells"), each described by a frozen dataclass, done once and kept as a file."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

import torch

from tacit.recipes import Progress, fingerprint, plain

C = TypeVar("C")
Outcome = dict[str, Any]


def outcomes(
    cells: Sequence[C],
    compute: Callable[[C], Outcome],
    *,
    folder: Path,
    workers: int,
    progress: Progress,
    name: Callable[[C], str],
) -> dict[C, Outcome]:
    """What each cell came to: read from `folder` where it is there already, else computed and written there.

    `compute` is a function of a module (workers are processes of one thread each) and returns plain data.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted = list(dict.fromkeys(cells))
    found = known(wanted, folder)
    waiting = [cell for cell in wanted if cell not in found]
    for cell, outcome in _computed(waiting, compute, workers, progress, name):
        _write(folder, cell, outcome)
        found[cell] = outcome
    return {cell: found[cell] for cell in wanted}


def known(cells: Sequence[C], folder: Path) -> dict[C, Outcome]:
    """What an earlier run left; nothing is computed, and what is missing stays missing."""
    return {cell: _read(_path(folder, cell)) for cell in cells if _path(folder, cell).exists()}


def _computed(
    cells: list[C], compute: Callable[[C], Outcome], workers: int, progress: Progress, name: Callable[[C], str]
) -> Iterator[tuple[C, Outcome]]:
    if workers <= 1 or len(cells) <= 1:
        for done, cell in enumerate(cells):
            progress(name(cell), done, len(cells))
            yield cell, compute(cell)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        jobs = {pool.submit(compute, cell): cell for cell in cells}
        try:
            while jobs:
                ready, _ = wait(jobs, timeout=1.0, return_when=FIRST_COMPLETED)
                running = next((cell for job, cell in jobs.items() if job.running()), next(iter(jobs.values())))
                progress(name(running), len(cells) - len(jobs), len(cells))
                for job in ready:
                    yield jobs.pop(job), job.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _path(folder: Path, cell: Any) -> Path:
    return folder / f"{fingerprint(cell)}.json"


def _read(path: Path) -> Outcome:
    try:
        outcome: Outcome = json.loads(path.read_text())["outcome"]
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{path} is no cell of a study, or it is damaged: delete it to run the cell again.") from None
    return outcome


def _write(folder: Path, cell: Any, outcome: Outcome) -> None:
    path = _path(folder, cell)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps({"cell": plain(cell), "outcome": outcome}, indent=1))
    partial.replace(path)
