"""Ledgers across a fork: every connection is let go of before it, between transactions."""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tacit.privacy._book import DatabaseBook

_books: weakref.WeakSet[DatabaseBook] = weakref.WeakSet()
_forking: list[DatabaseBook] = []
_lock = threading.Lock()


def watch(book: DatabaseBook) -> None:
    """From here on a fork waits until this book is between two transactions."""
    _books.add(book)


def _before() -> None:
    """Let go of every connection, between transactions: SQLite's locks do not survive a fork.

    A child that inherits an open connection believes that it holds the parent's lock on the file, even through a new
    connection; when the parent then closes its own, the log that the child writes to is deleted, with its charges.
    """
    _lock.acquire()
    _forking.extend(book for book in _books if book.durable)
    for book in _forking:
        book._lock.acquire()
        book._engine.dispose()


def _after() -> None:
    while _forking:
        _forking.pop()._lock.release()
    _lock.release()


os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_after)
