"""Rows that stand for a batch in checks: of its shapes and types, but drawn."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tacit.gradients.batches import change


def synthetic(batch: Any, rows: int, seed: int, spread: float = 0.0) -> Any:
    """Rows of the same shape and type: floats uniform in [0, 1), integers drawn from those that occur.

    With a `spread`, floats are normal with that deviation.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(t: Tensor) -> Tensor:
        shape = (rows, *t.shape[1:])
        if t.is_floating_point() or t.is_complex():
            drawn = (torch.randn if spread else torch.rand)(shape, generator=generator)
            return (drawn * (spread or 1)).to(t.device, t.dtype)
        values = t.reshape(-1)
        if not values.numel():
            return t.new_zeros(shape)
        return values[torch.randint(values.numel(), shape, generator=generator).to(t.device)]

    return change(batch, draw)


def constant(t: Tensor) -> bool:
    """Whether all entries are the same, so that what is drawn from them cannot differ."""
    return bool((t == t.reshape(-1)[:1]).all())


def with_another_row(batch: Any, other: Any, row: int) -> Any:
    """One row from `other`, the rest as it was."""
    found: list[Tensor] = []
    change(other, lambda t: found.append(t[row : row + 1]) or t)  # type: ignore[func-returns-value]
    queue = iter(found)
    return change(batch, lambda t: torch.cat([t[:row], next(queue), t[row + 1 :]]))
