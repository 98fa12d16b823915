"""A small vision transformer, pre-norm, with learned positions (Dosovitskiy et al., 2021)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn


class Attention(nn.Module):
    """Every token of a row looks at the tokens of the same row, with several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"A width of {width} cannot be shared among {heads} heads.")
        self.heads = heads
        self.ask = nn.Linear(width, 3 * width)
        self.answer = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        split = self.ask(tokens).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(split[0], split[1], split[2])
        return self.answer(seen.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class TransformerBlock(nn.Module):
    """Attention and an MLP, each behind a LayerNorm and added to what came in."""

    def __init__(self, width: int, heads: int, expansion: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, expansion * width)
        self.down = nn.Linear(expansion * width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = torch.add(tokens, self.attention(self.norm1(tokens)))
        return torch.add(tokens, self.down(nn.functional.gelu(self.up(self.norm2(tokens)))))


def small_normal(*shape: int) -> nn.Parameter:
    """A parameter for tokens and positions, as transformers start them."""
    return nn.Parameter(nn.init.trunc_normal_(torch.empty(*shape), std=0.02, a=-0.04, b=0.04))


class ViT(nn.Module):
    """Square images in [0, 1] to logits: normalised inside, cut into patches, blocks, one token or the mean, a head.

    Args:
        channels: Input channels.
        classes: The number of classes.
        size: The side of the images.
        patch: The side of a patch.
        width: Features of a token.
        depth: Blocks.
        heads: Of the attention.
        expansion: Of the MLP inside a block.
        pooling: "mean" over tokens, or a class "token".
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
        size: int = 32,
        patch: int = 4,
        width: int = 64,
        depth: int = 4,
        heads: int = 4,
        expansion: int = 2,
        pooling: Literal["mean", "token"] = "mean",
        mean: Sequence[float] = (0.5,),
        std: Sequence[float] = (0.5,),
    ) -> None:
        super().__init__()
        if size % patch:
            raise ValueError(f"Images of {size} pixels cannot be cut into patches of {patch}.")
        if pooling not in ("mean", "token"):
            raise ValueError(f"pooling is 'mean' or 'token', not {pooling!r}.")
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(1, -1, 1, 1))
        self.cut = nn.Conv2d(channels, width, patch, stride=patch)
        self.positions = small_normal(1, (size // patch) ** 2, width)
        self.token = small_normal(1, 1, width) if pooling == "token" else None
        self.body = nn.Sequential(*(TransformerBlock(width, heads, expansion) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.cut((images - self.mean) / self.std).flatten(2).transpose(1, 2) + self.positions
        if self.token is not None:
            tokens = torch.cat([self.token.expand(len(tokens), -1, -1), tokens], 1)
        seen = self.norm(self.body(tokens))
        return self.head(seen.mean(1) if self.token is None else seen[:, 0])  # type: ignore[no-any-return]
