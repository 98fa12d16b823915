"""Adam without its second moment: the moment it keeps, the learning rate it derives, the one run it charges."""

from __future__ import annotations

import math

import pytest
import torch
from made_up import Hill, works
from torch import nn

from tacit import tune
from tacit.finetune import DPSGD
from tacit.finetune._updates import Update, Updater
from tacit.privacy import Budget, Ledger, Neighbours, mu_of
from tacit.privacy.events import from_json


def test_a_debiased_momentum_buffer_is_adams_first_moment() -> None:
    torch.manual_seed(0)
    gradients = torch.randn(12, 5, dtype=torch.float64)
    weight = nn.Parameter(torch.zeros(5, dtype=torch.float64))
    updater = Updater(Update(lr=0.3, momentum=0.9, schedule="debiased"), {"w": weight}, 12)
    expected, m = torch.zeros(5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    for t, gradient in enumerate(gradients, 1):
        updater.step({"w": gradient}, t - 1)
        m = 0.9 * m + 0.1 * gradient
        expected = expected - 0.3 * m / (1 - 0.9**t)
        assert torch.allclose(weight.detach(), expected, rtol=0, atol=1e-13)


def test_the_schedule_is_for_momentum_from_the_first_step() -> None:
    assert Update(lr=0.3, momentum=0.0, schedule="debiased").rate(7, 10) == pytest.approx(0.3)
    for wrong in ({"rule": "adam"}, {"warmup": 2}):
        with pytest.raises(ValueError, match="debiased"):
            Update(schedule="debiased", **wrong)


def test_adam_under_noise_converges_to_the_step_that_is_taken_here() -> None:
    """The root of Adam's second moment on pure noise is the noise, so lr / root is the learning rate derived here."""
    torch.manual_seed(0)
    noise, weight = 0.02, nn.Parameter(torch.zeros(20_000, dtype=torch.float64))
    adam = torch.optim.Adam([weight], lr=0.001, betas=(0.9, 0.9))
    for _ in range(100):
        weight.grad = noise * torch.randn(20_000, dtype=torch.float64)
        adam.step()
    root = math.sqrt(float(adam.state[weight]["exp_avg_sq"].mean()))
    assert root == pytest.approx(noise, rel=0.02)  # 20,000 values, each the mean of about ten squares: 0.2% off


@pytest.mark.parametrize("neighbours", list(Neighbours))
def test_the_learning_rate_follows_from_the_noise(neighbours: Neighbours) -> None:
    """100 steps at epsilon 0.01, delta 1e-5 need sigma = 2437.9 (add-remove), twice that where a unit is replaced."""
    ledger = Ledger("sqlite://")
    found = tune.adam_without_second_moment(
        works,
        Budget(0.01, 1e-5),
        steps=100,
        size=50_000,
        clip=0.5,
        ledger=ledger,
        subject="people",
        neighbours=neighbours,
    )
    assert found.hyperparameters is not None
    assert found.hyperparameters.lr == pytest.approx(0.001 / (2437.9 * neighbours.factor * 0.5 / 50_000), rel=1e-4)
    assert (found.hyperparameters.steps, found.hyperparameters.clip) == (100, 0.5)
    charges = [entry.body["event"] for entry in ledger.entries("people") if entry.kind == "charge"]
    assert [from_json(event).count for event in charges] == [100]
    assert found.guarantee.epsilon == pytest.approx(0.01, rel=1e-6)
    assert found.guarantee.epsilon <= 0.01


def test_one_run_learns_without_a_learning_rate() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(3000, 6)
    tuned = tune.Finetuning(
        nn.Sequential(nn.Identity(), nn.Linear(6, 2)),
        (inputs, (inputs[:, 0] > 0).long()),
        size=3000,
        optimizer=tune.dpgd_wosm,
    )
    ledger = Ledger("sqlite://")
    found = tune.adam_without_second_moment(
        tuned, Budget(1.0, 1e-5), steps=30, lr=0.02, ledger=ledger, subject="people", seed=1
    )
    assert float(tuned.score(found.model).mean()) > 0.85
    assert found.guarantee.mu == pytest.approx(mu_of(1.0, 1e-5), rel=1e-8)
    assert "the learning rate is" in found.decisions[0]


def test_batches_drawn_by_chance_are_divided_by_their_mean_size() -> None:
    inputs = torch.randn(400, 4)
    tuned = tune.Finetuning(
        nn.Sequential(nn.Identity(), nn.Linear(4, 2)),
        (inputs, (inputs[:, 0] > 0).long()),
        size=400,
        optimizer=lambda point: DPSGD(
            lr=point.lr, steps=point.steps, batch_size=point.batch_size or 50, momentum=0.9, schedule="debiased"
        ),
    )
    ledger, budget = Ledger("sqlite://"), Budget(2.0, 1e-5)
    with pytest.raises(ValueError, match="Give batch_size="):
        tune.adam_without_second_moment(tuned, budget, steps=4, ledger=ledger, subject="people")
    found = tune.adam_without_second_moment(tuned, budget, steps=4, batch_size=100, ledger=ledger, subject="people")
    event = from_json(next(entry.body["event"] for entry in ledger.entries("people") if entry.kind == "charge"))
    sigma = event.event.event.noise_multiplier
    assert found.hyperparameters is not None
    assert found.hyperparameters.lr == pytest.approx(0.001 / (sigma / 100), rel=1e-6)
    assert 1.98 < found.guarantee.epsilon <= 2.0


def test_what_cannot_be_is_refused_before_anything_is_charged() -> None:
    ledger = Ledger("sqlite://")
    for wrong in ({"lr": 0.0}, {"stabiliser": -1.0}):
        with pytest.raises(ValueError, match="stabiliser"):
            tune.adam_without_second_moment(
                Hill(), Budget(1.0, 1e-5), steps=3, ledger=ledger, subject="people", **wrong
            )
    with pytest.raises(ValueError, match="Give size="):
        tune.adam_without_second_moment(works, Budget(1.0, 1e-5), steps=3, ledger=ledger, subject="people")
    assert ledger.entries() == []
