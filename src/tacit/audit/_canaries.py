"""Canaries: made-up people, of whom a fair coin decides whether they are in the data of one run.

They are drawn with torch's generator from a public seed: nothing about them is anybody's secret but the coins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Canaries:
    """Rows and labels, one canary each."""

    rows: Any
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def chosen(self, which: Tensor) -> tuple[Any, Tensor]:
        """The rows and labels of some of them: what is added to the data."""
        if isinstance(self.rows, dict):
            return {name: value[which] for name, value in self.rows.items()}, self.labels[which]
        if isinstance(self.rows, list):
            return [row for row, there in zip(self.rows, which.tolist(), strict=True) if there], self.labels[which]
        return self.rows[which], self.labels[which]


def gradient_directions(count: int, *, size: float = 1e3) -> tuple[nn.Module, Canaries]:
    """A linear model and canaries whose gradients are orthogonal: the strongest canaries that there are.

    Row i is ``size`` times the i-th unit vector, so only column i of the weight has a gradient, as long as one
    likes: a clip makes it exactly as long as the clip, and nobody else touches that column.
    """
    model = nn.Linear(count, 2, bias=False)
    nn.init.zeros_(model.weight)
    return model, Canaries(size * torch.eye(count), torch.zeros(count, dtype=torch.long))


def images(count: int, shape: tuple[int, ...] = (1, 28, 28), *, classes: int = 10, seed: int = 0) -> Canaries:
    """Images of uniform noise in [0, 1] with random labels: nothing that others have in common."""
    chance = torch.Generator().manual_seed(seed)
    return Canaries(torch.rand(count, *shape, generator=chance), torch.randint(classes, (count,), generator=chance))


def videos(
    count: int, shape: tuple[int, ...] = (3, 8, 32, 32), *, classes: int = 10, seed: int = 0, moving: bool = True
) -> Canaries:
    """Clips (channels, frames, height, width) of noise; ``moving``: one image that is shifted from frame to frame."""
    chance = torch.Generator().manual_seed(seed)
    channels, frames, *rest = shape
    still = torch.rand(count, channels, *rest, generator=chance)
    if moving:
        clip = torch.stack([still.roll(frame, -1) for frame in range(frames)], 2)
    else:
        clip = torch.rand(count, *shape, generator=chance)
    return Canaries(clip, torch.randint(classes, (count,), generator=chance))


def texts(count: int, length: int = 32, *, vocabulary: int, classes: int = 2, seed: int = 0) -> Canaries:
    """Sequences of random tokens (``input_ids`` with a full ``attention_mask``), random labels."""
    chance = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocabulary, (count, length), generator=chance)
    rows = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return Canaries(rows, torch.randint(classes, (count,), generator=chance))


def loss_scores(before: nn.Module, after: nn.Module, canaries: Canaries, *, batch: int = 256) -> Tensor:
    """How much a canary's loss fell between two models: the black-box score. The higher, the more likely "in"."""

    def losses(model: nn.Module) -> Tensor:
        was_training = model.training
        model.eval()
        found = []
        with torch.no_grad():
            for start in range(0, len(canaries), batch):
                part = torch.zeros(len(canaries), dtype=torch.bool)
                part[start : start + batch] = True
                rows, labels = canaries.chosen(part)
                out = model(**rows) if isinstance(rows, dict) else model(rows)
                logits = getattr(out, "logits", out)
                found.append(nn.functional.cross_entropy(logits.double(), labels, reduction="none"))
        model.train(was_training)
        return torch.cat(found)

    return losses(before) - losses(after)
