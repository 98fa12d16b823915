"""Trials over a cluster: everything but the first part runs with Ray, in an environment of its own."""

from __future__ import annotations

import itertools
import math
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from made_up import breaks, descent, dies, half, right, trains, works
from torch import distributed
from troubled import SECRET, Troubled

from tacit import CuratorEvent, tune
from tacit.distributed import Team
from tacit.privacy import Budget, Ledger, Neighbours, Receipt, mu_of
from tacit.privacy.events import from_json, gaussian, gaussian_noise
from tests.patient_ray import be_patient

BOX = tune.Space(lr=(0.01, 1.0), steps=(2, 2))
ONE = Budget(1.0, 1e-5)


def search(ledger: Ledger, trainable: Any, points: int = 2, **how: Any) -> tune.Tuned:
    how = {"runner": tune.RayRunner(workers=2), "score": half, "size": 10_000} | how
    return tune.grid_search(trainable, BOX, ONE, ledger=ledger, subject="people", points=points, **how)


def mus(ledger: Ledger) -> list[float]:
    bodies = [entry.body for entry in ledger.entries("people") if entry.kind == "charge"]
    return [1 / noise for body in bodies if (noise := gaussian_noise(from_json(body["event"]))) is not None]


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as opened:
        yield opened


def test_without_ray_there_is_a_sentence(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"Ray is not installed: pip install 'tacit\[cluster\]'"):
        search(ledger, works)
    assert mus(ledger) == []


def test_what_tasks_cannot_take_part_in_is_refused(ledger: Ledger) -> None:
    with pytest.raises(ValueError, match="not memory"):
        search(Ledger("sqlite://"), works)
    with pytest.raises(ValueError, match="cannot be sent"):
        search(ledger, lambda *given: works(*given))
    with pytest.raises(ValueError, match="at least one worker"):
        tune.RayRunner(workers=0)
    with pytest.raises(ValueError, match="one rank"):
        tune.RayRunner(ranks=0)
    assert mus(ledger) == []


# With Ray


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        yield be_patient(patch)


