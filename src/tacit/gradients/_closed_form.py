"""One linear layer under a loss whose gradient by the outputs is known: no graph, no handles, no backward pass.

A loss offers that as a function `output_gradients(outputs, labels)`, an attribute: losses, their gradients by the
outputs, and which rows fail (None: none), each computed of its row alone. What a layer makes of them is what the rule
of linear layers records; checks on synthetic rows, and of a unit now and then, go the usual way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from tacit.gradients._grad_factors import Factored, PerRow, Settled
from tacit.gradients._units import Units

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_KINDS = (nn.Linear, nn.LayerNorm, nn.Sequential, nn.Identity, nn.Flatten, nn.ReLU)
_FORWARDS: dict[type, Any] = {kind: kind.forward for kind in _KINDS}


@dataclass
class Found:
    """What a pass found, as a `Recorder` has it."""

    settled: dict[str, Settled]
    losses: Tensor
    failing: Tensor | None  # rows that the loss cannot take
    outputs: None = None


def untouched(model: nn.Module) -> bool:
    """Whether a model is made of plain layers alone, as torch has them: no hook, no forward of its own, not compiled.

    Args:
        model: It is looked at, not run.

    Returns:
        Whether it computes what its layers' classes say, and draws from no generator, in any mode.
    """
    return not _has_any_global_hook() and all(  # type: ignore[no-untyped-call]
        _FORWARDS.get(type(module)) is type(module).forward
        and "forward" not in module.__dict__
        and module._compiled_call_impl is None
        and not any(getattr(module, hooks) for hooks in _HOOKS)
        for module in model.modules()
    )


def closed_form(
    model: nn.Module, loss: Any, parameters: Mapping[str, Tensor], batch: Any, units: Units
) -> Found | None:
    """The pieces of one linear layer's gradients; None where model, loss or batch are others: nothing was computed."""
    gradients = getattr(loss, "output_gradients", None)
    if gradients is None or type(model) is not nn.Linear or type(batch) is not tuple or len(batch) != 2:
        return None
    x, labels = batch
    suits = type(x) is type(labels) is Tensor and x.dim() == 2 and x.dtype == model.weight.dtype
    suits = suits and labels.dtype == torch.long and x.device.type == "cpu"  # elsewhere a look at labels would wait
    if not suits or torch.is_autocast_enabled(x.device.type) or not untouched(model):
        return None
    with torch.no_grad():
        losses, g, failing = gradients(F.linear(x, model.weight, model.bias), labels)
        settled: dict[str, Settled] = {}
        if "weight" in parameters:
            settled["weight"] = Factored(g[:, None], x[:, None], tuple(model.weight.shape)).settle(units)
        if "bias" in parameters:
            settled["bias"] = PerRow(g).settle(units)
    return Found(settled, losses, failing)
