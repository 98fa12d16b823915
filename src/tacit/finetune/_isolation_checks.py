"""Checks that rows stay apart where no `gradients.Engine` makes them: in forward passes alone, in what is cached."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from tacit.gradients import (
    Probe,
    check_many_apart,
    check_private_apart,
    check_rows_apart,
    leaves,
    row_shapes,
    varies,
)

FEWEST = 7  # rows of a check


class IsolationChecks:
    """Checks a kind of rows once, and again for more rows at a time than before.

    Of one kind are rows of the same shapes in which the same integers vary: synthetic rows draw integers from those
    that occur, so a check in which one did not vary says nothing of rows in which it does.
    """

    def __init__(self) -> None:
        self._rows: dict[Any, int] = {}  # at a time, in the last check of each kind

    def forget(self) -> None:
        """Check every kind again."""
        self._rows.clear()

    def check(
        self, probing: Callable[[], AbstractContextManager[Probe]], batch: Any, rows: int, *, private: bool = False
    ) -> None:
        """Do synthetic rows like these stay apart, three and so many (seven at least) at a time?

        Args:
            probing: Opens what is asked of rows; only where something is left to check.
            batch: Some rows.
            rows: How many there will be at a time.
            private: Whether the integers of the batch are private; see `gradients.check_private_apart`.

        Raises:
            RowsMixed: They do not.
        """
        kind = row_shapes(batch), tuple(varies(t) for t in leaves(batch))
        if rows <= self._rows.get(kind, 0):
            return
        many = max(rows, FEWEST)
        with probing() as probe:
            if private:
                check_private_apart(probe, batch, many)
            else:
                check_rows_apart(probe, batch)
                check_many_apart(probe, batch, many)
        self._rows[kind] = rows
