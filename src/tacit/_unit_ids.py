"""Ids of units: integers or strings, one per row; equal ids are the same unit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tacit._refusals import Refusal


def distinct(ids: Any, count: int, what: str = "row") -> tuple[list[int] | list[str], Tensor]:
    """The different ids in ascending order, and for each row which of them it has. Integers or strings, not both."""
    expected = f"Unit ids are one integer or string per {what}, in one dimension."
    if isinstance(ids, Tensor) and (ids.is_floating_point() or ids.is_complex()):
        raise Refusal(expected)
    values = ids.detach().cpu().numpy() if isinstance(ids, Tensor) else ids
    if not isinstance(values, np.ndarray) or values.dtype.kind == "O":  # as pandas hands texts over
        try:
            values = [] if isinstance(values, str) else list(values)
        except TypeError:
            raise Refusal(expected) from None
        if count == 0 and not values:
            return [], torch.empty(0, dtype=torch.long)
        plain = [
            value.item() if isinstance(value, Tensor | np.generic) and value.ndim == 0 else value for value in values
        ]
        if {type(value) for value in plain} not in ({int}, {str}):
            raise Refusal(expected)
        try:
            values = np.array(plain, dtype=np.int64) if isinstance(plain[0], int) else np.array(plain, dtype=np.str_)
        except OverflowError:
            values = np.array([str(value) for value in plain])
    if values.shape != (count,) or values.dtype.kind not in "iuU":
        raise Refusal(expected)
    found, inverse = np.unique(values, return_inverse=True)
    return found.tolist(), torch.from_numpy(inverse.astype(np.int64))
