"""A temperature inside of a model's head: the plain architecture then gives calibrated logits by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tacit.models import head_of, plain_copy

_WAY_OUT = "save with merge=False, which writes the calibration beside the weights as they are."


def with_temperature(model: nn.Module, temperature: float, inputs: Any = None) -> nn.Module:
    """A plain copy of the model whose logits are divided by the temperature; `model` stays as it is.

    Args:
        model: A classifier whose logits are the output of its head.
        temperature: Above 0.
        inputs: A batch on which the copy is compared with the model, public or synthetic. Without it one is drawn,
            where the model states what it takes.

    Raises:
        ValueError: The logits are not linear in the head, or nothing is known to try it on.
    """
    copied = plain_copy(model)
    name, head = head_of(copied)
    if sum(own is head.weight for part in copied.modules() for own in part._parameters.values()) > 1:
        raise ValueError(f"The head {name!r} shares its weights with another layer: {_WAY_OUT}")
    head.weight = nn.Parameter(head.weight.detach() / temperature, requires_grad=head.weight.requires_grad)
    if head.bias is not None:
        head.bias = nn.Parameter(head.bias.detach() / temperature, requires_grad=head.bias.requires_grad)
    batch = _synthetic(model) if inputs is None else inputs
    training = model.training
    try:
        with torch.no_grad():
            wanted, found = (logits_of(part.eval(), batch) for part in (model, copied))
    except (RuntimeError, TypeError, ValueError, AssertionError):
        raise ValueError(
            "The model does not take what was drawn for it: give inputs=, a batch of public rows."
        ) from None
    finally:
        model.train(training)
    if not torch.allclose(found, wanted / temperature, rtol=1e-4, atol=1e-5):
        raise ValueError(f"The logits of this model are more than the output of its last layer {name!r}: {_WAY_OUT}")
    return copied


def logits_of(model: nn.Module, batch: Any) -> Tensor:
    """The logits, also where a model of transformers wraps them; `batch` may be its keyword arguments."""
    out = model(**batch) if isinstance(batch, dict) else model(batch)
    found: Tensor = getattr(out, "logits", out)
    return found


def _synthetic(model: Any) -> Any:
    first = next(model.parameters())
    config, known = getattr(model, "config", None), getattr(model, "pretrained_cfg", None)
    kind = getattr(model, "main_input_name", "")
    if known and known.get("input_size"):
        return _images(known["input_size"]).to(first)
    if kind == "pixel_values" and config is not None and hasattr(config, "image_size"):
        size = config.image_size if isinstance(config.image_size, list | tuple) else (config.image_size,) * 2
        return _images((config.num_channels, *size)).to(first)
    if kind == "input_ids":
        return torch.ones(1, 8, dtype=torch.long, device=first.device)
    raise ValueError("Nothing is known about what this model takes: give inputs=, a batch of public or synthetic rows.")


def _images(size: Sequence[int]) -> Tensor:
    return torch.rand(2, *size, generator=torch.Generator().manual_seed(0))
