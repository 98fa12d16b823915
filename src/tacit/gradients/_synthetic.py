"""Rows that stand for a batch in checks: of its shapes and types, but drawn."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tacit.gradients._batches import change


def synthetic(batch: Any, rows: int, seed: int, spread: float = 0.0) -> Any:
    """Rows of the same shape and type: floats uniform in [0, 1), integers from those that occur, each equally often.

    With a `spread`, floats are normal with that deviation. Where there is room, every integer occurs.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(t: Tensor) -> Tensor:
        shape = torch.Size((rows, *t.shape[1:]))
        if t.is_floating_point() or t.is_complex():
            drawn: Tensor = (torch.randn if spread else torch.rand)(shape, generator=generator)
            return (drawn * (spread or 1)).to(t.device, t.dtype)
        values = torch.unique(t)
        if not values.numel():
            return t.new_zeros(shape)
        places = torch.cat([torch.randperm(values.numel(), generator=generator), torch.arange(shape.numel())])
        places = places[: shape.numel()] % values.numel()
        order = torch.randperm(shape.numel(), generator=generator)
        return torch.reshape(values[places[order].to(t.device)], shape)

    return change(batch, draw)


def mirrored(batch: Any, rows: int) -> Any:
    """The first half of the rows, every second the negative of the one before, and then the same backwards.

    They are in order by no key at all that tells rows apart: a model that sorts them has to move some, so that rows
    taken for others show.
    """
    order = torch.arange(rows)
    order = torch.minimum(order, rows - 1 - order)
    odd = order % 2 == 1

    def mirror(t: Tensor) -> Tensor:
        if not (t.is_floating_point() or t.is_complex()):
            return t[order.to(t.device)]
        sign = torch.where(odd, -1.0, 1.0).to(t.device, t.dtype).reshape(-1, *[1] * (t.dim() - 1))
        return t[(order - odd.long()).to(t.device)] * sign

    return change(batch, mirror)


def constant(t: Tensor) -> bool:
    """Whether all entries are the same, so that what is drawn from them cannot differ."""
    return bool((t == t.reshape(-1)[:1]).all()) if t.numel() else True


def varies(t: Tensor) -> bool:
    """Whether integers differ; floats are drawn anew in any case."""
    return t.is_floating_point() or t.is_complex() or not constant(t)


def with_other_rows(batch: Any, other: Any, changed: Tensor) -> Any:
    """The rows that are to be changed from `other`, the rest as it was."""
    found: list[Tensor] = []
    change(other, lambda t: found.append(t) or t)  # type: ignore[func-returns-value]
    queue = iter(found)

    def mix(t: Tensor) -> Tensor:
        mask = changed.to(t.device).reshape(-1, *[1] * (t.dim() - 1))
        return torch.where(mask, next(queue), t)

    return change(batch, mix)
