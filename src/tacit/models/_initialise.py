"""From scratch: the same architecture with freshly initialised weights."""

from __future__ import annotations

import torch
from torch import nn

from tacit.models._selection import normalisers


def scratch(model: nn.Module, seed: int) -> nn.Module:
    """Draw every parameter anew, in place and the same for the same seed; torch's own generators do not notice.

    A module that can reset itself does so (running statistics included). Of the others, normalisers get scale one and
    shift zero, other biases zero, other vectors (layer scales) 0.1, and everything with more dimensions (class tokens,
    positions, the weights of libraries' own layers) a normal of deviation 0.02, truncated at two deviations.

    Args:
        model: The model.
        seed: Of the draw.

    Returns:
        The model.
    """
    norms = {id(module) for _, module in normalisers(model)}
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())), torch.no_grad():
        torch.manual_seed(seed)
        for module in reversed(list(model.modules())):  # parts before wholes: what a whole sets in its parts stands
            reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if callable(reset):
                reset()
            else:
                _reset_bare(module, is_norm=id(module) in norms)
    return model


def _reset_bare(module: nn.Module, *, is_norm: bool) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        if name == "bias":
            parameter.zero_()
        elif parameter.dim() > 1:
            nn.init.trunc_normal_(parameter, std=0.02, a=-0.04, b=0.04)
        else:
            parameter.fill_(1.0 if is_norm else 0.1)
