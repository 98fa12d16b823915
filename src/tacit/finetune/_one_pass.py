"""A frozen part of a model over each row once: what is cached, and the checks that it may be.

What is cached of a row must be that row's own: clipping bounds what a row does through its own gradient, and nothing
bounds what it does through the cached values of others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tacit._curator import Curator
from tacit._refusals import Refusal
from tacit.data import Rows, TensorRecords, synthetic_rows
from tacit.distributed import Team
from tacit.finetune._isolation_checks import FEWEST, IsolationChecks
from tacit.finetune._predictions import at_once, rows_that_fit, to_look_at
from tacit.finetune._reading import Portion, Reader, draws, in_place, likeness, to, where_of
from tacit.gradients import (
    Probe,
    RowsMixed,
    change,
    copied,
    due,
    undisturbed,
)
from tacit.privacy import sampling

_ROWS = 1024  # at a time, at most: the check needs two passes over as many
_MOST, _MOST_COARSE = 0.01, 0.25  # of a row's norm, the latter in 16 bits; rounding is far below it
MIXED = (
    "What the frozen part of the model gives for a row changed with the other rows, in a way that the checks on "
    "synthetic rows did not see: it cannot be cached, and no bound would hold. Nothing of it was released. Look for "
    "what depends on the whole batch (a count, a rank, a capacity, a maximum)."
)


class OnePass:
    """A frozen part of a model over each row once: places of rows and what it gives for them; see `extract`.

    Formal guarantee: a part that does not keep rows apart is refused (`RowsMixed`), as far as checks see it: on
    synthetic rows, three, seven and as many as a portion has, before a row is read, and again for rows of another
    shape, for more rows than before and for integers that vary where they did not; and in some portions, the first
    among them, on a real row, of which the part must give the same among others and among copies of itself. Where rows
    are kept apart both passes compute the same, whatever the data, so a stop reveals nothing (see `gradients.spot`).

    Args:
        part: The frozen part.
        records: The rows.
        curator: Receives errors about unusable rows.
        strict: Raise for a row that cannot be read now and might be later.
        workers: Processes that read rows ahead of time.
        team: Ranks that share the rows.

    Raises:
        RowsMixed: What the part gives for a row depends on other rows.
    """

    def __init__(
        self,
        part: nn.Module,
        records: TensorRecords,
        curator: Curator | None = None,
        *,
        strict: bool = False,
        workers: int = 0,
        team: Team | None = None,
    ) -> None:
        rows = _EachRow(records)
        like = likeness(rows, training=False, curator=curator)
        where = where_of(part)
        self._part, self._curator, self._team = part, curator, team
        self._reader = Reader(rows, like, where, strict=strict, curator=curator, workers=workers)
        self.portions = to_look_at(rows.sizes, len(rows), at_once(team, len(rows), min(rows_that_fit(like), _ROWS)))
        self._isolation = IsolationChecks()
        _refuse_chance(part, to(like, where))
        tried = synthetic_rows(records) or like
        most = max(map(len, self.portions), default=1) if rows.sizes is None else 1  # of texts, by their size: later
        self._check(to(tried.inputs, where), most)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        mine = self.portions if self._team is None else self._team.mine(self.portions)
        with torch.no_grad(), self._reader.ahead(Portion(places, None) for places in mine) as read:
            for number, (portion, shown, mute) in enumerate(read):
                count = len(portion.units)
                yield (
                    portion.units,
                    in_place(partial(self._of, count, due(number, count)), shown, mute, self._curator).cpu(),
                )

    def _of(self, count: int, place: int | None, shown: Rows, mute: Tensor | None) -> Tensor:
        """What the part gives for rows; if they are all of the portion, the one at `place` is looked at."""
        self._check(shown.inputs, len(shown.owner), private=True)
        found: Tensor = self._part(shown.inputs)
        if place is not None and len(shown.owner) == count and (mute is None or not bool(mute[place])):
            self._look_at(shown.inputs, found, place)
        if mute is None:
            return found
        return found.masked_fill(mute.to(found.device).view(-1, *[1] * (found.dim() - 1)), math.nan)

    def _check(self, inputs: Any, rows: int, *, private: bool = False) -> None:
        """Do synthetic rows like these stay apart, a few and as many as there are at a time?"""
        try:
            self._isolation.check(self._probing, inputs, max(rows, FEWEST), private=private)
            return
        except RowsMixed as found:
            sentence = str(found)
        raise RowsMixed(f"The part of the model whose outputs are cached does not keep rows apart. {sentence}")

    @contextmanager
    def _probing(self) -> Iterator[Probe]:
        with undisturbed(self._part):
            yield _Outputs(self._part, lambda part, given: part(given), {})

    def _look_at(self, inputs: Any, found: Tensor, place: int) -> None:
        """Compare what a real row has with what it has if all others are copies of it."""
        copies = copied(torch.tensor([place]), len(found))
        with undisturbed(self._part):
            again: Tensor = self._part(change(inputs, lambda t: t[copies.to(t.device)]))
        first, second = found[place].double(), again[place].double()
        gap = float((first - second).norm())  # not a number if either is none
        if gap > (_MOST if found.dtype.itemsize >= 4 else _MOST_COARSE) * float(first.norm()):
            raise RowsMixed(MIXED)


class _Outputs(Probe):
    """Do rows stay apart? Asked of what a part gives for each, however many numbers."""

    def gradient(self, batch: Any, weights: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
        with torch.no_grad():
            found = self.losses(batch)
        if found.shape[:1] != weights.shape:
            raise Refusal(
                "The frozen part of the model does not give one output for each row, so its outputs cannot be cached: "
                "train with another scheme, or without last_blocks=."
            )
        return found, {}


def _refuse_chance(backbone: nn.Module, like: Rows) -> None:
    """Refuse a backbone that says something else of the same synthetic rows with other random numbers."""
    generator = torch.Generator().manual_seed(0)

    def synthetic(t: Tensor) -> Tensor:
        many = t.expand(4, *t.shape[1:])
        return torch.randn(many.shape, generator=generator).to(t) if t.is_floating_point() else many

    inputs = change(like.inputs, synthetic)
    with torch.no_grad(), sampling.fresh_randomness():
        first, second = (backbone(change(inputs, Tensor.clone)) for _ in range(2))
    if not torch.equal(first.nan_to_num(), second.nan_to_num()):
        raise Refusal(
            "The model draws random numbers in evaluation mode (a dropout that is never switched off?), so its "
            "features cannot be cached: train with another scheme, or switch that off."
        )


class _EachRow:
    """Every row of a table as a unit of its own."""

    unit, uniforms, most_rows = "row", 0, 1
    scored_by: Literal["row", "unit"] = "row"

    def __init__(self, table: TensorRecords) -> None:
        self._table = table
        self.sizes: Tensor | None = getattr(table, "row_sizes", None)
        self.draws = draws(table)

    def __len__(self) -> int:
        return len(self._table.labels())

    def labels(self) -> Tensor:
        return torch.zeros(len(self), dtype=torch.long)

    def rows(self, units: Tensor, uniforms: Tensor | None) -> Rows:
        del uniforms
        places = torch.arange(len(units))
        return Rows(self._table.read(units), torch.zeros_like(places), places)

    def blank(self, size: int | None = None) -> Rows:
        found: Rows = self._table.blank(size)  # type: ignore[attr-defined]
        return found._replace(labels=torch.zeros(1, dtype=torch.long))

    def fingerprint(self) -> str:
        return self._table.fingerprint()
