"""What a model says of records: row by row, or of each unit over the mean of its rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tacit._curator import Curator
from tacit.data import Records, Rows
from tacit.distributed import Team
from tacit.finetune._reading import Portion, Reader, in_place, likeness, where_of
from tacit.finetune._tasks import Task, outputs_of
from tacit.gradients import in_own_places, leaves
from tacit.privacy import sampling

_BYTES = 64 * 2**20  # of inputs at a time
SHARES, _FEWEST = 8, 16  # of what several ranks look at, and the units that each share has at least
_TOKENS = 4096  # at a time: a vocabulary of logits each may come out


def portions(
    records: Records, units: Tensor, rows_at_once: int, most: float = math.inf, *, shares: int = 0
) -> list[Tensor]:
    """Places among `units`, in portions of at most so many rows, and at most `most` units; a unit is never divided.

    Records that know the size of their units' rows (texts) are taken size by size, so that little is padded. With
    `shares`, a power of two, there are up to so many portions of equal size, for as many ranks (see `_shared_out`).

    Formal guarantee: where the cuts are depends on the number of units that were drawn, on their sizes and on public
    numbers (`rows_at_once`, the most rows of a unit), never on who fails. A larger draw has more portions, not larger
    ones: it needs no more memory.
    """
    sizes: Tensor | None = getattr(records, "sizes", None)
    each = int(min(max(1, rows_at_once // max(records.most_rows, 1)), most))
    alike = [torch.arange(len(units))] if sizes is None else list(by_size(sizes[units]).values())
    if shares:
        return [part for places in alike for part in _shared_out(places, each, shares)]
    return [part for places in alike for part in torch.split(places, each)]


def _shared_out(places: Tensor, each: int, shares: int) -> tuple[Tensor, ...]:
    """Parts of equal size, a power of two of them: up to `shares`, and further ones where one may have `each` only.

    No part is smaller than sixteen if there is another way: kernels compute a row alike in all passes of sixteen and
    more, and otherwise in smaller ones, so that a unit that comes could change the last bits of all others. Where the
    power of two would make them smaller there are as few parts of equal size as there can be; where these are smaller
    as well, all but the last are of sixteens. Where the cuts are depends on the three numbers, not on how many ranks
    there are.
    """
    count, parts = len(places), 1
    while 2 * parts <= shares and count >= 2 * parts * _FEWEST:
        parts *= 2
    while count > parts * each:
        parts *= 2
    if parts == 1 or count >= parts * _FEWEST:
        return torch.tensor_split(places, parts)
    parts = math.ceil(count / each)
    if count >= parts * _FEWEST:
        return torch.tensor_split(places, parts)
    return torch.split(places, max(each - each % _FEWEST, min(each, _FEWEST)))


def units_at_once(expected: float) -> int:
    """The most units of a portion: what a Poisson draw of this mean exceeds once in 1e9 times; then there are two."""
    return math.ceil(expected + 6 * math.sqrt(expected)) + 1


def by_size(sizes: Tensor) -> dict[int, Tensor]:
    """The places of each size, the smallest first."""
    return {size: torch.nonzero(sizes == size).flatten() for size in sorted(set(sizes.tolist()))}


def to_look_at(sizes: Tensor | None, count: int, rows: int, most_rows: int = 1) -> list[Tensor]:
    """0 to count - 1 in portions for a model whose outputs alone are kept: so many rows, or tokens of texts."""
    if sizes is None:
        return list(torch.split(torch.arange(count), max(1, rows // max(most_rows, 1))))
    found = by_size(sizes)
    return [p for s, places in found.items() for p in torch.split(places, max(1, _TOKENS // (s * most_rows)))]


def rows_that_fit(like: Rows) -> int:
    """How many rows like this one may be loaded at a time."""
    size = sum(part.numel() * part.element_size() for part in leaves(like.inputs)) / max(len(like.labels), 1)
    return max(1, int(_BYTES / max(size, 1)))


def at_once(team: Team | None, count: int, rows: int) -> int:
    """How many units are looked at together: over several ranks an eighth, in sixteens, whatever their number."""
    return rows if team is None else min(rows, 16 * math.ceil(count / (16 * SHARES)))


class Predictions(NamedTuple):
    """Probabilities and labels, one line per row or per unit, and whose each line is."""

    probs: Tensor
    labels: Tensor
    owner: Tensor


def predictions(
    model: nn.Module,
    records: Records,
    task: Task,
    units: Tensor | None = None,
    *,
    workers: int = 0,
    curator: Curator | None = None,
    team: Team | None = None,
) -> Predictions:
    """What the model says of everybody, in order: by row or by unit, as `records.scored_by` has it. Of public records.

    A unit that cannot be read is left out, and the curator receives an `ErrorEvent`; one broken file does not end a run
    that was paid.
    """
    everybody = torch.arange(len(records)) if units is None else units
    if (scored := getattr(records, "scored", None)) is not None:  # a line for each member, as it would have alone
        whole, inner, place = scored(everybody)
        where = torch.zeros(len(whole), dtype=torch.long).scatter_(0, inner, everybody[place])
        lines = predictions(model, whole, task, inner, workers=workers, curator=curator, team=team)
        found = [lines._replace(owner=where[lines.owner])]
    else:
        like = likeness(records, training=False, curator=curator)
        with _looked_at(model, records, like, everybody, workers, curator, team) as read:
            found = [_said(model, records, task, *each) for each in read]
        found = found if team is None else team.gather(found)
    joined = Predictions(*(torch.cat(parts) for parts in zip(*found, strict=True)))
    order = torch.argsort(joined.owner, stable=True)
    return Predictions(*(part[order] for part in joined))


def worths(
    model: nn.Module,
    records: Records,
    task: Task,
    worth: Callable[[Tensor, Tensor], Tensor],
    like: Rows | None = None,
    units: Tensor | None = None,
    *,
    workers: int = 0,
    team: Team | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """A number per line of what is said of private units, and whose it is, in portions.

    Formal guarantee: a unit that cannot be read, or makes model or number raise, has no line, and keeps its place (see
    `reading`): what is said of everybody else does not depend on it. What a model draws itself is drawn in secret, for
    it goes by position. `like` is what rows look like, found before the
    charge.
    """
    like = like or likeness(records, training=False)
    everybody = torch.arange(len(records)) if units is None else units
    if (scored := getattr(records, "scored", None)) is not None:  # a line for each member, as it would have alone
        whole, inner, place = scored(everybody)
        where = torch.zeros(len(whole), dtype=torch.long).scatter_(0, inner, everybody[place])
        each = worths(model, whole, task, worth, like, inner, workers=workers, team=team)
        return [(where[owner], values) for owner, values in each]
    with sampling.fresh_randomness(), _looked_at(model, records, like, everybody, workers, team=team) as read:
        found = [
            in_place(partial(_worth, model, records, task, worth, portion.units), rows, mute)
            for portion, rows, mute in read
        ]
    return found if team is None else team.gather(found)


def _looked_at(
    model: nn.Module,
    records: Records,
    like: Rows,
    units: Tensor,
    workers: int,
    curator: Curator | None = None,
    team: Team | None = None,
) -> AbstractContextManager[Iterator[tuple[Portion, Rows, Tensor | None]]]:
    """The rows of some units in portions, for a model whose outputs alone are kept; those of this rank."""
    reader = Reader(records, like, where_of(model), curator=curator, workers=workers)
    sizes: Tensor | None = getattr(records, "sizes", None)
    sizes = None if sizes is None else sizes[units]
    rows = at_once(team, len(units) * records.most_rows, rows_that_fit(like))
    look = to_look_at(sizes, len(units), rows, records.most_rows)
    look = look if team is None else team.mine(look)
    return reader.ahead(Portion(units[places], None) for places in look)


def _worth(
    model: nn.Module,
    records: Records,
    task: Task,
    worth: Callable[[Tensor, Tensor], Tensor],
    units: Tensor,
    rows: Rows,
    mute: Tensor | None,
) -> tuple[Tensor, Tensor]:
    said = _answers(model, records, task, units, rows, private=True)
    kept = _not_muted(said.owner, rows, mute, len(units))
    return units[said.owner[kept]], worth(said.probs, said.labels)[kept]


def _said(
    model: nn.Module, records: Records, task: Task, portion: Portion, rows: Rows, mute: Tensor | None
) -> Predictions:
    said = _answers(model, records, task, portion.units, rows)
    kept = _not_muted(said.owner, rows, mute, len(portion.units))
    return Predictions(said.probs[kept], said.labels[kept], portion.units[said.owner[kept]])


def _not_muted(owner: Tensor, rows: Rows, mute: Tensor | None, units: int) -> Tensor:
    """Which lines are of units that are not muted."""
    muted = torch.zeros(units, dtype=torch.bool)
    if mute is not None:
        muted[rows.owner[mute].cpu()] = True
    return ~muted[owner]


@torch.no_grad()
def _answers(
    model: nn.Module, records: Records, task: Task, units: Tensor, rows: Rows, *, private: bool = False
) -> Predictions:
    """By row or by unit; owners are places among the units.

    The model sees `private` rows in places of their own, or one unit more or less could change the answers for others.
    """
    labels, whole = rows.labels.cpu(), getattr(task, "summary", None) is None

    def said(given: tuple[Any, Tensor]) -> Tensor:
        return kept(task, outputs_of(model, given[0]).cpu(), given[1])[0]

    given = rows.inputs, labels
    found = in_own_places(said, given, len(labels), most=_rows_at_once(records, rows)) if private else said(given)
    one = Predictions(found, labels if whole else torch.zeros(len(labels), dtype=torch.long), rows.owner.cpu())
    return one if records.scored_by == "row" else _by_unit(one, len(units))


def _rows_at_once(records: Records, rows: Rows) -> int:
    """How many rows a model may see together, by the length of a row alone: of texts, as many as in `to_look_at`."""
    lengths = [leaf.shape[1] for leaf in leaves(rows.inputs) if leaf.dim() > 1]
    return _TOKENS if getattr(records, "sizes", None) is None else max(1, _TOKENS // max(lengths, default=1))


def kept(task: Task, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Beliefs and labels; or, of a task whose outputs are too large to keep, a summary that has both in it."""
    summary = getattr(task, "summary", None)
    if summary is None:
        return task.probs(outputs), labels
    return summary(outputs, labels), torch.zeros(len(labels), dtype=torch.long)


def _by_unit(rows: Predictions, units: int) -> Predictions:
    """The mean over each unit's rows, which lie side by side and share a label."""
    sizes = torch.bincount(rows.owner, minlength=units)
    starts = torch.cumsum(sizes, 0) - sizes
    place = torch.repeat_interleave(torch.arange(units), sizes)
    total = rows.probs.new_zeros(units, *rows.probs.shape[1:]).index_add_(0, place, rows.probs)
    mean = total / sizes.clamp_min(1).view(-1, *[1] * (rows.probs.dim() - 1))
    return Predictions(mean, rows.labels[starts.clamp_max(len(rows.labels) - 1)], torch.arange(units))
