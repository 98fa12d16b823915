"""A small net over the comparisons of a clip's frames."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class TemporalHead(nn.Module):
    """Each moment is normalized and mapped, the mean over moments is classified: the order of moments says nothing.

    Args:
        moments: Of a clip.
        features: Of a moment; a row has moments x features numbers.
        classes: The number of classes.
        width: Of the layer in between.
    """

    def __init__(self, *, moments: int, features: int, classes: int, width: int = 32) -> None:
        super().__init__()
        self.moments = moments
        self.norm = nn.LayerNorm(features)
        self.mapped = nn.Linear(features, width)
        self.head = nn.Linear(width, classes)

    def forward(self, rows: Tensor) -> Tensor:
        each = self.norm(rows.view(len(rows), self.moments, -1))
        return self.head(torch.relu(self.mapped(each)).mean(1))  # type: ignore[no-any-return]
