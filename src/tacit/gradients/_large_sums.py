"""Zeros for the sums of large tables, in memory that earlier sums no longer need.

Blocks that are too large for the heap come fresh from the system, page by page, in every step: for the words of BERT
that took as long as a third of its backward.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict

import numpy as np
import torch
from torch import Tensor

from tacit._malloc import KEPT, USUAL

_idle: defaultdict[int, list[bytearray]] = defaultdict(list)  # by size; taking from and adding to a list is atomic


def zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Zeros in float64; large ones in memory that goes back when the last tensor that shares it is gone."""
    size = 8 * math.prod(shape)
    if size < USUAL or like.device.type != "cpu":
        return like.new_zeros(shape, dtype=torch.float64)
    try:
        memory, fresh = _idle[size].pop(), False
    except IndexError:
        memory, fresh = bytearray(size), True
    array = np.frombuffer(memory, dtype=np.float64)
    weakref.finalize(array, _give_back, memory).atexit = False
    total = torch.from_numpy(array).reshape(shape)
    return total if fresh else total.zero_()


def _give_back(memory: bytearray) -> None:
    if sum(size * len(some) for size, some in list(_idle.items())) + len(memory) <= KEPT:
        _idle[len(memory)].append(memory)
