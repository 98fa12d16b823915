"""Adapters: a small residual MLP after every block that changes nothing until it is trained (Houlsby et al., 2019)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from tacit._deprecation import renamed_attributes
from tacit.models._blocks import blocks_of
from tacit.models._save_guard import guard_save

_NAME = "tacit_adapter"


class BottleneckAdapter(nn.Module):
    """x + up(gelu(down(x))) over the features, with `up` zero at the start.

    `channels_first` is the number of dimensions at which the features are the second one (4 for N x C x H x W images);
    of any other tensor they are the last.

    Args:
        width: The number of features.
        reduction: The bottleneck is this much narrower.
        channels_first: The number of dimensions at which the features are the second one (4 for images).
    """

    def __init__(self, width: int, *, reduction: int = 4, channels_first: int | None = None) -> None:
        super().__init__()
        hidden = max(1, width // reduction)
        self.channels_first = channels_first
        self.down = nn.Linear(width, hidden)
        self.up = nn.Linear(hidden, width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.down.reset_parameters()
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, x: Tensor) -> Tensor:
        where = 1 if x.dim() == self.channels_first else -1
        if x.shape[where] != self.down.in_features:
            raise ValueError(
                f"An adapter for {self.down.in_features} features met a tensor of shape {tuple(x.shape)}: the blocks "
                "of this model are not of a kind that can be adapted; choose another scheme."
            )
        return torch.add(x, self._change(x.movedim(where, -1)).movedim(-1, where))

    def _change(self, features: Tensor) -> Tensor:
        return self.up(nn.functional.gelu(self.down(features)))  # type: ignore[no-any-return]


def insert_adapters(model: nn.Module, reduction: int = 4) -> list[str]:
    """Add an adapter to every block of the model; returns the names of the adapters.

    The outputs stay bitwise the same until something is trained. Copies, pickles and `state_dict` hold the adapters; to
    load such a `state_dict`, insert adapters into the new model first. A model that has adapters is refused.

    Args:
        model: The model.
        reduction: The bottleneck is this much narrower.

    Returns:
        The names of the adapters.

    Raises:
        ValueError: The model has adapters already, or no blocks.
    """
    if reduction < 1:
        raise ValueError(f"reduction must be at least 1, not {reduction}.")
    if adapters_of(model):
        raise ValueError("This model has adapters already: inserting them twice would stack two on every block.")
    blocks = blocks_of(model)
    made = [_adapter_for(name, block, reduction) for name, block in blocks]
    for (_, block), adapter in zip(blocks, made, strict=True):
        block.add_module(_NAME, adapter)
        if type(block).forward is not nn.Sequential.forward:  # a Sequential runs its new last child by itself
            block.register_forward_hook(_through_adapter)
    guard_save(model)
    return [f"{name}.{_NAME}" for name, _ in blocks]


def remove_adapters(model: nn.Module) -> None:
    """Take every adapter out, trained or not, in place."""
    for module in list(model.modules()):
        if isinstance(getattr(module, _NAME, None), BottleneckAdapter):
            delattr(module, _NAME)
            for key in [key for key, hook in module._forward_hooks.items() if hook is _through_adapter]:
                del module._forward_hooks[key]


def adapters_of(model: nn.Module) -> list[tuple[str, BottleneckAdapter]]:
    """The adapters of a model, by name.

    Args:
        model: The model.

    Returns:
        Pairs of name and adapter.
    """
    return [(name, module) for name, module in model.named_modules() if isinstance(module, BottleneckAdapter)]


def _through_adapter(block: nn.Module, _: Any, output: Any) -> Any:
    """Send what a block puts out, or the first of several things, through its adapter."""
    adapter = getattr(block, _NAME)
    return (adapter(output[0]), *output[1:]) if isinstance(output, tuple) else adapter(output)


def _adapter_for(name: str, block: nn.Module, reduction: int) -> BottleneckAdapter:
    """As wide as what the block's last weighted layer puts out; blocks with convolutions have channels first."""
    spatial = max((len(m.kernel_size) for m in block.modules() if isinstance(m, _ConvNd)), default=0)
    widths = [width for module in block.modules() if (width := _width_out(module, spatial)) is not None]
    if not widths:
        raise ValueError(f"The block {name!r} ({type(block).__name__}) has no layer that tells its width.")
    like = next(p for p in block.parameters() if p.is_floating_point())
    adapter = BottleneckAdapter(widths[-1], reduction=reduction, channels_first=spatial + 2 if spatial else None)
    return adapter.to(like).train(block.training)


def _width_out(module: nn.Module, spatial: int) -> int | None:
    """Of a linear layer, a convolution over images rather than over their channels, or transformers' Conv1D (`nf`)."""
    if isinstance(module, nn.Linear):
        return module.out_features
    if isinstance(module, _ConvNd):
        return module.out_channels if len(module.kernel_size) == spatial else None
    width = getattr(module, "nf", None)
    return width if isinstance(width, int) and isinstance(getattr(module, "weight", None), Tensor) else None


__getattr__ = renamed_attributes(__name__, {"Adapter": "BottleneckAdapter"})  # pickles of models have the old name
