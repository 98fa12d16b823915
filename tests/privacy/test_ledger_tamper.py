"""What was done to a ledger behind its back is found; what is not a ledger, or not ours to read, is refused."""

import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from tacit.privacy import Budget, Ledger, LedgerDamaged, LedgerError, events, leases
from tacit.privacy import _storage as storage
from tacit.privacy._storage import digest
from tacit.privacy._subject import canonical

BUDGET = Budget(1.0, 1e-6)
TABLES = (storage.entries, storage.subjects, storage.head)


@contextmanager
def behind_its_back(url: str) -> Iterator[Connection]:
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        yield connection
    engine.dispose()


@pytest.fixture
def written(ledger: Ledger) -> Ledger:
    """One subject, four charges and a settlement: seven entries with the second subject."""
    ledger.subject("s", budget=BUDGET)
    ledger.subject("t", budget=BUDGET, mode="renyi")
    for noise in (20.0, 30.0, 40.0):
        ledger.charge("s", events.gaussian(noise), stage="x", note="as written")
    ledger.settle(ledger.charge("s", events.gaussian(50.0, 4), stage="x"), 1)
    assert ledger.verify() == 7
    return ledger


def body_of(connection: Connection, seq: int) -> dict[str, Any]:
    query = sa.select(storage.entries.c.body).where(storage.entries.c.seq == seq)
    return dict(json.loads(connection.execute(query).scalar_one()))


def write_body(connection: Connection, seq: int, body: dict[str, Any]) -> None:
    table = storage.entries
    connection.execute(sa.update(table).where(table.c.seq == seq).values(body=canonical(body)))


@pytest.mark.parametrize(
    ("seq", "change"),
    [
        (4, {"event": {"type": "GaussianDpEvent", "noise_multiplier": 3000.0}}),
        (4, {"cost": 1}),
        (5, {"note": "as rewritten"}),
        (5, {"seeded": True}),
        (7, {"refund": 0}),
        (1, {"epsilon": 100.0}),
    ],
)
def test_an_edited_entry_is_found(written: Ledger, seq: int, change: dict[str, Any]) -> None:
    with behind_its_back(written.url) as connection:
        write_body(connection, seq, body_of(connection, seq) | change)
    with pytest.raises(LedgerDamaged, match=f"Entry {seq} was changed"):
        written.verify()


@pytest.mark.parametrize("column", ["kind", "subject", "receipt", "previous", "hash"])
def test_every_column_is_under_the_hash(written: Ledger, column: str) -> None:
    with behind_its_back(written.url) as connection:
        connection.execute(sa.update(storage.entries).where(storage.entries.c.seq == 5).values({column: "0"}))
    with pytest.raises(LedgerDamaged, match="Entry 5 was changed"):
        written.verify()


def test_edited_terms_and_totals_are_found(written: Ledger) -> None:
    for column in ("terms", "state"):
        table = storage.subjects
        with behind_its_back(written.url) as connection:
            kept = connection.execute(sa.select(table.c[column]).where(table.c.name == "s")).scalar_one()
            edited = json.loads(kept) | ({"epsilon": 50.0} if column == "terms" else {"spent": 0})
            connection.execute(sa.update(table).where(table.c.name == "s").values({column: canonical(edited)}))
        with pytest.raises(LedgerDamaged, match="running total of s"):
            written.verify()
        with behind_its_back(written.url) as connection:
            connection.execute(sa.update(table).where(table.c.name == "s").values({column: kept}))
        written.verify()


def test_added_and_removed_subjects_are_found(written: Ledger) -> None:
    with behind_its_back(written.url) as connection:
        connection.execute(sa.insert(storage.subjects).values(name="u", terms="{}", state="{}"))
    with pytest.raises(LedgerDamaged, match="list of subjects"):
        written.verify()
    with behind_its_back(written.url) as connection:
        connection.execute(sa.delete(storage.subjects).where(storage.subjects.c.name.in_(["t", "u"])))
    with pytest.raises(LedgerDamaged, match="list of subjects"):
        written.verify()


@pytest.mark.parametrize(
    ("removed", "sentence"),
    [([7], "should end with entry 7 and ends with 6"), ([6, 7], "ends with 5"), ([4], "Entry 4 is missing")],
)
def test_removed_entries_are_found(written: Ledger, removed: list[int], sentence: str) -> None:
    with behind_its_back(written.url) as connection:
        connection.execute(sa.delete(storage.entries).where(storage.entries.c.seq.in_(removed)))
    with pytest.raises(LedgerDamaged, match=sentence):
        written.verify()


