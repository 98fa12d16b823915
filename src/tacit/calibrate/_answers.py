"""The answers that a source has given, kept where its ledger is kept (or in a database of its own, if that is behind a
service): one question is answered once.

Fresh noise for the same question would average out. So a query's id is written down before it is charged, and its noisy
answer before it leaves:

    begin -> (charge) -> finish        the answer is kept; asked again, it is returned as it was
    begin -> abandon                   refused before the charge: as if it had never been asked
    begin -> (crash)                   whether it was charged or had left is unknown: the id is refused from then on
"""

from __future__ import annotations

import json
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from os import register_at_fork
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from tacit.calibrate._queries import Answer, Query
from tacit.privacy import Ledger, LedgerError, connect

_metadata = sa.MetaData()
_table = sa.Table(
    "tacit_answers",
    _metadata,
    sa.Column("subject", sa.String(200), primary_key=True),
    sa.Column("id", sa.String(200), primary_key=True),
    sa.Column("query", sa.Text, nullable=False),
    sa.Column("answer", sa.Text),  # empty while the question is open
)
_lock = threading.RLock()  # no fork in the middle of a transaction
register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


class Refused(Exception):
    """A question that a source does not answer. The sentence depends on nothing private and may travel."""


class AnswerBook(ABC):
    """The answers of all subjects of one ledger."""

    def begin(self, subject: str, query: Query) -> Answer | None:
        """Open a question and return None, or return the answer that was given; refused if neither can be."""
        known = self._open(subject, query)
        if known is None:
            return None
        asked, answered = known
        if asked != query.text:
            raise Refused(f"Query {query.id} was another question before: choose a new id. Nothing was charged.")
        if answered is None:
            raise Refused(
                f"Query {query.id} is being answered, or was interrupted after it may have been charged: "
                "it is not answered again. Ask under a new id, which is charged anew."
            )
        return Answer.from_json(json.loads(answered))

    @abstractmethod
    def _open(self, subject: str, query: Query) -> tuple[str, str | None] | None:
        """Write the question down, atomically; or return what is there already: the question and its answer."""

    @abstractmethod
    def abandon(self, subject: str, query: Query) -> None:
        """Nothing was charged: forget that it was asked."""

    @abstractmethod
    def reopen(self, subject: str) -> None:
        """Forget the questions that were begun and have no answer."""

    @abstractmethod
    def finish(self, subject: str, query: Query, answer: Answer) -> None:
        """Keep the answer, durably; only then may it leave."""


class _InMemory(AnswerBook):
    """For a ledger in memory."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], tuple[str, str | None]] = {}

    def _open(self, subject: str, query: Query) -> tuple[str, str | None] | None:
        with _lock:
            known = self._kept.get((subject, query.id))
            if known is None:
                self._kept[subject, query.id] = (query.text, None)
            return known

    def abandon(self, subject: str, query: Query) -> None:
        self._kept.pop((subject, query.id), None)

    def reopen(self, subject: str) -> None:
        for key in [key for key, (_, answer) in self._kept.items() if key[0] == subject and answer is None]:
            del self._kept[key]

    def finish(self, subject: str, query: Query, answer: Answer) -> None:
        self._kept[subject, query.id] = (query.text, json.dumps(answer.to_json()))


class _InDatabase(AnswerBook):
    """A table in the ledger's own database."""

    def __init__(self, url: str) -> None:
        self._engine = connect(url, create=True)
        with self._transaction() as connection:
            if connection.dialect.name == "postgresql":
                connection.exec_driver_sql("SELECT pg_advisory_xact_lock(7461636975)")  # two first openings at once
            _metadata.create_all(connection)

    def _open(self, subject: str, query: Query) -> tuple[str, str | None] | None:
        key = {"subject": subject, "id": query.id}
        with self._transaction() as connection:
            if connection.dialect.name == "postgresql":  # SQLite's writers queue up anyway
                connection.exec_driver_sql("SELECT pg_advisory_xact_lock(7461636975)")
            row = connection.execute(sa.select(_table).filter_by(**key)).one_or_none()
            if row is not None:
                return row.query, row.answer
            connection.execute(sa.insert(_table).values(**key, query=query.text))
            return None

    def abandon(self, subject: str, query: Query) -> None:
        with self._transaction() as connection:
            wanted = (_table.c.subject == subject, _table.c.id == query.id, _table.c.answer.is_(None))
            connection.execute(sa.delete(_table).where(*wanted))

    def reopen(self, subject: str) -> None:
        with self._transaction() as connection:
            connection.execute(sa.delete(_table).where(_table.c.subject == subject, _table.c.answer.is_(None)))

    def finish(self, subject: str, query: Query, answer: Answer) -> None:
        with self._transaction() as connection:
            wanted = (_table.c.subject == subject, _table.c.id == query.id)
            connection.execute(sa.update(_table).where(*wanted).values(answer=json.dumps(answer.to_json())))

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        with _lock:
            try:
                with self._engine.begin() as connection:
                    yield connection
            except sa.exc.SQLAlchemyError as error:
                raise LedgerError("The answers beside the ledger cannot be used, so nothing is answered.") from error
            finally:
                self._engine.dispose()  # no connection stays open: SQLite's locks do not survive a fork


_in_memory: weakref.WeakKeyDictionary[Ledger, AnswerBook] = weakref.WeakKeyDictionary()


def book_of(ledger: Ledger, answers: str | Path | None = None) -> AnswerBook:
    """The answers beside this ledger: in its database, or in memory if that is where the ledger is.

    Args:
        ledger: The ledger.
        answers: A file or a database of their own. A ledger behind a service needs it, for it keeps charges alone.

    Returns:
        The answers.

    Raises:
        ValueError: The ledger is behind a service, and no file for the answers was given.
    """
    with _lock:
        if answers is not None:
            return _InDatabase(str(answers) if "://" in str(answers) else f"sqlite:///{answers}")
        if ledger.url.startswith(("https://", "http://")):
            raise ValueError("This ledger is behind a service: say with answers= in which file answers are kept here.")
        if ledger.durable:
            return _InDatabase(ledger.url)
        return _in_memory.setdefault(ledger, _InMemory())


def reopen(ledger: Ledger, subject: str, *, answers: str | Path | None = None) -> None:
    """Let the questions of a subject be asked again that a killed process had begun and not answered.

    Formal guarantee: an answer is kept before it leaves, so one that was not kept has not left. The caller knows
    that the process which began them is gone, and pays for them again or adopts what it had charged
    (`privacy.replay.adopt`).

    Args:
        ledger: The ledger.
        subject: The data set's name in it.
        answers: As in `Source`.
    """
    book_of(ledger, answers).reopen(subject)
