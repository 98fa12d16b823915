"""Checkpoints of public training: everything that the next step depends on, so that a killed run ends as it would have.

Nothing here is private: the data was declared public.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tacit import _checkpoints as checkpoints
from tacit.pretrain._robust import Robust

VERSION = 1


def save(
    path: Path,
    *,
    run: str,
    step: int,
    model: nn.Module,
    robust: Robust,
    order: Tensor,
    generators: list[torch.Generator],
) -> None:
    """Write what the step after `step` depends on."""
    kept, scalars = checkpoints.optimizer_state(robust.optimizer)
    state = robust.state_dict()
    tensors = {f"model.{name}": value.clone() for name, value in model.state_dict().items()} | kept | {"order": order}
    tensors |= {f"generator.{place}": generator.get_state() for place, generator in enumerate(generators)}
    tensors |= {f"delta.{place}": change for place, change in enumerate(state["delta"] or [])}
    facts = {"run": run, "step": step, "left": state["left"], "scalars": scalars}
    checkpoints.write(path, checkpoints.pack("pretraining", VERSION, tensors, facts))


def load(
    path: Path, *, run: str, model: nn.Module, robust: Robust, generators: list[torch.Generator]
) -> tuple[int, Tensor]:
    """Put everything back; returns how many steps are done and the order of the rows in the epoch."""
    tensors, facts = checkpoints.unpack("pretraining", VERSION, path)
    if facts["run"] != run:
        raise ValueError(
            f"The checkpoint {path} is of another run (other model, data or settings): give the same ones to go on "
            "with it, or another path to start anew."
        )
    device = next(model.parameters()).device
    model.load_state_dict(_under(tensors, "model."))
    checkpoints.load_optimizer(robust.optimizer, tensors, facts["scalars"])
    delta: Any = [change.to(device) for change in _under(tensors, "delta.").values()]
    robust.load_state_dict({"optimizer": robust.optimizer.state_dict(), "left": facts["left"], "delta": delta or None})
    for place, generator in enumerate(generators):
        generator.set_state(tensors[f"generator.{place}"])
    return int(facts["step"]), tensors["order"]


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    found = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    numbered = all(name.isdigit() for name in found)
    return dict(sorted(found.items(), key=lambda item: int(item[0]))) if numbered else found
