"""Memory that a step frees is kept for the next one.

A private step frees most of what it has at its end. By default glibc then gives it back to the system, and the next
step gets it again page by page, zeroed: a tenth of a step of a small ViT, a fourth of one of BERT.
"""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache

KEPT = 1 << 30  # bytes at the top of the heap that are not given back
USUAL = 32 << 20  # blocks from this size on are not from the heap: they would leave holes that fit nothing
_TRIM, _MMAP = -1, -3  # mallopt's names
_CHOICES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


@cache
def keep_freed_memory() -> bool:
    """Let glibc's malloc keep up to a gigabyte of small blocks that were freed, from now on; returns whether it does.

    Nothing is changed elsewhere, nor where the environment decides: by malloc's own variables, or by `TACIT_MALLOC=0`.
    """
    if platform.libc_ver()[0] != "glibc" or os.environ.get("TACIT_MALLOC") == "0":
        return False
    if any(os.environ.get(name) for name in _CHOICES):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_TRIM, KEPT)) and bool(mallopt(_MMAP, USUAL))  # the latter is where it ends up by itself
