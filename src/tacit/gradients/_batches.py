"""Batches as people have them: a tensor, or tuples, lists and mappings of tensors with one entry per row."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

WHOLE = 16  # rows at a time where a row's last bits decide, and fewer where so many are larger than this:
_BYTES = 64 * 2**20


def leaves(batch: Any) -> Iterator[Tensor]:
    """Every tensor with rows."""
    return iter(_leaves(batch))


def _leaves(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch] if batch.dim() else []
    if isinstance(batch, list | tuple):  # before mappings, for which Python asks a registry
        return [leaf for item in batch for leaf in _leaves(item)]
    if isinstance(batch, Mapping):
        return [leaf for item in batch.values() for leaf in _leaves(item)]
    return []


def count_rows(batch: Any) -> int:
    """How many rows the batch has; all its tensors must agree."""
    sizes = {int(t.shape[0]) for t in _leaves(batch)}
    if not sizes:
        raise ValueError("The batch holds no tensor with rows; give a tensor, or a tuple, list or mapping of tensors.")
    if len(sizes) > 1:
        raise ValueError(
            f"The tensors of the batch disagree on the number of rows: {sorted(sizes)}. Each tensor needs one entry "
            f"per row in its first dimension; put constants into the loss function instead."
        )
    return sizes.pop()


def row_shapes(batch: Any) -> tuple[tuple[int, ...], ...]:
    return tuple([tuple(t.shape[1:]) for t in _leaves(batch)])


def change(batch: Any, by: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with every tensor with rows replaced."""
    if isinstance(batch, Tensor):
        return by(batch) if batch.dim() else batch
    if isinstance(batch, Mapping):
        changed = {key: change(item, by) for key, item in batch.items()}
        return changed if type(batch) is dict else _same_mapping(batch, changed)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(change(item, by) for item in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(change(item, by) for item in batch)
    return batch


def in_own_places(function: Callable[[Any], Tensor], batch: Any, rows: int, *, most: int = WHOLE) -> Tensor:
    """What a function says of each row, to the last bit whoever else is there.

    Kernels round a row otherwise in another place of a batch, or among another number of rows; where two classes are
    nearly tied, these bits decide who is right. So `WHOLE` rows are given to the function at a time, never more or
    fewer, and each stands in a place that its own values decide. Of large rows, and where the caller says `most`, it is
    fewer, by the shape of a row alone: one row must not need the memory of sixteen.

    Formal guarantee: a row's result depends on nothing but that row, if the function keeps rows apart and rounds a row
    in the same way in equal places of batches of equal shapes. Rows that have the same place follow each other: there
    are never more passes than rows, whatever is in them.
    """
    if not rows:
        return function(batch)
    each = sum(leaf.numel() * leaf.element_size() for leaf in _leaves(batch)) // rows
    whole = max(1, min(WHOLE, most, _BYTES // max(each, 1)))
    places, turns = _own_places(batch, rows, whole)
    found: Tensor | None = None
    for turn in range(int(turns.max()) + 1):
        mine = torch.nonzero(turns == turn).flatten()
        index = mine[:1].repeat(whole).index_copy_(0, places[mine], mine)  # some row again where nobody's place is
        said = function(change(batch, lambda t, index=index: t[index.to(t.device)]))  # type: ignore[misc]
        found = said.new_empty(rows, *said.shape[1:]) if found is None else found
        found[mine.to(said.device)] = said[places[mine].to(said.device)]
    return torch.empty(0) if found is None else found


def _own_places(batch: Any, rows: int, whole: int) -> tuple[Tensor, Tensor]:
    """The place of each row among so many, a hash of its bytes, and how many rows before it have the same place."""
    sums = [0] * rows
    for leaf in _leaves(batch):
        lines = leaf.detach().reshape(rows, math.prod(leaf.shape[1:])).cpu().contiguous().view(torch.uint8).numpy()
        sums = [zlib.crc32(line, found) for line, found in zip(lines, sums, strict=True)]
    places, taken = torch.tensor(sums) % whole, [0] * whole
    turns = []
    for place in places.tolist():
        turns.append(taken[place])
        taken[place] += 1
    return places, torch.tensor(turns)


def rows_of(batch: Any, index: Tensor, rows: int) -> Any:
    """The chosen rows; neighbouring ones as views."""
    if index.numel() == 0:
        return change(batch, lambda t: t[:0])
    first, last = int(index[0]), int(index[-1])
    if last - first + 1 == index.numel() and bool((index.diff() == 1).all()):
        if index.numel() == rows:
            return batch
        return change(batch, lambda t: t[first : first + index.numel()])
    return change(batch, lambda t: t[index.to(t.device)])


def _same_mapping(batch: Mapping[Any, Any], changed: dict[Any, Any]) -> Any:
    try:
        return type(batch)(changed)  # type: ignore[call-arg]
    except TypeError:
        return changed
