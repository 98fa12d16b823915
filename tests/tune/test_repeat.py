"""Repeat and select: what it charges, what it hides, and who wins."""

from __future__ import annotations

import logging
import math
import sys
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from made_up import DRY, Hill, breaks, half, works
from torch import Tensor, nn

from tacit import tune
from tacit.finetune import DPSGD
from tacit.privacy import Budget, Ledger, Neighbours, Receipt, UnsupportedEvent, guarantee
from tacit.privacy.events import compose, from_json, gaussian, gaussian_noise

BOX = tune.Space(lr=(0.01, 10.0), steps=(1, 9))
ONE = Budget(1.0, 1e-5)


def winner_epsilon(mu: float, mean: float, shape: float, delta: float) -> float:
    """Theorem 2 of Papernot & Steinke for a Gaussian of mu, over a dense grid of orders, and the usual conversion."""
    low, high = 1e-12, 1 - 1e-12
    for _ in range(200):  # the halting probability whose mean number of trials is `mean`
        gamma = (low + high) / 2
        now = shape * (1 - gamma) / (gamma * (1 - gamma**shape)) if shape else (1 / gamma - 1) / math.log(1 / gamma)
        low, high = (gamma, high) if now > mean else (low, gamma)
    orders = [1 + 1.01**k for k in range(-400, 900)]
    second = min((1 - 1 / o) * o * mu**2 / 2 + math.log(1 / gamma) / o for o in orders)
    found = (
        o * mu**2 / 2
        + (1 + shape) * second
        + math.log(mean) / (o - 1)
        + math.log1p(-1 / o)
        - math.log(delta * o) / (o - 1)
        for o in orders
    )
    return min(found)


@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("mean", [2.0, 10.0])
def test_one_trial_gets_the_most_that_the_theorem_allows(mean: float, shape: float) -> None:
    plan = tune.plan_repeats(Hill(), BOX, ONE, mean=mean, shape=shape)
    one = gaussian_noise(compose([plan.training, plan.score]))
    assert one is not None
    exact = winner_epsilon(1 / one, mean, shape, 1e-5)
    assert 0.97 < exact <= 1.0  # our orders are fewer, so ours is never less
    assert 0.9998 < guarantee(plan.event, delta=1e-5).epsilon <= 1.0


@pytest.mark.parametrize("neighbours", list(Neighbours))
@pytest.mark.parametrize("shape", [1.0, math.inf])
def test_the_search_is_one_charge_within_the_budget(shape: float, neighbours: Neighbours) -> None:
    ledger = Ledger("sqlite://")
    found = tune.repeat_and_select(
        Hill(), BOX, ONE, ledger=ledger, subject="people", mean=16, shape=shape, neighbours=neighbours
    )
    entries = ledger.entries("people")
    assert [entry.kind for entry in entries] == ["subject", "charge"]
    event = from_json(entries[1].body["event"])
    assert (event.mean, event.shape) == (16.0, shape)  # no trial at all: below 2e-7
    assert found.guarantee.epsilon == pytest.approx(1.0, rel=3e-4)
    assert found.guarantee.epsilon <= 1.0
    assert found.trials == ()
    assert found.final_run_guarantee is not None
    assert found.final_run_guarantee.epsilon < 0.8


class Loud(Hill):
    """A trainable that tells on itself in every way it can."""

    def __call__(self, hyperparameters: tune.Hyperparameters, mu: float, receipt: Receipt) -> float:
        print("training")
        print("training", file=sys.stderr)
        warnings.warn("training", stacklevel=1)
        logging.getLogger("loud").error("training")
        return super().__call__(hyperparameters, mu, receipt)


def test_nothing_tells_how_many_trials_there_were(capfd: pytest.CaptureFixture[str]) -> None:
    numbers, seen = set(), set()
    for seed in range(8):
        ledger, told = Ledger("sqlite://"), []
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            found = tune.repeat_and_select(
                Loud(),
                BOX,
                ONE,
                ledger=ledger,
                subject="people",
                mean=6,
                seed=seed,
                curator=lambda event, told=told: told.append((event.trial, event.error)),
            )
        numbers.add(len(told))
        text = repr(found).replace(repr(found.hyperparameters), "POINT")
        entries = [(entry.kind, sorted(entry.body), entry.body.get("event")) for entry in ledger.entries()]
        seen.add((text, str(entries), len(warned), "".join(capfd.readouterr())))
        assert not told[0][1]
    assert len(numbers) > 3  # they did differ
    assert len(seen) == 1
    assert seen.pop()[2:] == (0, "")
    assert logging.root.manager.disable == 0


def test_the_best_released_score_wins() -> None:
    for seed in range(3):
        told: list[tune.Trial] = []
        found = tune.repeat_and_select(
            Hill(size=100_000),
            BOX,
            ONE,
            ledger=Ledger("sqlite://"),
            subject="people",
            seed=seed,
            curator=lambda event, told=told: told.append(event.trial),
        )
        best = max(told, key=lambda trial: trial.score)
        assert found.hyperparameters == best.hyperparameters
        assert best.score == pytest.approx(found.model, abs=0.1)


def test_settings_are_spread_over_the_box() -> None:
    told: list[tune.Trial] = []
    for seed in range(20):
        tune.repeat_and_select(
            works,
            BOX,
            ONE,
            ledger=Ledger("sqlite://"),
            subject="people",
            score=half,
            size=10_000,
            seed=seed,
            curator=lambda event: told.append(event.trial),
        )
    lrs = [trial.hyperparameters.lr for trial in told]
    assert len(set(lrs)) == len(lrs) > 50
    assert 0.01 <= min(lrs) < 0.05
    assert 2.0 < max(lrs) <= 10.0
    assert {trial.hyperparameters.steps for trial in told} == set(range(1, 10))


