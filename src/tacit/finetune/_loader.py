"""A `DataLoader` as records: its data set, collate function and workers, without its order.

Which rows a loader gives next is decided by its sampler, and a private step needs another one: Poisson subsampling of
whole units, drawn from the receipt's key. So the sampler is left behind; the rest of the loader is kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from tacit._refusals import Refusal
from tacit._unit_ids import distinct
from tacit.data import Groupable, Rows, check_alike, stacked, without_replacement
from tacit.data import members as members_of
from tacit.gradients import change, leaves

_SAMPLE, _USER = "sample", "user"
_AT_ONCE = 256  # units that a fingerprint reads at a time
_PLAIN = "DataLoader(dataset, batch_size=…, shuffle=True)"


class LoaderRecords(Groupable):
    """The rows of a loader's data set, each its own unit or grouped by `unit_ids`; a row is the loader's batch of one.

    Formal guarantee: a row is read and collated alone, so that it depends on no other row (a collate function that
    mixes rows, or pads them to the longest, has nothing to mix), and no row is converted to the type of others
    (`data.stacked`): one that is muted when it comes alone is muted in all company. What transforms draw from global
    generators goes by the receipt's key (`sampling.reading_randomness`).

    Args:
        loader: A `DataLoader` with a map-style data set and no sampler of its own.
        unit_ids: One integer or string per item of the data set; items with the same id are one unit.
        unit: What a unit is; "sample", or "user" with `unit_ids`.
        rows_each: The most rows of a unit read in one step, drawn without replacement (default: all of them).
    """

    scored_by: Literal["row", "unit"] = "row"

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        unit_ids: Any = None,
        unit: str | None = None,
        rows_each: int | None = None,
    ) -> None:
        check_loader(loader)
        self.loader = loader
        self.count = len(loader.dataset)  # type: ignore[arg-type]
        if self.count == 0:
            raise Refusal("There are no rows to learn from: the loader's data set is empty.")
        if unit_ids is None and unit not in (None, _SAMPLE):
            raise Refusal(
                f"unit={unit!r} needs to know whose each row is: give unit_ids, one integer or string per row of the "
                "data set (all of them different, if everybody has one row)."
            )
        if unit_ids is not None and unit == _SAMPLE:
            raise Refusal("Rows have owners, so a unit is more than a sample: say what with unit=, such as 'patient'.")
        self.unit = _SAMPLE if unit_ids is None else unit or _USER
        self._ids: list[int] | list[str] | None = None
        self._members: list[Tensor] | None = None
        if unit_ids is not None:
            self._ids, owner = distinct(unit_ids, self.count, "row of the data set")
            self._members = members_of(owner)
        largest = max((len(rows) for rows in self._members), default=1) if self._members is not None else 1
        self.most_rows = largest if rows_each is None else min(rows_each, largest)
        self.uniforms = self.most_rows if self.most_rows < largest else 0  # for each unit and step
        self._reading = _Reading(loader.dataset, loader.collate_fn)
        self.draws = self._reading.tensors is None

    @property
    def unit_ids(self) -> list[int] | list[str] | None:
        return self._ids

    def __len__(self) -> int:
        return self.count if self._members is None else len(self._members)

    def labels(self) -> Tensor:
        """Those that the data set has at hand (a tensor of its own, `targets`); for others every row would be read."""
        dataset: Any = self.loader.dataset
        if type(dataset) is TensorDataset:
            return dataset.tensors[1] if len(dataset.tensors) == 2 else torch.empty(0, dtype=torch.long)
        found = getattr(dataset, "targets", None)
        try:
            return torch.empty(0, dtype=torch.long) if found is None or callable(found) else torch.as_tensor(found)
        except (TypeError, ValueError, RuntimeError):
            return torch.empty(0, dtype=torch.long)

    def rows(self, units: Tensor, uniforms: Tensor | None) -> Rows:
        mine = [[unit] if self._members is None else self._members[unit].tolist() for unit in units.tolist()]
        if uniforms is not None and self.uniforms:
            chosen = [without_replacement(len(rows), line) for rows, line in zip(mine, uniforms, strict=True)]
            mine = [[rows[place] for place in places.tolist()] for rows, places in zip(mine, chosen, strict=True)]
        index = [row for rows in mine for row in rows]
        batch = self._reading(index) if index else change(self._reading([0]), lambda t: t[:0])
        owner = torch.arange(len(mine)).repeat_interleave(torch.tensor([len(rows) for rows in mine], dtype=torch.long))
        return Rows(batch, torch.zeros(len(owner), dtype=torch.long), owner)

    def fingerprint(self) -> str:
        found = hashlib.sha256(repr((self.count, self.unit, *([self.uniforms] if self.uniforms else []))).encode())
        for rows in self._members or ():
            found.update(repr(rows.tolist()).encode())
        for start in range(0, self.count, _AT_ONCE):
            batch = self._reading(list(range(start, min(start + _AT_ONCE, self.count))))
            found.update(repr(_structure(batch)).encode())
            for part in leaves(batch):
                found.update(part.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return found.hexdigest()


class _Reading:
    """Rows of a data set, by their numbers, as one batch."""

    def __init__(self, dataset: Any, collate: Any) -> None:
        self.dataset, self.collate = dataset, collate
        self.tensors = dataset.tensors if type(dataset) is TensorDataset and collate is default_collate else None

    def __call__(self, index: list[int]) -> Any:
        if self.tensors is not None:
            return [values[index] for values in self.tensors]
        if self.collate is default_collate:  # stacks rows, and does nothing else with them
            return _plain(stacked([self.dataset[row] for row in index]))
        rows = [_plain(self.collate([self.dataset[row]])) for row in index]
        if any(len(part) != 1 for row in rows for part in leaves(row)):
            raise Refusal(_ONE_ROW)
        check_alike(rows)
        return _joined(rows)


def check_loader(loader: Any) -> None:
    """Refuse a loader whose order cannot be replaced by Poisson subsampling without changing what it gives."""
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"loader is a torch.utils.data.DataLoader, not {type(loader).__name__}: tacit re-makes it with Poisson "
            f"subsampling, so a plain {_PLAIN} is enough."
        )
    if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__getitem__"):
        raise Refusal(
            "A stream (IterableDataset) cannot be Poisson-subsampled, for its rows cannot be asked for by number: give "
            "a data set with __len__ and __getitem__."
        )
    if type(loader.batch_sampler) is not BatchSampler:
        raise Refusal(
            "This loader makes its batches itself (batch_sampler=, or batch_size=None), and a private batch is a "
            f"Poisson subsample: give a plain {_PLAIN}."
        )
    sampler = loader.batch_sampler.sampler
    shuffles = isinstance(sampler, RandomSampler) and not sampler.replacement and sampler._num_samples is None
    if not shuffles and type(sampler) is not SequentialSampler:
        raise Refusal(
            f"This loader has a sampler of its own ({type(sampler).__name__}), which gives rows other chances than the "
            f"Poisson subsampling that is charged for: give a plain {_PLAIN}, and torch.utils.data.Subset to use only "
            "some rows."
        )


def batching(loader: DataLoader[Any]) -> tuple[int, bool]:
    """The batch size of a loader that passed the check, and whether it leaves out the last, smaller batch."""
    batches: Any = loader.batch_sampler
    return int(batches.batch_size), bool(batches.drop_last)


def _structure(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return str(batch.dtype), tuple(batch.shape)
    if isinstance(batch, Mapping):
        return {str(key): _structure(value) for key, value in batch.items()}
    return [_structure(value) for value in batch]


def _plain(batch: Any) -> Any:
    """The batch in dicts, lists and tuples; refused if there is anything in it but tensors with rows."""
    if isinstance(batch, Tensor):
        if not batch.dim():
            raise Refusal(_NO_ROWS.format(what="a tensor without dimensions"))
        return batch
    if isinstance(batch, Mapping):
        return {key: _plain(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_plain(value) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_plain(value) for value in batch)
    raise Refusal(_NO_ROWS.format(what=f"a {type(batch).__name__}"))


_NO_ROWS = (
    "The loader's batches hold {what}: a private batch is tensors with one entry per row, in tuples, lists or dicts. "
    "Leave the rest out in collate_fn. Nothing was charged."
)


_ONE_ROW = (
    "collate_fn must return one row for each item: it was given one item, and returned more or less. Nothing was "
    "charged."
)


def _joined(batches: list[Any]) -> Any:
    """Rows of several batches, one after the other."""
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(batches)
    if isinstance(first, Mapping):
        return {key: _joined([batch[key] for batch in batches]) for key in first}
    parts = [_joined(list(each)) for each in zip(*batches, strict=True)]
    return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
