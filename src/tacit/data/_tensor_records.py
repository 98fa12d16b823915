"""Records from what people have: tensors, or any data set with `__len__` and `__getitem__`; grouped by owner or not."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from copy import copy
from typing import Any, Literal

import torch
from torch import Tensor

from tacit._refusals import Refusal
from tacit._unit_ids import distinct
from tacit.data._arrays import as_tensors
from tacit.data._grouped import Groupable, Ids, members, named, without_replacement
from tacit.data._loaders import plain_labels
from tacit.data._records import Records, Rows
from tacit.data._stacking import stacked
from tacit.data._views import Augment, FlipAndShift

SAMPLE, USER = "sample", "user"


class TensorRecords(Groupable):
    """Labelled rows as records, each its own unit (a "sample") or, with `owners`, grouped by owner.

    Args:
        inputs: A tensor or array (rows first; memory-mapped ones stay on disk), a mapping of these, or a data set whose
            items are (input, label).
        labels: One label per row; None for a data set.
        owners: One integer or string per row; rows with the same owner are one unit.
        unit: What an owner is (default: "user").
        rows_each: The most rows of a unit shown in one step, drawn without replacement (default: all of them).
        augment: The number of augmented views of every row, all of them rows of its unit.
        views: How views are made (default: flips and shifts).

    Raises:
        ValueError: Lengths that differ, arrays that are no numbers, or an invalid unit.

    Examples:
        >>> import torch
        >>> from tacit.data import TensorRecords
        >>> rows = TensorRecords(torch.randn(6, 4), torch.tensor([0, 1, 0, 1, 0, 1]))
        >>> patients = rows.group_by(["ann", "bob", "ann", "ann", "eve", "bob"], unit="patient")
        >>> len(rows), rows.unit, len(patients), patients.unit
        (6, 'sample', 3, 'patient')
    """

    scored_by: Literal["row", "unit"] = "row"

    def __init__(
        self,
        inputs: Any,
        labels: Any = None,
        owners: Ids | None = None,
        *,
        unit: str | None = None,
        rows_each: int | None = None,
        augment: int | None = None,
        views: Augment | None = None,
    ) -> None:
        self.inputs = inputs = as_tensors(inputs, "Inputs", "convert them first, as in X.astype('float32')")
        self._labels = _classes(labels if labels is not None else _labels_of(inputs))
        count = _count(inputs)
        if count != len(self._labels):
            raise Refusal("The numbers of rows and of labels differ: each row needs one label.")
        if count == 0:
            raise Refusal("There are no rows to learn from.")
        for value, what in ((rows_each, "rows_each"), (augment, "augment")):
            if value is not None and value < 1:
                raise Refusal(f"{what} is a number of rows, at least 1; got {value}.")
        self._rows_each = rows_each
        self._views = (views or FlipAndShift()) if augment is not None else None
        self._copies = augment or 1
        self._own(owners, unit)

    def _own(self, owners: Ids | None, unit: str | None) -> None:
        """From now on a unit is a row, or all rows of an owner."""
        if owners is None and unit not in (None, SAMPLE):
            raise Refusal(f"A row is a sample: for unit={unit!r} give owners, one for each row.")
        if owners is not None and unit == SAMPLE:
            raise Refusal("Rows have owners, so a unit is more than a sample: say what with unit=, such as 'patient'.")
        self.unit, self.owners = SAMPLE if owners is None else named(unit or USER), owners
        self._ids: list[int] | list[str] | None = None
        self._members: list[Tensor] | None = None
        if owners is not None:
            self._ids, owner = distinct(owners, len(self._labels))
            self._members = members(owner)
        largest = max((len(rows) for rows in self._members), default=1) if self._members is not None else 1
        self._shown = largest if self._rows_each is None else min(self._rows_each, largest)
        self._drawn = self._rows_each is not None and largest > self._rows_each

    @property
    def unit_ids(self) -> list[int] | list[str] | None:
        return self._ids

    def group_by(self, ids: Ids, *, unit: str, at_most: int | None = None) -> Records:
        if self.grouped:
            return super().group_by(ids, unit=unit, at_most=at_most)
        if at_most is not None and at_most < 1:
            raise Refusal(f"at_most is a number of rows, at least 1; got {at_most}.")
        other = copy(self)
        other._rows_each = self._rows_each if at_most is None else at_most
        other._own(ids, unit)
        return other

    @property
    def most_rows(self) -> int:
        return self._shown * self._copies

    @property
    def varies(self) -> bool:
        """Whether a unit may be shown other rows from step to step: by what was asked for, not by its rows."""
        return self._rows_each is not None or self._views is not None

    @property
    def uniforms(self) -> int:
        drawn = self._shown if self._drawn else 0
        return drawn + (self.most_rows * self._views.uniforms if self._views is not None else 0)

    def __len__(self) -> int:
        return len(self._labels) if self._members is None else len(self._members)

    def labels(self) -> Tensor:
        return self._labels

    def rows(self, units: Tensor, uniforms: Tensor | None) -> Rows:
        index, owner = self._chosen(units, uniforms)
        inputs, labels = self.read(index), _picked(self._labels, index)
        if uniforms is None or self._views is None:
            return Rows(inputs, labels, owner)
        if not isinstance(inputs, Tensor):
            raise Refusal("Only rows that are one tensor each can be augmented.")
        copies = self._copies
        rest = uniforms[:, self._shown if self._drawn else 0 :].reshape(len(units), -1, self._views.uniforms)
        place = _place_in_unit(owner, len(units))
        drawn_uniforms = torch.cat([rest[owner, place * copies + copy] for copy in range(copies)])
        repeated = inputs.repeat(copies, *[1] * (inputs.dim() - 1))
        order = torch.arange(copies * len(index)).view(copies, -1).t().flatten()  # the views of a row side by side
        viewed = self._views(repeated, drawn_uniforms)[order]
        return Rows(viewed, labels.repeat_interleave(copies, 0), owner.repeat_interleave(copies))

    def fingerprint(self) -> str:
        found = hashlib.sha256(repr((self._shown, self._copies, self._views, len(self._labels))).encode())
        found.update(repr(list(self.inputs)).encode() if isinstance(self.inputs, Mapping) else b"")
        found.update(_told(self._labels))
        for rows in self._members or ():
            found.update(_told(rows))
        own = getattr(self.inputs, "fingerprint", None)  # of files: their content, which need not be decoded for it
        if callable(own):
            found.update(own().encode())
            return found.hexdigest()
        for start in range(0, len(self._labels), 4096):
            batch = self.read(torch.arange(start, min(start + 4096, len(self._labels))))
            for part in _tensors(batch):
                found.update(_told(part))
        return found.hexdigest()

    @property
    def draws(self) -> bool:
        """Whether reading rows may draw from global generators: tensors do not, a data set's transforms might."""
        return not isinstance(self.inputs, Tensor | Mapping) and bool(getattr(self.inputs, "draws", True))

    @property
    def grouped(self) -> bool:
        """Whether rows have owners."""
        return self._members is not None

    @property
    def augmented(self) -> bool:
        return self._views is not None

    def with_inputs(self, inputs: Any) -> TensorRecords:
        """The same labels and units with other inputs: features, say."""
        if _count(inputs) != len(self._labels) or self.augmented:
            raise Refusal("Other inputs are one per row, of rows that are not augmented.")
        other = copy(self)
        other.inputs = inputs
        return other

    def _chosen(self, units: Tensor, uniforms: Tensor | None) -> tuple[Tensor, Tensor]:
        """Which rows are shown, and whose they are."""
        if self._members is None:
            return units, torch.arange(len(units))
        mine = [self._members[unit] for unit in units.tolist()]
        if uniforms is not None and self._drawn:
            fates = uniforms[:, : self._shown]  # the rest is for views
            mine = [
                rows[without_replacement(len(rows), drawn_uniforms)]
                for rows, drawn_uniforms in zip(mine, fates, strict=True)
            ]
        if not mine:
            return torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.long)
        sizes = torch.tensor([len(rows) for rows in mine])
        return torch.cat(mine), torch.repeat_interleave(torch.arange(len(mine)), sizes)

    def read(self, index: Tensor) -> Any:
        """The inputs of some rows, by their number: to look at only, for rows in a row are not copied."""
        if isinstance(self.inputs, Tensor):
            return _taken(self.inputs, index)
        if isinstance(self.inputs, Mapping):
            return {key: _taken(value, index) for key, value in self.inputs.items()}
        if len(index) == 0:
            return self.read(torch.zeros(1, dtype=torch.long))[:0]
        return stacked([self.inputs[int(i)][0] for i in index])


