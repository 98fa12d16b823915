"""Trials over a cluster, with Ray."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa
import torch
from torch.distributed import TCPStore, init_process_group  # type: ignore[attr-defined]

from tacit._curator import Curator
from tacit._refusals import ENDING, text_of
from tacit.distributed import Team
from tacit.privacy import Ledger, ReceiptError
from tacit.tune._runners import Done, Found, check_shared, opened, outcome
from tacit.tune._trials import Job, Trial

_SILENCE = timedelta(minutes=30)  # after which ranks of a trial give each other up


@dataclass(frozen=True)
class RayRunner:
    """At most `workers` trials at a time on a Ray cluster, each over `ranks` processes with `threads` threads.

    `address` is the cluster's ("auto": the one that this machine belongs to); without it a small one is started here
    and ended after the trials. One that the program has already joined is used as it is. Every trial charges the ledger
    by itself, so its address must hold everywhere: a server, or a file that all machines see. A trial that dies is not
    tried again, for it was charged: it has no score, and the others go on. What trials print stays on their machines,
    unless the program has joined a cluster that sends it here. A trial carries the rows of its trainable, which Ray may
    spill to disk: the cluster is the curator's, all of it.

    With several ranks a trial is one run of `finetune.fit` over that many processes (gloo), on one receipt that its
    first rank has charged: the trainable is called on every rank, by the others with a receipt that releases nothing.
    `tune.Finetuning` and functions around `fit(…, receipt=receipt)` are such trainables. Ranks of a trial start
    together or not at all, wherever the cluster has room.

    Args:
        address: The cluster's ("auto": the one that this machine belongs to); None starts a small one here.
        workers: Trials at a time.
        threads: Threads of each process.
        ranks: Processes of each trial.
    """

    address: str | None = None
    workers: int = 2
    threads: int = 1
    ranks: int = 1

    def __post_init__(self) -> None:
        if self.workers < 1 or self.threads < 1 or self.ranks < 1:
            raise ValueError("There is at least one worker, with at least one thread and one rank.")

    def check(self, sent: object, ledger: Ledger, curator: Curator | None = None) -> None:
        """Refuse what no task can be sent (see `check_shared`), and a program without Ray."""
        check_shared(sent, ledger, curator)
        _ray()

    def __call__(self, jobs: Sequence[Job], ledger: Ledger) -> Done:
        del ledger  # each opens it by its address
        ray = _ray()
        started = not ray.is_initialized()
        if started:
            ray.init(address=self.address, log_to_driver=False, **({} if self.address else self._small()))
        try:
            yield from self._run(ray, jobs)
        finally:
            if started:
                ray.shutdown()

    def _small(self) -> dict[str, Any]:
        """A cluster of this machine, whose workers find the modules that this program finds."""
        found = {"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}}
        cpus = self.workers * self.threads * self.ranks
        return {"num_cpus": cpus, "include_dashboard": False, "runtime_env": found}

    def _run(self, ray: Any, jobs: Sequence[Job]) -> Done:
        start = partial(_OneRank if self.ranks == 1 else _ManyRanks, ray, threads=self.threads, ranks=self.ranks)
        waiting, running = list(enumerate(jobs)), dict[Any, tuple[int, Job, _OneRank | _ManyRanks]]()
        try:
            while waiting or running:
                while waiting and len(running) < self.workers:
                    number, job = waiting.pop(0)
                    try:
                        sealed = ray.cloudpickle.dumps(_everywhere(job))  # Ray prints what it cannot read by itself
                    except ENDING:
                        raise
                    except BaseException as error:  # whatever a trainable does when it is sent for another time
                        yield number, job.lost, text_of(error)
                        continue
                    trial = start(sealed)
                    running[trial.result] = (number, job, trial)
                for reference in ray.wait(list(running), num_returns=1)[0] if running else ():
                    number, job, trial = running.pop(reference)
                    found = _received(ray, reference, job)
                    trial.end(received=True)
                    yield number, *found
        finally:
            for _, _, trial in running.values():
                trial.end(received=False)


class _OneRank:
    """A trial as one task."""

    def __init__(self, ray: Any, sealed: bytes, *, threads: int, ranks: int) -> None:
        del ranks
        self._ray = ray
        self.result = ray.remote(num_cpus=threads, max_retries=0)(_work).remote(sealed, threads)

    def end(self, *, received: bool) -> None:
        """Stop it, if its result was not received: Ray ends this process if a task is cancelled while it completes."""
        if not received:
            self._ray.cancel(self.result, force=True)


class _ManyRanks:
    """The processes of one trial; `result` is what its first rank returns."""

    def __init__(self, ray: Any, sealed: bytes, *, threads: int, ranks: int) -> None:
        self._ray = ray
        self._room = ray.util.placement_group([{"CPU": threads}] * ranks, strategy="PACK")  # all of it, or none
        rank = ray.remote(num_cpus=threads, max_restarts=0, max_task_retries=0)(_Rank)
        at = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        self._ranks = [rank.options(scheduling_strategy=at(self._room, i)).remote(threads) for i in range(ranks)]
        leader, *others = self._ranks
        address = leader.open.remote()
        self.result = leader.lead.remote(sealed, ranks)
        self._helping = [each.follow.remote(sealed, address, i, ranks) for i, each in enumerate(others, 1)]

    def end(self, *, received: bool) -> None:
        """A trial is over once its first rank has answered: whatever still runs is killed."""
        del received
        for each in self._ranks:
            self._ray.kill(each)
        self._ray.util.remove_placement_group(self._room)


class _Rank:
    """One process of a trial that has several."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._store: TCPStore | None = None

    def open(self) -> tuple[str, int]:
        """On the first rank: where the others find it. The port is the system's choice, and held from here on."""
        import ray

        here: str = ray.util.get_node_ip_address()
        store = TCPStore(here, 0, is_master=True, wait_for_workers=False, timeout=_SILENCE)
        self._store = store
        return here, store.port

    def lead(self, sealed: bytes, ranks: int) -> bytes:
        """Charge, train with the others, score."""
        init_process_group("gloo", store=self._store, rank=0, world_size=ranks, timeout=_SILENCE)
        return _work(sealed, self._threads)

    def follow(self, sealed: bytes, address: tuple[str, int], rank: int, ranks: int) -> None:
        """Train along; if that fails the process ends, the first rank loses a peer, and the trial fails."""
        torch.set_num_threads(self._threads)
        store = TCPStore(*address, is_master=False, timeout=_SILENCE)
        init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=_SILENCE)
        try:
            job: Job = pickle.loads(sealed)
            job.help(Team(rank, ranks))
        except BaseException:  # its text may quote rows
            os._exit(1)


