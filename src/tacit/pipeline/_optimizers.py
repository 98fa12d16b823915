"""The optimizer that [finetune] names."""

from __future__ import annotations

from typing import Any

from tacit import finetune
from tacit.pipeline._schema import Finetune


def optimizer_of(settings: Finetune, *, steps: int | None = None, lr: float | None = None) -> Any:
    """A `finetune` optimizer with the recipe's settings; `steps` and `lr` of a search take the place of its own."""
    how: dict[str, Any] = {
        "steps": steps or settings.steps,
        "clip": settings.clip,
        "lr": lr or settings.lr,
        "momentum": settings.momentum,
        "rule": settings.rule,
        "schedule": settings.schedule,
    }
    if settings.optimizer == "dpgd":
        return finetune.DPGD(**how)
    make: Any = {"dpsgd": finetune.DPSGD, "adpclip": finetune.AdpClip, "dpzo": finetune.DPZO}[settings.optimizer]
    return make(batch_size=settings.batch_size or 1, **how)
