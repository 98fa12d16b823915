"""From labels to units, and from a batch to the parts that fit into memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tacit._unit_ids import distinct
from tacit.gradients._units import Units


def group(unit_ids: Any, rows: int, device: torch.device) -> Units:
    """The rows by their ids, integers or strings; without ids every row is a unit."""
    if unit_ids is None:
        return Units.singletons(rows, device)
    if isinstance(unit_ids, Tensor) and unit_ids.dtype == torch.long and unit_ids.shape == (rows,):
        return Units.from_labels(unit_ids.to(device))  # numbered where they are
    return Units.from_labels(distinct(unit_ids, rows)[1].to(device))


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
    if units.trivial:
        everyone = units.of_row
        yield from ((rows, rows) for rows in ((everyone,) if units.count <= limit else torch.split(everyone, limit)))
        return
    everyone = torch.arange(units.count, device=units.of_row.device)
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
