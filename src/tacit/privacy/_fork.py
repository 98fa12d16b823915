"""Ledgers across a fork: every connection is let go of before it, between transactions."""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tacit.privacy._ledger import Ledger

_ledgers: weakref.WeakSet[Ledger] = weakref.WeakSet()
_forking: list[Ledger] = []
_lock = threading.Lock()


def watch(ledger: Ledger) -> None:
    """From here on a fork waits until this ledger is between two transactions."""
    _ledgers.add(ledger)


def _before() -> None:
    """Let go of every connection, between transactions: SQLite's locks do not survive a fork.

    A child that inherits an open connection believes that it holds the parent's lock on the file, even through a new
    connection; when the parent then closes its own, the log that the child writes to is deleted, with its charges.
    """
    _lock.acquire()
    _forking.extend(ledger for ledger in _ledgers if ledger.durable)
    for ledger in _forking:
        ledger._lock.acquire()
        ledger._engine.dispose()


def _after() -> None:
    while _forking:
        _forking.pop()._lock.release()
    _lock.release()


os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_after)
