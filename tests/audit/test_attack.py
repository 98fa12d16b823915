"""Attacks on a model in hand: what was learnt by heart is found, what was not is not."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tacit.audit import Membership, attack, canaries, exposure, invert


def loss(model: nn.Module, rows: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(rows[0]), rows[1], reduction="none")


def learnt(data: tuple[Tensor, Tensor], seed: int = 0, steps: int = 80) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 64), nn.ReLU(), nn.Linear(64, 3))
    before = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model, data).mean().backward()
        optimizer.step()
    return before, model


def people(seed: int) -> tuple[Tensor, Tensor]:
    made = canaries.images(60, (1, 6, 6), classes=3, seed=seed)
    return made.rows, made.labels


@pytest.mark.parametrize("method", ["loss", "gradient", "lira"])
def test_what_was_learnt_by_heart_is_found(method: str) -> None:
    before, after = learnt(people(0))
    shadows = [learnt(people(10 + i), seed=i)[1] for i in range(4)] if method == "lira" else []
    found = attack(after, people(0), people(1), loss=loss, before=before, method=method, shadows=shadows)  # type: ignore[arg-type]
    assert found.auroc > (0.65 if method == "gradient" else 0.8)  # many steps: gradients were those of the first
    assert found.found_at(0.1) > 0.2
    assert f"AUROC {found.auroc:.3f}" in str(found)


@pytest.mark.parametrize("method", ["loss", "gradient", "lira"])
def test_strangers_are_alike(method: str) -> None:
    """60 against 60 that are alike: the area is 0.5 within 5.5 standard errors (0.054 each)."""
    before, after = learnt(people(0))
    shadows = [learnt(people(10 + i), seed=i)[1] for i in range(3)]
    found = attack(after, people(2), people(3), loss=loss, before=before, method=method, shadows=shadows)  # type: ignore[arg-type]
    assert found.error == pytest.approx(math.sqrt(121 / (12 * 3600)))
    assert abs(found.auroc - 0.5) < 5.5 * found.error


def test_attacks_that_miss_something_are_refused() -> None:
    _, after = learnt(people(0), steps=1)
    for method, message in (
        ("gradient", "needs before="),
        ("lira", "shadow models"),
        ("magic", "loss, gradient or lira"),
    ):
        with pytest.raises(ValueError, match=message):
            attack(after, people(0), people(1), loss=loss, method=method)  # type: ignore[arg-type]


def test_the_gradient_of_one_row_is_the_row() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3))
    rows, labels = people(4)
    loss(model, (rows[:1], labels[:1])).sum().backward()
    gradient = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert torch.allclose(invert(gradient, (1, 6, 6)), rows[0].double(), atol=1e-5)
    with pytest.raises(ValueError, match="first layer"):
        invert({"0.weight": torch.zeros(2, 2)}, (1, 6, 6))


def test_two_attacks_as_one() -> None:
    one = Membership(name="a", inside=np.array([1.0]), outside=np.array([0.0]))
    assert one.together(Membership(name="b", inside=np.array([0.0]), outside=np.array([1.0]))).auroc == 0.5


def test_published_and_clipped_leak_and_private_does_not(tmp_path: object) -> None:
    """32 members, 32 others: a standard error of 0.073; the published form is far above chance, DP is not.

    LiRA on two nets has 120 members and 120 others: 0.037. The forms without noise are deterministic.
    """
    found = exposure(episodes=8, models=2)
    error = found.members["DP"].error
    assert found.members["as published"].auroc > 0.65
    assert found.members["clip only"].auroc > 0.65
    assert abs(found.members["DP"].auroc - 0.5) < 5.5 * error
    assert found.trained_on["as published"].auroc > 0.75
    assert found.trained_on["clip only"].auroc > 0.75
    assert abs(found.trained_on["DP"].auroc - 0.5) < 5.5 * found.trained_on["DP"].error + 0.05  # 0.05: epsilon is not 0
    assert found.correlation("as published") > 0.99
    assert found.correlation("clip only") > 0.99
    assert abs(found.correlation("DP")) < 5.5 / math.sqrt(784)
    found.picture(f"{tmp_path}/exposure.png")
    assert "DP, epsilon 1: stream: Tent: AUROC" in str(found)
