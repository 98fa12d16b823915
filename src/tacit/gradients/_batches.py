"""Batches as people have them: a tensor, or tuples, lists and mappings of tensors with one entry per row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

WHOLE = 16  # rows that a kernel computes alike, wherever they stand


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


def filled(batch: Any, rows: int) -> Any:
    """The batch, and its first rows again, up to a multiple of `WHOLE` rows.

    A kernel computes rows beyond the last whole multiple otherwise, so that a row's last bits depend on how many others
    there are; where two classes are nearly tied, these bits decide who is right.
    """
    more = -rows % WHOLE if rows else 0
    if not more:
        return batch
    return rows_of(batch, torch.arange(rows + more) % rows, rows)


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
