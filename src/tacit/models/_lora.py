"""LoRA: a low-rank change beside linear layers that are themselves frozen (Hu et al., 2022); the layers are peft's."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from tacit.models._adapters import adapters_of
from tacit.models._blocks import blocks_of
from tacit.models._loading import library
from tacit.models._save_guard import guard_save, unguard_save

_NAME = "tacit"


def insert_lora(
    model: nn.Module, *, rank: int = 8, alpha: float = 16.0, targets: Sequence[str] | None = None, seed: int = 0
) -> list[str]:
    """Put a low-rank change, zero at the start, beside linear layers, in place; returns the names of these layers.

    `targets` are full names of layers. By default they are the layers of the attention that peft knows for the kind of
    model (query and value of BERT, the joint projection of GPT-2), and for a model that it does not know every linear
    layer inside of the blocks. The outputs stay the same until something is trained. `seed` draws the first of the two
    factors; torch's own generators do not notice.

    Args:
        model: The model.
        rank: Of the change.
        alpha: Its scale is alpha / rank.
        targets: Full names of linear layers.
        seed: Draws the first factor.

    Returns:
        The names of the layers.
    """
    if rank < 1 or not alpha > 0:
        raise ValueError(f"The rank is at least 1 and alpha above 0; got {rank} and {alpha}.")
    if lora_of(model):
        raise ValueError("This model has LoRA layers already: inserting them twice would stack two on every layer.")
    peft = library("peft", "text")
    chosen = _targets(model) if targets is None else _named(model, targets)
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        for transposed in (False, True):  # Conv1D of transformers keeps its weight the other way round
            layers = [name for name, is_transposed in chosen.items() if is_transposed is transposed]
            if layers:
                config = peft.LoraConfig(
                    r=rank,
                    lora_alpha=alpha,
                    target_modules="|".join(re.escape(name) for name in layers),
                    fan_in_fan_out=transposed,
                )
                peft.inject_adapter_in_model(config, model, adapter_name=_NAME)
    guard_save(model)
    return [name for name, _ in lora_of(model)]


def lora_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers of a model that have a low-rank change beside them, by name; with peft's own wrapper or without.

    Args:
        model: The model.

    Returns:
        Pairs of name and layer.
    """
    return [(name, module) for name, module in model.named_modules() if _is_lora(module)]


def lora_parts(model: nn.Module) -> Iterator[nn.Module]:
    """What is trained of them: the low-rank factors."""
    for _, layer in lora_of(model):
        yield from (part for own, part in layer.named_children() if own.startswith("lora_"))


def merge_lora(model: nn.Module) -> nn.Module:
    """Add the low-rank changes to the weights that they lie beside, in place: a plain model again.

    Args:
        model: The model.

    Returns:
        The model.
    """
    for name, layer in lora_of(model):
        whole: Any = layer
        whole.merge()
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, whole.get_base_layer())
    if not adapters_of(model):
        unguard_save(model)
    return model


def _is_lora(module: nn.Module) -> bool:
    """By structure, so that nothing of peft is imported for models that have none of it."""
    return isinstance(getattr(module, "base_layer", None), nn.Module) and isinstance(
        getattr(module, "lora_A", None), nn.ModuleDict
    )


def _targets(model: nn.Module) -> dict[str, bool]:
    """The names of the layers, and whether each keeps its weight transposed."""
    blocks = [module for _, block in blocks_of(model) for module in block.modules()]
    inside = {id(module) for module in blocks}
    closed = {id(part) for module in blocks if isinstance(module, nn.MultiheadAttention) for part in module.modules()}
    found = {
        name: kind
        for name, module in model.named_modules()
        if id(module) in inside - closed and (kind := _transposed(module)) is not None
    }
    known = library("peft", "text").utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    usual = known.get(getattr(getattr(model, "config", None), "model_type", None), ())
    of_attention = {name: kind for name, kind in found.items() if name.rpartition(".")[2] in usual}
    if not found:
        raise ValueError(
            "The blocks of this model have no linear layer of their own for LoRA: give targets= the names of linear "
            "layers, or choose another scheme."
        )
    return of_attention or found


def _named(model: nn.Module, targets: Sequence[str]) -> dict[str, bool]:
    modules = dict(model.named_modules())
    found = {}
    for name in targets:
        kind = _transposed(modules[name]) if name in modules else None
        if kind is None:
            raise ValueError(f"{name!r} is no linear layer of this model: targets are their full names.")
        found[name] = kind
    return found


def _transposed(module: nn.Module) -> bool | None:
    """None for what is no linear layer."""
    if isinstance(module, nn.Linear):
        return False
    weight = getattr(module, "weight", None)
    is_conv1d = isinstance(getattr(module, "nf", None), int) and isinstance(weight, nn.Parameter) and weight.dim() == 2
    return True if is_conv1d else None
