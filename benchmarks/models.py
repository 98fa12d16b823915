"""The nets of the benchmarks, as plain torch modules that every engine can take.

Bare parameters sit in small modules of their own and tokens are kept in one dimension: without these two courtesies
opacus could not run the nets at all.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Tokens(nn.Module):
    """Prepend the class token and add the position embedding."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.position = nn.Parameter(torch.randn(1, count, width) * 0.02)

    def forward(self, patches: Tensor) -> Tensor:
        first = self.first.expand(patches.shape[0], -1, -1)
        return torch.cat([first, patches], dim=1) + self.position


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.before_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        return x + self.mlp(self.before_mlp(x))


class ViT(nn.Module):
    """28 x 28 images in patches of 4 x 4 by default: 49 patches and a class token."""

    def __init__(
        self, width: int = 192, depth: int = 6, heads: int = 3, classes: int = 10, image: int = 28, patch: int = 4
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, kernel_size=patch, stride=patch)
        self.tokens = Tokens((image // patch) ** 2 + 1, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.tokens(self.patches(images).flatten(2).transpose(1, 2))
        return self.head(self.norm(self.blocks(x))[:, 0])


class LayerScale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class ConvBlock(nn.Module):
    """Depthwise 5 x 5, LayerNorm, up by two, GELU, down, layer scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, kernel_size=5, padding=2, groups=width)
        self.pointwise = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.GELU(),
            nn.Linear(2 * width, width),
            LayerScale(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.depthwise(x).flatten(2).transpose(1, 2)
        return x + self.pointwise(tokens).transpose(1, 2).view_as(x)


class ConvNeXt(nn.Module):
    """Two stages of four blocks, width 32 then 64, on 28 x 28 images."""

    def __init__(self, width: int = 32, depth: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.stages = nn.Sequential(
            nn.Conv2d(1, width, kernel_size=2, stride=2),
            *(ConvBlock(width) for _ in range(depth)),
            nn.Conv2d(width, 2 * width, kernel_size=2, stride=2),
            *(ConvBlock(2 * width) for _ in range(depth)),
        )
        self.norm = nn.LayerNorm(2 * width)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.norm(self.stages(images).mean(dim=(2, 3))))


class Bert(nn.Module):
    """transformers' BERT, six layers of width 384, random weights, no dropout; positions are passed per row."""

    def __init__(self, classes: int = 2) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(
            hidden_size=384,
            num_hidden_layers=6,
            num_attention_heads=12,
            intermediate_size=1536,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=classes,
        )
        self.bert = BertForSequenceClassification(config)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.bert(
            input_ids=tokens, position_ids=positions, token_type_ids=torch.zeros_like(tokens), return_dict=False
        )[0]
