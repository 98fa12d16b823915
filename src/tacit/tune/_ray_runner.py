"""Trials over a cluster, with Ray."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import sqlalchemy as sa
import torch

from tacit.privacy import Ledger, ReceiptError
from tacit.tune._runners import REFUSALS, Done, check_shared
from tacit.tune._trials import Job, Trial


@dataclass(frozen=True)
class RayRunner:
    """At most `workers` trials at a time as tasks of a Ray cluster, each with `threads` threads.

    `address` is the cluster's ("auto": the one that this machine belongs to); without it a small one is started here
    and ended after the trials. One that the program has already joined is used as it is. Every task charges the ledger
    by itself, so its address must hold everywhere: a server, or a file that all machines see. A task that dies is not
    tried again, for it was charged: it has no score, and the others go on. What tasks print stays on their machines,
    unless the program has joined a cluster that sends it here. A task carries the rows of its trainable, which Ray may
    spill to disk: the cluster is the curator's, all of it.

    Args:
        address: The cluster's ("auto": the one that this machine belongs to); None starts a small one here.
        workers: Trials at a time.
        threads: Threads of each.
    """

    address: str | None = None
    workers: int = 2
    threads: int = 1

    def __post_init__(self) -> None:
        if self.workers < 1 or self.threads < 1:
            raise ValueError("There is at least one worker, with at least one thread.")

    def __call__(self, jobs: Sequence[Job], ledger: Ledger) -> Done:
        check_shared(jobs, ledger)
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
        return {"num_cpus": self.workers * self.threads, "include_dashboard": False, "runtime_env": found}

    def _run(self, ray: Any, jobs: Sequence[Job]) -> Done:
        task = ray.remote(num_cpus=self.threads, max_retries=0)(_work)
        waiting, running = list(enumerate(jobs)), dict[Any, tuple[int, Job]]()
        try:
            while waiting or running:
                while waiting and len(running) < self.workers:
                    number, job = waiting.pop(0)
                    running[task.remote(_everywhere(job), self.threads)] = (number, job)
                for reference in ray.wait(list(running), num_returns=1)[0]:
                    number, job = running.pop(reference)
                    yield number, *_received(ray, reference, job)
        finally:
            for reference in running:
                ray.cancel(reference, force=True)


def _work(job: Job, threads: int) -> tuple[Trial, str] | Exception:
    torch.set_num_threads(threads)
    try:
        return job.run()
    except REFUSALS as error:  # as a value: what a task raises, Ray prints with its traceback
        return error


def _received(ray: Any, reference: Any, job: Job) -> tuple[Trial, str]:
    try:
        found: tuple[Trial, str] | Exception = ray.get(reference)
    except ray.exceptions.RayError as error:  # killed
        found = error
    if isinstance(found, ReceiptError):  # nothing was released: no result of this search is private
        raise found
    if isinstance(found, Exception):
        lost = Trial(hyperparameters=job.hyperparameters, mu=job.mu, score=None)
        reason = (str(found).strip().splitlines() or [""])[-1]
        return lost, f"the task ended without a result ({type(found).__name__}: {reason})"
    return found


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
    except ImportError:
        raise ValueError("Ray is not installed: pip install 'tacit[cluster]'.") from None
    return ray
