"""Which parameters a scheme trains: chosen by the type of the layer, never by a part of its name."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

_NORMALISERS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm, _NormBase)


def normalisers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The normalisation layers, by name: torch's own and those of libraries that write their own class."""
    for name, module in model.named_modules():
        if isinstance(module, _NORMALISERS) or _looks_like_one(module):
            yield name, module


def _looks_like_one(module: nn.Module) -> bool:
    """A layer without children that has one scale per feature and an epsilon (LlamaRMSNorm, T5LayerNorm, ...)."""
    weight = getattr(module, "weight", None)
    has_epsilon = hasattr(module, "eps") or hasattr(module, "variance_epsilon")
    return has_epsilon and weight is not None and weight.dim() == 1 and not any(True for _ in module.children())


def head_of(model: nn.Module) -> tuple[str, nn.Linear]:
    """The layer that makes the predictions: the last linear one."""
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not found:
        raise ValueError("This model has no linear layer that could be its head: choose the scheme 'full'.")
    return found[-1]


def _full(model: nn.Module) -> Iterator[str]:
    return (name for name, _ in model.named_parameters())


def _norms(model: nn.Module) -> Iterator[str]:
    for name, module in normalisers(model):
        yield from (f"{name}.{own}".lstrip(".") for own, _ in module.named_parameters(recurse=False))


def _linear(model: nn.Module) -> Iterator[str]:
    name, head = head_of(model)
    return (f"{name}.{own}".lstrip(".") for own, _ in head.named_parameters(recurse=False))


def _selective(model: nn.Module) -> Iterator[str]:
    yield from _norms(model)
    yield from _linear(model)


def _bias(model: nn.Module) -> Iterator[str]:
    biases = {id(module.bias) for module in model.modules() if isinstance(getattr(module, "bias", None), nn.Parameter)}
    return (name for name, parameter in model.named_parameters() if id(parameter) in biases)


SCHEMES = {"full": _full, "linear": _linear, "norms": _norms, "selective": _selective, "bias": _bias}


def select(model: nn.Module, scheme: str) -> list[str]:
    """Make exactly the scheme's parameters trainable; returns their names."""
    if scheme not in SCHEMES:
        raise ValueError(f"Unknown scheme {scheme!r}: choose one of {', '.join(SCHEMES)}.")
    chosen = set(SCHEMES[scheme](model))
    if not chosen:
        raise ValueError(f"The scheme {scheme!r} finds nothing to train in this model.")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in chosen)
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]
