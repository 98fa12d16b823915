"""Optuna's samplers on private trials: what they see, what is charged, and how it ends."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any

import optuna
import pytest
import torch
from made_up import DRY, Hill, breaks, half, works
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.trial import TrialState
from torch import nn

from tacit import tune
from tacit.finetune import DPSGD
from tacit.privacy import Budget, Ledger, mu_of
from tacit.privacy.events import from_json, gaussian, gaussian_noise
from tacit.tune._optuna_trials import distributions

BOX = tune.Space(lr=(0.01, 10.0), steps=(1, 9))
ONE = Budget(1.0, 1e-5)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    yield
    optuna.logging.set_verbosity(before)


def study(seed: int = 0) -> optuna.Study:
    return optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=3))


def mus(ledger: Ledger) -> list[float]:
    bodies = [entry.body for entry in ledger.entries("people") if entry.kind == "charge"]
    return [1 / noise for body in bodies if (noise := gaussian_noise(from_json(body["event"]))) is not None]


def test_the_box_as_optuna_has_it() -> None:
    box = tune.Space(lr=(0.01, 10.0), steps=(1, 9), batch_size=(16, 64), clip=(0.5, 0.5))
    assert distributions(box) == {
        "lr": FloatDistribution(0.01, 10.0, log=True),
        "steps": IntDistribution(1, 9, log=True),
        "batch_size": IntDistribution(16, 64, log=True),
        "clip": FloatDistribution(0.5, 0.5, log=True),
    }


def test_every_trial_is_charged_and_the_study_sees_released_scores_alone() -> None:
    ledger, hill, led = Ledger("sqlite://"), Hill(size=100_000), study()
    found = tune.optuna_search(led, hill, BOX, ONE, trials=6, ledger=ledger, subject="people")
    assert len(mus(ledger)) == 12
    total = math.sqrt(sum(mu**2 for mu in mus(ledger)))
    assert mu_of(1.0, 1e-5) * (1 - 1e-8) < total <= mu_of(1.0, 1e-5)
    assert found.guarantee.epsilon <= 1.0
    assert [trial.value for trial in led.trials] == [trial.score for trial in found.trials]
    assert [trial.params["lr"] for trial in led.trials] == [point.lr for point, _ in hill.seen]
    assert [trial.user_attrs["receipt"] for trial in led.trials] == [trial.receipt for trial in found.trials]
    assert {trial.user_attrs["mu"] for trial in led.trials} == {mu for _, mu in hill.seen}
    best = max(found.trials, key=lambda trial: trial.score)
    assert led.best_params == {"lr": best.hyperparameters.lr, "steps": best.hyperparameters.steps}
    assert found.hyperparameters == best.hyperparameters
    assert found.model == pytest.approx(best.score, abs=0.06)  # six standard deviations
    assert found.model != best.score  # which was not told without its noise
    assert all(trial.model is None for trial in found.trials)


def test_trials_that_fail_are_charged_and_told_as_failed() -> None:
    ledger, led = Ledger("sqlite://"), study()
    with pytest.raises(tune.RunFailed, match="All 3 trials failed") as failed:  # of 9: the rest is kept
        tune.optuna_search(led, breaks, BOX, ONE, trials=9, ledger=ledger, subject="people", score=half, size=10_000)
    assert [trial.state for trial in led.trials] == [TrialState.FAIL] * 3
    assert len(mus(ledger)) == 6
    assert failed.value.result is not None
    assert failed.value.result.decisions[0] == "Stopped after 3 of 9 trials: all have failed."
    assert "patient" not in str(failed.value) + repr(failed.value.result) + str(led.trials)


def test_a_search_ends_where_the_budget_does() -> None:
    """Five trials are wanted, and the budget was shared by two."""
    ledger, led = Ledger("sqlite://"), study()
    found = tune.optuna_search(led, Hill(), BOX, Budget(2.0, 1e-5), trials=5, of=2, ledger=ledger, subject="people")
    assert [trial.state for trial in led.trials] == [TrialState.COMPLETE] * 2 + [TrialState.FAIL]
    assert found.decisions == ("Stopped after 2 of 5 trials: people has nothing left for another.",)
    assert len(found.trials) == 2
    assert found.model is not None
    assert found.guarantee.epsilon <= 2.0
    with pytest.raises(tune.RunFailed, match="No trial was run"):
        tune.optuna_search(led, Hill(), BOX, Budget(2.0, 1e-5), trials=1, ledger=ledger, subject="people")
    assert len(mus(ledger)) == 4


def test_several_searches_share_a_study_a_ledger_and_a_budget() -> None:
    ledger, led = Ledger("sqlite://"), study()
    for trials in (1, 3):
        tune.optuna_search(led, Hill(), BOX, ONE, trials=trials, of=4, ledger=ledger, subject="people", scores=0.4)
    assert [trial.state for trial in led.trials] == [TrialState.COMPLETE] * 4
    assert math.sqrt(sum(mu**2 for mu in mus(ledger))) == pytest.approx(mu_of(1.0, 1e-5), rel=1e-8)


def test_an_interrupted_trial_is_not_left_open() -> None:
    def interrupted(point: Any, mu: float, receipt: Any) -> float:
        if receipt.stage == DRY:
            return works(point, mu, receipt)
        raise KeyboardInterrupt

    led = study()
    with pytest.raises(KeyboardInterrupt):
        tune.optuna_search(
            led, interrupted, BOX, ONE, trials=2, ledger=Ledger("sqlite://"), subject="people", score=half, size=10_000
        )
    assert [trial.state for trial in led.trials] == [TrialState.FAIL]


def test_progress_counts_trials_and_what_they_spent() -> None:
    told: list[tuple[Any, ...]] = []
    tune.optuna_search(
        study(),
        Hill(),
        BOX,
        ONE,
        trials=2,
        scores=0.3,
        ledger=Ledger("sqlite://"),
        subject="people",
        progress=lambda what, done, of, *, spent: told.append((what, done, of, spent)),
    )
    assert [(what, done, of) for what, done, of, _ in told] == [("optuna", n, 2) for n in (0, 1, 1, 2)]
    assert told[-1][3] == (pytest.approx(1.0), 1.0)


def test_what_cannot_be_is_refused_before_anything_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger("sqlite://")
    inputs = torch.randn(40, 4)
    sampled = tune.Finetuning(
        nn.Sequential(nn.Identity(), nn.Linear(4, 2)),
        (inputs, (inputs[:, 0] > 0).long()),
        size=40,
        optimizer=lambda point: DPSGD(lr=point.lr, steps=point.steps, batch_size=10),
    )
    for led, trainable, words in (
        (optuna.create_study(), Hill(), "direction='maximize'"),
        (optuna.create_study(directions=["maximize", "maximize"]), Hill(), "direction='maximize'"),
        (study(), sampled, "fixed in advance"),
        (study(), works, "Give score="),
    ):
        with pytest.raises(ValueError, match=words):
            tune.optuna_search(led, trainable, BOX, ONE, trials=2, ledger=ledger, subject="people")
    assert ledger.entries() == []
    led = study()
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ValueError, match=r"Optuna is not installed: pip install 'tacit\[optuna\]'"):
        tune.optuna_search(led, Hill(), BOX, ONE, trials=2, ledger=ledger, subject="people")


def test_a_subject_that_has_spent_before_pays_for_fewer() -> None:
    ledger = Ledger("sqlite://")
    ledger.subject("people", ONE)
    ledger.charge("people", gaussian(1 / (0.8 * mu_of(1.0, 1e-5))), stage="finetune")
    found = tune.optuna_search(study(), Hill(), BOX, ONE, trials=4, ledger=ledger, subject="people", scores=0.3)
    assert len(found.trials) == 1
    assert found.guarantee.epsilon <= 1.0
