"""`save_pretrained` of a model that has LoRA or adapters in it."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

_SAVE = "save_pretrained"


def guard_save(model: nn.Module) -> None:
    """Let `save_pretrained` of a model of transformers write its plain form, or refuse.

    The parts that LoRA and adapters add have names that `from_pretrained` does not know: it would drop them and
    initialize the layers that they belong to at random, with no more than a line in a log.
    """
    for module in model.modules():
        if callable(getattr(type(module), _SAVE, None)):
            object.__setattr__(module, _SAVE, partial(_save_plain, module))


def unguard_save(model: nn.Module) -> None:
    """Undo `guard_save`: the model is plain again."""
    for module in model.modules():
        module.__dict__.pop(_SAVE, None)


def _save_plain(module: nn.Module, *args: Any, **options: Any) -> Any:
    from tacit.models._plain import plain_copy

    plain: Any = plain_copy(module)
    return plain.save_pretrained(*args, **options)
