"""Entropies against the formulas written out, and their gradients against finite differences."""

import math
from collections.abc import Callable

import pytest
import torch
from obvious import belief_entropy, plain_entropy
from torch import Tensor

from tacit.adapt import entropy, opinion, opinion_as_printed


def logits(rows: int = 6, classes: int = 5, scale: float = 2.0) -> Tensor:
    return scale * torch.randn(rows, classes, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(function(x).sum(), x)[0]


def differences(function: Callable[[Tensor], float], x: Tensor, step: float = 1e-5) -> Tensor:
    """Central differences of a function of one row."""
    found = torch.zeros_like(x)
    for k in range(len(x)):
        shift = torch.zeros_like(x)
        shift[k] = step
        found[k] = (function(x + shift) - function(x - shift)) / (2 * step)
    return found


@pytest.mark.parametrize("classes", [2, 3, 7])
def test_entropy_is_the_sum_over_classes(classes: int) -> None:
    x = logits(classes=classes)
    expected = []
    for row in x.tolist():
        total = sum(math.exp(v) for v in row)
        expected.append(-sum(math.exp(v) / total * math.log(math.exp(v) / total) for v in row))
    assert entropy(x).tolist() == pytest.approx(expected, rel=1e-12)


def test_entropy_of_known_predictions() -> None:
    assert float(entropy(torch.zeros(1, 4))) == pytest.approx(math.log(4))
    half = torch.tensor([[0.0, 0.0, -1e4]])
    assert float(entropy(half)) == pytest.approx(math.log(2))


def test_entropy_gradient_is_that_of_the_formula() -> None:
    """dH/dx_k = -p_k (log p_k + H)."""
    x = logits()
    p = x.softmax(1)
    expected = -p * (p.log() + entropy(x)[:, None])
    torch.testing.assert_close(gradient(entropy, x), expected)


@pytest.mark.parametrize("classes", [2, 3, 7])
def test_opinion_is_the_entropy_of_beliefs_and_doubt(classes: int) -> None:
    for row, found in zip(logits(classes=classes).tolist(), opinion(logits(classes=classes)).tolist(), strict=True):
        total = sum(math.exp(v) for v in row) + classes
        beliefs, doubt = [math.exp(v) / total for v in row], classes / total
        assert sum(beliefs) + doubt == pytest.approx(1)
        assert found == pytest.approx(-sum(b * math.log(b) for b in beliefs) - doubt * math.log(doubt), rel=1e-12)


def test_opinion_gradient_holds_the_length_of_the_logits_fixed() -> None:
    x = logits()
    found = gradient(opinion, x)
    for row, own in zip(x, found, strict=True):
        length = row.norm()
        constant = lambda y, length=length: float(belief_entropy(y, length))  # noqa: E731
        torch.testing.assert_close(own, differences(constant, row), rtol=1e-7, atol=1e-9)
        free = differences(lambda y: float(belief_entropy(y, y.norm())), row)
        assert not torch.allclose(own, free, rtol=1e-2)  # the length does matter
        assert float(own @ row) == pytest.approx(0, abs=1e-12)  # no step along the logits


def as_printed(row: list[float]) -> float:
    """b = (e^x - 1) / S, u = K / S, S = sum e^x; b <= 0 and u >= 1 count as nothing."""
    total = sum(math.exp(v) for v in row)
    parts = [(math.exp(v) - 1) / total for v in row] + [len(row) / total]
    return -sum(part * math.log(part) for part in parts if 0 < part < 1)


def test_the_papers_form_with_its_guard() -> None:
    x = torch.cat([logits(), logits(scale=0.2), logits().abs(), -logits().abs()])
    assert opinion_as_printed(x).tolist() == pytest.approx([as_printed(row) for row in x.tolist()], rel=1e-10)


def test_the_papers_form_by_hand() -> None:
    """x = (1, 0, -1): S = 4.0862, b = (0.42051, 0, < 0), u = 3 / S = 0.73419."""
    s = math.e + 1 + 1 / math.e
    expected = -(math.e - 1) / s * math.log((math.e - 1) / s) - 3 / s * math.log(3 / s)
    assert expected == pytest.approx(0.59114, abs=1e-5)
    assert float(opinion_as_printed(torch.tensor([[1.0, 0.0, -1.0]]))) == pytest.approx(expected, rel=1e-6)


def test_the_papers_form_has_its_gradient_and_none_where_it_is_guarded() -> None:
    x = logits()
    for row, own in zip(x, gradient(opinion_as_printed, x), strict=True):
        length = row.norm()
        value = lambda y, length=length: as_printed((y / y.norm() * length).tolist())  # noqa: E731
        torch.testing.assert_close(own, differences(value, row), rtol=1e-6, atol=1e-8)
    guarded = -logits().abs() - 1  # every belief negative, doubt above one
    assert torch.equal(opinion_as_printed(guarded), torch.zeros(6, dtype=torch.float64))
    assert torch.equal(gradient(opinion_as_printed, guarded), torch.zeros_like(guarded))


@pytest.mark.parametrize("unsure", [entropy, opinion, opinion_as_printed])
@pytest.mark.parametrize("size", [100.0, 1e4, 1e18])
def test_large_logits_do_not_overflow(unsure: Callable[[Tensor], Tensor], size: float) -> None:
    x = size * torch.tensor([[1.0, -1.0, 0.5], [1.0, 1.0, -1.0], [-1.0, -1.0, -1.0]])
    assert torch.isfinite(unsure(x)).all()
    assert torch.isfinite(gradient(unsure, x)).all()
    assert float(entropy(x)[1]) == pytest.approx(math.log(2))


@pytest.mark.parametrize("unsure", [entropy, opinion, opinion_as_printed])
def test_logits_of_zero_have_a_gradient(unsure: Callable[[Tensor], Tensor]) -> None:
    assert torch.isfinite(gradient(unsure, torch.zeros(2, 4))).all()


def test_the_slow_formulas_agree_with_each_other() -> None:
    """The oracles of the other tests, against plain arithmetic."""
    row = logits(1)[0]
    p = row.softmax(0)
    assert float(plain_entropy(row)) == pytest.approx(float(-(p * p.log()).sum()))
    total = float(row.exp().sum()) + 5
    parts = [*(row.exp() / total).tolist(), 5 / total]
    assert float(belief_entropy(row)) == pytest.approx(-sum(b * math.log(b) for b in parts))
