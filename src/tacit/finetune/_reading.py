"""Rows of some units, whatever single units do to it: who cannot be read keeps its place, blank and muted.

What rows look like (structure, types, shapes) is agreed on by several units before anything is charged, and then it is
public: no single unit decides it, and a unit that looks different later is blanked like one that cannot be read. So
neither the order nor the shape of the work depends on who fails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from tacit._refusals import Problem, Refusal, of_the_machine, tell, text_of
from tacit.data import Records, Rows
from tacit.gradients import RowsMixed, change

T = TypeVar("T")
Compute = Callable[[Rows, Tensor | None], T]  # of rows, and which of them are muted (a bool per row; None: nobody)

LOOKED_AT = 5  # units that agree on what rows look like
UNREADABLE = "The rows of a unit cannot be used: it contributes nothing, in its place."
LATER = "Some rows cannot be read now. Nothing of this step was released: run again to go on."
DIFFERENT = (
    "Rows cannot be read, or differ in shape or type (up to five units were looked at): give rows of one shape and "
    "type. Nothing was charged. Details may reveal rows: see curator.error."
)
TOGETHER = (
    "The model takes these rows one by one and not together, so it does not keep rows apart. Nothing of this step was "
    "released."
)


def likeness(records: Records, *, training: bool, curator: object = None) -> Rows:
    """One blank row like those of these records, before anything is charged.

    Formal guarantee: of five units four must agree (all, of three or fewer), so replacing, adding or removing one unit
    turns the answer into a `Refusal` at most, never into another answer.
    """
    if getattr(records, "sizes", None) is not None:
        largest: Rows = records.blank()  # type: ignore[attr-defined]
        return largest
    found: list[Rows] = []
    looked = min(len(records), LOOKED_AT)
    drawn_uniforms = torch.full((1, records.uniforms), 0.5) if training else None
    for unit in range(looked):
        try:
            found.append(_first(records.rows(torch.tensor([unit]), drawn_uniforms)))
        except Exception as error:
            if isinstance(error, Refusal):
                raise
            tell(curator, Problem(DIFFERENT, f"unit {unit}: {text_of(error)}"))
    kinds = Counter(kind_of(rows) for rows in found)
    kind, votes = kinds.most_common(1)[0] if kinds else (None, 0)
    if votes < max(1, looked - 1 if looked > 3 else looked):
        tell(curator, Problem(DIFFERENT, f"what was seen: {dict(kinds)}"))
        raise Refusal(DIFFERENT)
    agreed: Rows = blank(next(rows for rows in found if kind_of(rows) == kind))
    return agreed


def kind_of(rows: Rows) -> tuple[Any, ...]:
    """What rows look like: structure, types and shapes, whatever their number."""
    return _kind(rows.inputs), _kind(rows.labels)


@dataclass(frozen=True)
class Reader:
    """Reads rows of units that may fail.

    `strict`: rows that cannot be read now might be read when the step is replayed, and then the same noise would be on
    two sums; so they stop the run. (All of them could be read before the charge.)
    """

    records: Records
    like: Rows
    device: torch.device
    strict: bool = False
    curator: object = None

    def __call__(self, units: Tensor, uniforms: Tensor | None) -> tuple[Rows, Tensor | None]:
        """The rows of these units, in their order, and which are muted; units of one size, where sizes differ.

        Formal guarantee: each unit has the rows that it has whoever else is asked for, at a place that depends on the
        numbers of rows before it alone. One that raises, or whose rows are not of the agreed kind, has one blank row.
        """
        like = self._like(units)
        rows = self._together(units, uniforms, like)
        if rows is not None:
            return to(rows, self.device), None
        each = [
            self._alone(unit, None if uniforms is None else uniforms[i, None], like) for i, unit in enumerate(units)
        ]
        whole = [rows or like for rows in each]
        counts = torch.tensor([len(rows.labels) for rows in whole])
        inputs, labels = (_joined([getattr(rows, name) for rows in whole]) for name in ("inputs", "labels"))
        mute = torch.tensor([rows is None for rows in each]).repeat_interleave(counts)
        owner = torch.arange(len(whole)).repeat_interleave(counts)
        return to(Rows(inputs, labels, owner), self.device), mute.to(self.device)

    def _like(self, units: Tensor) -> Rows:
        sizes = getattr(self.records, "sizes", None)
        if sizes is None or not len(units):
            return self.like
        found: Rows = self.records.blank(int(sizes[units[0]]))  # type: ignore[attr-defined]
        return found

    def _together(self, units: Tensor, uniforms: Tensor | None, like: Rows) -> Rows | None:
        """All of them at once, which is fast; None if anything is odd, whoever's it is."""
        try:
            rows = self.records.rows(units, uniforms)
            return rows if _fits(rows, like, len(units)) else None
        except Exception:  # also for want of memory: one by one they ask for less
            return None

    def _alone(self, unit: Tensor, chance: Tensor | None, like: Rows) -> Rows | None:
        error: Exception | None = None
        rows, said = None, "not of the agreed kind"
        try:
            rows = self.records.rows(unit[None], chance)
            if _fits(rows, like, 1):
                return rows
        except Exception as raised:  # for want of memory, too: how much a unit asks for is the unit's own doing
            error, said = raised, text_of(raised)
        tell(self.curator, Problem(LATER if self.strict and error else UNREADABLE, f"unit {int(unit)}: {said}"))
        if self.strict and error is not None:
            raise _later()
        return None