def _work(sealed: bytes, threads: int) -> bytes:
    """Run a job; what comes of it is a value, for what a task raises, or cannot hand back, Ray prints."""
    from ray import cloudpickle

    torch.set_num_threads(threads)
    return outcome(sealed, cloudpickle.dumps)


def _received(ray: Any, reference: Any, job: Job) -> tuple[Trial, str]:
    found: Found
    try:
        found = opened(ray.get(reference))
    except ray.exceptions.RayError as error:  # killed
        found = error
    if isinstance(found, ReceiptError):  # nothing was released: no result of this search is private
        raise found
    if isinstance(found, Exception):
        reason = (str(found).strip().splitlines() or [""])[-1]
        found = f"the task ended without a result ({type(found).__name__}: {reason})"
    return (job.lost, found) if isinstance(found, str) else found


def _everywhere(job: Job) -> Job:
    """The job with the whole path of a ledger's file, for a task may run in another folder."""
    url = sa.engine.make_url(job.ledger)
    if not url.drivername.startswith("sqlite") or not url.database:
        return job
    whole = url.set(database=str(Path(url.database).resolve()))
    return replace(job, ledger=whole.render_as_string(hide_password=False))


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would report home
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError:
        raise ValueError("Ray is not installed: pip install 'tacit[cluster]'.") from None
    return ray
