"""A small, deep and narrow ConvNeXt-like net with LayerNorm: no row of a batch ever meets another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of images laid out as N x C x H x W."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Block(nn.Module):
    """Depthwise 5x5, LayerNorm, a 1x1 up and a 1x1 down, scaled and added to what came in (Liu et al., 2022)."""

    def __init__(self, width: int, expansion: int) -> None:
        super().__init__()
        self.mix = nn.Conv2d(width, width, 5, padding=2, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, expansion * width)
        self.down = nn.Linear(expansion * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, images: Tensor) -> Tensor:
        out = self.norm(self.mix(images).permute(0, 2, 3, 1))
        out = self.scale * self.down(nn.functional.gelu(self.up(out)))
        return torch.add(images, out.permute(0, 3, 1, 2))


class ConvNet(nn.Module):
    """Images in [0, 1] to logits: normalised inside, a 2x2 stem, stages of blocks, the mean over places, a head.

    Args:
        channels: Input channels.
        classes: The number of classes.
        widths: Of the stages.
        depths: Blocks of each stage.
        expansion: Of the MLP inside a block.
        mean: Per channel, for normalisation.
        std: Per channel, for normalisation.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        *,
        channels: int,
        classes: int,
        widths: Sequence[int] = (32, 64),
        depths: Sequence[int] = (4, 4),
        expansion: int = 2,
        mean: Sequence[float] = (0.5,),
        std: Sequence[float] = (0.5,),
    ) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(1, -1, 1, 1))
        layers: list[nn.Module] = [nn.Conv2d(channels, widths[0], 2, stride=2), ChannelNorm(widths[0])]
        for index, (width, depth) in enumerate(zip(widths, depths, strict=True)):
            if index:
                layers += [ChannelNorm(widths[index - 1]), nn.Conv2d(widths[index - 1], width, 2, stride=2)]
            layers += [Block(width, expansion) for _ in range(depth)]
        self.body = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(widths[-1])
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.body((images - self.mean) / self.std)
        return self.head(self.norm(features.mean((2, 3))))  # type: ignore[no-any-return]
