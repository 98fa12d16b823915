"""Which models draw nothing themselves, so that their sums need no generators of their own."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from tacit.finetune._tasks import SILENT_LOSSES

_FORWARDS = {
    kind: kind.forward for kind in (nn.Linear, nn.LayerNorm, nn.Sequential, nn.Identity, nn.Flatten, nn.ReLU)
}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def silent(model: nn.Module, loss: Any) -> bool:
    """Whether a model is made of these layers alone, as torch has them, and its loss is one of the package's own.

    Formal guarantee: what such a model and loss compute draws from no generator, in any mode and for any rows. A module
    of another class, with a hook or a forward of its own, or compiled is taken to draw.

    Args:
        model: The model; it is looked at, not run.
        loss: The loss per row.

    Returns:
        False where it is not known.
    """
    if loss not in SILENT_LOSSES or _has_any_global_hook():
        return False
    return all(
        _FORWARDS.get(type(module)) is type(module).forward
        and "forward" not in module.__dict__
        and module._compiled_call_impl is None
        and not any([getattr(module, hooks) for hooks in _HOOKS])
        for module in model.modules()
    )