class Picky:
    """Fails where the learning rate is above 0.3, and keeps its receipts."""

    size = 10_000

    def __init__(self) -> None:
        self.receipts: list[Receipt] = []

    def __call__(self, hyperparameters: tune.Hyperparameters, mu: float, receipt: Receipt) -> float:
        if receipt.stage != DRY:
            self.receipts.append(receipt)
        return works(hyperparameters, mu, receipt) if hyperparameters.lr < 0.3 else breaks(hyperparameters, mu, receipt)

    def score(self, model: float) -> Tensor:
        return half(model)


def test_a_trial_that_fails_loses_and_keeps_its_words(capfd: pytest.CaptureFixture[str]) -> None:
    for seed in range(5):
        picky, told = Picky(), []
        search = partial(
            tune.repeat_and_select,
            picky,
            BOX,
            ONE,
            ledger=Ledger("sqlite://"),
            subject="people",
            seed=seed,
            mean=20,
            curator=lambda event, told=told: told.append(event.trial),
        )
        try:
            found = search()
        except tune.RunFailed:
            assert all(trial.failed for trial in told)
        else:
            assert found.hyperparameters is not None
            assert found.hyperparameters.lr < 0.3
            assert "patient" not in repr(found)
        assert picky.receipts
        assert not any(receipt.live for receipt in picky.receipts)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("shape", [1.0, math.inf])
def test_without_a_winner_there_is_no_model(shape: float) -> None:
    """All trials have failed, or (Poisson) there may have been none: the result does not say which."""
    results = set()
    for seed in range(5):
        with pytest.raises(tune.RunFailed, match="No trial has won") as failed:
            tune.repeat_and_select(
                breaks,
                BOX,
                ONE,
                ledger=Ledger("sqlite://"),
                subject="people",
                score=half,
                size=10_000,
                mean=1,
                shape=shape,
                seed=seed,
            )
        results.add(str(failed.value) + repr(failed.value.result))
    assert len(results) == 1


def test_subjects_that_can_and_cannot_pay() -> None:
    ledger = Ledger("sqlite://")
    event, final = tune.plan_repeats(Hill(), BOX, ONE, mean=3).event, gaussian(5.0, 4)
    ledger.subject("planned", Budget(3.0, 1e-5), plan=[event, final])
    ledger.subject("renyi", Budget(2.0, 1e-5), mode="renyi")
    ledger.subject("gaussian", ONE)
    ledger.subject("patients", ONE, unit="patient", plan=[event])
    for name in ("planned", "renyi"):
        tune.repeat_and_select(Hill(), BOX, ONE, ledger=ledger, subject=name, mean=3)
        assert ledger.spent(name).epsilon > 0.5
    with pytest.raises(UnsupportedEvent, match="the renyi or the plan mode"):
        tune.repeat_and_select(Hill(), BOX, ONE, ledger=ledger, subject="gaussian", mean=3)
    with pytest.raises(ValueError, match="the terms must agree"):
        tune.repeat_and_select(Hill(), BOX, ONE, ledger=ledger, subject="patients", mean=3)
    assert [entry.kind for entry in ledger.entries("gaussian")] == ["subject"]


# Fine-tuning


def rows(size: int = 400) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    inputs = torch.randn(size, 4)
    return inputs, (inputs[:, 0] > 0).long()


def test_fine_tuning_runs_on_a_trials_receipt_and_neither_settles_nor_leases() -> None:
    ledger, told = Ledger("sqlite://"), []
    tuned = tune.Finetuning(nn.Sequential(nn.Identity(), nn.Linear(4, 2)), rows(2000), size=2000, measure="accuracy")
    found = tune.repeat_and_select(
        tuned,
        tune.Space(lr=(0.1, 1.0), steps=(2, 8)),
        Budget(8.0, 1e-5),
        ledger=ledger,
        subject="people",
        mean=2,
        seed=1,
        curator=lambda event: told.append(event.error),
    )
    assert set(told) == {""}
    assert isinstance(found.model, nn.Module)
    assert [entry.kind for entry in ledger.entries()] == ["subject", "charge"]
    assert float(tuned.score(found.model).mean()) > 0.8


def poisson(point: tune.Hyperparameters) -> Any:
    return DPSGD(lr=point.lr, steps=point.steps, batch_size=200)


def test_batches_drawn_by_chance_need_fixed_steps() -> None:
    ledger, told = Ledger("sqlite://"), []
    tuned = tune.Finetuning(nn.Sequential(nn.Identity(), nn.Linear(4, 2)), rows(), size=400, optimizer=poisson)
    budget = Budget(8.0, 1e-5)
    with pytest.raises(ValueError, match="fix steps and batch"):
        tune.repeat_and_select(tuned, tune.Space(lr=(0.1, 1.0), steps=(2, 8)), budget, ledger=ledger, subject="people")
    assert ledger.entries() == []
    found = tune.repeat_and_select(
        tuned,
        tune.Space(lr=(0.1, 1.0), steps=(4, 4)),
        budget,
        ledger=ledger,
        subject="people",
        mean=2,
        curator=lambda event: told.append(event.error),
    )
    assert set(told) == {""}
    assert 7.9 < found.guarantee.epsilon <= 8.0
