"""On a GPU reading a value makes the program wait: how often that happens must not depend on the number of layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tacit.gradients import Engine
from tacit.gradients import _grad_factors as factors
from tacit.gradients import _kernels as kernels

WAITING = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "_unique2", "masked_select")
MOST = 12  # in one step with one part


class Waits(TorchDispatchMode):
    """Counts the functions after which a program waits for its device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.__name__.split(".")[0] in WAITING
        return func(*args, **(kwargs or {}))


def net(layers: int) -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(24, 24), nn.LayerNorm(24), nn.GELU()) for _ in range(layers)]
    return nn.Sequential(*blocks, nn.Linear(24, 3))


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum((1, 2))


def waits(layers: int) -> int:
    engine = Engine(net(layers), loss, clip=1.0)
    x = torch.randn(20, 40, 24)
    for _ in range(2):
        engine(x)
    engine._calls = 10  # a step without the check of a unit during the run
    with Waits() as seen:
        engine(x)
    return seen.count


def test_waiting_does_not_grow_with_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factors, "_few", factors._many)  # what other devices than a CPU do
    monkeypatch.setattr(kernels, "serves", lambda *_: False)
    few, many = waits(1), waits(6)
    assert few == many <= MOST


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_step_on_a_gpu_waits_no_more_often_than_counted() -> None:
    engine = Engine(net(4).cuda(), loss, clip=1.0)
    x = torch.randn(20, 40, 24, device="cuda")
    for _ in range(2):
        engine(x)
    engine._calls = 10
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchroniz") as said:
            engine(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum("synchroniz" in str(each.message) for each in said) <= MOST
