"""The same run through `finetune.fit`, which every integration is compared with, bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tacit.finetune import DPSGD, fit
from tacit.privacy import Ledger

COUNT, BATCH, STEPS, CLIP, RATE = 24, 8, 6, 0.5, 0.3
PROMISE: dict[str, Any] = {"epsilon": 5.0, "delta": 1e-5, "size": COUNT, "seed": 3}


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(COUNT, 4, generator=generator), torch.randint(0, 3, (COUNT,), generator=generator)


def dataset() -> TensorDataset:
    return TensorDataset(*rows())


def fitted(model: nn.Module, data: Any, *, batch_size: int = BATCH, steps: int = STEPS, **more: Any) -> nn.Module:
    update = {"lr": RATE, "momentum": 0.9} | more.pop("update", {})
    optimizer = DPSGD(batch_size=batch_size, steps=steps, clip=CLIP, **update)
    options = PROMISE | {"scheme": "full", "head": "keep", "ledger": Ledger("sqlite://")} | more
    return fit(model, data, optimizer=optimizer, **options).model


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])
