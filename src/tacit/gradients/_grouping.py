"""From labels to units, and from a batch to the parts that fit into memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tacit.gradients._units import Units


def group(units: Any, rows: int, device: torch.device) -> Units:
    if units is None:
        return Units.singletons(rows, device)
    try:
        labels = torch.as_tensor(units, device=device)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError("units must be integer labels, one per row: number the names first.") from None
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"units must be integer labels, one per row, not {labels.dtype}.")
    if labels.shape != (rows,):
        raise ValueError(f"units must be one label per row, of shape ({rows},), not {tuple(labels.shape)}.")
    return Units.from_labels(labels)


def muted(mute: Any, units: Units) -> Tensor | None:
    """Which units have a muted row; None if nothing is muted."""
    if mute is None:
        return None
    rows = torch.as_tensor(mute, device=units.of_row.device)
    if rows.dtype != torch.bool or rows.shape != (units.rows,):
        raise ValueError(f"mute must be one boolean per row, of shape ({units.rows},).")
    if units.trivial:
        return rows
    return torch.zeros(units.count, dtype=torch.bool, device=rows.device).index_fill_(0, units.of_row[rows], True)


def parts(units: Units, limit: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows to take together and the units they are; a unit is never split over two parts."""
    everyone = torch.arange(units.count, device=units.of_row.device)
    if units.trivial:
        yield from ((rows, rows) for rows in torch.split(everyone, limit))
        return
    if units.rows <= limit:
        yield torch.arange(units.rows, device=everyone.device), everyone
        return
    order = torch.argsort(units.of_row, stable=True)
    ends = torch.cumsum(units.sizes, 0).tolist()
    start = first = 0
    for unit, end in enumerate(ends):
        if end - start > limit and unit > first:
            previous = ends[unit - 1]
            yield order[start:previous], everyone[first:unit]
            start, first = previous, unit
    yield order[start:], everyone[first:]
