"""Rows of a data set side by side, each as it would be alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import default_collate


class Unlike(ValueError):
    """Rows that do not look alike: none of them may be changed so that they fit together."""


def stacked(items: list[Any]) -> Any:
    """`torch.utils.data.default_collate` of items that are alike.

    Formal guarantee: each row is what it would be if it were the only item. Torch's own function looks at the first
    item for the keys, and turns numbers of different types into those of the widest: a whole number among others would
    count if it comes with them, and be of another type, which is muted, if it comes alone. Here it is of its own type
    always.

    Args:
        items: Of a data set; one at least.

    Returns:
        The batch.

    Raises:
        Unlike: The items differ in structure, types or shapes.
    """
    check_alike(items)
    return default_collate(items)


def check_alike(items: list[Any]) -> None:
    """Refuse items that differ in structure, types or shapes.

    Args:
        items: Of a data set, or rows made of them.

    Raises:
        Unlike: They differ.
    """
    first = _kind(items[0])
    if any(_kind(item) != first for item in items[1:]):
        raise Unlike("Rows differ in structure, types or shapes.")


def _kind(item: Any) -> Any:
    if isinstance(item, Tensor | np.ndarray):
        return type(item), item.dtype, tuple(item.shape)
    if isinstance(item, Mapping):
        return type(item), tuple((key, _kind(value)) for key, value in item.items())
    if isinstance(item, list | tuple):
        return type(item), tuple(_kind(value) for value in item)
    return type(item)
