"""Cells: small computations, each described by a frozen dataclass, done once, several at a time, and kept as files."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import contextmanager
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
    for cell, outcome in computed(waiting, compute, workers=workers, progress=progress, name=name):
        write(path_of(folder, cell), {"cell": plain(cell), "outcome": outcome})
        found[cell] = outcome
    return {cell: found[cell] for cell in wanted}


def known(cells: Sequence[C], folder: Path) -> dict[C, Outcome]:
    """What an earlier run left; nothing is computed, and what is missing stays missing."""
    return {cell: _outcome(path_of(folder, cell)) for cell in cells if path_of(folder, cell).exists()}


def computed(
    cells: Sequence[C],
    compute: Callable[[C], Outcome],
    *,
    workers: int,
    progress: Progress,
    name: Callable[[C], str],
) -> Iterator[tuple[C, Outcome]]:
    """Cells as they are done, in `workers` processes; nothing is kept."""
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


# -- files ------------------------------------------------------------------------------------------------------------


def path_of(folder: Path, cell: Any) -> Path:
    """The file of a cell: equal cells have equal names, on every machine."""
    return folder / f"{fingerprint(cell)}.json"


def read(path: Path) -> dict[str, Any]:
    """What `write` wrote; nothing if there is no such file."""
    if not path.exists():
        return {}
    try:
        stored = json.loads(path.read_text("utf-8"))
    except ValueError:
        stored = None
    if not isinstance(stored, dict):
        raise damaged(path)
    return stored


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside `path`, of the same suffix, that takes its place when it is written."""
    partial = path.with_name(f"{path.stem}.{os.getpid()}.part{path.suffix}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write(path: Path, stored: dict[str, Any]) -> None:
    """Write a file that is there as a whole or not at all."""
    with replacing(path) as partial:
        partial.write_text(json.dumps(stored, indent=1), "utf-8")


def damaged(path: Path) -> ValueError:
    return ValueError(f"{path} is no cell of a study, or it is damaged: delete it to run the cell again.")


def _outcome(path: Path) -> Outcome:
    outcome = read(path).get("outcome")
    if not isinstance(outcome, dict):
        raise damaged(path)
    return outcome
