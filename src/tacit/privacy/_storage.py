"""The ledger's tables, and opening them safely on SQLite and PostgreSQL.

``entries`` is append-only and hash-chained: every fact is there. ``subjects`` and ``head`` are running totals of it, so
that a charge reads a few rows however long the ledger is; ``verify`` recomputes them.

Formal guarantee (SQLite): whatever was committed is in the main file, synchronised to the disk, when the commit
returns. A rollback journal beside it serves an unfinished transaction alone, so that the main file without any other
holds every charge. (A write-ahead log does not give that: charges would be in the log until it is merged.)
"""

from __future__ import annotations

import hashlib
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.pool import StaticPool

SCHEMA_VERSION = 2

metadata = sa.MetaData()
meta = sa.Table("tacit_meta", metadata, sa.Column("key", sa.String(40), primary_key=True), sa.Column("value", sa.Text))
entries = sa.Table(
    "tacit_entries",
    metadata,
    sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("kind", sa.String(10), nullable=False),  # subject, charge or settle
    sa.Column("subject", sa.String(200), nullable=False),
    sa.Column("receipt", sa.String(40), index=True),
    sa.Column("body", sa.Text, nullable=False),
    sa.Column("previous", sa.String(64), nullable=False),
    sa.Column("hash", sa.String(64), nullable=False),
    sa.Index("ix_tacit_entries_by_subject", "subject", "seq"),
)
subjects = sa.Table(
    "tacit_subjects",
    metadata,
    sa.Column("name", sa.String(200), primary_key=True),
    sa.Column("terms", sa.Text, nullable=False),
    sa.Column("state", sa.Text, nullable=False),  # spent, what is left of a plan, whether anything was seeded
)
head = sa.Table(
    "tacit_head",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("seq", sa.BigInteger, nullable=False),
    sa.Column("hash", sa.String(64), nullable=False),
)
START = "0" * 64
_PATIENCE = 120.0  # seconds that a writer waits for the others


def _by_subject(connection: Connection) -> None:
    """Version 2 finds the last entry of a subject, which says how its total stands."""
    connection.exec_driver_sql("CREATE INDEX IF NOT EXISTS ix_tacit_entries_by_subject ON tacit_entries (subject, seq)")


# What brings a ledger of version v to v + 1; never edited once released.
MIGRATIONS: dict[int, Callable[[Connection], None]] = {1: _by_subject}


class LedgerError(Exception):
    """The ledger cannot be used as requested; the message says why and what to do."""


def digest(seq: int, kind: str, subject: str, receipt: str | None, body: str, previous: str) -> str:
    """The hash of an entry: everything in it, and the hash of the one before."""
    parts = [str(seq), kind, subject, receipt or "", body, previous]
    return hashlib.sha256("".join(f"{len(part)}:{part}" for part in parts).encode()).hexdigest()


def connect(url: str, *, create: bool) -> Engine:
    """An engine whose commits are durable and whose writers queue up instead of failing."""
    try:
        parsed = make_url(url)
    except sa.exc.ArgumentError:
        raise LedgerError(
            f"{url!r} is not a ledger address: use sqlite:///FILE or postgresql://USER@HOST/NAME."
        ) from None
    if parsed.get_backend_name() == "sqlite":
        return _sqlite(parsed, create)
    if parsed.get_backend_name() == "postgresql":
        if parsed.drivername == "postgresql":
            parsed = parsed.set(drivername="postgresql+psycopg")
        try:
            engine = sa.create_engine(parsed, pool_pre_ping=True)
        except ModuleNotFoundError:
            raise LedgerError("PostgreSQL ledgers need a driver: pip install 'tacit[postgres]'.") from None
        sa.event.listen(engine, "connect", _durable_postgres)
        return engine
    raise LedgerError(f"A ledger is stored in SQLite or PostgreSQL, not in {parsed.get_backend_name()}.")


