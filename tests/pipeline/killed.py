"""Runs that die: at the n-th durable write (of the ledger or a file), before it or just after it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tacit import checkpoints, pipeline
from tacit.pipeline import Outcome
from tacit.privacy import Ledger


class Killed(BaseException):
    """Nothing in the package catches this."""


@contextmanager
def dying(monkeypatch: pytest.MonkeyPatch, at: int, *, after: bool) -> Iterator[list[int]]:
    """Die at write number `at`; the list has the number of writes so far."""
    count = [0]
    transaction, write = Ledger._transaction, checkpoints.write

    def tick(now: bool) -> None:
        if now == after and count[0] == at:
            raise Killed

    @contextmanager
    def dying_transaction(self: Ledger) -> Iterator[Any]:
        count[0] += 1
        tick(now=False)
        with transaction(self) as connection:
            yield connection
        tick(now=True)

    def dying_write(path: Path, content: bytes, mode: int = 0o644) -> None:
        count[0] += 1
        tick(now=False)
        write(path, content, mode)
        tick(now=True)

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "_transaction", dying_transaction)
        patch.setattr(checkpoints, "write", dying_write)
        yield count


def writes(monkeypatch: pytest.MonkeyPatch, recipe: Path, out: Path) -> tuple[int, Outcome]:
    """How many writes a run makes that nobody kills, and what it comes to."""
    with dying(monkeypatch, -1, after=False) as count:
        outcome = pipeline.run(pipeline.read(recipe), out)
    return count[0], outcome


def costs(outcome: Outcome) -> list[tuple[str, str, Any, int | None]]:
    """What was charged, without the name of the run."""
    found = []
    for entry in outcome.ledger.entries():
        if entry.kind == "charge":
            found.append((entry.subject, entry.body["stage"], entry.body["event"], entry.body["cost"]))
        if entry.kind == "settle" and entry.body["refund"]:
            found.append((entry.subject, "settled", None, entry.body["refund"]))
    return sorted(found, key=str)
