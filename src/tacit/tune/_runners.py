"""Where trials run: here, one after the other; in processes of their own; or on a cluster with Ray.

Each charges the same ledger by itself, for a receipt lives in the process that charged. A trial whose process dies has
no score and stays charged; the others go on.
"""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import torch

from tacit.privacy import BudgetExceeded, Ledger, LedgerError, ReceiptError
from tacit.tune._trials import Job, Trial

REFUSALS = (LedgerError, BudgetExceeded, ReceiptError)  # of the ledger and its receipts: they say nothing of any row

Done = Iterator[tuple[int, Trial, str]]  # which job, what came out, and what went wrong (for the curator)


class Runner(Protocol):
    """Runs jobs and hands back each as it ends."""

    def __call__(self, jobs: Sequence[Job], ledger: Ledger) -> Done: ...


@dataclass(frozen=True)
class SerialRunner:
    """In this process, one after the other."""

    def __call__(self, jobs: Sequence[Job], ledger: Ledger) -> Done:
        for number, job in enumerate(jobs):
            yield number, *job.run(ledger)


@dataclass(frozen=True)
class Processes:
    """In at most `workers` processes at a time, each with `threads` threads.

    Args:
        workers: Processes at a time.
        threads: Threads of each.
    """

    workers: int = 2
    threads: int = 1

    def __post_init__(self) -> None:
        if self.workers < 1 or self.threads < 1:
            raise ValueError("There is at least one worker, with at least one thread.")

    def __call__(self, jobs: Sequence[Job], ledger: Ledger) -> Done:
        check_shared(jobs, ledger)
        context = multiprocessing.get_context("spawn")
        waiting, running = list(enumerate(jobs)), dict[Any, tuple[int, Job, BaseProcess]]()
        try:
            while waiting or running:
                while waiting and len(running) < self.workers:
                    number, job = waiting.pop(0)
                    ours, theirs = context.Pipe(duplex=False)
                    process: BaseProcess = context.Process(target=_work, args=(theirs, job, self.threads), daemon=True)
                    process.start()
                    theirs.close()
                    running[ours] = (number, job, process)
                for pipe in wait(list(running)):
                    number, job, process = running.pop(pipe)
                    yield number, *_received(pipe, job)
                    process.join()
        finally:
            for _, _, process in running.values():
                process.kill()


def check_shared(jobs: Sequence[Job], ledger: Ledger) -> None:
    """Refuse, before anything is charged, what other processes cannot take part in."""
    if not ledger.durable:
        raise ValueError("Trials in other processes charge the same ledger: give it a file or a server, not memory.")
    try:
        pickle.dumps(jobs[0] if jobs else None)
    except (pickle.PicklingError, AttributeError, TypeError):
        raise ValueError(
            "This trainable or its score cannot be sent to another process: use functions of a module (no lambda), or "
            "run the trials here."
        ) from None


def _work(pipe: Connection[Any, Any], job: Job, threads: int) -> None:
    torch.set_num_threads(threads)
    found: tuple[Trial, str] | Exception
    try:
        found = job.run()
    except REFUSALS as error:
        found = error
    pipe.send_bytes(pickle.dumps(found))  # `send` would hand tensors over in memory that goes when this process ends
    pipe.close()


def _received(pipe: Any, job: Job) -> tuple[Trial, str]:
    try:
        found: tuple[Trial, str] | Exception = pickle.loads(pipe.recv_bytes())
    except (EOFError, OSError):
        lost = Trial(hyperparameters=job.hyperparameters, mu=job.mu, score=None)
        return lost, "the process ended without a word"
    if isinstance(found, Exception):
        raise found
    return found
