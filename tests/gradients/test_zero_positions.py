"""Positions without a gradient by structure are left out, with the same answer; others are not."""

from __future__ import annotations

import pytest
import torch
from oracle import check
from torch import Tensor, nn

from tacit.gradients import Engine
from tacit.gradients._recorder import Recorder


class Pooled(nn.Module):
    """Two layers over eight positions, of which some are used; `gate` opens another for rows that are very large."""

    def __init__(self, pool: str) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 4)
        self.pool = pool

    def forward(self, x: Tensor) -> Tensor:
        out = self.second(torch.nn.functional.gelu(self.norm(self.first(x))))
        if self.pool == "first":
            return out[:, 0]
        if self.pool == "two":
            return out[:, 2] * out[:, -1].cos()
        if self.pool == "mean":
            return out.mean(1)
        if self.pool == "gate":
            return out[:, 0] + out[:, 3] * torch.relu(x.sum((1, 2)) - 1e3)[:, None]
        largest = x.sum(2).argmax(1)
        return out[torch.arange(len(x)), largest]


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum(1)


LEFT = {"first": (0,), "two": (2, 7), "gate": (0,), "mean": tuple(range(8)), "largest": None}


@pytest.mark.parametrize("pool", LEFT)
def test_the_answer_is_that_of_every_row_by_itself(pool: str) -> None:
    torch.manual_seed(0)
    model, x = Pooled(pool).double(), torch.randn(6, 8, 5).double()
    if pool == "gate":
        x[[1, 4]] += 1e3  # where another position has a gradient: these rows are added one by one
    check(model, loss, x, units=[0, 0, 1, 2, 3, 3])
    check(model, loss, x, microbatch=4)


@pytest.mark.parametrize(("pool", "live"), LEFT.items())
def test_what_is_left_out_is_what_the_structure_says(pool: str, live: tuple[int, ...] | None) -> None:
    model, x = Pooled(pool), torch.randn(20, 8, 5)
    engine = Engine(model, loss, clip=1.0)
    engine(x)
    known = engine._plan.zeros.known
    assert known["first.weight", 8] == known["second.weight", 8] == live


def test_positions_are_left_out_of_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, int] = {}
    record = Recorder.record

    def watch(self: Recorder, target, piece) -> None:  # type: ignore[no-untyped-def]
        if hasattr(piece, "u"):
            seen[target.names[0]] = piece.u.shape[1]
        record(self, target, piece)

    engine = Engine(Pooled("first"), loss, clip=1.0)
    engine(torch.randn(20, 8, 5))
    monkeypatch.setattr(Recorder, "record", watch)
    engine(torch.randn(20, 8, 5))
    assert seen == {"first.weight": 1, "second.weight": 1}


def test_who_opens_another_position_changes_nothing_for_the_rest() -> None:
    torch.manual_seed(0)
    engine = Engine(Pooled("gate"), loss, clip=0.1)
    x = torch.randn(20, 8, 5)
    engine(x)
    large = x.clone()
    large[7] += 1e3
    silent = torch.arange(20) == 7
    rest, expected = (engine(given, mute=silent) for given in (large, x))
    for name, value in expected.sum.items():
        assert torch.equal(rest.sum[name], value), name
