"""Where trials run: here, one after the other; in processes of their own; or on a cluster with Ray.

Each charges the same ledger by itself, for a receipt lives in the process that charged. A trial whose process dies has
no score and stays charged; the others go on.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from tacit._curator import Curator
from tacit._refusals import ENDING, Refusal, attempt, text_of
from tacit.privacy import BudgetExceeded, Ledger, LedgerError, ReceiptError
from tacit.tune._trials import Job, Trial

_UNSENDABLE = (
    "This trainable or its score cannot be sent to another process: use functions of a module (no lambda), or run the "
    "trials here (without runner=). Nothing was charged. Details may reveal rows: see curator=."
)
_MAPPED = (
    "The activations or features of this trainable are larger than a gigabyte and lie in a file that no other process "
    "can open: run the trials here (without runner=). Nothing was charged."
)
_COMPUTED = (
    "This trainable or its score holds a tensor with the graph that it was computed by, which no other process can be "
    "sent: detach() it, or run the trials here (without runner=). Nothing was charged."
)
REFUSALS = (LedgerError, BudgetExceeded, ReceiptError)  # of the ledger and its receipts: they say nothing of any row

Found = tuple[Trial, str] | Exception | str  # what a trial came to, why there is none, or the text of that (private)
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

    def check(self, sent: object, ledger: Ledger, curator: Curator | None = None) -> None:
        """Refuse what no other process can be sent; see `check_shared`."""
        check_shared(sent, ledger, curator, files=False)

    def __call__(self, jobs: Sequence[Job], ledger: Ledger) -> Done:
        del ledger  # each opens it by its address
        context = multiprocessing.get_context("spawn")
        waiting, running = list(enumerate(jobs)), dict[Any, tuple[int, Job, BaseProcess]]()
        try:
            while waiting or running:
                while waiting and len(running) < self.workers:
                    number, job = waiting.pop(0)
                    ours, theirs = context.Pipe(duplex=False)
                    given = theirs, _Sealed(job), self.threads
                    process: BaseProcess = context.Process(target=_work, args=given)  # it may have children of its own
                    try:
                        process.start()
                    except ENDING:
                        raise
                    except BaseException as error:  # whatever a trainable does when it is sent for another time
                        yield number, job.lost, text_of(error)
                        continue
                    finally:
                        theirs.close()
                    running[ours] = (number, job, process)
                for pipe in _ready({pipe: process for pipe, (_, _, process) in running.items()}):
                    number, job, process = running.pop(pipe)
                    found = _received(pipe, job)
                    process.join()
                    yield number, *found
        finally:
            for _, _, process in running.values():
                process.kill()
                process.join()  # then it charges no more


def _ready(running: Mapping[Any, BaseProcess]) -> set[Any]:
    """The pipes of processes that have answered or ended: an end of a pipe may live on in a child of theirs."""
    ends = {end: pipe for pipe, process in running.items() for end in (pipe, process.sentinel)}
    return {ends[end] for end in wait(list(ends))} if ends else set()  # of nothing it waits forever


@runtime_checkable
class SendingRunner(Runner, Protocol):
    """A runner whose trials run in other processes."""

    def check(self, sent: object, ledger: Ledger, curator: Curator | None = None) -> None: ...


def check_shared(sent: object, ledger: Ledger, curator: Curator | None = None, *, files: bool = True) -> None:
    """Refuse, before anything is charged, what other processes cannot take part in.

    Args:
        sent: What each of them is given.
        ledger: What they charge.
        curator: Receives the reason why something cannot be pickled.
        files: Whether numbers that are mapped from a file can be sent.

    Raises:
        Refusal: The ledger is in memory, or something cannot be sent.
    """
    if not ledger.durable:
        raise Refusal("Trials in other processes charge the same ledger: give it a file or a server, not memory.")
    attempt(_Trying(files).dump, sent, sentence=_UNSENDABLE, curator=curator)


class _Trying(pickle.Pickler):
    """Finds out whether something can be pickled, without a copy of its numbers."""

    def __init__(self, files: bool) -> None:
        super().__init__(io.BytesIO())
        self._files = files

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or value.device.type != "cpu" or value.layout is not torch.strided:
            return NotImplemented
        if not self._files and value.untyped_storage().filename is not None:
            raise Refusal(_MAPPED)
        if not self._files and value.requires_grad and not value.is_leaf:
            raise Refusal(_COMPUTED)
        return Tensor, ()


class _Sealed:
    """A job on its way to a process, as bytes: that process opens it where it can report what goes wrong."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def __reduce__(self) -> tuple[type[bytes], tuple[bytes]]:
        return bytes, (bytes(ForkingPickler.dumps(self.job)),)  # numbers go by shared memory


def _work(pipe: Connection[Any, Any], sealed: bytes, threads: int) -> None:
    """Run a job. Whatever is raised goes back as text for the curator, and nothing that is printed is seen.

    A trainable's threads, finalizers and warnings may print what they know of rows, also when the process ends: so it
    ends at once, and has no output. It ends with the process that has started it, too, however that ends.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.register_at_fork(after_in_child=pipe.close)  # a child that lives on does not keep the other end waiting
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):
        os.dup2(nowhere, output)
    try:
        torch.set_num_threads(threads)
        pipe.send_bytes(outcome(sealed))  # bytes: memory that is shared goes with this process
        pipe.close()
    finally:
        os._exit(0)


def _end_with_parent() -> None:
    """End this process when its parent has: nobody waits for its trial, and what it would charge is wanted for others.

    A search that was killed may have been started again by then, on the rest of the budget.
    """
    if (parent := multiprocessing.parent_process()) is not None:
        wait([parent.sentinel])
        os._exit(1)


def outcome(sealed: bytes, dumps: Callable[[Found], bytes] = pickle.dumps) -> bytes:
    """Run a pickled job, in another process; what comes of it as bytes, for `opened`. Nothing is raised.

    Args:
        sealed: The job.
        dumps: Pickles.

    Returns:
        The trial with what went wrong, an error of the ledger, or the text of any other.
    """
    try:
        return dumps(_outcome(pickle.loads(sealed)))
    except BaseException as error:
        return dumps(text_of(error))


def _outcome(job: Job) -> Found:
    try:
        return job.run()
    except REFUSALS as error:
        return error


def opened(found: bytes) -> Found:
    """What `outcome` says; a model's class may do anything when it is read, and its text is for the curator.

    Args:
        found: Pickled.

    Returns:
        The same, or the text of what was raised.
    """
    try:
        said: Found = pickle.loads(found)
    except ENDING:
        raise
    except BaseException as error:
        return text_of(error)
    return said


def _received(pipe: Any, job: Job) -> tuple[Trial, str]:
    """What a process says of its job; a trial whose result cannot be read is lost, and the curator knows why."""
    found: Found = "the process ended without a word"
    with suppress(EOFError, OSError):
        if pipe.poll():
            found = opened(pipe.recv_bytes())
    if isinstance(found, Exception):
        raise found
    return (job.lost, found) if isinstance(found, str) else found
