"""Trainables for the tests, in a module of their own so that other processes can load them."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tacit import finetune
from tacit.privacy import Receipt, epsilon_of, grid_sum, mechanisms
from tacit.tune import Hyperparameters

DRY = "rehearsal"  # the stage of a receipt for a dry run


@dataclass
class Hill:
    """A synthetic objective: the best r grows with epsilon along a line, and what is lost grows with the distance.

    It makes its releases for real, so that receipts are used as they are meant to be.
    """

    slope: float = 40.0
    offset: float = 2.0
    delta: float = 1e-5
    size: int = 2000
    seen: list[tuple[Hyperparameters, float]] = field(default_factory=list)

    def __call__(self, hyperparameters: Hyperparameters, mu: float, receipt: Receipt) -> float:
        for _ in range(hyperparameters.steps):
            mechanisms.gaussian_query(grid_sum(torch.ones(3), low=0.0, high=1.0), receipt)
        if receipt.stage != DRY:
            self.seen.append((hyperparameters, mu))
        best = self.slope * epsilon_of(mu, self.delta) + self.offset
        off = abs(torch.tensor(hyperparameters.r / best).log().item())
        return max(0.0, 0.95 - 0.2 * off)

    def score(self, model: float) -> Tensor:
        """As many units are right as the model says."""
        return (torch.arange(self.size) < model * self.size).double()


def half(model: Any) -> Tensor:
    """A score that every model has."""
    del model
    return torch.full((100,), 0.5)


def works(hyperparameters: Hyperparameters, mu: float, receipt: Receipt) -> float:
    """Makes one release of what was paid for."""
    del hyperparameters, mu
    mechanisms.gaussian_query(grid_sum(torch.ones(3), low=0.0, high=1.0), receipt)
    return 0.5


@dataclass
class Steady:
    """Every run works and scores `level`; a default is known."""

    size: int = 50_000
    level: float = 0.7

    def __call__(self, hyperparameters: Hyperparameters, mu: float, receipt: Receipt) -> float:
        works(hyperparameters, mu, receipt)
        return self.level

    def default(self, mu: float) -> Any:
        del mu
        return Hyperparameters(lr=1.0, steps=3)

    def score(self, model: float) -> Tensor:
        return (torch.arange(self.size) < model * self.size).double()


def idle(hyperparameters: Hyperparameters, mu: float, receipt: Receipt) -> float:
    """Uses nothing of what was paid."""
    del hyperparameters, mu, receipt
    return 0.5


def breaks(hyperparameters: Hyperparameters, mu: float, receipt: Receipt) -> float:
    """Fails, with private words, once it is paid for: in the dry run before it works."""
    if receipt.stage == DRY:
        return works(hyperparameters, mu, receipt)
    raise ArithmeticError("patient 17 has a fever")


def dies(hyperparameters: Hyperparameters, mu: float, receipt: Receipt) -> float:
    """Killed in the middle if its learning rate is large; works otherwise."""
    if hyperparameters.lr > 0.1:
        os.kill(os.getpid(), signal.SIGKILL)
    return works(hyperparameters, mu, receipt)


def data() -> tuple[Tensor, Tensor]:
    """Rows that have something to learn."""
    drawn = torch.Generator().manual_seed(3)
    inputs = torch.randn(80, 5, generator=drawn)
    return inputs, (inputs[:, 0] > 0).long()


def descent(hyperparameters: Hyperparameters) -> finetune.DPGD:
    """Steps over everybody, all of them private."""
    return finetune.DPGD(lr=hyperparameters.lr, steps=hyperparameters.steps, free_step=False)


def trains(hyperparameters: Hyperparameters, mu: float, receipt: Receipt) -> nn.Module:
    """A run of `fit` on the receipt, over however many ranks there are."""
    del mu
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 2))
    paid: dict[str, Any] = {"receipt": receipt, "delta": 1e-5, "size": 10_000}
    return finetune.fit(model, data(), scheme="full", optimizer=descent(hyperparameters), **paid).model


def right(model: nn.Module) -> Tensor:
    """Whether each row is predicted right."""
    inputs, labels = data()
    with torch.no_grad():
        return (model(inputs).argmax(1) == labels).double()
