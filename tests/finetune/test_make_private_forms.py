"""Mixed precision, gradient checkpointing, gradient accumulation and compiled models, each beside a plain loop.

With everybody in every step, a clip that nobody reaches and no noise, a private step is a plain one: the loops of
torch below are the reference, written out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import tacit
from tacit.finetune import DPSGD, fit
from tacit.privacy import Ledger

COUNT, STEPS, RATE = 24, 3, 0.5


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(COUNT, 1, 6, 6, generator=generator), torch.randint(0, 3, (COUNT,), generator=generator)


class Net(nn.Module):
    """Two blocks and a head; with `recompute` the blocks' activations are computed again in the backward pass."""

    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU())
        self.second = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.GELU())
        self.head = nn.Linear(16, 3)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for block in (self.first, self.second):
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        found: Tensor = self.head(x)
        return found


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def plain(model: nn.Module, *, autocast: torch.dtype | None = None, parts: int = 1) -> Tensor:
    """The loop that everybody writes."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    inputs, targets = rows()
    own = next(model.parameters()).dtype
    for _ in range(STEPS):
        optimizer.zero_grad()
        for x, y in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
            with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
                loss = functional.cross_entropy(model(x.to(own)), y)
            (loss / parts).backward()
        optimizer.step()
    return weights(model)


def private(model: nn.Module, **options: Any) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    told = {"epsilon": math.inf, "delta": 1e-5, "steps": STEPS, "clip": 1e6, "ledger": Ledger("sqlite://")} | options
    loader = DataLoader(TensorDataset(*rows()), batch_size=COUNT)
    loop = tacit.make_private(model, optimizer, loader, nn.CrossEntropyLoss(), **told)
    for batch in loop:
        loop.step(batch)
    return weights(loop.model)


def test_a_plain_step_and_gradient_accumulation() -> None:
    """In float64, to rounding."""
    for options in ({}, {"microbatch": 5}):
        net, other = Net().double(), Net().double()
        loader = DataLoader(TensorDataset(rows()[0].double(), rows()[1]), batch_size=COUNT)
        optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
        loop = tacit.make_private(
            net,
            optimizer,
            loader,
            nn.CrossEntropyLoss(),
            epsilon=math.inf,
            delta=1e-5,
            steps=STEPS,
            clip=1e6,
            ledger=Ledger("sqlite://"),
            **options,
        )
        for batch in loop:
            loop.step(batch)
        # no noise is on no grid, and a factor of 1 has no rounding: what is left is float64
        assert torch.allclose(weights(net), plain(other, parts=4), rtol=0, atol=1e-9)


def test_gradient_accumulation_does_not_change_a_private_run() -> None:
    noisy = {"epsilon": 5.0, "clip": 1.0, "batch_size": 8, "seed": 1}
    once, accumulated = private(Net(), **noisy), private(Net(), microbatch=3, **noisy)
    assert torch.allclose(once, accumulated, rtol=0, atol=1e-6)
    assert not torch.allclose(once, private(Net(), **(noisy | {"seed": 2})), rtol=0, atol=1e-2)


def test_gradient_checkpointing() -> None:
    assert torch.allclose(private(Net(recompute=True)), plain(Net(recompute=True)), rtol=0, atol=1e-6)
    noisy = {"epsilon": 5.0, "clip": 1.0, "batch_size": 8, "seed": 1}
    assert torch.equal(private(Net(recompute=True), **noisy), private(Net(), **noisy))


def test_mixed_precision() -> None:
    """Activations have eight bits, so single weights differ in the third digit of a step; both loops alike."""
    found, reference, exact = (
        private(Net(), autocast=torch.bfloat16),
        plain(Net(), autocast=torch.bfloat16),
        plain(Net()),
    )
    start = weights(Net())
    moved = float((exact - start).norm())
    assert float((found - reference).norm()) < 0.02 * moved
    assert float((found - exact).norm()) > 1e-5 * moved  # it is another precision
    noisy = {"epsilon": 5.0, "clip": 1.0, "batch_size": 8, "seed": 1}
    low, high = private(Net(), autocast=torch.bfloat16, **noisy), private(Net(), **noisy)
    assert 0 < float((low - high).norm()) < 0.05 * float((high - start).norm())


def test_a_model_in_bfloat16_takes_float_rows() -> None:
    found, reference = private(Net().bfloat16()), plain(Net().bfloat16())
    assert float((found - reference).norm()) < 0.05 * float((plain(Net()) - weights(Net())).norm())
    fitted = fit(
        Net().bfloat16(),
        rows(),
        optimizer=DPSGD(batch_size=COUNT, steps=STEPS, clip=1e6, lr=RATE, momentum=0.0),
        epsilon=math.inf,
        delta=1e-5,
        size=COUNT,
        scheme="full",
        head="keep",
        ledger=Ledger("sqlite://"),
    )
    assert torch.equal(weights(fitted.model), found)


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


COMPILED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "torch.compile(model)": lambda model: torch.compile(model, backend="eager"),  # type: ignore[return-value]
    "model.compile()": compiled_in_place,
}


@pytest.mark.parametrize("how", COMPILED)
def test_compiled_models(how: str) -> None:
    """The private steps are those of the model inside; the compiled one has its weights, and still is one."""
    noisy = {"epsilon": 5.0, "clip": 1.0, "batch_size": 8, "seed": 1}
    model = COMPILED[how](Net())
    assert torch.equal(private(model, **noisy), private(Net(), **noisy))
    assert torch.allclose(private(COMPILED[how](Net())), plain(COMPILED[how](Net())), rtol=0, atol=1e-6)
    inner = getattr(model, "_orig_mod", model)
    with torch.no_grad():
        assert torch.equal(model(rows()[0]), inner(rows()[0]))


def test_a_compiled_loss() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    quick = torch.compile(loss, backend="eager")
    found = []
    for each in (loss, quick):
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
        loop = tacit.make_private(
            net,
            optimizer,
            DataLoader(TensorDataset(*rows()), batch_size=8),
            each,
            epsilon=5.0,
            delta=1e-5,
            steps=2,
            clip=1.0,
            seed=1,
            ledger=Ledger("sqlite://"),
        )
        for batch in loop:
            loop.step(batch)
        found.append(weights(net))
    assert torch.equal(*found)