@pytest.fixture(scope="module")
def cluster(ray: Any) -> Iterator[Any]:
    paths = {"env_vars": {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=paths)
    yield ray
    ray.shutdown()


@pytest.mark.cluster
def test_a_cluster_of_its_own_is_started_and_ended(ray: Any, ledger: Ledger) -> None:
    found = search(ledger, works)
    assert not ray.is_initialized()
    assert [trial.failed for trial in found.trials] == [False, False]
    assert found.model == 0.5


@pytest.mark.cluster
@pytest.mark.usefixtures("cluster")
def test_every_task_charges_the_same_ledger(ledger: Ledger) -> None:
    found = search(ledger, works, points=4)
    assert len(mus(ledger)) == 8
    total = math.sqrt(sum(mu**2 for mu in mus(ledger)))
    assert mu_of(1.0, 1e-5) * (1 - 1e-8) < total <= mu_of(1.0, 1e-5)
    assert [trial.hyperparameters for trial in found.trials] == list(BOX.grid(4))
    assert found.guarantee.epsilon <= 1.0
    assert {trial.receipt for trial in found.trials} <= {entry.receipt for entry in ledger.entries("people")}
    ledger.verify(ledger.head)


@pytest.mark.cluster
@pytest.mark.usefixtures("cluster")
def test_a_killed_task_stays_charged_and_the_search_goes_on(ledger: Ledger) -> None:
    errors: list[str] = []
    found = search(ledger, dies, points=3, curator=lambda event: errors.append(event.error))
    assert [trial.failed for trial in found.trials] == [False, False, True]
    assert len(mus(ledger)) == 6  # once each: it was not tried again
    assert found.model == 0.5
    assert sorted(errors)[-1].startswith("the task ended without a result")


@pytest.mark.cluster
@pytest.mark.usefixtures("cluster")
def test_a_task_that_fails_keeps_its_words(ledger: Ledger, capfd: pytest.CaptureFixture[str]) -> None:
    errors: list[str] = []
    with pytest.raises(tune.RunFailed, match="All 2 trials failed") as failed:
        search(ledger, breaks, curator=lambda event: errors.append(event.error))
    assert errors == ["ArithmeticError: patient 17 has a fever"] * 2
    assert "patient" not in str(failed.value) + repr(failed.value.result) + "".join(capfd.readouterr())
    assert len(mus(ledger)) == 4, "both stay charged"


@pytest.mark.cluster
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    "trouble", ["cannot be pickled", "cannot be read", "is not sent again", "panics when it is sent again"]
)
def test_what_cannot_be_sent_or_read_is_heard_by_the_curator_alone(
    trouble: str, ledger: Ledger, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ray prints what it cannot read, and raises what it cannot send."""
    told: list[str] = []
    mine = Troubled(trouble)
    with pytest.raises(tune.RunFailed, match="All 1 trials failed") as failed:
        search(ledger, mine, points=1, score=mine.score, curator=lambda event: told.append(event.error))
    assert len(told) == 1
    assert SECRET in told[0]
    assert SECRET not in str(failed.value) + "".join(capfd.readouterr())


@pytest.mark.cluster
@pytest.mark.usefixtures("cluster")
def test_a_task_that_the_ledger_refuses_is_a_failed_trial(ledger: Ledger) -> None:
    """Another process spends nearly everything once the search has begun."""

    def spend(event: CuratorEvent) -> None:
        del event
        left = ledger.remaining("people").mu
        if left is not None and left > 0.01:
            ledger.charge("people", gaussian(1 / (left * 0.999)), stage="finetune")

    found = search(ledger, works, points=6, runner=tune.RayRunner(workers=1), curator=spend)
    assert [trial.failed for trial in found.trials] == [False] + [True] * 5
    assert found.guarantee.epsilon <= 1.0
    assert found.model == 0.5


@pytest.mark.cluster
@pytest.mark.usefixtures("cluster")
def test_a_ledger_by_a_relative_path_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Ledger("sqlite:///here.db") as ledger:
        assert search(ledger, works).model == 0.5
        assert len(mus(ledger)) == 4


class Training:
    """`trains` as a trainable that says what it releases."""

    unit, size = "sample", 10_000

    def __init__(self, run: Any) -> None:
        self.run = run

    def event(self, point: tune.Hyperparameters, mu: float, neighbours: Neighbours) -> Any:
        return descent(point).event(neighbours.factor * math.sqrt(point.steps) / mu, self.size)

    def __call__(self, point: tune.Hyperparameters, mu: float, receipt: Receipt) -> Any:
        return self.run(point, mu, receipt)


@pytest.mark.cluster
@pytest.mark.usefixtures("cluster")
def test_a_trial_over_two_ranks_is_that_of_one(tmp_path: Path) -> None:
    """One charge for a trial, whatever its ranks, and (seeded) the model of a trial in one process, up to rounding."""
    found = {}
    for ranks in (1, 2):
        with Ledger(f"sqlite:///{tmp_path / str(ranks)}.db") as ledger:
            how = {"runner": tune.RayRunner(workers=1, ranks=ranks), "score": right, "seed": 4}
            found[ranks] = search(ledger, Training(trains), points=2, **how)
            assert len(mus(ledger)) == 4, "a training and a score for each of two trials"
            ledger.verify(ledger.head)
            assert found[ranks].guarantee.epsilon <= 1.0
    assert [trial.failed for trial in found[2].trials] == [False, False]
    for one, two in zip(found[1].trials, found[2].trials, strict=True):
        assert one.score == pytest.approx(two.score, abs=0.05)
    for name, value in found[1].model.state_dict().items():
        assert torch.allclose(found[2].model.state_dict()[name], value, atol=1e-4)


class LosesARank:
    """`trains`, but one rank is killed in the second step, once the first was released, if the rate is large."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __call__(self, point: tune.Hyperparameters, mu: float, receipt: Receipt) -> Any:
        if point.lr > 0.1 and distributed.is_initialized() and distributed.get_rank() == self.rank:
            add_up, seen = Team.add_up, itertools.count()

            def dying(team: Team, *sums: Any, **how: Any) -> Any:
                if next(seen) == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                return add_up(team, *sums, **how)

            Team.add_up = dying  # type: ignore[method-assign]
        return trains(point, mu, receipt)


@pytest.mark.cluster
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_trial_that_loses_a_rank_stays_charged_and_the_others_go_on(rank: int, ledger: Ledger) -> None:
    """What it had released is paid, once and in full: no refund, no second try; the search goes on without it."""
    errors: list[str] = []
    how = {"runner": tune.RayRunner(workers=1, ranks=2), "score": right}
    lost = Training(LosesARank(rank))
    found = search(ledger, lost, points=3, curator=lambda event: errors.append(event.error), **how)
    assert [trial.failed for trial in found.trials] == [False, False, True]
    assert found.model is not None
    charged = [entry.receipt for entry in ledger.entries("people") if entry.kind == "charge"]
    assert len(charged) == len(set(charged)) == 6, "a training and a score for each of three trials"
    assert [entry.body["refund"] for entry in ledger.entries("people") if entry.kind == "settle"] == []
    assert ledger.spent("people").mu == pytest.approx(math.sqrt(sum(mu**2 for mu in mus(ledger))), rel=1e-6)
    assert found.guarantee.epsilon <= 1.0
    assert len([error for error in errors if error]) == 1
    ledger.verify(ledger.head)
