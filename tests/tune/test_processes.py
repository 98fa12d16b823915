"""Trials in other processes: what cannot be sent is refused early, and what goes wrong there is for the curator."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from made_up import Hill, half, works
from torch import nn
from troubled import SECRET, Troubled

from tacit import finetune, tune
from tacit._refusals import Refusal
from tacit.privacy import Budget, Ledger, Receipt
from tacit.tune._trials import Job

BOX = tune.Space(lr=(0.01, 1.0), steps=(2, 2))
ONE = Budget(1.0, 1e-5)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as opened:
        yield opened


def charges(ledger: Ledger) -> int:
    return sum(entry.kind == "charge" for entry in ledger.entries())


@pytest.mark.parametrize(
    "trouble",
    [
        "cannot be pickled",
        "cannot be read",
        "exits",
        "interrupts",
        "has no price",
        "does not arrive",
        "is not sent again",
        "panics when it is sent again",
    ],
)
def test_what_goes_wrong_in_a_process_is_heard_by_the_curator_alone(
    trouble: str, ledger: Ledger, capfd: pytest.CaptureFixture[str]
) -> None:
    told: list[str] = []
    with pytest.raises(tune.RunFailed, match="All 1 trials failed") as failed:
        tune.grid_search(
            Troubled(trouble),
            BOX,
            ONE,
            ledger=ledger,
            subject="people",
            points=1,
            runner=tune.Processes(1),
            curator=lambda event: told.append(event.error),
        )
    assert len(told) == 1
    assert SECRET in told[0]
    assert SECRET not in str(failed.value) + repr(failed.value.result)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("trouble", ["talks", "has a thread that goes on", "has a child"])
def test_what_a_trial_does_beside_its_work_is_not_seen_and_holds_nothing_up(
    trouble: str, ledger: Ledger, capfd: pytest.CaptureFixture[str]
) -> None:
    found = tune.grid_search(
        Troubled(trouble), BOX, ONE, ledger=ledger, subject="people", points=1, runner=tune.Processes(1)
    )
    assert [trial.failed for trial in found.trials] == [False]
    assert capfd.readouterr() == ("", "")


def test_what_cannot_be_sent_after_its_first_run_is_refused(ledger: Ledger) -> None:
    with pytest.raises(Refusal, match="cannot be sent to another process"):
        tune.grid_search(Keeps(), BOX, ONE, ledger=ledger, subject="people", points=2, runner=tune.Processes(1))
    assert ledger.entries() == []


class Keeps(Troubled):
    """Keeps a function without a name from its first run."""

    def __init__(self) -> None:
        super().__init__("")

    def __call__(self, *given: Any) -> nn.Module:
        self.kept = lambda: None
        return super().__call__(*given)


@pytest.mark.parametrize("trouble", ["cannot be pickled", "cannot be read"])
def test_a_model_that_does_not_come_back_whole_is_refused_before_a_charge(trouble: str, ledger: Ledger) -> None:
    told: list[Any] = []
    search = partial(tune.grid_search, Troubled(trouble, rehearsed=True), BOX, ONE, ledger=ledger, points=1)
    with pytest.raises(Refusal, match="way back from another process failed in a dry run") as refused:
        search(subject="people", runner=tune.Processes(1), curator=told.append)
    assert SECRET in told[0].details
    assert SECRET not in str(refused.value)
    assert ledger.entries() == []


def test_a_process_that_is_stopped_has_ended_when_its_search_goes_on(ledger: Ledger) -> None:
    """So it charges nothing any more."""
    ledger.subject("people", ONE)
    mine = Troubled("waits")
    jobs = [
        Job(
            trainable=mine,
            score=mine.score,
            hyperparameters=tune.Hyperparameters(lr=lr, steps=2),
            mu=0.01,
            mu_score=0.01,
            size=10_000,
            subject="people",
            ledger=ledger.url,
            note="",
        )
        for lr in (1.0, 0.05)
    ]
    before = multiprocessing.active_children()
    running = tune.Processes(2)(jobs, ledger)
    assert next(iter(running))[0] == 1
    children = [child for child in multiprocessing.active_children() if child not in before]
    running.close()  # type: ignore[attr-defined]
    assert children
    assert not any(child.is_alive() for child in children)


def test_a_trial_that_dies_as_it_answers_holds_nothing_up_whoever_has_its_pipe(ledger: Ledger, tmp_path: Path) -> None:
    mine = Troubled("dies as it answers and leaves a child", file=str(tmp_path / "child"))
    with pytest.raises(tune.RunFailed, match="All 1 trials failed"):
        tune.grid_search(mine, BOX, ONE, ledger=ledger, subject="people", points=1, runner=tune.Processes(1))
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)  # after a minute the file is gone


SEARCH = """
from troubled import Troubled
from tacit import tune
from tacit.privacy import Budget, Ledger
tune.grid_search(
    Troubled("holds a lock", file="lock"), tune.Space(lr=(0.01, 1.0), steps=(2, 2)), Budget(1.0, 1e-5),
    ledger=Ledger("sqlite:///ledger.db"), subject="people", points=2, runner=tune.Processes(1),
)
"""


def test_a_trial_does_not_outlive_a_search_that_is_killed(tmp_path: Path) -> None:
    """It would go on for hours, and charge what a search that is started again has counted on."""
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    searching = subprocess.Popen([sys.executable, "-c", SEARCH], cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths})
    lock = tmp_path / "lock"
    while not (lock.exists() and lock.read_text()):
        assert searching.poll() is None
        time.sleep(0.1)
    searching.kill()
    searching.wait()
    assert released(lock), os.kill(int(lock.read_text()), signal.SIGKILL)


def released(lock: Path) -> bool:
    """Whether nobody holds a lock on a file, after a minute at most."""
    until = time.monotonic() + 60
    with lock.open() as file:
        while time.monotonic() < until:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.1)
            else:
                return True
    return False


class Computed(Troubled):
    """Has a tensor that no queue takes."""

    def __init__(self) -> None:
        super().__init__("")
        self.kept = torch.ones(3, requires_grad=True) * 2


def test_a_tensor_with_its_graph_is_refused_before_a_charge(ledger: Ledger) -> None:
    with pytest.raises(Refusal, match=r"detach\(\) it"):
        tune.grid_search(Computed(), BOX, ONE, ledger=ledger, subject="people", points=1, runner=tune.Processes(1))
    assert ledger.entries() == []


def poisson(**more: Any) -> tune.Finetuning:
    inputs = torch.randn(400, 4, generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {
        "optimizer": lambda p: finetune.DPSGD(batch_size=100, steps=p.steps, lr=p.lr),
        "size": 400,
    }
    return tune.Finetuning(nn.Linear(4, 2), (inputs, (inputs[:, 0] > 0).long()), **(options | more))


def unsendable_hill() -> Hill:
    hill = Hill(size=20_000)
    hill.seen = [lambda: None]  # type: ignore[list-item]
    return hill


START = tune.Hyperparameters(lr=1.0, steps=2)
EIGHT = Budget(8.0, 1e-5)
SEARCHES: dict[str, Any] = {
    "random": lambda **how: tune.random_search(poisson(), BOX, EIGHT, trials=2, **how),
    "grid": lambda **how: tune.grid_search(poisson(), BOX, EIGHT, points=2, **how),
    "linear": lambda **how: tune.linear_scaling(poisson(), BOX, EIGHT, **how),
    "default": lambda **how: tune.default_search(unsendable_hill(), ONE, default=START, **how),
}


@pytest.mark.parametrize("search", SEARCHES)
def test_what_cannot_be_sent_is_refused_before_the_subject_is_opened(search: str, ledger: Ledger) -> None:
    """A subject that is opened for one list of Poisson-subsampled runs takes no other."""
    told: list[Any] = []
    with pytest.raises(Refusal, match="cannot be sent to another process"):
        SEARCHES[search](ledger=ledger, subject="people", runner=tune.Processes(2), curator=told.append)
    assert ledger.get_subject("people") is None
    assert "lambda" in told[0].details


def local(hyperparameters: tune.Hyperparameters, mu: float, receipt: Receipt) -> nn.Module:
    """A model of a class that no other process knows."""

    class Own(nn.Linear):
        pass

    works(hyperparameters, mu, receipt)
    return Own(2, 2)


class InPlace:
    """A runner of one's own, in this process."""

    def __call__(self, jobs: Sequence[Job], ledger: Ledger) -> Any:
        for number, job in enumerate(jobs):
            yield number, *job.run(ledger)


@pytest.mark.parametrize(("trials", "runner"), [(1, tune.Processes(2)), (2, InPlace())], ids=["one run", "own runner"])
def test_what_is_sent_nowhere_need_not_be_sendable(trials: int, runner: Any) -> None:
    search = partial(tune.random_search, local, BOX, ONE, score=half, size=10_000, ledger=Ledger("sqlite://"))
    assert search(subject="people", trials=trials, runner=runner).model is not None
