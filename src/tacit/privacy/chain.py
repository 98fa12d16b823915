"""The hash chain: appending to it, and finding what was changed behind its back."""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from tacit.privacy import storage
from tacit.privacy.events import from_json
from tacit.privacy.filters import Mode, fits, to_units
from tacit.privacy.state import Subject
from tacit.privacy.storage import LedgerError

_HEAD = sa.select(storage.head.c.seq, storage.head.c.hash).where(storage.head.c.id == 1).with_for_update()
_APPEND = sa.insert(storage.entries)
_ADVANCE = sa.update(storage.head).where(storage.head.c.id == 1)


_LEASES = ("lease", "saved", "resumed", "kept")  # of ``leases`` and ``replay``: they cost nothing


class LedgerDamaged(LedgerError):
    """The ledger is not what was written: a row was edited, removed or added, or an old copy was put back."""


def current(connection: Connection) -> tuple[int, str]:
    """The end of the chain. Every other writer waits from here on (SQLite's transactions already made it)."""
    row = connection.execute(_HEAD).one()
    return int(row.seq), str(row.hash)


def head_of(seq: int, digest: str) -> str:
    return f"{seq}:{digest}"


def append(connection: Connection, kind: str, subject: str, receipt: str | None, body: str) -> str:
    """Write one entry behind the last one; the new head."""
    seq, previous = current(connection)
    seq += 1
    digest = storage.digest(seq, kind, subject, receipt, body, previous)
    row = {"seq": seq, "kind": kind, "subject": subject, "receipt": receipt, "body": body}
    connection.execute(_APPEND, row | {"previous": previous, "hash": digest})
    connection.execute(_ADVANCE, {"seq": seq, "hash": digest})
    return head_of(seq, digest)


def last_lease(connection: Connection, receipt_id: str) -> tuple[str, dict[str, Any]] | None:
    """The newest word on who holds a receipt and how far its releases are given away: its kind and what it says."""
    current(connection)  # which makes every other writer wait
    table = storage.entries
    kinds = table.c.kind.in_((*_LEASES, "settle"))
    query = sa.select(table.c.kind, table.c.body).where(table.c.receipt == receipt_id, kinds)
    row = connection.execute(query.order_by(table.c.seq.desc()).limit(1)).one_or_none()
    return None if row is None else (row.kind, dict(json.loads(row.body)))


def kept_key(connection: Connection, receipt_id: str) -> str | None:
    """The digest of the key that was kept for replaying a receipt's releases, if one was."""
    table = storage.entries
    query = sa.select(table.c.body).where(table.c.receipt == receipt_id, table.c.kind == "kept")
    body = connection.execute(query.order_by(table.c.seq).limit(1)).scalar_one_or_none()
    return None if body is None else str(json.loads(body)["key"])


def verify(connection: Connection, head: str | None) -> int:
    """Replay the ledger from its first entry; the number of entries."""
    end = current(connection)
    wanted = _parse(head)
    seq, previous = 0, storage.START
    subjects: dict[str, Subject] = {}
    charged: dict[str, int] = {}  # what each receipt may still return
    for row in connection.execute(sa.select(storage.entries).order_by(storage.entries.c.seq)):
        if row.seq != seq + 1:
            raise LedgerDamaged(f"Entry {seq + 1} is missing.")
        seq = row.seq
        if row.previous != previous or row.hash != storage.digest(
            row.seq, row.kind, row.subject, row.receipt, row.body, row.previous
        ):
            raise LedgerDamaged(f"Entry {seq} was changed after it was written.")
        previous = row.hash
        if wanted and wanted[0] == seq and wanted[1] != row.hash:
            raise LedgerDamaged(
                f"Entry {seq} is not the one of the given head: another copy of the ledger was put back."
            )
        _replay(subjects, charged, row)
    if (seq, previous) != end:
        raise LedgerDamaged(
            f"The ledger should end with entry {end[0]} and ends with {seq}: rows were removed or added."
        )
    if wanted and wanted[0] > seq:
        raise LedgerDamaged(
            f"The given head is entry {wanted[0]}, but the ledger ends at {seq}: rows were cut, or an old copy is back."
        )
    kept = {row.name: row for row in connection.execute(sa.select(storage.subjects))}
    if set(kept) != set(subjects):
        raise LedgerDamaged("The list of subjects is not the one that the entries declare.")
    for name, subject in subjects.items():
        if kept[name].terms != subject.terms_json or kept[name].state != subject.state_json:
            raise LedgerDamaged(f"The running total of {name} is not the sum of its entries.")
    return seq


def _replay(subjects: dict[str, Subject], charged: dict[str, int], row: sa.Row[tuple[object, ...]]) -> None:
    if row.kind == "subject":
        subjects[row.subject] = Subject.read(row.subject, row.body, "{}")
        return
    known, body = subjects.get(row.subject), json.loads(row.body)
    if known is None:
        raise LedgerDamaged(f"Entry {row.seq} charges {row.subject}, which no entry declares.")
    if row.kind in _LEASES:
        if row.receipt not in charged:
            raise LedgerDamaged(f"Entry {row.seq} leases a receipt that no entry charges, or a settled one.")
        return
    if row.kind == "settle":
        if not 0 <= body["refund"] <= charged.pop(row.receipt, -1):
            raise LedgerDamaged(f"Entry {row.seq} returns what its receipt never paid.")
        subjects[row.subject] = known.minus(body["refund"])
        return
    cost = body["cost"]
    if known.terms.mode is Mode.PLAN:
        after = known.take_planned(body["event"])
        if after is None:
            raise LedgerDamaged(f"Entry {row.seq} is not in the plan of {row.subject}.")
    else:
        again = to_units(known.terms.cost(from_json(body["event"])))
        # a cost may differ in its last digits between machines; never by more than the filters' own tolerance
        if (again is None) != (cost is None) or (again is not None and abs(again - cost) > again * 1e-9 + 1):
            raise LedgerDamaged(f"Entry {row.seq} was charged at another price than its event has.")
        if not fits(known.spent, cost, known.terms.cap):
            raise LedgerDamaged(f"Entry {row.seq} overspends {row.subject}.")
        after = known.plus(cost)
    charged[row.receipt] = cost or 0
    subjects[row.subject] = after.marked(body["seeded"])


def _parse(head: str | None) -> tuple[int, str] | None:
    if head is None:
        return None
    seq, _, digest = head.partition(":")
    if not seq.isdigit() or len(digest) != 64:
        raise LedgerError("A head looks like 12:3fa9... (a number, a colon and 64 hexadecimal digits).")
    return int(seq), digest
