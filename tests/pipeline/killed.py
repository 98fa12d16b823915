"""Runs that die: at the n-th durable write (of the ledger or a file), before it or just after it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tacit import _checkpoints as checkpoints
from tacit import pipeline
from tacit.pipeline import PipelineResult
from tacit.privacy._book import DatabaseBook


class Killed(BaseException):
    """Nothing in the package catches this."""


@contextmanager
def dying(monkeypatch: pytest.MonkeyPatch, at: int, *, after: bool) -> Iterator[list[int]]:
    """Die at write number `at`; the list has the number of writes so far."""
    count = [0]
    transaction, write = DatabaseBook.transaction, checkpoints.write

    def tick(now: bool) -> None:
        if now == after and count[0] == at:
            raise Killed

    @contextmanager
    def dying_transaction(self: DatabaseBook) -> Iterator[Any]:
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
        patch.setattr(DatabaseBook, "transaction", dying_transaction)
        patch.setattr(checkpoints, "write", dying_write)
        yield count


def writes(monkeypatch: pytest.MonkeyPatch, recipe: Path, out: Path) -> tuple[int, PipelineResult]:
    """How many writes a run makes that nobody kills, and what it comes to."""
    with dying(monkeypatch, -1, after=False) as count:
        outcome = pipeline.run(pipeline.read(recipe), out)
    return count[0], outcome


def costs(outcome: PipelineResult) -> list[tuple[str, str, float]]:
    """What was charged to whom, in the order of the ledger; a settlement that returns something is one of them.

    To nine digits: which steps a search tries depends on noise, and with it the last digits of a price.
    """
    found = []
    for entry in outcome.ledger.entries():
        if entry.kind == "charge":
            found.append((entry.subject, entry.body["stage"], float(f"{entry.body['cost']:.9e}")))
        if entry.kind == "settle" and entry.body["refund"]:
            found.append((entry.subject, "settled", float(entry.body["refund"])))
    return found


def killed_and_resumed(
    monkeypatch: pytest.MonkeyPatch, recipe: Path, out: Path, at: int, *, after: bool
) -> PipelineResult:
    """A run that dies at write number `at` and is run again, with a ledger of its own."""
    for file in [*recipe.parent.glob("ledger.db*"), *recipe.parent.glob("tacit-*")]:
        file.unlink()
    with dying(monkeypatch, at, after=after), pytest.raises(Killed):
        pipeline.run(pipeline.read(recipe), out)
    return pipeline.run(pipeline.read(recipe), out)
