"""What a model says of records: row by row, or of each unit over the mean of its rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tacit.data.records import Records
from tacit.finetune.tasks import Task, outputs_of

_BYTES = 64 * 2**20  # of inputs at a time


def portions(records: Records, units: Tensor, rows_at_once: int | None = None) -> list[Tensor]:
    """Units in portions whose rows fit into memory; a unit is never divided."""
    rows = rows_at_once or rows_that_fit(records)
    return list(torch.split(units, max(1, rows // max(records.most_rows, 1))))


def rows_that_fit(records: Records) -> int:
    """How many rows may be loaded at a time."""
    first = records.rows(torch.zeros(1, dtype=torch.long), None)
    size = sum(part.numel() * part.element_size() for part in _leaves(first.inputs)) / max(len(first.labels), 1)
    return max(1, int(_BYTES / max(size, 1)))


class Said(NamedTuple):
    """Probabilities and labels, one line per row or per unit, and whose each line is."""

    beliefs: Tensor
    labels: Tensor
    owner: Tensor


def predictions(model: nn.Module, records: Records, task: Task) -> Said:
    """What the model says of everybody, in order: by row or by unit, as `records.scored_by` has it."""
    device = next(model.parameters()).device
    found: list[Said] = []
    with torch.no_grad():
        for units in portions(records, torch.arange(len(records))):
            rows = records.rows(units, None)
            said = task.beliefs(outputs_of(model, to(rows.inputs, device))).cpu()
            one = Said(said, rows.labels, units[rows.owner])
            found.append(one if records.scored_by == "row" else _by_unit(one, units))
    return Said(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def _by_unit(rows: Said, units: Tensor) -> Said:
    """The mean over each unit's rows, which lie side by side and share a label."""
    sizes = torch.bincount(rows.owner - units[0], minlength=len(units))
    starts = torch.cumsum(sizes, 0) - sizes
    place = torch.repeat_interleave(torch.arange(len(units)), sizes)
    total = torch.zeros(len(units), *rows.beliefs.shape[1:]).index_add_(0, place, rows.beliefs)
    mean = total / sizes.clamp_min(1).view(-1, *[1] * (rows.beliefs.dim() - 1))
    return Said(mean, rows.labels[starts.clamp_max(len(rows.labels) - 1)], units)


def to(rows: Any, device: torch.device) -> Any:
    """Rows on a device."""
    if isinstance(rows, Tensor):
        return rows.to(device)
    if isinstance(rows, dict):
        return {key: to(value, device) for key, value in rows.items()}
    return type(rows)(to(value, device) for value in rows)


def _leaves(rows: Any) -> list[Tensor]:
    if isinstance(rows, Tensor):
        return [rows]
    values = rows.values() if isinstance(rows, dict) else rows
    return [part for value in values for part in _leaves(value)]
