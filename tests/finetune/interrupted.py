"""A run that is interrupted in the middle of a step and called again, beside one that never was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from by_hand import SEED, net, people
from torch import nn

from tacit.finetune import Optimizer, fit
from tacit.privacy import Ledger

SIZE = 20


def trained(folder: Path, optimizer: Optimizer, **more: Any) -> nn.Module:
    folder.mkdir(exist_ok=True)
    model = net()
    options: dict[str, Any] = {"epsilon": 5.0, "delta": 1e-5, "size": SIZE, "scheme": "full", "head": "keep"}
    options |= {"seed": SEED, "checkpoint": folder / "run.safetensors", "every": 2}
    with Ledger(f"sqlite:///{folder / 'ledger.db'}") as ledger:
        fit(model, people(), optimizer=optimizer, ledger=ledger, **(options | more))
    return model


def whole_and_interrupted(folder: Path, optimizer: Optimizer, at: int) -> tuple[nn.Module, nn.Module]:
    """The models of both; the second was stopped in step `at`, after its draw and before its release."""

    def stop(event: Any) -> None:
        if event.step == at:
            raise KeyboardInterrupt

    whole = trained(folder / "whole", optimizer)
    with pytest.raises(KeyboardInterrupt):
        trained(folder / "parts", optimizer, curator=stop)
    return whole, trained(folder / "parts", optimizer)
