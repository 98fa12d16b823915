"""Canaries: synthetic people, of whom a fair coin decides whether they are in the data of one run.

They are drawn with torch's generator from a public seed: nothing about them is secret but the coins.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_RIDGE = 1e-5  # of gradients of length 1


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
    likes: a clip makes it exactly as long as the clip, and no other row touches that column.
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
                found.append(_cross_entropy(_logits(model, rows).double(), labels))
        model.train(was_training)
        return torch.cat(found)

    return losses(before) - losses(after)


def gradient_scores(
    before: nn.Module,
    after: nn.Module,
    canaries: Canaries,
    *,
    instead: Canaries | None = None,
    loss: Callable[..., Tensor] | None = None,
) -> Tensor:
    """How much of each canary's gradient is in what changed between two models: the white-box score.

    The change is written as a mixture of all canaries' gradients at the model of before (least squares with a little
    ridge), so that canaries whose gradients point the same way are distinguished. The higher, the more likely "in".

    Args:
        before: The model before, which is public.
        after: The model that was released.
        canaries: The canaries.
        instead: Who is there in the place of a canary that is out, one each; by default none.
        loss: ``loss(logits, labels)``, one number per row; by default the cross-entropy.

    Returns:
        One score per canary; zeros if nothing changed.
    """
    measure = loss or _cross_entropy
    released = dict(after.named_parameters())
    names = [n for n, p in before.named_parameters() if n in released and not torch.equal(p, released[n])]
    if not names:
        return torch.zeros(len(canaries), dtype=torch.float64)
    model = copy.deepcopy(before).eval()
    wanted = [p.requires_grad_(True) for n, p in model.named_parameters() if n in names]
    parts = [_gradients(model, wanted, each, measure) for each in (canaries, instead) if each is not None]
    table = torch.cat(parts)
    moved = torch.cat([(p - released[n]).detach().double().flatten() for n, p in zip(names, wanted, strict=True)])
    gram = table @ table.T
    scores: Tensor = torch.linalg.solve(gram + _RIDGE * torch.eye(len(gram), dtype=gram.dtype), table @ moved)
    return scores if instead is None else scores[: len(canaries)] - scores[len(canaries) :]


def _gradients(model: nn.Module, wanted: list[Tensor], canaries: Canaries, measure: Callable[..., Tensor]) -> Tensor:
    """The direction of each canary's gradient, one row each."""
    rows = []
    for place in range(len(canaries)):
        inputs, labels = canaries.chosen(torch.arange(len(canaries)) == place)
        with torch.enable_grad():
            value = measure(_logits(model, inputs), labels).sum()
            gradients = torch.autograd.grad(value, wanted, allow_unused=True)
        flat = [torch.zeros_like(p) if g is None else g for p, g in zip(wanted, gradients, strict=True)]
        row = torch.cat([g.flatten() for g in flat]).double()
        rows.append(row / row.norm().clamp_min(1e-30))
    return torch.stack(rows)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, labels, reduction="none")


def _logits(model: nn.Module, rows: Any) -> Tensor:
    said = model(**rows) if isinstance(rows, dict) else model(rows)
    found: Tensor = getattr(said, "logits", said)
    return found