def rechain(connection: Connection) -> None:
    """Make every hash right again, as someone who knows the format can."""
    seq, previous = 0, storage.START
    for row in connection.execute(sa.select(storage.entries).order_by(storage.entries.c.seq)).all():
        new = digest(row.seq, row.kind, row.subject, row.receipt, row.body, previous)
        where = storage.entries.c.seq == row.seq
        connection.execute(sa.update(storage.entries).where(where).values(previous=previous, hash=new))
        seq, previous = row.seq, new
    connection.execute(sa.update(storage.head).values(seq=seq, hash=previous))


@pytest.mark.parametrize(
    ("seq", "change", "sentence"),
    [
        (4, {"cost": 1}, "another price"),
        (4, {"cost": None}, "another price"),
        (4, {"event": {"type": "GaussianDpEvent", "noise_multiplier": 3000.0}}, "another price"),
        (4, {"cost": -1}, "costs less than nothing"),
        (4, {"cost": True}, "costs less than nothing"),
        (4, {"event": {"type": "LaplaceDpEvent", "noise_multiplier": -0.1}}, "cannot be charged: A noise multiplier"),
        (4, {"event": {"type": "GaussianDpEvent"}}, "lacks a field"),
        (4, {"state": "0" * 64}, "says another total"),
        (7, {"refund": 2**90}, "returns what its receipt never paid"),
        (7, {"refund": -1}, "returns what its receipt never paid"),
        (7, {"used": 5}, "releases that may have been made"),
        (1, {"epsilon": 0.01}, "overspends s"),
    ],
)
def test_a_rewritten_chain_must_still_make_sense(
    written: Ledger, seq: int, change: dict[str, Any], sentence: str
) -> None:
    with behind_its_back(written.url) as connection:
        write_body(connection, seq, body_of(connection, seq) | change)
        rechain(connection)
    with pytest.raises(LedgerDamaged, match=sentence):
        written.verify()


def test_a_charge_is_refused_on_a_total_that_the_chain_does_not_say(written: Ledger) -> None:
    """Not only ``verify``: what an edit of the running total would give back cannot be spent."""
    table, event = storage.subjects, events.gaussian(1000.0)
    open_ = written.charge("s", event, stage="x")
    entries = len(written.entries())
    with behind_its_back(written.url) as connection:
        kept = connection.execute(sa.select(table.c.state).where(table.c.name == "s")).scalar_one()
        edited = canonical(json.loads(kept) | {"spent": 0})
        connection.execute(sa.update(table).where(table.c.name == "s").values(state=edited))
    for attempt in (
        lambda: written.charge("s", event, stage="x"),
        lambda: written.settle(open_),
        lambda: leases.extend(written, open_, 1),
        lambda: written.spent("s"),
        lambda: written.remaining("s"),
        lambda: written.total(),
    ):
        with pytest.raises(LedgerDamaged, match="running total of s is not what its last entry says"):
            attempt()
    assert len(written.entries()) == entries
    written.charge("t", event, stage="x")  # nothing happened to the other
    with behind_its_back(written.url) as connection:
        connection.execute(sa.update(table).where(table.c.name == "s").values(state=kept))
    written.charge("s", event, stage="x")
    written.verify()


def test_a_charge_is_refused_behind_a_cut_or_an_edited_tail(written: Ledger) -> None:
    table, event = storage.entries, events.gaussian(1000.0)
    with behind_its_back(written.url) as connection:
        write_body(connection, 7, body_of(connection, 7) | {"refund": 0})
    with pytest.raises(LedgerDamaged, match="Entry 7 was changed"):
        written.charge("s", event, stage="x")
    with behind_its_back(written.url) as connection:
        connection.execute(sa.delete(table).where(table.c.seq == 7))
    with pytest.raises(LedgerDamaged, match="should end with entry 7"):
        written.charge("s", event, stage="x")


