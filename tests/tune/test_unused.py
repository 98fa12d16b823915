"""A trainable that makes no release has no guarantee: every search ends with an error and returns nothing."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
import torch
from made_up import half, idle, works

from tacit import tune
from tacit.privacy import Budget, Ledger, Receipt, ReceiptError, events, grid_sum, mechanisms
from tacit.privacy._receipts import check_used
from tacit.tune import _ray_runner as ray_runner
from tacit.tune._runners import opened, outcome
from tacit.tune._trials import Job

BOX = tune.Space(lr=(0.1, 1.0), steps=(2, 2))
ONE = Budget(1.0, 1e-5)


def sized(trainable: Any, size: int = 1000) -> Any:
    made = partial(trainable)
    made.size, made.score = size, half  # type: ignore[attr-defined]
    return made


def by_optuna(trainable: Any, box: Any, budget: Any, **how: Any) -> Any:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return tune.optuna_search(optuna.create_study(direction="maximize"), trainable, box, budget, trials=2, **how)


def by_parts(trainable: Any, box: Any, budget: Any, **how: Any) -> Any:
    return tune.subset_search(None, box, budget, parts=(trainable, trainable), mean=2, **how)


def rest_alone(trainable: Any, box: Any, budget: Any, **how: Any) -> Any:
    return tune.subset_search(None, box, budget, parts=(sized(works), trainable), mean=2, **how)


SEARCHES: dict[str, Callable[..., Any]] = {
    "linear scaling": tune.linear_scaling,
    "random": tune.random_search,
    "random, several": partial(tune.random_search, trials=2),
    "grid": tune.grid_search,
    "repeat and select": tune.repeat_and_select,
    "subset": by_parts,
    "subset, the rest": rest_alone,
    "optuna": by_optuna,
    "without second moment": lambda t, _, b, **how: tune.adam_without_second_moment(t, b, steps=2, **how),
    "known hyperparameters": lambda t, _, b, **how: tune.train(t, tune.Hyperparameters(lr=1.0, steps=2), b, **how),
}


@pytest.mark.parametrize("name", SEARCHES)
def test_no_search_returns_what_nothing_was_released_for(name: str) -> None:
    with pytest.raises(ReceiptError, match="Nothing was released on receipt"):
        SEARCHES[name](sized(idle), BOX, ONE, ledger=Ledger("sqlite://"), subject="people")


def test_nor_one_in_other_processes(tmp_path: Path) -> None:
    with (
        Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger,
        pytest.raises(ReceiptError, match="Nothing was released on receipt"),
    ):
        tune.grid_search(
            idle, BOX, ONE, ledger=ledger, subject="people", score=half, size=1000, points=1, runner=tune.Processes(1)
        )


@pytest.mark.cluster
def test_nor_one_over_a_cluster(tmp_path: Path) -> None:
    with (
        Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger,
        pytest.raises(ReceiptError, match="Nothing was released on receipt"),
    ):
        tune.grid_search(
            idle, BOX, ONE, ledger=ledger, subject="people", score=half, size=1000, points=1, runner=tune.RayRunner()
        )


def test_a_task_hands_the_error_over_as_a_value(tmp_path: Path) -> None:
    """What a task raises Ray would print with its traceback; so it is returned, and raised here."""
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        ledger.subject("people", ONE)
        job = Job(
            trainable=idle,
            score=half,
            hyperparameters=tune.Hyperparameters(lr=1.0, steps=2),
            mu=0.1,
            mu_score=0.1,
            size=100,
            subject="people",
            ledger=ledger.url,
            note="",
        )
        said = outcome(pickle.dumps(job))  # what a task returns
    assert isinstance(opened(said), ReceiptError)
    ray = SimpleNamespace(get=lambda _: said, exceptions=SimpleNamespace(RayError=ArithmeticError))
    with pytest.raises(ReceiptError, match="Nothing was released"):
        ray_runner._received(ray, None, job)


def test_a_final_run_alone_that_releases_nothing() -> None:
    """The trials were private; what would be handed out is not."""
    runs = []

    def lazy_at_last(point: tune.Hyperparameters, mu: float, receipt: Receipt) -> float:
        runs.append(mu)
        return (works if len(runs) <= 4 else idle)(point, mu, receipt)

    trainable, plan = sized(lazy_at_last), tune.plan(ONE, 2, size=1000)
    with pytest.raises(ReceiptError, match="Nothing was released"):
        tune.linear_scaling(trainable, BOX, ONE, ledger=Ledger("sqlite://"), subject="people", plan=plan)
    assert len(runs) == 5


def test_a_trial_that_loses_counts_as_well() -> None:
    """Repeat and select: one trial of a secret number released nothing, so nothing is returned."""
    runs = []

    def first_only(point: tune.Hyperparameters, mu: float, receipt: Receipt) -> float:
        runs.append(mu)
        return (idle if len(runs) == 1 else works)(point, mu, receipt)

    with pytest.raises(ReceiptError, match="Nothing was released"):
        tune.repeat_and_select(sized(first_only), BOX, ONE, ledger=Ledger("sqlite://"), subject="people")


def test_what_makes_a_receipt_used() -> None:
    ledger = Ledger("sqlite://")
    ledger.subject("people", ONE)
    receipt = ledger.charge("people", events.gaussian(100.0), stage="test")
    with pytest.raises(ReceiptError, match="not handed out"):
        check_used(receipt)
    mechanisms.gaussian_query(grid_sum(torch.ones(3), low=0.0, high=1.0), receipt)
    check_used(receipt)