def _taken(values: Tensor, index: Tensor) -> Tensor:
    """Some rows; those that lie in a row as a slice, which costs nothing to take."""
    if len(index) == 0:
        return _picked(values, index)
    first, last = int(index[0]), int(index[-1])
    if last - first + 1 != len(index) or not torch.equal(index, torch.arange(first, last + 1)):
        return _picked(values, index)
    return values[first : last + 1]


def _picked(values: Tensor, index: Tensor) -> Tensor:
    """values[index]; on one device by torch's own copy of rows, which takes half the time."""
    if isinstance(values, Tensor) and values.device == index.device:
        return values.index_select(0, index)
    return values[index]


def _place_in_unit(owner: Tensor, units: int) -> Tensor:
    """0, 1, 2, ... within the rows of each unit, which lie side by side."""
    sizes = torch.bincount(owner, minlength=units)
    starts = torch.cumsum(sizes, 0) - sizes
    return torch.arange(len(owner)) - starts[owner]


def _classes(labels: Any) -> Tensor:
    """Labels as a tensor; integers of any size as losses take them."""
    found = torch.as_tensor(as_tensors(labels, "Labels", "number the classes from 0"))
    whole = not (found.is_floating_point() or found.is_complex() or found.dtype == torch.bool)
    return found.long() if whole else found


def _count(inputs: Any) -> int:
    if not isinstance(inputs, Mapping):
        return len(inputs)
    sizes = {len(value) for value in inputs.values()}
    if len(sizes) != 1:
        raise Refusal("The inputs disagree on the number of rows.")
    return sizes.pop()


def _labels_of(dataset: Any) -> Tensor:
    """The labels of a data set: as it lists them, else asked one by one."""
    found = plain_labels(dataset)
    return torch.stack([torch.as_tensor(dataset[i][1]) for i in range(len(dataset))]) if found is None else found


def _tensors(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    values = batch.values() if isinstance(batch, Mapping) else batch
    return [part for value in values for part in _tensors(value)]


def _told(values: Tensor) -> bytes:
    """Shape, type and values: without the shape, rows that went from one unit to the next would not show."""
    plain = values.detach().cpu().contiguous()
    content = plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return f"{plain.dtype} {tuple(plain.shape)} ".encode() + content
