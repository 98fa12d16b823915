"""Memory that a step frees is kept for the next one.

A private step frees most of what it has at its end. By default glibc then gives it back to the system, and the next
step gets it again page by page, zeroed: a tenth of a step of a small ViT, a fourth of one of BERT.
"""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache

KEPT = 1 << 30  # bytes at the top of the heap that are not given back, and the largest block that is taken from it
_USUAL = 32 << 20  # the largest block in older versions of glibc
_TRIM, _MMAP = -1, -3  # mallopt's names
_CHOICES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


@cache
def keep_freed_memory() -> bool:
    """Let glibc's malloc keep up to a gigabyte that was freed, for the rest of the process; returns whether it does.

    Nothing is changed elsewhere, nor where the environment decides: by malloc's own variables, or by `TACIT_MALLOC=0`.
    """
    if platform.libc_ver()[0] != "glibc" or os.environ.get("TACIT_MALLOC") == "0":
        return False
    if any(os.environ.get(name) for name in _CHOICES):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_TRIM, KEPT)) and any(mallopt(_MMAP, size) for size in (KEPT, _USUAL))
