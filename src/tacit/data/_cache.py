"""Decoded pictures kept within a bound, and digests of the files that they came from."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]


class Cache:
    """The arrays that were used last, at most `memory` bytes of them."""

    def __init__(self, memory: int) -> None:
        if memory < 0:
            raise ValueError(f"The memory of a cache is {memory} bytes, but it cannot be negative; 0 keeps nothing.")
        self.memory = memory
        self.used = 0
        self._kept: OrderedDict[Hashable, Pixels] = OrderedDict()

    def get(self, key: Hashable) -> Pixels | None:
        if (found := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
        return found

    def put(self, key: Hashable, pixels: Pixels) -> None:
        if pixels.nbytes > self.memory or key in self._kept:
            return
        self._kept[key] = pixels
        self.used += pixels.nbytes
        while self.used > self.memory:
            self.used -= self._kept.popitem(last=False)[1].nbytes


def digest(file: Path) -> str:
    """SHA-256 of a file's content. One that cannot be read raises: later it might be read, and all would differ."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def fingerprint(parts: Iterable[Any]) -> str:
    """SHA-256 over the representation of each part, in their order."""
    total = hashlib.sha256()
    for part in parts:
        total.update(repr(part).encode())
        total.update(b"\0")
    return total.hexdigest()
