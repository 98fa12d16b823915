"""What a model says of records: row by row, or of each unit over the mean of its rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tacit.data.records import Records
from tacit.finetune.tasks import Task, outputs_of

_BYTES = 64 * 2**20  # of inputs at a time
_TOKENS = 4096  # at a time: a vocabulary of logits each may come out


def portions(records: Records, units: Tensor, rows_at_once: int | None = None) -> list[Tensor]:
    """Places among `units`, in portions whose rows fit into memory; a unit is never divided.

    Records that know the size of their units' rows (texts) are taken size by size, so that little is padded.
    """
    rows = rows_at_once or rows_that_fit(records)
    sizes: Tensor | None = getattr(records, "sizes", None)
    each = max(1, rows // max(records.most_rows, 1))
    alike = [torch.arange(len(units))] if sizes is None else list(by_size(sizes[units]).values())
    return [part for places in alike for part in torch.split(places, each)]


def by_size(sizes: Tensor) -> dict[int, Tensor]:
    """The places of each size, the smallest first."""
    return {size: torch.nonzero(sizes == size).flatten() for size in sorted(set(sizes.tolist()))}


def to_look_at(sizes: Tensor | None, count: int, rows: int, most_rows: int = 1) -> list[Tensor]:
    """0 to count - 1 in portions for a model whose outputs alone are kept: so many rows, or tokens of texts."""
    if sizes is None:
        return list(torch.split(torch.arange(count), max(1, rows // max(most_rows, 1))))
    found = by_size(sizes)
    return [p for s, places in found.items() for p in torch.split(places, max(1, _TOKENS // (s * most_rows)))]


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
    found = [_said(model, records, task, units) for units in _everybody(records, rows_that_fit(records))]
    whole = Said(*(torch.cat(parts) for parts in zip(*found, strict=True)))
    order = torch.argsort(whole.owner, stable=True)
    return Said(*(part[order] for part in whole))


def forgiving(model: nn.Module, records: Records, task: Task) -> list[Said]:
    """The same in portions, of some order: a unit whose rows cannot be read has no line, and nobody hears of it."""
    try:
        rows = rows_that_fit(records)
    except (MemoryError, torch.OutOfMemoryError):  # of the machine, not of the rows
        raise
    except Exception:  # the first unit cannot be read, which nobody hears of, either
        rows = 1
    return [said for units in _everybody(records, rows) for said in _what_can_be_said(model, records, task, units)]


def _everybody(records: Records, rows: int) -> list[Tensor]:
    sizes: Tensor | None = getattr(records, "sizes", None)
    return to_look_at(sizes, len(records), rows, records.most_rows)


@torch.no_grad()
def _said(model: nn.Module, records: Records, task: Task, units: Tensor) -> Said:
    if (scored := getattr(records, "scored", None)) is not None:  # a line for each member, as it would have alone
        whole, inner, place = scored(units)
        where = torch.zeros(len(whole), dtype=torch.long).scatter_(0, inner, units[place])
        lines = _said(model, whole, task, inner)
        return lines._replace(owner=where[lines.owner])
    rows = records.rows(units, None)
    inputs = to(rows.inputs, next(model.parameters()).device)
    said, labels = kept(task, outputs_of(model, inputs).cpu(), rows.labels)
    one = Said(said, labels, rows.owner)
    one = one if records.scored_by == "row" else _by_unit(one, len(units))
    return one._replace(owner=units[one.owner])


def _what_can_be_said(model: nn.Module, records: Records, task: Task, units: Tensor) -> list[Said]:
    try:
        return [_said(model, records, task, units)]
    except (MemoryError, torch.OutOfMemoryError):  # of the machine, not of the rows
        raise
    except Exception:  # whatever rows of any kind can do; its text is private, too
        if len(units) == 1:
            return []
    return [one for unit in units for one in _what_can_be_said(model, records, task, unit[None])]


def kept(task: Task, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Beliefs and labels; or, of a task whose outputs are too large to keep, a summary that has both in it."""
    summary = getattr(task, "summary", None)
    if summary is None:
        return task.beliefs(outputs), labels
    return summary(outputs, labels), torch.zeros(len(labels), dtype=torch.long)


def _by_unit(rows: Said, units: int) -> Said:
    """The mean over each unit's rows, which lie side by side and share a label."""
    sizes = torch.bincount(rows.owner, minlength=units)
    starts = torch.cumsum(sizes, 0) - sizes
    place = torch.repeat_interleave(torch.arange(units), sizes)
    total = torch.zeros(units, *rows.beliefs.shape[1:]).index_add_(0, place, rows.beliefs)
    mean = total / sizes.clamp_min(1).view(-1, *[1] * (rows.beliefs.dim() - 1))
    return Said(mean, rows.labels[starts.clamp_max(len(rows.labels) - 1)], torch.arange(units))


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
