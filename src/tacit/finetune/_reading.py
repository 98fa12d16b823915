"""Rows of some units, whatever single units do to it: who cannot be read keeps its place, blank and muted.

What rows look like (structure, types, shapes) is agreed on by several units before anything is charged, and then it is
public: no single unit decides it, and a unit that looks different later is blanked like one that cannot be read. So
neither the order nor the shape of the work depends on who fails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from tacit._curator import Curator, ErrorEvent, report_event
from tacit._guard_rails import warn_of_pixels
from tacit._refusals import ENDING, WARNED, Refusal, of_the_machine, recorded_warnings, report_warnings, text_of
from tacit.data import Broken, Records, Rows
from tacit.finetune._workers import ahead
from tacit.gradients import RowsMixed, change
from tacit.privacy import sampling

T = TypeVar("T")
Compute = Callable[[Rows, Tensor | None], T]  # of rows, and which of them are muted (a bool per row; None: no row)

LOOKED_AT = 5  # units that agree on what rows look like
UNREADABLE = "The rows of a unit cannot be used: it contributes nothing, in its place."
LATER = "Some rows cannot be read now. Nothing of this step was released: run again to go on."
DIFFERENT = (
    "Rows cannot be read, or differ in shape or type (up to five units were looked at): give rows of one shape and "
    "type. Nothing was charged. Details may reveal rows: see curator=."
)
ELSEWHERE = (
    "Rows that can be read here cannot be read in worker processes: give workers=0, or open files when they are needed "
    "and not before. Nothing was charged. Details may reveal rows: see curator=."
)
MEMORY = "There was not enough memory for these rows. Nothing of this step was released: run again to go on."
_OF_CODE = (NameError, AttributeError, ImportError)  # their texts hold names of the code, and no values
TOGETHER = (
    "The model takes these rows one by one and not together, so it does not keep rows apart. Nothing of this step was "
    "released."
)


def likeness(records: Records, *, training: bool, curator: Curator | None = None) -> Rows:
    """One blank row like those of these records, before anything is charged.

    Formal guarantee: of five units four must agree (all, of three or fewer), so replacing, adding or removing one unit
    turns the answer into a `Refusal` at most, never into another answer.
    """
    if getattr(records, "sizes", None) is not None:
        largest: Rows = records.blank()  # type: ignore[attr-defined]
        return largest
    found: list[Rows] = []
    raised: set[str] = set()
    looked = min(len(records), LOOKED_AT)
    drawn_uniforms = torch.full((1, records.uniforms), 0.5) if training else None
    for unit in range(looked):
        try:
            with recorded_warnings():
                found.append(_first(records.rows(torch.tensor([unit]), drawn_uniforms)))
        except (Refusal, *ENDING):
            raise
        except BaseException as error:
            report_event(curator, ErrorEvent(DIFFERENT, f"unit {unit}: {text_of(error)}"))
            raised.add(f"{type(error).__name__}: {error}" if isinstance(error, _OF_CODE) else "")
    if not found and len(raised) == 1 and "" not in raised:
        raise Refusal(f"No row can be read: {raised.pop()} (in the data set or its collate). Nothing was charged.")
    kinds = Counter(kind_of(rows) for rows in found)
    kind, votes = kinds.most_common(1)[0] if kinds else (None, 0)
    if votes < max(1, looked - 1 if looked > 3 else looked):
        report_event(curator, ErrorEvent(DIFFERENT, f"what was seen: {dict(kinds)}"))
        raise Refusal(DIFFERENT)
    if training and votes == looked and all(isinstance(rows.inputs, Tensor) for rows in found):
        warn_of_pixels([rows.inputs[0] for rows in found], stacklevel=6)
    agreed: Rows = blank(next(rows for rows in found if kind_of(rows) == kind))
    return agreed


def kind_of(rows: Rows) -> tuple[Any, ...]:
    """What rows look like: structure, types and shapes, whatever their number."""
    return _kind(rows.inputs), _kind(rows.labels)


class Later(OSError):
    """Rows that cannot be read now, and might be later."""


class Portion(NamedTuple):
    """Units whose rows are read together; `key` is for what a data set draws itself (`sampling.reading_randomness`)."""

    units: Tensor
    uniforms: Tensor | None
    key: str | None = None

    def __repr__(self) -> str:
        """Who takes part is secret."""
        return "Portion(...)"


class Where(NamedTuple):
    """Where rows go: a device, and the floating type of the model's numbers."""

    device: torch.device
    dtype: torch.dtype | None = None


