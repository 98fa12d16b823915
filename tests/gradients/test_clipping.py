"""Clip policies against their formulas."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from oracle import assert_close, norm, unit_gradients
from torch import Tensor, nn

from tacit.gradients import (
    AdaptiveQuantile,
    Automatic,
    BatchClip,
    FilterByLoss,
    FilterByNorm,
    Flat,
    PerLayer,
    Policy,
    clipped_sum,
)

UNITS = [0, 1, 1, 2, 3, 3]


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


@pytest.fixture
def case() -> tuple[nn.Module, tuple[Tensor, Tensor], list[dict[str, Tensor]]]:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    batch = (torch.randn(6, 4).double() * 2, torch.randint(0, 3, (6,)))
    return model, batch, unit_gradients(model, loss, batch, UNITS)


def weighted(gradients: list[dict[str, Tensor]], factors: list[float]) -> dict[str, Tensor]:
    return {n: sum(f * g[n] for f, g in zip(factors, gradients, strict=True)) for n in gradients[0]}


def test_automatic(case) -> None:
    model, batch, gradients = case
    found = clipped_sum(model, loss, batch, clip=Automatic(0.5, stability=0.1), unit_ids=UNITS)
    assert_close(found.sum, weighted(gradients, [0.5 * (1 - 1e-5) / (float(norm(g)) + 0.1) for g in gradients]), 1e-10)
    assert found.bounds == {"gradient": 0.5}
    assert found.blocks == {"gradient": ("0.weight", "0.bias", "2.weight", "2.bias")}


def test_per_layer(case) -> None:
    model, batch, gradients = case
    found = clipped_sum(model, loss, batch, clip=PerLayer(0.2), unit_ids=UNITS)
    assert found.blocks == {"0": ("0.weight", "0.bias"), "2": ("2.weight", "2.bias")}
    assert found.bounds == pytest.approx({"0": 0.2 / math.sqrt(2), "2": 0.2 / math.sqrt(2)})
    for block, names in found.blocks.items():
        parts = [{n: g[n] for n in names} for g in gradients]
        factors = [min(1.0, found.bounds[block] * (1 - 1e-5) / float(norm(p))) for p in parts]
        assert_close({n: found.sum[n] for n in names}, weighted(parts, factors), 1e-10)
    named = clipped_sum(model, loss, batch, clip=PerLayer({"0": 1.0, "2": 3.0}), unit_ids=UNITS)
    assert named.bounds == {"0": 1.0, "2": 3.0}
    with pytest.raises(ValueError, match="No clip bound for the layers 2"):
        clipped_sum(model, loss, batch, clip=PerLayer({"0": 1.0}), unit_ids=UNITS)


@pytest.mark.parametrize("microbatch", [None, 3])
def test_adaptive_quantile(case, microbatch: int | None) -> None:
    model, batch, gradients = case
    norms = sorted(float(norm(g)) for g in gradients)
    policy = AdaptiveQuantile((norms[2] + norms[3]) / 2, quantile=0.5, rate=0.2)
    found = clipped_sum(model, loss, batch, clip=policy, unit_ids=UNITS, microbatch=microbatch)
    assert float(found.sum["count"]) == 3 * 0.5 - 0.5
    assert found.bounds == {"gradient": policy.bound, "count": 0.5}
    assert found.blocks["count"] == ("count",)
    after = policy.updated(float(found.sum["count"]), 4)
    assert after.bound == pytest.approx(policy.bound * math.exp(-0.2 * (0.75 - 0.5)))
    assert (after.quantile, after.rate) == (0.5, 0.2)


def test_adaptive_quantile_on_an_empty_batch_and_with_a_bad_row(case) -> None:
    model, (x, y), _ = case
    empty = clipped_sum(model, loss, (x[:0], y[:0]), clip=AdaptiveQuantile(1.0))
    assert float(empty.sum["count"]) == 0.0
    assert empty.bounds == {"gradient": 1.0, "count": 0.5}
    x[0, 0] = float("nan")
    assert float(clipped_sum(model, loss, (x, y), clip=AdaptiveQuantile(1e9)).sum["count"]) == 2.5


def test_adaptive_quantile_finds_the_quantile() -> None:
    policy = AdaptiveQuantile(0.01, quantile=0.8, rate=0.3)
    norms = torch.arange(1, 101).double()
    for _ in range(200):
        (values, bound) = policy.extra({"gradient": norms})["count"]
        assert bound == 0.5
        policy = policy.updated(float(values.sum()), 100)
    assert 78 <= policy.bound <= 82


def test_policies_without_bounds(case) -> None:
    model, batch, gradients = case
    norms = [float(norm(g)) for g in gradients]
    losses = mean_losses(loss(model, batch).detach())
    by_norm, by_loss = FilterByNorm(sorted(norms)[1] * 1.001), FilterByLoss(sorted(losses)[1] * 1.001)
    big, hard = [n > by_norm.threshold for n in norms], [v > by_loss.threshold for v in losses]
    cases: dict[Policy, list[bool]] = {
        by_norm: big,
        by_loss: hard,
        by_norm & by_loss: [a and b for a, b in zip(big, hard, strict=True)],
        by_norm | by_loss: [a or b for a, b in zip(big, hard, strict=True)],
    }
    for policy, dropped in cases.items():
        found = clipped_sum(model, loss, batch, clip=policy, unit_ids=UNITS)
        assert found.bounds == {}
        assert_close(found.sum, weighted(gradients, [0.0 if d else 1.0 for d in dropped]), 1e-10)


def test_batch_clip(case) -> None:
    model, batch, gradients = case
    total = weighted(gradients, [1.0] * 4)
    mean = float(norm(total)) / 4
    found = clipped_sum(model, loss, batch, clip=BatchClip(mean / 3), unit_ids=UNITS)
    assert found.bounds == {}
    assert_close(found.sum, {n: t / 3 for n, t in total.items()}, 1e-10)
    assert_close(clipped_sum(model, loss, batch, clip=BatchClip(mean * 3), unit_ids=UNITS).sum, total, 1e-10)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
def test_bounds_are_positive_numbers(bad: float) -> None:
    for policy in (Flat, Automatic, PerLayer, AdaptiveQuantile):
        with pytest.raises(ValueError, match="positive"):
            policy(bad)


def mean_losses(losses: Tensor) -> list[float]:
    return [
        float(torch.stack([v for v, u in zip(losses, UNITS, strict=True) if u == unit]).mean()) for unit in range(4)
    ]


@pytest.mark.parametrize("scalar", [np.float16(0.3), np.float32(0.3), torch.tensor(0.3, dtype=torch.float16)])
@pytest.mark.parametrize("policy", [Flat, Automatic, PerLayer, lambda bound: PerLayer({"gradient": bound})])
def test_a_bound_in_few_bits_keeps_its_margin(scalar: Any, policy: Any) -> None:
    """In 16 bits 1 - 1e-5 is 1: a unit would reach the bound itself, with nothing left for rounding."""
    made = policy(scalar)
    (bound,) = made.bounds({"gradient": ("weight",)}).values()
    (factors,) = made.factors({"gradient": torch.tensor([1e6], dtype=torch.float64)}, torch.zeros(1)).values()
    assert type(bound) is float
    assert float(factors[0]) * 1e6 <= bound * (1 - 0.9e-5)


@dataclass(frozen=True)
class Own(Policy):
    """Somebody's own policy, whose factors are of any type and shape."""

    make: Callable[[Tensor], Any]

    def bounds(self, blocks: dict[str, tuple[str, ...]]) -> dict[str, float]:
        return dict.fromkeys(blocks, 1.0)

    def factors(self, norms: Mapping[str, Tensor], losses: Tensor) -> dict[str, Any]:
        del losses
        return {block: self.make(norm) for block, norm in norms.items()}


@pytest.mark.parametrize("model", [nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))])
@pytest.mark.parametrize(
    "make",
    [
        lambda norm: norm.float() * 0 + 0.25,
        lambda norm: norm.half() * 0 + 0.25,
        lambda _: torch.tensor(0.25),
        lambda _: torch.tensor([0.25], dtype=torch.float64),
        lambda _: 0.25,
        lambda norm: torch.full((2 * len(norm),), 0.25, dtype=torch.float64)[::2],
    ],
)
def test_factors_of_ones_own_policy_are_numbers_whatever_their_type(model: nn.Module, make: Any) -> None:
    """Compiled kernels read one float64 for each unit: of others they would make other numbers, or read beyond them."""
    batch = (torch.randn(12, 4), torch.arange(12) % 3)
    found = clipped_sum(model, loss, batch, clip=Own(make))
    truth = clipped_sum(model, loss, batch, clip=Own(lambda norm: torch.full_like(norm, 0.25)))
    for name, value in truth.sum.items():
        assert torch.equal(found.sum[name], value)
        assert float(value.abs().max()) > 0
