"""The plain form of an adapted model: the architecture that timm or transformers know, with nothing of tacit in it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from tacit.models._adapters import adapters_of, remove_adapters
from tacit.models._heads import HAD_BIAS
from tacit.models._lora import lora_of, merge_lora
from tacit.models._save_guard import unguard_save


def plain_copy(model: nn.Module) -> nn.Module:
    """The same function as a plain model; `model` itself stays as it is.

    LoRA is merged into the weights it lies beside. Adapters that were never trained are left out; a trained one is a
    nonlinear layer of its own, for which the plain architecture has no place, so it is refused. Parameters that need no
    change are shared with `model`, not copied.

    Args:
        model: Any model; LoRA may be tacit's or peft's own.

    Returns:
        A model whose `state_dict` has the names of the original architecture.

    Raises:
        ValueError: The model has trained adapters.
    """
    model = uncompiled(model)
    trained = [name for name, adapter in adapters_of(model) if _changes(adapter.up)]
    if trained:
        raise ValueError(
            f"This model has trained adapters ({trained[0]}, ...): nonlinear layers that the plain architecture has no "
            "place for. Save with format='state_dict' and load with models.insert_adapters(model) and "
            "model.load_state_dict(...), or fine-tune with scheme='lora', which merges into plain weights."
        )
    changed = {id(p) for _, layer in lora_of(model) for p in layer.parameters()}
    shared = [t for t in (*model.parameters(), *model.buffers()) if id(t) not in changed]
    copied = copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
    unguard_save(copied)
    unload: Any = getattr(copied, "merge_and_unload", None)
    copied = unload() if unload is not None else merge_lora(copied)  # peft's own wrapper, or tacit's insertion
    remove_adapters(copied)
    for module in copied.modules():
        if isinstance(module, nn.Linear) and module.bias is None and getattr(module, HAD_BIAS, False):
            module.bias = nn.Parameter(module.weight.new_zeros(module.out_features))
    return copied


def uncompiled(model: nn.Module) -> nn.Module:
    """The model that `torch.compile` was given; any other model as it is."""
    while isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
        model = inner
    return model


def _changes(layer: nn.Linear) -> bool:
    return bool(torch.count_nonzero(layer.weight) or torch.count_nonzero(layer.bias))
