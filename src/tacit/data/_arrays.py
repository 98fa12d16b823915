"""Arrays as tensors: what numpy and pandas hold in memory, or on disk."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tacit._refusals import Refusal


def as_tensors(values: Any, what: str, way: str) -> Any:
    """Arrays, tables and columns as tensors, also those of a mapping; anything else as it is.

    Arrays whose rows lie one after the other are not copied, so memory-mapped ones stay on disk.

    Args:
        values: A tensor, an array, a mapping of these, or something else.
        what: What these are, for the message.
        way: How to make numbers of them, for the message.

    Returns:
        The same in tensors.

    Raises:
        Refusal: An array does not hold numbers.
    """
    if isinstance(values, Mapping) and any(_is_array(value) for value in values.values()):
        return {key: as_tensors(value, what, way) for key, value in values.items()}
    if not _is_array(values):
        return values
    array = np.asarray(values)
    try:
        array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
        with warnings.catch_warnings():  # of arrays that are read-only, into which nothing here writes
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(array)
    except TypeError:
        pass
    raise Refusal(f"{what} are an array of type {array.dtype}, which holds no numbers: {way}.")


def _is_array(values: Any) -> bool:
    return not isinstance(values, Tensor) and hasattr(values, "__array__")
