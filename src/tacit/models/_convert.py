"""Models with BatchNorm mix the rows of a batch; with GroupNorm they do not."""

from __future__ import annotations

import warnings

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def to_groupnorm(model: nn.Module, groups: int = 32) -> nn.Module:
    """Replace every BatchNorm by GroupNorm with the same scale and shift, in place; returns the model.

    `groups` is lowered to a divisor of the channels; BatchNorm1d, which may see a single position, keeps at least two
    channels in a group. Activations that a library keeps inside its BatchNorm follow the new layer. The statistics of
    earlier training are lost, so a pretrained model has to be trained again: `freeze_statistics` keeps them instead.

    Args:
        model: The model.
        groups: Of GroupNorm; lowered to a divisor of the channels.

    Returns:
        The model.
    """
    if groups < 1:
        raise ValueError(f"groups must be at least 1, not {groups}.")
    made = {id(m): _group_norm(m, groups) for m in model.modules() if isinstance(m, _BatchNorm)}
    if not made:
        return model
    warnings.warn(
        "The running statistics of BatchNorm are lost with it: a pretrained model needs training again, or "
        "freeze_statistics in place of to_groupnorm.",
        stacklevel=2,
    )
    for owner in list(model.modules()):
        for name, child in owner._modules.items():  # by slot, because a layer may be used in two places
            if id(child) in made:
                owner._modules[name] = made[id(child)]
    return made.get(id(model), model)


def _group_norm(old: _BatchNorm, groups: int) -> nn.Module:
    channels = old.num_features
    most = min(groups, max(1, channels // 2) if isinstance(old, nn.BatchNorm1d) else channels)
    fitting = next(count for count in range(most, 0, -1) if channels % count == 0)
    new = nn.GroupNorm(fitting, channels, eps=old.eps, affine=old.affine)
    if old.affine:
        new.weight, new.bias = old.weight, old.bias  # the same parameters, frozen or not
    inside = list(old.children())
    return (nn.Sequential(new, *inside) if inside else new).train(old.training)