def test_a_ledger_of_version_1_goes_on_and_is_compared_all_the_same(written: Ledger) -> None:
    """Its entries do not say the total: they are added up again, until a new entry says it."""
    with behind_its_back(written.url) as connection:
        for seq in range(3, 8):
            body = body_of(connection, seq)
            body.pop("state")
            write_body(connection, seq, body)
        rechain(connection)
        connection.exec_driver_sql("DROP INDEX ix_tacit_entries_by_subject")
        connection.execute(sa.update(storage.meta).values(value="1"))
        kept = connection.execute(
            sa.select(storage.subjects.c.state).where(storage.subjects.c.name == "s")
        ).scalar_one()
    before = written.spent("s")
    with Ledger(written.url, create=False) as again:
        assert again.spent("s") == before
        assert again.verify() == 7
        with behind_its_back(written.url) as connection:
            edited = canonical(json.loads(kept) | {"spent": 0})
            connection.execute(sa.update(storage.subjects).where(storage.subjects.c.name == "s").values(state=edited))
        with pytest.raises(LedgerDamaged, match="running total of s"):
            again.charge("s", events.gaussian(1000.0), stage="x")
        with behind_its_back(written.url) as connection:
            connection.execute(sa.update(storage.subjects).where(storage.subjects.c.name == "s").values(state=kept))
        again.charge("s", events.gaussian(1000.0), stage="x")
        assert again.verify() == 8
        assert "state" in again.entries()[-1].body
        with behind_its_back(written.url) as connection:
            assert connection.execute(sa.select(storage.meta.c.value)).scalar_one() == "2"
            indexes = sa.inspect(connection).get_indexes("tacit_entries")
        assert "ix_tacit_entries_by_subject" in {index["name"] for index in indexes}


def test_a_rewritten_chain_that_makes_sense_is_found_by_a_head(written: Ledger) -> None:
    head = written.head
    with behind_its_back(written.url) as connection:
        write_body(connection, 4, body_of(connection, 4) | {"note": "as rewritten"})
        rechain(connection)
    assert written.verify() == 7
    with pytest.raises(LedgerDamaged, match="Entry 7 is not the one of the given head"):
        written.verify(head)


def snapshot(url: str) -> dict[str, list[dict[str, Any]]]:
    with behind_its_back(url) as connection:
        return {t.name: [dict(row._mapping) for row in connection.execute(sa.select(t))] for t in TABLES}


def put_back(url: str, old: dict[str, list[dict[str, Any]]]) -> None:
    with behind_its_back(url) as connection:
        for table in TABLES:
            connection.execute(sa.delete(table))
            connection.execute(sa.insert(table), old[table.name])


def test_a_ledger_that_was_consistently_rewound_is_found_by_a_head(written: Ledger) -> None:
    old, earlier = snapshot(written.url), written.head
    receipt = written.charge("t", events.gaussian(100.0), stage="x")
    put_back(written.url, old)
    assert written.verify() == written.verify(earlier) == 7  # nothing in the file tells
    with pytest.raises(LedgerDamaged, match="given head is entry 8, but the ledger ends at 7"):
        written.verify(receipt.head)
    for _ in range(3):  # continued past the lost entry
        written.charge("t", events.gaussian(100.0), stage="x")
    assert written.verify() == 10
    with pytest.raises(LedgerDamaged, match="Entry 8 is not the one of the given head"):
        written.verify(receipt.head)


@pytest.mark.parametrize("continued", [False, True])
def test_an_old_copy_of_the_file_is_found_by_a_head(sqlite_url: str, tmp_path: Path, continued: bool) -> None:
    path = Path(sqlite_url.removeprefix("sqlite:///"))
    with Ledger(sqlite_url) as ledger:
        ledger.subject("s", budget=BUDGET)
    shutil.copy(path, tmp_path / "copy.db")
    with Ledger(sqlite_url) as ledger:
        receipt = ledger.charge("s", events.gaussian(10.0), stage="x")
    shutil.copy(tmp_path / "copy.db", path)
    with Ledger(sqlite_url) as ledger:
        for _ in range(2 if continued else 0):
            ledger.charge("s", events.gaussian(10.0), stage="x")
        assert ledger.verify() == (3 if continued else 1)
        with pytest.raises(LedgerDamaged, match="another copy" if continued else "old copy"):
            ledger.verify(receipt.head)


@pytest.mark.parametrize("head", ["", "12", "x:" + "0" * 64, "3:abc"])
def test_a_head_that_is_none_is_refused(ledger: Ledger, head: str) -> None:
    with pytest.raises(LedgerError, match="A head looks like"):
        ledger.verify(head)


def test_every_earlier_head_stays_valid(ledger: Ledger) -> None:
    heads = [ledger.head]
    ledger.subject("s", budget=BUDGET)
    heads += [ledger.charge("s", events.gaussian(50.0), stage="x").head for _ in range(3)]
    assert [ledger.verify(head) for head in heads] == [4] * 4