def _sqlite(url: URL, create: bool) -> Engine:
    path = None if url.database in (None, "", ":memory:") else Path(str(url.database))
    if path is not None and not create and not path.exists():
        raise LedgerError(f"There is no ledger at {path}.")
    if path is not None and not path.parent.exists():
        raise LedgerError(f"There is no folder {path.parent} to keep a ledger in.")
    options: dict[str, Any] = {} if path else {"poolclass": StaticPool}
    engine = sa.create_engine(url, connect_args={"timeout": _PATIENCE, "check_same_thread": False}, **options)
    sa.event.listen(engine, "connect", _durable_sqlite)
    sa.event.listen(engine, "begin", _begin_sqlite)
    return engine


def _begin_sqlite(connection: Connection) -> None:
    """Begin as a writer, and ask often: SQLite's own waiting, up to 0.1 s at a time, starves whoever waits long."""
    raw: Any = connection.connection.dbapi_connection
    deadline = time.monotonic() + _PATIENCE
    raw.execute("PRAGMA busy_timeout=0")
    try:
        while time.monotonic() < deadline:
            try:
                raw.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error):
                    break
                time.sleep(0.003)
        connection.exec_driver_sql("BEGIN IMMEDIATE")  # for the last time; whatever is wrong raises as ever
    finally:
        raw.execute(f"PRAGMA busy_timeout={int(1000 * _PATIENCE)}")


def durable(engine: Engine) -> bool:
    """Whether the database outlives its connection."""
    return not isinstance(engine.pool, StaticPool)


def _durable_sqlite(connection: Any, _: Any) -> None:
    """Every commit ends in the main file. A ledger that still has a write-ahead log is merged with it here."""
    connection.isolation_level = None  # transactions are begun by the listener above, as writers, not by the driver
    cursor = connection.cursor()
    cursor.execute("PRAGMA synchronous=EXTRA")
    deadline = time.monotonic() + _PATIENCE
    while not _in_one_file(cursor):  # SQLite does not wait here for others who have the log open
        if time.monotonic() > deadline:
            cursor.close()
            connection.close()
            raise LedgerError(
                "This ledger keeps its last charges in a write-ahead log, as older versions of tacit did, and another "
                "process has it open: end that process, so that they can be merged into the ledger's file."
            )
        time.sleep(0.01)
    cursor.close()


def _in_one_file(cursor: sqlite3.Cursor) -> bool:
    try:
        return cursor.execute("PRAGMA journal_mode=TRUNCATE").fetchall()[0][0] in ("truncate", "memory")
    except sqlite3.OperationalError as error:
        if "locked" not in str(error):
            raise
        return False


def _durable_postgres(connection: Any, _: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SET synchronous_commit TO on")
    connection.commit()


def prepare(engine: Engine, *, create: bool) -> None:
    """Create the tables of a new ledger, or migrate an older one; refuse a newer one and a file of something else."""
    with engine.begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql("SELECT pg_advisory_xact_lock(7461636974)")  # two first openings at once
        if not sa.inspect(connection).has_table(meta.name):
            if not create:
                raise LedgerError("This database holds no tacit ledger.")
            metadata.create_all(connection)
            connection.execute(sa.insert(meta).values(key="schema_version", value=str(SCHEMA_VERSION)))
            connection.execute(sa.insert(head).values(id=1, seq=0, hash=START))
            return
        row = connection.execute(sa.select(meta.c.value).where(meta.c.key == "schema_version")).scalar_one()
        version = int(row)
        if version > SCHEMA_VERSION:
            raise LedgerError(
                f"This ledger has schema version {version}; this tacit knows up to {SCHEMA_VERSION}. Upgrade tacit."
            )
        while version < SCHEMA_VERSION:
            MIGRATIONS[version](connection)
            version += 1
            connection.execute(sa.update(meta).where(meta.c.key == "schema_version").values(value=str(version)))


@contextmanager
def plain_errors(url: str) -> Iterator[None]:
    """Database errors as one sentence; whatever failed, the transaction was rolled back."""
    try:
        yield
    except sa.exc.SQLAlchemyError as error:
        cause = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
        shown = sa.engine.make_url(url).render_as_string(hide_password=True)
        raise LedgerError(f"The ledger {shown} cannot be used, and nothing was charged: {cause}.") from error
