"""Robustness of parameters: accuracy under noise by hand, weights put back, and rho of models whose rho is known."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from tacit.pretrain import rho, robust_accuracy, robustness
from tacit.pretrain._robustness import STDS, restored, under_noise


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(200, 3, generator=generator)
    return inputs, (inputs[:, 0] > 0).long()


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2)).train()


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("relative", [False, True])
def test_robust_accuracy_is_what_a_loop_by_hand_finds(
    model: nn.Module, data: tuple[Tensor, Tensor], relative: bool
) -> None:
    inputs, labels = data
    a, b, c, d = weights(model)
    generator = torch.Generator().manual_seed(5)
    found = []
    for _ in range(4):
        noisy = []
        for value in (a, b, c, d):
            size = math.sqrt(float((value**2).mean())) if relative else 1.0
            noisy.append(value + 0.4 * size * torch.randn(value.shape, generator=generator))
        scores = torch.relu(inputs @ noisy[0].T + noisy[1]) @ noisy[2].T + noisy[3]
        found.append(float((scores.argmax(1) == labels).float().mean()))
    told = under_noise(model, data, 0.4, relative=relative, draws=4, seed=5)
    assert told.accuracies == pytest.approx(found, abs=1e-6)
    assert told.mean == pytest.approx(sum(found) / 4, abs=1e-6)
    assert told.spread == pytest.approx(float(torch.tensor(found).std()), abs=1e-6)
    assert robust_accuracy(model, data, 0.4, relative=relative, draws=4, seed=5) == told.mean


def test_weights_and_mode_are_as_they_were(model: nn.Module, data: tuple[Tensor, Tensor]) -> None:
    before = weights(model)
    before_flags = [p.requires_grad for p in model.parameters()]
    found = robustness(model, data, draws=3, rows=4)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert [p.requires_grad for p in model.parameters()] == before_flags
    assert all(module.training for module in model.modules())
    assert found.under(0.1).std == STDS[0]
    assert found.under(math.sqrt(0.1)).std == STDS[1]  # the other reading of N(0, 0.1)
    assert len(found.under(0.2, relative=True).accuracies) == 3
    assert under_noise(model, data, 0.0, draws=2).accuracies == (found.clean, found.clean)
    with pytest.raises(ValueError, match="was not tried"):
        found.under(0.7)


class Fails(nn.Linear):
    """Falls over once its weights are noisy."""

    calls: Iterator[int]

    def forward(self, inputs: Tensor) -> Tensor:
        if next(self.calls) > 1:
            raise KeyboardInterrupt
        return super().forward(inputs)


def test_weights_come_back_after_an_interruption(data: tuple[Tensor, Tensor]) -> None:
    model = Fails(3, 2)
    model.calls = iter(range(100))
    before = weights(model)
    with pytest.raises(KeyboardInterrupt):
        robust_accuracy(model, data)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    with restored(model) as parts:
        parts[0].add_(1)
    assert torch.equal(model.weight, before[0])


def test_rho_of_a_linear_model_is_its_closed_form() -> None:
    """|dW x + db| <= |(x, 1)| |(dW, db)|, with equality where every row of (dW, db) points along (x, 1)."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    inputs = torch.randn(20, 4, dtype=torch.float64)
    closed = math.sqrt(float((inputs**2).sum(1).max()) + 1)
    found = rho(model, (inputs, torch.zeros(20, dtype=torch.long)), rows=20, directions=2)
    assert found.ascent == pytest.approx(closed, rel=1e-6)
    assert 0 < found.random < closed


def test_rho_of_a_deep_model_is_the_jacobians_norm() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    inputs = torch.randn(5, 3, dtype=torch.float64)
    largest = 0.0
    for row in inputs:
        lines = []
        for output in range(2):
            grads = torch.autograd.grad(model(row[None])[0, output], list(model.parameters()))
            lines.append(torch.cat([g.flatten() for g in grads]))
        largest = max(largest, float(torch.linalg.matrix_norm(torch.stack(lines), ord=2)))
    labels = torch.zeros(5, dtype=torch.long)
    found = rho(model, (inputs, labels), rows=5, directions=3, climbs=40, length=1e-5)
    assert found.ascent == pytest.approx(largest, rel=1e-3)


def test_what_is_refused(model: nn.Module, data: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(ValueError, match="standard deviation"):
        robust_accuracy(model, data, -0.1)
    with pytest.raises(ValueError, match="draws is at least 1"):
        robust_accuracy(model, data, draws=0)
    with pytest.raises(ValueError, match="two tensors"):
        robust_accuracy(model, data[0])
    with pytest.raises(ValueError, match="2 outputs"):
        robust_accuracy(model, (data[0], data[1] + 1))
