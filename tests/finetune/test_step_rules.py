"""DP-AdamBC, DP-AdamW without its noise, and distance over gradients: as by hand, and what they are for."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from by_hand import SEED, gap, key, net, one_row_units, people, weights
from by_hand import clipped_sum as summed
from torch import Tensor, nn

from tacit.finetune import DPGD, DPSGD, AdpAlloc, Update, fit
from tacit.finetune import _updates as updates
from tacit.finetune._updates import Updater
from tacit.privacy import Ledger


def stepped(update: Update, gradients: list[Tensor], start: Tensor, noise: float = 0.0) -> Tensor:
    parameter = nn.Parameter(start.clone())
    updater = Updater(update, {"w": parameter}, len(gradients), noise=noise)
    for number, gradient in enumerate(gradients):
        updater.step({"w": gradient}, number)
    return parameter.detach()


def draws(count: int, size: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(count)]


@pytest.mark.parametrize("rule", ["adambc", "adambcw"])
def test_the_variance_of_the_noise_is_taken_off(rule: Any) -> None:
    gradients, start, noise, floor = draws(6), torch.ones(5, dtype=torch.float64), 0.7, 1e-3
    update = Update(rule=rule, lr=0.1, betas=(0.8, 0.9), weight_decay=0.05, floor=floor)
    found = stepped(update, gradients, start, noise)
    w, m, v = start.clone(), torch.zeros(5).double(), torch.zeros(5).double()
    for t, gradient in enumerate(gradients, 1):
        g = gradient if rule == "adambcw" else gradient + 0.05 * w
        w = w * (1 - 0.1 * 0.05) if rule == "adambcw" else w
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
        own = torch.clamp(v / (1 - 0.9**t) - noise**2, min=floor)
        w = w - 0.1 * (m / (1 - 0.8**t)) / own.sqrt()
    assert torch.allclose(found, w, atol=1e-12)


def test_without_noise_and_floor_it_is_adam() -> None:
    gradients, start = draws(6), torch.ones(5, dtype=torch.float64)
    ours = stepped(Update(rule="adambc", lr=0.1, floor=1e-30), gradients, start)
    assert torch.allclose(ours, stepped(Update(rule="adam", lr=0.1), gradients, start), atol=1e-6)


def test_noise_no_longer_makes_all_steps_alike() -> None:
    """Gradients of 1 and 0.1 under noise of 1: Adam steps ten times less for the small one, AdamBC about alike."""
    generator = torch.Generator().manual_seed(1)
    true = torch.tensor([1.0, 0.3], dtype=torch.float64)
    noisy = [true + torch.randn(2, generator=generator, dtype=torch.float64) for _ in range(4000)]
    start = torch.zeros(2, dtype=torch.float64)
    plain = stepped(Update(rule="adam", lr=0.001), noisy, start)
    ours = stepped(Update(rule="adambc", lr=0.001, floor=1e-2), noisy, start, noise=1.0)
    assert float(plain[0] / plain[1]) > 2.0
    assert float(ours[0] / ours[1]) < 1.6


def test_distance_over_gradients_is_as_by_hand() -> None:
    gradients, start = draws(8), torch.ones(5, dtype=torch.float64)
    found = stepped(Update(rule="dog", lr=1.0, reach=0.1), gradients, start)
    w, way, squares = start.clone(), 0.1, 0.0
    for g in gradients:
        squares += float(g.square().sum())
        way = max(way, float((w - start).norm()))
        w = w - way / math.sqrt(squares) * g
    assert torch.allclose(found, w, atol=1e-12)


def test_distance_over_gradients_finds_its_own_scale() -> None:
    """|w - 300| and |w - 0.03| with the same settings: both come near, which no one learning rate does in 300 steps."""
    for target in (300.0, 0.03):
        parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        updater = Updater(Update(rule="dog", lr=1.0, reach=1e-4 * target), {"w": parameter}, 400)
        for number in range(400):
            updater.step({"w": torch.sign(parameter.detach() - target)}, number)
        assert abs(float(parameter.detach()) - target) < 0.25 * target


def test_a_run_knows_its_noise() -> None:
    """The whole run by hand: the standard deviation is sigma * clip / size."""
    optimizer = DPGD(steps=3, clip=0.5, rule="adambc", lr=0.05, free_step=False, floor=1e-4)
    fitted = fit(
        net(), people(), optimizer=optimizer, epsilon=5.0, delta=1e-5, size=24, scheme="full", seed=SEED, head="keep"
    )
    model, units = net(), one_row_units(*people())
    sizes = [p.numel() for p in model.parameters()]
    noise = fitted.noise_multiplier * 0.5 / 24
    updater = Updater(optimizer.update, dict(model.named_parameters()), 3, noise=noise)
    for step in range(3):
        total = summed(model, units, 0.5)
        parts = torch.split(key().normals(step, sum(sizes)) * fitted.noise_multiplier * 0.5, sizes)
        drawn = zip(total, parts, strict=True)
        updater.step({n: (total[n] + part.view_as(total[n])) / 24 for n, part in drawn}, step)
    assert gap(weights(fitted.model), weights(model)) < 1e-3


def test_where_the_noise_is_not_one_number_it_is_refused() -> None:
    with pytest.raises(ValueError, match="goes with DPSGD and DPGD"):
        AdpAlloc(batch_size=5, steps=8, rule="adambc")
    with pytest.raises(ValueError, match="floor and reach"):
        Update(rule="dog", reach=0.0)


def test_parameters_one_by_one_and_together_have_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for few in (0, 4):
        monkeypatch.setattr(updates, "_FEW", few)
        torch.manual_seed(0)
        parameters = {"a": nn.Parameter(torch.randn(40, 7)), "b": nn.Parameter(torch.randn(40))}
        updater = updates.Updater(updates.Update(lr=0.3, momentum=0.9, weight_decay=0.01), parameters, 5)
        assert updater._optimizer.param_groups[0]["foreach"] is (few == 0)
        for step in range(5):
            updater.step({name: torch.randn(p.shape, dtype=torch.float64) for name, p in parameters.items()}, step)
        found.append([p.detach() for p in parameters.values()])
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("rule", "more", "said"),
    [
        ("adam", {"lr": 1e38}, r"lr is 1e\+38, a first step of 1e\+39, more than the weights' type"),
        ("sgd", {"weight_decay": 1e39}, r"weight_decay is 1e\+39, more than the weights' type"),
        ("adambc", {"floor": 1e39}, r"floor is 1e\+39, more than the weights' type"),
    ],
)
def test_what_the_first_step_would_fail_on_is_refused_before_the_charge(rule: Any, more: Any, said: str) -> None:
    model, ledger = nn.Sequential(nn.Identity(), nn.Linear(3, 2)), Ledger("sqlite://")
    rows = torch.randn(20, 3), torch.arange(20) % 2
    options: dict[str, Any] = {"epsilon": 5.0, "delta": 1e-5, "size": 20, "scheme": "full", "seed": SEED}
    with pytest.raises(ValueError, match=said):
        fit(model, rows, optimizer=DPSGD(batch_size=5, steps=3, rule=rule, **more), ledger=ledger, **options)
    assert not ledger.entries()


def test_a_long_step_is_no_error() -> None:
    """Of a run that is paid for: the way so far is what releases made it."""
    far = stepped(Update(rule="dog", lr=3e38), [torch.full((5,), 1e-3)] * 2, torch.ones(5))
    assert not far.isnan().any()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"rule": "sdg"}, "rule is one of sgd, adam, adamw, adambc, adambcw, dog, not 'sdg'"),
        ({"schedule": "cos"}, "schedule is one of constant, cosine, linear, debiased, not 'cos'"),
        ({"average": "mean"}, "average is one of none, ema, swa, not 'mean'"),
        ({"betas": (0.9, 1.0)}, r"betas are two numbers in \[0, 1\)"),
        ({"weight_decay": math.inf}, "weight_decay not negative"),
    ],
)
def test_a_name_that_is_none_is_not_taken_for_another(wrong: Any, said: str) -> None:
    """They used to train with AdamW, a linear schedule and the plain mean."""
    with pytest.raises(ValueError, match=said):
        Update(**wrong)
