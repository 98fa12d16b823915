"""Two compiled passes for releases, `release.c`; each has the bits of the lines of torch that it stands for.

So it does not matter to a resumed run, or to several ranks, whether they are in use: nothing is recorded about it.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from tacit._compiled import compiled

_SOURCE = Path(__file__).with_name("release.c")
_WORD = (1 << 53) - 1


def to_uniforms(words: Tensor) -> Tensor:
    """((w >> 11) + 1) 2^-53 of each 64-bit word w, in the memory of the words: float64 on the CPU, without gaps."""
    library = _library()
    if library is not None:
        library.tacit_uniforms(words.data_ptr(), words.numel())
        return words
    drawn = words.view(torch.int64).bitwise_right_shift(11).bitwise_and_(_WORD).add_(1)
    return words.copy_(drawn).mul_(2.0**-53)


def grid_add(value: Tensor, noise: Tensor, ratio: float, step: float) -> Tensor | None:
    """What ``_grids.in_torch`` makes of a sum and its noise, in one pass; None: they do not suit, nothing was done."""
    library = _library()
    if library is None or not (
        value.dtype == noise.dtype == torch.float64
        and value.device.type == noise.device.type == "cpu"
        and value.is_contiguous()
        and noise.is_contiguous()
        and value.numel() == noise.numel()
    ):
        return None
    out = torch.empty_like(value)
    pointers = value.data_ptr(), noise.data_ptr(), value.numel(), 1 / step, ratio, step, out.data_ptr()
    library.tacit_grid_add(*pointers)
    return out


@cache
def _library() -> ctypes.CDLL | None:
    library = compiled(_SOURCE)
    if library is not None:
        pointer, size, number = ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_double
        library.tacit_uniforms.argtypes = (pointer, size)
        library.tacit_grid_add.argtypes = (pointer, pointer, size, number, number, number, pointer)
        library.tacit_uniforms.restype = library.tacit_grid_add.restype = None
    return library
