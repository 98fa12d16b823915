"""Locks that a forked child starts with anew: a thread of the parent that had one is not there to give it back."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

_locks: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()


class ForkSafeLock:
    """A re-entrant lock that nobody holds in a forked child, but for a thread that forks within: it leaves as it came.

    Example:
        >>> turn = ForkSafeLock()
        >>> with turn.held(), turn.held():
        ...     print("one thread, twice")
        one thread, twice
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _locks.add(self)

    @contextmanager
    def held(self) -> Iterator[None]:
        """One thread at a time is within."""
        with self._lock:  # this one is given back, also where a fork within has put a new one in its place
            yield


def _forked() -> None:
    for each in _locks:
        each._lock = threading.RLock()


os.register_at_fork(after_in_child=_forked)