def test_a_newer_schema_is_refused(ledger_url: str) -> None:
    Ledger(ledger_url).close()
    with behind_its_back(ledger_url) as connection:
        connection.execute(sa.update(storage.meta).values(value="99"))
    with pytest.raises(LedgerError, match=r"schema version 99; this tacit knows up to 2\. Upgrade tacit"):
        Ledger(ledger_url)


def test_an_older_schema_is_migrated_step_by_step(ledger_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Ledger(ledger_url) as ledger:
        ledger.subject("s", budget=BUDGET)
        receipt = ledger.charge("s", events.gaussian(10.0), stage="x")
    steps = [
        "ALTER TABLE tacit_subjects ADD COLUMN colour VARCHAR(10)",
        "UPDATE tacit_subjects SET colour = 'green'",
    ]
    now = storage.SCHEMA_VERSION
    monkeypatch.setattr(storage, "SCHEMA_VERSION", now + 2)
    monkeypatch.setattr(
        storage, "MIGRATIONS", {v: (lambda c, s=s: c.exec_driver_sql(s)) for v, s in enumerate(steps, start=now)}
    )
    with Ledger(ledger_url, create=False) as ledger:
        assert ledger.verify(receipt.head) == 2
    with behind_its_back(ledger_url) as connection:
        assert connection.exec_driver_sql("SELECT colour FROM tacit_subjects").scalar_one() == "green"
        assert connection.execute(sa.select(storage.meta.c.value)).scalar_one() == str(now + 2)
    Ledger(ledger_url).close()  # and not again


def test_a_migration_that_fails_changes_nothing(ledger_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Ledger(ledger_url).close()

    def broken(connection: Connection) -> None:
        connection.exec_driver_sql("ALTER TABLE tacit_subjects ADD COLUMN colour VARCHAR(10)")
        connection.exec_driver_sql("UPDATE nowhere SET x = 1")

    now = storage.SCHEMA_VERSION
    monkeypatch.setattr(storage, "SCHEMA_VERSION", now + 1)
    monkeypatch.setattr(storage, "MIGRATIONS", {now: broken})
    with pytest.raises(LedgerError, match="nowhere"):
        Ledger(ledger_url)
    monkeypatch.undo()
    with Ledger(ledger_url) as ledger:
        assert ledger.verify() == 0
    with behind_its_back(ledger_url) as connection:
        assert "colour" not in {column["name"] for column in sa.inspect(connection).get_columns("tacit_subjects")}


def test_a_database_of_something_else_is_not_taken_for_a_ledger(ledger_url: str) -> None:
    with behind_its_back(ledger_url) as connection:
        connection.exec_driver_sql("CREATE TABLE recipes (name VARCHAR(10))")
    with pytest.raises(LedgerError, match="holds no tacit ledger"):
        Ledger(ledger_url, create=False)
    with behind_its_back(ledger_url) as connection:
        assert sa.inspect(connection).get_table_names() == ["recipes"]


def test_files_and_folders_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match=r"There is no ledger at .*none\.db"):
        Ledger(f"sqlite:///{tmp_path / 'none.db'}", create=False)
    with pytest.raises(LedgerError, match=r"There is no folder .*none"):
        Ledger(f"sqlite:///{tmp_path / 'none' / 'a.db'}")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_not_sqlite(tmp_path: Path) -> None:
    path = tmp_path / "letter.txt"
    path.write_text("Dear ledger, " * 100)
    for create in (True, False):
        with pytest.raises(LedgerError, match="file is not a database"):
            Ledger(f"sqlite:///{path}", create=create)
    assert path.read_text().startswith("Dear ledger")


def test_a_file_with_torn_pages(sqlite_url: str) -> None:
    path = Path(sqlite_url.removeprefix("sqlite:///"))
    with Ledger(sqlite_url) as ledger:
        ledger.subject("s", budget=BUDGET)
        for _ in range(20):
            ledger.charge("s", events.gaussian(100.0), stage="x")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises((LedgerError, sqlite3.DatabaseError)) as refusal:
        Ledger(sqlite_url).verify()
    assert isinstance(refusal.value, LedgerError)


@pytest.mark.parametrize("url", ["", "mysql://x/y", "http://example.org"])
def test_addresses_of_no_ledger(url: str) -> None:
    with pytest.raises(LedgerError, match="ledger"):
        Ledger(url)


def test_a_password_is_not_shown() -> None:
    with pytest.raises(LedgerError) as refusal:
        Ledger("postgresql://tacit:hunter2@127.0.0.1:9/ledger?connect_timeout=2")
    assert "hunter2" not in str(refusal.value)
    assert "127.0.0.1" in str(refusal.value)