class Found(NamedTuple):
    """The rows of a portion, which of them are muted, and what went wrong, for the curator."""

    rows: Rows | None  # None: something cannot be read that should be
    mute: Tensor | None
    problems: tuple[ErrorEvent, ...] = ()


@dataclass(frozen=True)
class Reader:
    """Reads rows of units that may fail; here, or in worker processes (`ahead`).

    `strict`: rows that cannot be read now might be read when the step is replayed, and then the same noise would be on
    two sums; so they stop the run. Not those that fail at every replay (`data.Broken`): they add zero every time.
    """

    records: Records
    like: Rows
    where: Where  # where rows go
    strict: bool = False
    curator: Curator | None = None
    workers: int = 0

    def __call__(self, portion: Portion) -> tuple[Rows, Tensor | None]:
        """The rows of these units, in their order, and which are muted; units of one size, where sizes differ.

        Formal guarantee: each unit has the rows that it has whoever else is asked for, at a place that depends on the
        numbers of rows before it alone. One that raises, or whose rows are not of the agreed kind, has one blank row.
        """
        return self._taken(self.read(portion))

    @contextmanager
    def ahead(self, portions: Iterable[Portion]) -> Iterator[Iterator[tuple[Portion, Rows, Tensor | None]]]:
        """What calling the reader with each portion in turn returns, read ahead of time by `workers` processes."""
        read = Reader(self.records, self.like, Where(torch.device("cpu")), strict=self.strict).read
        with ahead(read, portions, self.workers) as found:
            yield ((portion, *self._taken(rows)) for portion, rows in found)

    def read(self, portion: Portion) -> Found:
        """What can be done in any process: nothing is reported or printed, and nothing raises because of a row."""
        with (
            recorded_warnings() as texts,
            sampling.reading_randomness(portion.key) if draws(self.records) else nullcontext(),
        ):
            found = self._read(*portion[:2])
        warned = tuple(ErrorEvent(WARNED, text) for text in dict.fromkeys(texts))
        return found._replace(problems=warned + found.problems)

    def _read(self, units: Tensor, uniforms: Tensor | None) -> Found:
        like = self._like(units)
        rows = self._together(units, uniforms, like)
        if rows is not None:
            return Found(rows, None)
        problems: list[ErrorEvent] = []
        each: list[Rows | None] = []
        for i, unit in enumerate(units):
            alone, problem = self._alone(unit, None if uniforms is None else uniforms[i, None], like)
            each.append(alone)
            problems += [] if problem is None else [problem]
            if problem is not None and problem.sentence == LATER:
                return Found(None, None, tuple(problems))
        whole = [rows or like for rows in each]
        counts = torch.tensor([len(rows.labels) for rows in whole])
        inputs, labels = (_joined([getattr(rows, name) for rows in whole]) for name in ("inputs", "labels"))
        mute = torch.tensor([rows is None for rows in each]).repeat_interleave(counts)
        owner = torch.arange(len(whole)).repeat_interleave(counts)
        return Found(Rows(inputs, labels, owner), mute, tuple(problems))

    def _taken(self, found: Found) -> tuple[Rows, Tensor | None]:
        for problem in found.problems:
            report_event(self.curator, problem)
        if found.rows is None:
            raise Later(LATER)
        return to(found.rows, self.where), None if found.mute is None else found.mute.to(self.where.device)

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
        except ENDING:
            raise
        except BaseException:  # also for want of memory: one by one they ask for less
            return None

    def _alone(self, unit: Tensor, chance: Tensor | None, like: Rows) -> tuple[Rows | None, ErrorEvent | None]:
        sentence, said = UNREADABLE, "not of the agreed kind"
        try:
            rows = self.records.rows(unit[None], chance)
            if _fits(rows, like, 1):
                return rows, None
        except ENDING:
            raise
        except BaseException as raised:  # for want of memory, too: how much a unit asks for is the unit's own doing
            later = self.strict and not isinstance(raised, Broken)
            sentence, said = LATER if later else UNREADABLE, text_of(raised)
        return None, ErrorEvent(sentence, f"unit {int(unit)}: {said}")


