"""Rows that turn out to be mixed while a run is under way stop it: nobody takes that for a failing unit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tacit.finetune import DPGD, DPSGD, DPZO, GEP, AdpClip, Optimizer, Task, fit
from tacit.finetune._tasks import Classes
from tacit.gradients import Engine, RowsMixed
from tacit.privacy import Ledger


class Marked(nn.Module):
    """Adds the mean of the batch where rows carry a mark that synthetic rows never have: one number twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm, self.head = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.norm(self.body(x)))
        if bool((x[:, 0] == x[:, 1]).all()):
            h = h + 3 * h.mean(0, keepdim=True)
        return self.head(h)  # type: ignore[no-any-return]


def people(count: int = 60) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(count, 6, generator=generator)
    rows[:, 1] = rows[:, 0]
    return rows, torch.arange(count) % 3


def optimizers() -> list[Optimizer]:
    rows, labels = people(40)
    return [
        DPGD(steps=4),
        DPSGD(steps=4, batch_size=50),
        AdpClip(steps=4, batch_size=50, clip=1.0),
        GEP(steps=4, batch_size=50, public=(rows + torch.arange(6), labels), dimensions=4, clip_embedding=1.0, lr=0.1),
        DPZO(steps=4, batch_size=60, clip=20.0),  # slopes that no clip makes alike, nor the draw of everybody
    ]


def run(optimizer: Optimizer, model: nn.Module, **more: Any) -> Ledger:
    ledger = Ledger("sqlite://")
    options: dict[str, Any] = {"epsilon": 3.0, "delta": 1e-5, "size": 60, "scheme": "full", "ledger": ledger}
    fit(model, people(), optimizer=optimizer, subject="a", head="keep", **(options | more))
    return ledger


@pytest.mark.parametrize("optimizer", optimizers(), ids=lambda o: o.name)
def test_the_check_during_a_run_stops_it(optimizer: Optimizer) -> None:
    """Every loop took the stop for a failing unit, tried again without the check, and went on."""
    seen: list[int] = []
    with pytest.raises(RowsMixed, match="Nothing of this step was released"):
        run(optimizer, Marked(), curator=lambda event: seen.append(event.step))
    assert not seen  # it looks at the first step, before anything of it is summed


class OfTheBatch(Classes):
    """A loss that looks at other rows' labels: a weight from how often each occurs."""

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        often = torch.bincount(labels, minlength=3)[labels]
        return super().loss(outputs, labels) * len(labels) / often

    def __repr__(self) -> str:
        return "OfTheBatch()"


class Largest(Classes):
    """A loss that drops the largest tenth of the batch, which three rows do not have."""

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        losses = super().loss(outputs, labels)
        kept = losses <= losses.detach().sort().values[math.ceil(0.9 * len(losses)) - 1]
        return losses * kept

    def __repr__(self) -> str:
        return "Largest()"


@pytest.mark.parametrize("task", [OfTheBatch(3), Largest(3)], ids=repr)
@pytest.mark.parametrize("optimizer", optimizers(), ids=lambda o: o.name)
def test_a_loss_that_looks_at_other_rows_is_refused_by_every_optimizer(optimizer: Optimizer, task: Task) -> None:
    """DPZO looked at three rows with one label, once."""
    torch.manual_seed(0)
    seen: list[int] = []
    with pytest.raises(RowsMixed):
        run(optimizer, nn.Sequential(nn.Linear(6, 3)), task=task, curator=lambda event: seen.append(event.step))
    assert not seen


def test_gradients_that_are_built_are_checked_as_well() -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    with pytest.raises(RowsMixed, match="Nothing of this step was released"):
        list(Engine(Marked(), loss, clip=1.0).each(people()))
