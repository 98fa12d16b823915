"""The optimizer that [finetune] names."""

from __future__ import annotations

from typing import Any

from tacit import finetune
from tacit.pipeline._schema import Finetune


def optimizer_of(told: Finetune, *, steps: int | None = None, lr: float | None = None) -> Any:
    """A `finetune` optimizer with the recipe's settings; `steps` and `lr` of a search take the place of its own."""
    how: dict[str, Any] = {
        "steps": steps or told.steps,
        "clip": told.clip,
        "lr": lr or told.lr,
        "momentum": told.momentum,
        "rule": told.rule,
        "schedule": told.schedule,
    }
    if told.optimizer == "dpgd":
        return finetune.DPGD(**how)
    make: Any = {"dpsgd": finetune.DPSGD, "adpclip": finetune.AdpClip, "dpzo": finetune.DPZO}[told.optimizer]
    return make(batch_size=told.batch or 1, **how)
