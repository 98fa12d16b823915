"""Data sets as torch's loaders hold them: any items, a function that collates them, a folder of samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset, default_collate

from tacit._refusals import Refusal

LABELS = ("labels", "label", "targets", "target")


class Collated:
    """A data set of (input, label) items from items of any kind, each collated alone.

    Formal guarantee: a row is made of its own item and nothing else, whatever the function does with several items: one
    that mixes them (mixup), or pads a row to the longest of its batch, never sees two.

    Args:
        items: Anything with `__len__` and `__getitem__`.
        collate: Makes a batch of a list of items: (inputs, labels), or a mapping in which "labels" or "label" is one.
    """

    def __init__(self, items: Any, collate: Callable[[list[Any]], Any] = default_collate) -> None:
        self.items, self.collate = items, collate
        found = plain_labels(items)
        if found is not None:
            self.targets = found

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, place: int) -> tuple[Any, Any]:
        inputs, labels = self._split(self.collate([self.items[place]]))
        return _only(inputs), _only(labels)

    @staticmethod
    def _split(batch: Any) -> tuple[Any, Any]:
        if isinstance(batch, Mapping):
            name = next((name for name in LABELS if name in batch), None)
            if name is not None:
                rest = {key: value for key, value in batch.items() if key != name}
                return rest if len(rest) > 1 else next(iter(rest.values()), None), batch[name]
        elif isinstance(batch, Sequence) and len(batch) == 2:
            return batch[0], batch[1]
        raise Refusal("Items (or what collate_fn makes of them) are (input, label), or a mapping with 'label'.")


def samples_of(dataset: Any) -> list[Any]:
    """What each row was read from, as data sets of folders list it (`samples`: file and class)."""
    if isinstance(dataset, Subset):
        samples = samples_of(dataset.dataset)
        return [samples[place] for place in dataset.indices]
    found = getattr(dataset.items if isinstance(dataset, Collated) else dataset, "samples", None)
    if found is None:
        raise Refusal(
            "unit_ids as a function is for data sets that list their files as `samples`, as ImageFolder does: give one "
            "id per row instead."
        )
    return [sample[0] if isinstance(sample, tuple | list) else sample for sample in found]


def plain_labels(dataset: Any) -> Tensor | None:
    """The labels of a data set that lists them: `targets` or `labels`; None: each item has to be asked."""
    if isinstance(dataset, Subset):
        whole = plain_labels(dataset.dataset)
        return None if whole is None else whole[torch.as_tensor(dataset.indices)]
    for name in ("targets", "labels"):
        found = getattr(dataset, name, None)
        if found is not None and not callable(found):
            return torch.as_tensor(found)
    return None


def as_items(dataset: Any, collate: Callable[[list[Any]], Any] = default_collate) -> Any:
    """A data set as one of (input, label) items."""
    return Collated(dataset, collate) if collate is not default_collate or _mapped(dataset) else dataset


def _mapped(dataset: Any) -> bool:
    """Whether items are mappings: most of the first five that can be read, so that no single one decides it."""
    votes = []
    for place in range(min(len(dataset), 5)):
        with suppress(Exception):  # a row that cannot be read is handled where rows are read
            votes.append(isinstance(dataset[place], Mapping))
    return 2 * sum(votes) > len(votes)


def _only(batch: Any) -> Any:
    """The one row of a batch."""
    if isinstance(batch, Mapping):
        return {key: _only(value) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_only(value) for value in batch)
    if not hasattr(batch, "__len__") or len(batch) != 1:
        raise Refusal("collate_fn must return one row for each item: it was given one item, and returned more or less.")
    return batch[0]
