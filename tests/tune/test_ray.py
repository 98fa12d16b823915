"""Trials over a cluster: everything but the first part runs with Ray, in an environment of its own."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from made_up import breaks, descent, dies, half, right, trains, trains_or_loses_a_rank, works

from tacit import CuratorEvent, tune
from tacit.privacy import Budget, Ledger, Neighbours, Receipt, mu_of
from tacit.privacy.events import from_json, gaussian, gaussian_noise

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
def cluster() -> Iterator[Any]:
    import ray

    paths = {"env_vars": {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}}
    for left in (2, 1, 0):  # a node that is not up within 30 s, as on a busy machine, gives up
        try:
            ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=paths)
            break
        except Exception:
            ray.shutdown()
            if not left:
                raise
    yield ray
    ray.shutdown()


@pytest.mark.cluster
def test_a_cluster_of_its_own_is_started_and_ended(ledger: Ledger) -> None:
    import ray

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
    told: list[str] = []
    found = search(ledger, dies, points=3, curator=lambda event: told.append(event.error))
    assert [trial.failed for trial in found.trials] == [False, False, True]
    assert len(mus(ledger)) == 6  # once each: it was not tried again
    assert found.model == 0.5
    assert sorted(told)[-1].startswith("the task ended without a result")


@pytest.mark.cluster
@pytest.mark.usefixtures("cluster")
def test_a_task_that_fails_keeps_its_words(ledger: Ledger, capfd: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []
    found = search(ledger, breaks, curator=lambda event: told.append(event.error))
    assert found.model is None
    assert told == ["ArithmeticError: patient 17 has a fever"] * 2
    assert "patient" not in repr(found) + "".join(capfd.readouterr())


@pytest.mark.cluster
@pytest.mark.usefixtures("cluster")
def test_a_task_that_the_ledger_refuses_is_a_failed_trial(ledger: Ledger) -> None:
    """Somebody else spends nearly everything once the search has begun."""

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


@pytest.mark.cluster
@pytest.mark.usefixtures("cluster")
def test_a_trial_that_loses_a_rank_stays_charged_and_the_others_go_on(ledger: Ledger) -> None:
    how = {"runner": tune.RayRunner(workers=1, ranks=2), "score": right}
    found = search(ledger, Training(trains_or_loses_a_rank), points=3, **how)
    assert [trial.failed for trial in found.trials] == [False, False, True]
    assert len(mus(ledger)) == 6
    ledger.verify(ledger.head)
