"""Rows read ahead of time in other processes: decoding goes on while the model computes.

Who takes part in a step is known as soon as a run is charged (the draw is keyed), so the rows of the next portions can
be read before their turn comes. Portion i goes to worker i mod n, and comes back from it in its turn: what a run sees
does not depend on how fast a worker is.

This serves every kind of records: a reader calls nothing but `records.rows(units, uniforms)`, so folders of images,
videos and data sets of one's own need no code for it. Records that are costly to hand to a process (open files, large
caches) say in `__getstate__` what to leave out; caches are a worker's own. Where processes are forked (Linux) nothing
is copied at all.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import cycle
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import Any

import torch

from tacit._refusals import Refusal
from tacit.finetune._shared_rows import Inbox, Outbox
from tacit.privacy.events import check_count

AHEAD = 2  # portions on their way to or from a worker: one that it reads, and one that waits
LOST = (
    "A worker process that reads rows has ended (killed, or out of memory or shared memory: see /dev/shm). Nothing of "
    "this step was released: run again to go on, with fewer workers if there is too little memory."
)
UNSENT = (
    "These data cannot be handed to worker processes: use functions of a module in their transforms (no lambda), or "
    "workers=0. Nothing was charged."
)

Read = Callable[[Any], Any]  # of a portion; it never raises because of a row


def check_workers(workers: int) -> int:
    """A number of processes; 0: rows are read here."""
    if workers:
        check_count(workers, "workers")
    return workers


@contextmanager
def ahead(read: Read, tasks: Iterable[Any], workers: int) -> Iterator[Iterator[tuple[Any, Any]]]:
    """What `read` returns of each task, with the task, in their order; by so many processes, or here.

    Formal guarantee: what is returned is a function of the task alone, so a run with workers releases what it would
    without. A worker writes nothing anywhere: whatever goes wrong with a row comes back with its rows, for the curator.
    One that ends raises `OSError` where its next rows would be used, before anything of that step is released.

    Args:
        read: Called in the workers.
        tasks: Taken from here as workers become free, two for each.
        workers: 0 reads each task when it is asked for.

    Yields:
        (task, result), in order.
    """
    if not workers:
        yield ((task, read(task)) for task in tasks)
        return
    pool = [_Worker(read) for _ in range(workers)]
    try:
        yield _in_order(pool, iter(tasks))
    finally:
        for worker in pool:
            worker.close()


class _Worker:
    """A process at the other end of a pipe."""

    def __init__(self, read: Read) -> None:
        context = multiprocessing.get_context()
        self.pipe, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(target=_serve, args=(self.pipe, theirs, read), daemon=True)
        failed = False
        try:
            self._process.start()
        except (pickle.PicklingError, AttributeError, TypeError):
            failed = True
        theirs.close()
        self._inbox = Inbox()
        if failed:
            self.pipe.close()
            raise Refusal(UNSENT)

    def send(self, task: Any) -> None:
        with suppress(OSError):  # it ended: that shows when its rows are asked for
            self.pipe.send_bytes(pickle.dumps((task, self._inbox.free())))

    def receive(self) -> Any:
        try:
            return self._inbox.unpack(self.pipe.recv())
        except (EOFError, OSError, RuntimeError):  # also rows in shared memory of a process that is gone
            pass
        raise OSError(LOST)

    def close(self) -> None:
        self.pipe.close()
        self._process.terminate()
        self._process.join()


def _in_order(pool: list[_Worker], tasks: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
    waiting: deque[tuple[_Worker, Any]] = deque()
    turns = cycle(pool)

    def send() -> None:
        for task in tasks:
            worker = next(turns)
            worker.send(task)
            waiting.append((worker, task))
            return

    for _ in range(AHEAD * len(pool)):
        send()
    while waiting:
        worker, task = waiting.popleft()
        found = worker.receive()
        send()
        yield task, found


def _serve(ours: Connection[Any, Any], pipe: Connection[Any, Any], read: Read) -> None:
    """Read what is asked for until the other end closes. Whatever happens here, nothing is printed."""
    try:
        with suppress(OSError):
            ours.close()  # a forked copy of the other end: while it is open, no end of file says that the run has died
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _print_nothing()
        torch.set_num_threads(1)
        _keep_memory()
        tasks: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=_listen, args=(pipe, tasks), daemon=True).start()
        outbox = Outbox()
        while (asked := tasks.get()) is not None:
            task, number = asked
            pipe.send(outbox.pack(read(task), number))
    except BaseException:  # its text may reveal a row
        os._exit(1)


def _print_nothing() -> None:
    """Decoders in C print what they think of a file, and a user's data set may print a row."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    os.close(nowhere)


def _keep_memory() -> None:
    """Rows come and go in large arrays: glibc would give each back to the system, and pay for its pages anew."""
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX: no array has a mapping of its own
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: what is free stays


def _listen(pipe: Connection[Any, Any], tasks: SimpleQueue[Any]) -> None:
    """Take tasks off the pipe as they come, or both ends could wait for each other to read."""
    with suppress(EOFError, OSError):
        while True:
            tasks.put(pickle.loads(pipe.recv_bytes()))
    tasks.put(None)
