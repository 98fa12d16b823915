"""A small residual net with GroupNorm (He et al., 2016; Wu and He, 2018): no row of a batch ever meets another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3x3 convolutions, each with its GroupNorm, added to what came in (through a 1x1 where the shape changes)."""

    def __init__(self, before: int, width: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(groups, width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(groups, width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, width, 1, stride=stride, bias=False), nn.GroupNorm(groups, width)
            )

    def forward(self, images: Tensor) -> Tensor:
        out = nn.functional.relu(self.norm1(self.conv1(images)))
        out = self.norm2(self.conv2(out))
        return nn.functional.relu(torch.add(out, self.shortcut(images)))


class ResNet(nn.Module):
    """Images in [0, 1] to logits: normalised inside, a 3x3 stem, stages of blocks, the mean over places, a head.

    Args:
        channels: Input channels.
        classes: The number of classes.
        widths: Of the stages.
        depths: Blocks of each stage.
        groups: Of GroupNorm.
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
        widths: Sequence[int] = (16, 32, 64),
        depths: Sequence[int] = (2, 2, 2),
        groups: int = 8,
        mean: Sequence[float] = (0.5,),
        std: Sequence[float] = (0.5,),
    ) -> None:
        super().__init__()
        if odd := [width for width in widths if width % groups]:
            raise ValueError(f"A width of {odd[0]} cannot be split into {groups} groups.")
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(1, -1, 1, 1))
        self.stem = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(groups, widths[0])
        blocks: list[nn.Module] = []
        before = widths[0]
        for stage, (width, depth) in enumerate(zip(widths, depths, strict=True)):
            for index in range(depth):
                blocks.append(BasicBlock(before, width, 2 if stage and not index else 1, groups))
                before = width
        self.body = nn.Sequential(*blocks)
        self.head = nn.Linear(before, classes)

    def forward(self, images: Tensor) -> Tensor:
        features = nn.functional.relu(self.norm(self.stem((images - self.mean) / self.std)))
        return self.head(self.body(features).mean((2, 3)))  # type: ignore[no-any-return]