def try_workers(records: Records, like: Rows, workers: int, curator: Curator | None = None) -> None:
    """Refuse, before anything is charged, data that cannot be read in another process.

    Formal guarantee: that of `likeness`. The units it looked at are read, and one of them may fail.
    """
    if not workers:
        return
    units = torch.arange(min(len(records), LOOKED_AT))
    drawn_uniforms = torch.full((len(units), records.uniforms), 0.5)
    portions = [Portion(units[i, None], drawn_uniforms[i, None]) for i in range(len(units))]
    with Reader(records, like, Where(torch.device("cpu")), curator=curator, workers=1).ahead(portions) as read:
        failed = sum(mute is not None and bool(mute.any()) for _, _, mute in read)
    if failed > (1 if len(units) > 3 else 0):
        raise Refusal(ELSEWHERE)


def draws(records: Records) -> bool:
    """Whether reading rows may draw from global generators, as transforms of other libraries do.

    Records (and data sets) that do not say so by `draws = False`, which saves a moment for each portion.
    """
    return bool(getattr(records, "draws", True))


def varies(records: Records) -> bool:
    """Whether a unit may be shown other rows from step to step, as its records declare.

    By what the caller asked for (`rows_each`, `at_most`, `augment`, clips), never by how many rows somebody has: how
    many `uniforms` there are depends on the largest unit. Records that do not say so by `varies = False` may.
    """
    return draws(records) or bool(getattr(records, "varies", True))


def in_place(compute: Compute[T], rows: Rows, mute: Tensor | None, curator: Curator | None = None) -> T:
    """What is computed of all rows together; units that make it raise are blanked and muted in their place.

    Formal guarantee: what is computed last has the shapes and the order of the rows as they came, so no other
    unit's arithmetic depends on who fails. An error is raised only if blank rows raise as well (then it is the code's,
    or the machine's where memory is wanting), if rows fail together that do not fail alone, or if rows are not kept
    apart (`RowsMixed`); its text names no value. A warning of model or loss goes to the curator alone.
    """
    with recorded_warnings() as texts:
        found = _in_place(compute, rows, mute, curator)
    report_warnings(texts, curator)
    return found


def _in_place(compute: Compute[T], rows: Rows, mute: Tensor | None, curator: Curator | None) -> T:
    found = _try(compute, rows, mute)
    if not isinstance(found, _Failed):
        return found
    nothing = Rows(blank(rows.inputs), blank(rows.labels), rows.owner)
    if found.memory:  # a row may ask for any amount; if blank ones find no memory either, it is no row's failure
        compute(nothing, None)
    failing = torch.zeros(len(rows.owner), dtype=torch.bool, device=rows.owner.device)
    for unit in torch.unique(rows.owner):
        mine = rows.owner == unit
        said = _try(compute, Rows(*(_taken(part, mine) for part in rows)), None if mute is None else mute[mine])
        if isinstance(said, _Failed):
            failing |= mine
            report_event(curator, ErrorEvent(UNREADABLE, f"place {int(unit)}: {said.text}"))
    emptied = Rows(_without(rows.inputs, failing), _without(rows.labels, failing), rows.owner)
    found = _try(compute, emptied, failing if mute is None else mute | failing)
    if not isinstance(found, _Failed):
        return found
    compute(nothing, None)  # raises, if it was not the values
    raise MemoryError(MEMORY) if found.memory else RuntimeError(TOGETHER)


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


def to(rows: Any, where: Where) -> Any:
    """Rows on a device, their floating inputs in the model's own precision; integers (tokens, pixels) as they are."""

    def moved(t: Tensor) -> Tensor:
        return t.to(where.device, where.dtype if where.dtype is not None and t.is_floating_point() else t.dtype)

    if isinstance(rows, Rows):
        return Rows(change(rows.inputs, moved), rows.labels.to(where.device), rows.owner.to(where.device))
    return change(rows, moved)


def where_of(model: nn.Module) -> Where:
    """Where a model takes its rows."""
    parameters = list(model.parameters())
    types = list(dict.fromkeys(p.dtype for p in parameters if p.is_floating_point()))
    half = types[:1] == [torch.bfloat16] or types[:1] == [torch.float16]
    # of several types nobody knows which one reads the rows, unless the first is half
    return Where(parameters[0].device, types[0] if half or len(types) == 1 else None)


@dataclass(frozen=True)
class _Failed:
    text: str
    memory: bool


def _try(compute: Compute[T], rows: Rows, mute: Tensor | None) -> T | _Failed:
    try:
        return compute(rows, mute)
    except (RowsMixed, *ENDING):  # no row's failure: it stops the run (a second try might not look again)
        raise
    except BaseException as error:
        return _Failed(text_of(error), of_the_machine(error))


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
