"""Norms and sums at sizes where float32 loses digits: never too small, and never more than the bound."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tacit.gradients import Engine, clipped_sum
from tacit.gradients._norms import built_norms, ghost_square_norms, square_norms


@pytest.mark.parametrize(("entries", "value"), [(10**6, 3.0), (10**7, 0.1), (10**8, 1.0), (10**9, 0.1)])
def test_a_norm_of_many_entries_is_right(entries: int, value: float) -> None:
    values = torch.tensor([[value]]).expand(1, entries)
    true = entries * float(values[0, 0]) ** 2
    found = float(square_norms(values))
    assert true * (1 - 1e-12) <= found <= true * (1 + 5e-6)


def test_a_norm_of_many_drawn_entries_is_right() -> None:
    values = torch.rand(2, 5 * 10**6 + 7)
    true = values.double().square().sum(1)
    found = square_norms(values)
    assert bool((found >= true * (1 - 1e-12)).all())
    assert bool((found <= true * (1 + 5e-6)).all())


@pytest.mark.parametrize(("length", "width"), [(2, 65536), (700, 96), (64, 8192)])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.7])
def test_gram_sums_are_never_too_small(length: int, width: int, value: float) -> None:
    # Equal entries round the same way every time, which is the worst a long sum can do.
    u, v = torch.full((1, length, width), value), torch.full((1, length, 16), value)
    exact = float(u[0, 0, 0])
    true = (length * exact**2) ** 2 * width * 16
    found = float(ghost_square_norms(u, v))
    assert true * (1 - 1e-12) <= found <= true * (1 + 1e-3)


def whole(sums: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(v.double().square().sum()) for v in sums.values()))


def test_a_wide_layer_with_many_positions_stays_within_the_bound() -> None:
    torch.manual_seed(0)
    model = nn.Linear(2048, 2048, bias=False)
    rows = torch.rand(1, 1024, 2048)
    engine = Engine(model, lambda m, x: m(x).sum((1, 2)), clip=1.0)
    engine.validate(rows[:, :2])
    found = engine(rows)
    assert 1 - 1e-4 < whole(found.sum) <= 1.0


def test_a_tied_table_stays_within_the_bound() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(50257, 128)

        def forward(self, ids: Tensor) -> Tensor:
            return F.linear(self.table(ids), self.table.weight)

    torch.manual_seed(0)
    model = Tied()
    nn.init.uniform_(model.table.weight)
    found = clipped_sum(model, lambda m, x: m(x).sum((1, 2)), torch.arange(8)[None], clip=1.0)
    assert 1 - 1e-4 < whole(found.sum) <= 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("positions", [1, 6, 600])  # built, Gram matrices, built from factors
def test_a_large_sum_moves_by_one_bound_when_a_unit_comes(dtype: torch.dtype, positions: int) -> None:
    """Equal units round alike: in float32 the sum of 6,000 would be off by more than a unit's contribution."""
    torch.manual_seed(0)
    units = 6000 if positions == 1 else 500
    model = nn.Linear(24, 16).to(dtype)
    row = torch.rand(1, positions, 24).to(dtype)
    odd = -3 * torch.rand(1, positions, 24).to(dtype)
    engine = Engine(model, lambda m, x: m(x).square().sum((1, 2)), clip=1.0)
    before = engine(row.repeat(units, 1, 1))
    after = engine(torch.cat([row.repeat(units, 1, 1), odd]))
    alone = engine(odd.repeat(8, 1, 1))
    moved = {name: after.sum[name] - value for name, value in before.sum.items()}
    assert whole(moved) <= 1.0
    for name, value in alone.sum.items():
        assert float((moved[name] - value / 8).abs().max()) <= 1e-9


def test_the_norm_of_a_built_matrix_that_underflows_is_not_too_small() -> None:
    """A unit of 84 positions with clips down to 1e-39: where denormals are flushed it added 71 times the clip."""
    size, positions = 1e-19, 12 * 7
    u = torch.full((1, positions, 64), size)
    try:
        for flush in (False, True):
            torch.set_flush_denormal(flush)
            found, _ = built_norms(u, u, run=0)
            assert float(found) >= (size**2 * positions * 64) ** 2
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("length", [2, 64, 300])
@pytest.mark.parametrize("size", [1.0, 1e10])
def test_positions_cancel_no_further_than_the_bound_of_rounding_assumes(length: int, size: float) -> None:
    """k <= 650 in Lemma 10: the terms of a unit that adds nothing are at most so many clips long."""
    a, b = (torch.randn(1, length // 2, 4) * size for _ in range(2))
    u, v = torch.cat([a, -a], 1), torch.cat([b, b], 1)
    most = float((u.double().norm(dim=2) * v.double().norm(dim=2)).sum())
    for found in (ghost_square_norms(u, v), built_norms(u, v, run=0)[0]):
        assert most <= 650 * math.sqrt(float(found))
