"""Trials over a cluster: everything but the first part runs with Ray, in an environment of its own."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_up import breaks, dies, half, works

from tacit import CuratorEvent, tune
from tacit.privacy import Budget, Ledger, mu_of
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
    assert mus(ledger) == []


# With Ray


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    import ray

    paths = {"env_vars": {"PYTHONPATH": str(Path(__file__).parent)}}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=paths)
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
