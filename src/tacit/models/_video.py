"""A small multiscale video transformer: fewer and wider tokens from stage to stage (after MViT, Fan et al., 2021)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tacit.models._vit import TransformerBlock, small_normal


class Coarser(nn.Module):
    """The mean of 2x2 neighbouring places at each time, with the features widened behind a LayerNorm."""

    def __init__(self, grid: tuple[int, int, int], width: int, wider: int) -> None:
        super().__init__()
        self.grid = grid
        self.norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, wider)

    def forward(self, tokens: Tensor) -> Tensor:
        times, rows, columns = self.grid
        squares = self.norm(tokens).unflatten(1, (times, rows // 2, 2, columns // 2, 2))
        return self.widen(squares.mean((3, 5)).flatten(1, 3))  # type: ignore[no-any-return]


class VideoNet(nn.Module):
    """Clips in [0, 1], laid out as N x T x C x H x W, to logits: normalised inside, cut into tubes, stages, a head.

    Args:
        classes: The number of classes.
        channels: Input channels.
        frames: Of a clip.
        size: The side of the frames.
        tube: Frames, height and width of a patch.
        widths: Of the stages.
        depths: Blocks of each stage.
        head_width: Features of an attention head.
        expansion: Of the MLP inside a block.
        mean: Per channel, for normalisation.
        std: Per channel, for normalisation.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        *,
        classes: int,
        channels: int = 3,
        frames: int = 8,
        size: int = 32,
        tube: tuple[int, int, int] = (2, 8, 8),
        widths: Sequence[int] = (32, 64),
        depths: Sequence[int] = (2, 2),
        head_width: int = 16,
        expansion: int = 4,
        mean: Sequence[float] = (0.5,),
        std: Sequence[float] = (0.5,),
    ) -> None:
        super().__init__()
        halvings = 2 ** (len(widths) - 1)
        if frames % tube[0] or size % (tube[1] * halvings) or size % (tube[2] * halvings):
            raise ValueError(
                f"Clips of {frames} frames of {size}x{size} pixels cannot be cut into tubes of {tube} whose grid is "
                f"halved {len(widths) - 1} times."
            )
        self.register_buffer("mean", torch.tensor(mean).view(1, 1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(1, 1, -1, 1, 1))
        times, rows, columns = frames // tube[0], size // tube[1], size // tube[2]
        self.cut = nn.Conv3d(channels, widths[0], tube, stride=tube)
        self.positions = small_normal(1, times * rows * columns, widths[0])
        layers: list[nn.Module] = []
        for stage, (width, depth) in enumerate(zip(widths, depths, strict=True)):
            if stage:
                layers.append(Coarser((times, rows, columns), widths[stage - 1], width))
                rows, columns = rows // 2, columns // 2
            layers += [TransformerBlock(width, max(1, width // head_width), expansion) for _ in range(depth)]
        self.body = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(widths[-1])
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, clips: Tensor) -> Tensor:
        tubes = self.cut(((clips - self.mean) / self.std).transpose(1, 2))
        tokens = tubes.flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.body(tokens)).mean(1))  # type: ignore[no-any-return]
