"""The head of a model, the layer that makes its predictions, and how to get a fresh one."""

from __future__ import annotations

from typing import Any

from torch import nn

from tacit.models._adapters import BottleneckAdapter
from tacit.models._blocks import find_blocks
from tacit.models._lora import lora_of

HAD_BIAS = "_tacit_had_bias"  # set on a fresh head: whether the head that the model came with has a bias


def head_of(model: nn.Module) -> tuple[str, nn.Linear]:
    """The layer that makes the predictions: the last linear one that is no part of an adapter or a LoRA layer.

    Args:
        model: The model.

    Returns:
        Its name and the layer.

    Raises:
        ValueError: There is none.
    """
    added = [module for module in model.modules() if isinstance(module, BottleneckAdapter)]
    inside = {id(part) for module in (*added, *(layer for _, layer in lora_of(model))) for part in module.modules()}
    found = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear) and id(m) not in inside]
    if not found:
        raise ValueError("This model has no linear layer that could be its head: choose the scheme 'full'.")
    return found[-1]


def with_head(model: nn.Module, classes: int, *, bias: bool = True, zero: bool = True) -> nn.Module:
    """Replace the head by a fresh one with `classes` outputs, in place; returns the model.

    The new head starts at zero, so that every class is equally likely at first, or with torch's usual values if not
    `zero`. A head that has the right size already is made afresh too: what it knew of other data is gone. Where the
    model (or its transformers configuration) notes its number of classes, the note follows. A model that is nothing but
    its head cannot change in place: then the new layer is returned.

    Args:
        model: The model.
        classes: The number of classes.
        bias: Whether the head has a bias.
        zero: Start at zero instead of torch's usual values.

    Returns:
        The model.
    """
    if classes < 1:
        raise ValueError(f"A head needs at least one class, not {classes}.")
    name, old = head_of(model)
    if any(part is old for _, block in find_blocks(model) for part in block.modules()):
        raise ValueError(
            f"The last linear layer, {name!r}, is part of a block: this model has no head. Put one behind it, such as "
            "nn.Sequential(model, nn.Linear(width, classes))."
        )
    if is_tied(model, old):
        raise ValueError(
            f"The head {name!r} shares its weights with the embeddings of this language model, so a fresh one would "
            "take these away from it: keep it (head='keep')."
        )
    new = nn.Linear(old.in_features, classes, bias=bias, device=old.weight.device, dtype=old.weight.dtype)
    if zero:
        for parameter in new.parameters():
            nn.init.zeros_(parameter)
    new.train(old.training)
    setattr(new, HAD_BIAS, getattr(old, HAD_BIAS, old.bias is not None))
    if not name:
        return new
    owners = _owners(model, name)
    setattr(owners[-1], name.rpartition(".")[2], new)
    for owner in owners:
        _note(owner, classes)
    return model


def is_tied(model: nn.Module, layer: nn.Linear) -> bool:
    """Whether another part of the model uses the weight of this layer as well."""
    return sum(own is layer.weight for module in model.modules() for own in module._parameters.values()) > 1


def _owners(model: nn.Module, name: str) -> list[nn.Module]:
    """The modules around a module, from the model inwards."""
    parts = name.split(".")[:-1]
    return [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts) + 1)]


def _note(owner: nn.Module, classes: int) -> None:
    for key in ("num_classes", "num_labels"):
        if isinstance(owner.__dict__.get(key), int):
            setattr(owner, key, classes)
    config: Any = getattr(owner, "config", None)
    if isinstance(getattr(config, "num_labels", None), int):
        config.num_labels = classes
