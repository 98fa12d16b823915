"""Weights as files that plain timm and transformers load."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tacit._folders import replaced
from tacit.models._adapters import adapters_of
from tacit.models._heads import head_of, is_tied
from tacit.models._loading import library
from tacit.models._lora import lora_of
from tacit.models._plain import plain_copy
from tacit.models._texts import HEAD, TextClassifier

WeightFormat = Literal["plain", "peft", "state_dict"]
WEIGHTS, CONFIG = "model.safetensors", "config.json"
PEFT_WEIGHTS, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
RESULT_FILES = (
    WEIGHTS,
    CONFIG,
    HEAD,
    PEFT_WEIGHTS,
    PEFT_CONFIG,
    "model.safetensors.index.json",
    "model-*-of-*.safetensors",
)


def save_weights(
    model: nn.Module, folder: str | Path, *, format: WeightFormat = "plain", tokenizer: Any = None
) -> list[Path]:
    """Write the weights of a model to a folder; whoever loads them needs nothing of tacit.

    - A model of transformers: what `save_pretrained` writes, for `from_pretrained`. A `models.TextClassifier`: its
      encoder in that form and `head.safetensors` with the weight and bias of its head (`models.text` loads both).
    - Any other model: `model.safetensors`, for `load_state_dict` or timm's `create_model(..., checkpoint_path=)`. If
      timm can build the model from its name and its number of classes alone, also the `config.json` that
      `create_model("local-dir:FOLDER")` reads.

    Args:
        model: The model; it stays as it is.
        folder: Made if there is none. The weights that an earlier call left there are replaced.
        format: `"plain"` merges LoRA. `"peft"` writes LoRA (and the head) as an adapter for
            `PeftModel.from_pretrained(base, folder)`. `"state_dict"` writes every tensor under the name it has now,
            with adapters: to load it, insert the same adapters first.
        tokenizer: Written too, if given.

    Returns:
        The files, that of the weights first.

    Raises:
        ValueError: The model has no plain form, or the folder is a file.
    """
    write = {"plain": _plain, "peft": _peft, "state_dict": _state_dict}.get(format)
    if write is None:
        raise ValueError(f"A format is 'plain', 'peft' or 'state_dict', not {format!r}.")
    reasons = [reason for part in model.modules() if isinstance(reason := getattr(part, "no_plain_form", None), str)]
    if reasons and format != "state_dict":
        raise ValueError(reasons[0])
    with replaced(Path(folder), RESULT_FILES) as part:
        main = write(model, part)
        if tokenizer is not None:
            tokenizer.save_pretrained(part)
        names = sorted((file.relative_to(part) for file in part.rglob("*") if file.is_file()), key=lambda f: f != main)
    return [Path(folder) / name for name in names]


def _plain(model: nn.Module, folder: Path) -> Path:
    plain = plain_copy(model)
    if isinstance(plain, TextClassifier):
        _pretrained(plain.encoder, folder, may_lack="pooler.")
        _write(plain.head.state_dict(), folder / HEAD)
    elif _of_transformers(plain):
        _pretrained(plain, folder)
    else:
        _write(plain.state_dict(), folder / WEIGHTS)
        _timm_config(plain, folder)
    return Path(WEIGHTS)


def _state_dict(model: nn.Module, folder: Path) -> Path:
    _write(model.state_dict(), folder / WEIGHTS)
    return Path(WEIGHTS)


def _pretrained(model: nn.Module, folder: Path, may_lack: str = "\0") -> None:
    """`save_pretrained`, once it is sure that `from_pretrained` will find every weight and use every weight."""
    whole: Any = model
    try:
        with torch.device("meta"):
            built = type(whole)(whole.config).state_dict()
    except Exception as error:  # whatever a class of somebody's own does
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{type(model).__name__} cannot be built from its configuration ({reason}), so from_pretrained could not "
            "load it: use format='state_dict'."
        ) from None
    wanted = {name: tuple(value.shape) for name, value in built.items() if not name.startswith(may_lack)}
    found = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    if wanted != found:
        odd = sorted({*wanted.items()} ^ {*found.items()})[0][0]
        raise ValueError(
            f"{type(model).__name__} as its configuration describes it has other weights than this model (for one, "
            f"{odd}), and from_pretrained would replace them by random ones. If it is the bias of the head, fine-tune "
            "with the same bias= as the class has; or use format='state_dict'."
        )
    whole.save_pretrained(folder)


def _of_transformers(model: nn.Module) -> bool:
    return callable(getattr(model, "save_pretrained", None)) and hasattr(model, "config")


def _write(state: dict[str, Any], path: Path) -> None:
    """Each tensor by itself: a file has no tied weights, and what loads it ties them again."""
    taken: set[int] = set()
    tensors: dict[str, Tensor] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            plain = value.detach().cpu().contiguous()
            key = plain.untyped_storage().data_ptr()
            alone = key not in taken and plain.untyped_storage().nbytes() == plain.nbytes
            tensors[name] = plain if alone else plain.clone()
            taken.add(key)
    save_file(tensors, path, metadata={"format": "pt"})


def _timm_config(model: nn.Module, folder: Path) -> None:
    """What `create_model("local-dir:FOLDER")` reads, where name and number of classes say everything."""
    known: Any = getattr(model, "pretrained_cfg", None)
    if not known or not isinstance(getattr(model, "num_classes", None), int):
        return
    timm = library("timm", "vision")
    try:
        with torch.device("meta"):
            built: nn.Module = timm.create_model(known["architecture"], num_classes=model.num_classes)
    except Exception:  # a model of somebody's own that only looks like one of timm
        return
    if _shapes(built) == _shapes(model):
        timm.models._hub.save_config_for_hf(model, folder / CONFIG)


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def _peft(model: nn.Module, folder: Path) -> Path:
    """As peft keeps an adapter: the two factors of each layer, and the head as a module that is saved whole."""
    layers: list[tuple[str, Any]] = lora_of(model)
    if not layers or adapters_of(model):
        raise ValueError("format='peft' is for a model with LoRA and nothing else (scheme='lora').")
    own: Any = model
    if hasattr(own, "peft_config") and callable(getattr(own, "merge_and_unload", None)):  # peft's own wrapper
        own.save_pretrained(folder)
        return Path(PEFT_WEIGHTS)
    name, head = head_of(model)
    trained_head = not is_tied(model, head) and any(p.requires_grad for p in head.parameters())
    state = {f"{layer}.{key}": value for layer, part in layers for key, value in _factors(part)}
    if trained_head:
        state |= {f"{name}.{key}": value for key, value in head.state_dict().items()}
    inside = {id(p) for _, layer in layers for p in layer.parameters()} | {id(p) for p in head.parameters()}
    other = [key for key, p in model.named_parameters() if p.requires_grad and id(p) not in inside]
    sizes = {(part.r[part.active_adapter[0]], part.lora_alpha[part.active_adapter[0]]) for _, part in layers}
    if other or len(sizes) > 1:
        raise ValueError(
            f"An adapter of peft holds LoRA of one rank and the head, and this model has more that was trained "
            f"({other[0] if other else 'several ranks'}): use format='plain', which merges everything."
        )
    [(rank, alpha)] = sizes
    config = library("peft", "text").LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=sorted(layer for layer, _ in layers),
        modules_to_save=[name] if trained_head else None,
        fan_in_fan_out=all(part.fan_in_fan_out for _, part in layers),
        base_model_name_or_path=getattr(getattr(model, "config", None), "_name_or_path", None) or None,
        inference_mode=True,
    )
    config.save_pretrained(folder)
    _write({f"base_model.model.{key}": value for key, value in state.items()}, folder / PEFT_WEIGHTS)
    return Path(PEFT_WEIGHTS)


def _factors(layer: Any) -> Iterator[tuple[str, Tensor]]:
    active = layer.active_adapter[0]
    for own in ("lora_A", "lora_B"):
        yield f"{own}.weight", getattr(layer, own)[active].weight
