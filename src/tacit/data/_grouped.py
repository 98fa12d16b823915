"""Units of records put together into larger ones: the videos of a patient, the messages of a user.

A guarantee is for what the data hold together. To promise something to a patient, all that is a patient's has to be one
unit first: naming it so is not enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from tacit._guard_rails import check_unit_name
from tacit._refusals import Refusal
from tacit._unit_ids import distinct
from tacit.data._cache import fingerprint
from tacit.data._records import Records, Rows

Ids = Tensor | Sequence[int] | Sequence[str]  # one per row or unit; equal ids are the same person


class Groupable:
    """What every kind of records in here can do: be grouped."""

    @property
    def unit_ids(self) -> list[int] | list[str] | None:
        """A name for every unit that is its own whoever else is there; None: nothing but its place tells it apart."""
        return None

    def group_by(self: Records, ids: Ids, *, unit: str, at_most: int | None = None) -> Records:
        """Records in which all units with the same id are one unit, of the kind that `unit` names ("patient", say).

        Args:
            ids: one integer or string per unit of these records, in their order.
            unit: what the new units are.
            at_most: how many of its members a unit shows at a time, drawn without replacement (default: all).

        Formal guarantee: a unit of the result is everything with its id, so one clipped contribution holds all of it.
        """
        return Grouped(self, ids, unit=unit, at_most=at_most)


class Grouped(Groupable):
    """All units of `whole` with the same id as one unit: see `Groupable.group_by`.

    Args:
        whole: Any records.
        ids: One integer or string per unit of `whole`.
        unit: What a group is ("patient").
        at_most: The most members shown in one step.
    """

    def __init__(self, whole: Records, ids: Ids, *, unit: str, at_most: int | None = None) -> None:
        self.whole, self.unit = whole, named(unit)
        if at_most is not None and at_most < 1:
            raise Refusal(f"at_most is a number of members, at least 1; got {at_most}.")
        self._ids, self.group_of = distinct(ids, len(whole), "unit of these records")
        self._members = members(self.group_of)
        largest = max(len(mine) for mine in self._members)
        self._shown = largest if at_most is None else min(at_most, largest)
        self._drawn = self._shown < largest
        self.varies = at_most is not None or bool(getattr(whole, "varies", True))

    @property
    def unit_ids(self) -> list[int] | list[str] | None:
        return self._ids

    @property
    def uniforms(self) -> int:
        return (self._shown if self._drawn else 0) + self._shown * self.whole.uniforms

    @property
    def most_rows(self) -> int:
        return self._shown * self.whole.most_rows

    @property
    def scored_by(self) -> Literal["row", "unit"]:
        """As the members are: a unit counts by the mean over them."""
        return self.whole.scored_by

    @property
    def draws(self) -> bool:
        return bool(getattr(self.whole, "draws", True))

    def __len__(self) -> int:
        return len(self._members)

    def labels(self) -> Tensor:
        return self.whole.labels()

    def scored(self, units: Tensor) -> tuple[Records, Tensor, Tensor]:
        """What is right or wrong about these units: members, in other records, and the place of each one's unit."""
        mine = [self._members[unit] for unit in units.tolist()]
        sizes = torch.tensor([len(one) for one in mine], dtype=torch.long)
        inner = torch.cat(mine or [torch.empty(0, dtype=torch.long)])
        return self.whole, inner, torch.repeat_interleave(torch.arange(len(mine)), sizes)

    def rows(self, units: Tensor, uniforms: Tensor | None) -> Rows:
        mine = [self._members[unit] for unit in units.tolist()]
        if uniforms is not None and self._drawn:
            fates = uniforms[:, : self._shown]
            mine = [
                one[without_replacement(len(one), drawn_uniforms)]
                for one, drawn_uniforms in zip(mine, fates, strict=True)
            ]
        sizes = torch.tensor([len(one) for one in mine], dtype=torch.long)
        place = torch.repeat_interleave(torch.arange(len(mine)), sizes)
        drawn_uniforms = None
        if uniforms is not None:
            each = self.whole.uniforms
            lines = uniforms[:, self._shown if self._drawn else 0 :].reshape(len(mine), self._shown, each)
            within = torch.arange(len(place)) - (torch.cumsum(sizes, 0) - sizes)[place]
            drawn_uniforms = lines[place, within]
        rows = self.whole.rows(torch.cat(mine or [torch.empty(0, dtype=torch.long)]), drawn_uniforms)
        return rows._replace(owner=place[rows.owner])

    def fingerprint(self) -> str:
        return fingerprint(["grouped", self.whole.fingerprint(), self.group_of.tolist(), self._shown])

    def __getattr__(self, name: str) -> Any:
        """What only some records have: `sizes`, a number per unit, `blank()` and `synthetic()`."""
        if name not in ("sizes", "blank", "synthetic", "made_up"):
            raise AttributeError(name)
        found = getattr(self.whole, name)
        if name != "sizes" or found is None:
            return found
        return torch.stack([torch.as_tensor(found)[mine].max() for mine in self._members])


def named(unit: str) -> str:
    """The name of a unit; any short noun."""
    if not isinstance(unit, str) or not unit.strip():
        raise Refusal("A unit is a short noun such as 'sample', 'video', 'patient' or 'user'.")
    check_unit_name(unit)
    return unit


def members(group_of: Tensor) -> list[Tensor]:
    """The places of each group, in ascending order."""
    return list(torch.split(torch.argsort(group_of, stable=True), torch.bincount(group_of).tolist()))


def without_replacement(count: int, drawn_uniforms: Tensor) -> Tensor:
    """Some of `count` places, all different, decided by the numbers (Fisher and Yates); in ascending order."""
    places = list(range(count))
    for i, chance in enumerate(drawn_uniforms[:count].tolist()):
        other = min(i + int((1 - chance) * (count - i)), count - 1)
        places[i], places[other] = places[other], places[i]
    return torch.tensor(sorted(places[: min(len(drawn_uniforms), count)]))