def in_place(compute: Compute[T], rows: Rows, mute: Tensor | None, curator: object = None) -> T:
    """What is computed of all rows together; units that make it raise are blanked and muted in their place.

    Formal guarantee: what is computed last has the shapes and the order of the rows as they came, so nobody else's
    arithmetic depends on who fails. An error is raised only if blank rows raise as well (then it is the code's), if
    rows fail together that do not fail alone, or if rows are not kept apart (`RowsMixed`); its text tells no value.
    """
    found = _try(compute, rows, mute)
    if not isinstance(found, _Failed):
        return found
    failing = torch.zeros(len(rows.owner), dtype=torch.bool, device=rows.owner.device)
    for unit in torch.unique(rows.owner):
        mine = rows.owner == unit
        said = _try(compute, Rows(*(_taken(part, mine) for part in rows)), None if mute is None else mute[mine])
        if isinstance(said, _Failed):
            failing |= mine
            tell(curator, Problem(UNREADABLE, f"place {int(unit)}: {said.text}"))
    emptied = Rows(_without(rows.inputs, failing), _without(rows.labels, failing), rows.owner)
    found = _try(compute, emptied, failing if mute is None else mute | failing)
    if not isinstance(found, _Failed):
        return found
    compute(Rows(blank(rows.inputs), blank(rows.labels), rows.owner), None)  # raises, if it was not the values
    raise RuntimeError(TOGETHER)


def muted_units(owner: Tensor, mute: Tensor | None) -> Tensor:
    """For each unit, in the order of the owners' numbers, whether any of its rows is muted."""
    _, place = torch.unique(owner, return_inverse=True)
    found = torch.zeros(int(place.max()) + 1 if len(place) else 0, dtype=torch.bool, device=owner.device)
    if mute is not None:
        found[place[mute]] = True
    return found


def blank(rows: Any) -> Any:
    """Zeros in the shape of some rows: nothing of anybody."""
    if isinstance(rows, Rows):
        return Rows(blank(rows.inputs), blank(rows.labels), rows.owner)
    return change(rows, torch.zeros_like)


def to(rows: Any, device: torch.device) -> Any:
    """Rows on a device."""
    return change(rows, lambda t: t.to(device))


@dataclass(frozen=True)
class _Failed:
    text: str


def _try(compute: Compute[T], rows: Rows, mute: Tensor | None) -> T | _Failed:
    try:
        return compute(rows, mute)
    except RowsMixed:  # no row's failure: it stops the run (a second try might not look again)
        raise
    except Exception as error:
        if of_the_machine(error):
            raise
        return _Failed(text_of(error))


def _later() -> OSError:
    return OSError(LATER)


def _first(rows: Rows) -> Rows:
    """The first row."""
    return Rows(*(_taken(part, slice(0, 1)) for part in rows))


def _taken(part: Any, which: Any) -> Any:
    return change(part, lambda t: t[which])


def _without(part: Any, failing: Tensor) -> Any:
    def emptied(t: Tensor) -> Tensor:
        return torch.where(failing.view(-1, *[1] * (t.dim() - 1)), torch.zeros_like(t), t)

    return change(part, emptied)


def _joined(parts: list[Any]) -> Any:
    """Rows one after the other; all are of one kind."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(parts)
    if isinstance(first, Mapping):
        return {key: _joined([part[key] for part in parts]) for key in first}
    return type(first)(_joined(list(each)) for each in zip(*parts, strict=True))


def _fits(rows: Rows, like: Rows, units: int) -> bool:
    count = len(rows.labels)
    if rows.owner.shape != (count,) or not _all_rows(rows.inputs, count) or kind_of(rows) != kind_of(like):
        return False
    return count == 0 or (int(rows.owner.min()) >= 0 and int(rows.owner.max()) < units)


def _all_rows(part: Any, count: int) -> bool:
    if isinstance(part, Tensor):
        return part.dim() > 0 and len(part) == count
    values = part.values() if isinstance(part, Mapping) else part
    return all(_all_rows(value, count) for value in values)


def _kind(part: Any) -> Any:
    if isinstance(part, Tensor):
        return str(part.dtype), tuple(part.shape[1:])
    if isinstance(part, Mapping):
        return tuple((str(key), _kind(value)) for key, value in part.items())
    if isinstance(part, list | tuple):
        return type(part).__name__, tuple(_kind(value) for value in part)
    return type(part).__name__
