"""The hash chain: appending to it, and finding what was changed behind its back.

Formal guarantee: a subject's total is used only if the last entry on that subject, which the chain's head stands
behind, says that total (``subject``). What an edited row, a lost or an added one would change is noticed before a
charge is accepted, and not only by ``verify``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from tacit.privacy import _storage as storage
from tacit.privacy._filters import Mode, fits
from tacit.privacy._repricing import PRICES, Standing, Underpriced, price_of, same, underpriced
from tacit.privacy._storage import LedgerError
from tacit.privacy._subject import Subject
from tacit.privacy.events import from_json, releases

_HEAD = sa.select(storage.head.c.seq, storage.head.c.hash).where(storage.head.c.id == 1).with_for_update()
_APPEND = sa.insert(storage.entries)
_END = sa.select(storage.entries.c.seq, storage.entries.c.hash).where(storage.entries.c.seq >= sa.bindparam("end"))
_FIND = sa.select(storage.subjects).where(storage.subjects.c.name == sa.bindparam("wanted"))
_ENTRIES = sa.select(storage.entries).where(storage.entries.c.subject == sa.bindparam("wanted"))
_LAST = _ENTRIES.order_by(storage.entries.c.seq.desc()).limit(1)
_ADVANCE = sa.update(storage.head).where(storage.head.c.id == 1)


_LEASES = ("lease", "saved", "resumed", "kept")  # of ``leases`` and ``replay``: they cost nothing


class LedgerDamaged(LedgerError):
    """The ledger is not what was written: a row was edited, removed or added, or an old copy was put back."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One row of the ledger, as it was written."""

    seq: int
    kind: str
    subject: str
    receipt: str | None
    body: dict[str, Any]
    hash: str


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


def subject(connection: Connection, name: str) -> Subject | None:
    """A subject and its total, if the chain's last entry on it says the same; None if there is none of that name.

    The entries of ledgers before version 2 do not say it: there the subject's entries are added up again.
    """
    end = current(connection)  # which makes every other writer wait
    if [(row.seq, row.hash) for row in connection.execute(_END, {"end": end[0] or 1})] != ([end] if end[0] else []):
        raise LedgerDamaged(f"The ledger should end with entry {end[0]} and does not: rows were removed or added.")
    row = connection.execute(_FIND, {"wanted": name}).one_or_none()
    last = connection.execute(_LAST, {"wanted": name}).one_or_none()
    if row is None and last is None:
        return None
    if row is None or last is None:
        raise LedgerDamaged("The list of subjects is not the one that the entries declare.")
    _check_hash(last)
    known, recorded = Subject.read(row.name, row.terms, row.state), json.loads(last.body).get("state")
    if recorded is None:
        recorded = _added_up(connection, name).fingerprint
    if recorded != known.fingerprint:
        raise LedgerDamaged(
            f"The running total of {name} is not what its last entry says: the ledger was edited. Nothing was charged."
        )
    return known


def at_todays_prices(connection: Connection, known: Subject, standing: Standing) -> Subject:
    """The subject with what earlier versions charged too little; ``standing`` says what was read before."""
    table = storage.entries
    query = sa.select(table).where(table.c.subject == known.name, table.c.seq > standing.seq).order_by(table.c.seq)
    for row in connection.execute(query):
        standing.add(known, row.seq, row.kind, row.receipt, json.loads(row.body))
    return standing.raised(known)


def counted(connection: Connection, known: Subject) -> Subject:
    """The subject as a charge has to count it: at today's prices, if its first charge was made at earlier ones.

    Versions only rise, so a subject whose first charge has today's prices has no other: one row is read.
    """
    table = storage.entries
    query = sa.select(table.c.body).where(table.c.subject == known.name, table.c.kind == "charge")
    first = connection.execute(query.order_by(table.c.seq).limit(1)).scalar()
    if first is None or json.loads(first).get("prices") == PRICES:
        return known
    return at_todays_prices(connection, known, Standing())


def _added_up(connection: Connection, name: str) -> Subject:
    subjects: dict[str, Subject] = {}
    charged: dict[str, Charged] = {}
    for row in connection.execute(_ENTRIES.order_by(storage.entries.c.seq), {"wanted": name}):
        _replay(subjects, charged, row)
    return subjects[name]


def entries(connection: Connection, subject: str | None, after: int = 0, most: int | None = None) -> list[Entry]:
    """Every row, or every row on one subject, oldest first: those behind entry ``after``, at most so many."""
    query = sa.select(storage.entries).where(storage.entries.c.seq > after).order_by(storage.entries.c.seq).limit(most)
    if subject is not None:
        query = query.where(storage.entries.c.subject == subject)
    return [
        Entry(seq=r.seq, kind=r.kind, subject=r.subject, receipt=r.receipt, body=json.loads(r.body), hash=r.hash)
        for r in connection.execute(query)
    ]


def find_charge(connection: Connection, receipt_id: str) -> sa.Row[Any] | None:
    """The entry that charged a receipt, if one did."""
    table = storage.entries
    query = sa.select(table).where(table.c.receipt == receipt_id, table.c.kind == "charge")
    return connection.execute(query).one_or_none()


def charge(connection: Connection, receipt_id: str) -> sa.Row[Any]:
    """The entry that charged a receipt."""
    row = find_charge(connection, receipt_id)
    if row is None:
        raise LedgerError(f"There is no receipt {receipt_id!r} in this ledger.")
    return row


def made_before(connection: Connection, receipt_id: str) -> int:
    """The releases of a receipt that earlier holders were given and may have made: they are not returned."""
    table = storage.entries
    query = sa.select(table.c.body).where(table.c.receipt == receipt_id, table.c.kind == "resumed")
    return max((int(json.loads(body)["upto"]) for body in connection.execute(query).scalars()), default=0)


def last_lease(connection: Connection, receipt_id: str) -> tuple[str, dict[str, Any]] | None:
    """The newest word on who holds a receipt and how far its releases are given away: its kind and what it says."""
    current(connection)  # which makes every other writer wait
    table = storage.entries
    kinds = table.c.kind.in_((*_LEASES, "settle"))
    query = sa.select(table.c.kind, table.c.body).where(table.c.receipt == receipt_id, kinds)
    row = connection.execute(query.order_by(table.c.seq.desc()).limit(1)).one_or_none()
    return None if row is None else (row.kind, dict(json.loads(row.body)))


def kept_key(connection: Connection, receipt_id: str) -> str | None:
    """The digest of the key that was kept for replaying a receipt's releases, if one was: the last one."""
    table = storage.entries
    query = sa.select(table.c.body).where(table.c.receipt == receipt_id, table.c.kind == "kept")
    body = connection.execute(query.order_by(table.c.seq.desc()).limit(1)).scalar_one_or_none()
    return None if body is None else str(json.loads(body)["key"])


def verify(connection: Connection, head: str | None) -> tuple[int, list[Underpriced]]:
    """Replay the ledger from its first entry: the number of entries, and what earlier versions priced too low."""
    low: list[Underpriced] = []
    end = current(connection)
    wanted = _parse(head)
    seq, previous = 0, storage.START
    subjects: dict[str, Subject] = {}
    charged: dict[str, Charged] = {}
    for row in connection.execute(sa.select(storage.entries).order_by(storage.entries.c.seq)):
        if row.seq != seq + 1:
            raise LedgerDamaged(f"Entry {seq + 1} is missing.")
        seq = row.seq
        _check_hash(row, previous)
        previous = row.hash
        if wanted and wanted[0] == seq and wanted[1] != row.hash:
            raise LedgerDamaged(
                f"Entry {seq} is not the one of the given head: another copy of the ledger was put back."
            )
        _replay(subjects, charged, row, low)
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
    return seq, low


@dataclass
class Charged:
    """What the chain knows of a receipt that is not settled."""

    cost: int  # what it may return at most
    releases: int
    made: int = 0  # releases of earlier holders: they stay spent


def _check_hash(row: sa.Row[tuple[object, ...]], previous: str | None = None) -> None:
    parts = (row.seq, row.kind, row.subject, row.receipt, row.body, row.previous)
    if row.hash != storage.digest(*parts) or previous not in (None, row.previous):
        raise LedgerDamaged(f"Entry {row.seq} was changed after it was written.")


def _replay(
    subjects: dict[str, Subject],
    charged: dict[str, Charged],
    row: sa.Row[tuple[object, ...]],
    low: list[Underpriced] | None = None,
) -> None:
    if row.kind == "subject":
        subjects[row.subject] = Subject.read(row.subject, row.body, "{}")
        return
    known, body = subjects.get(row.subject), json.loads(row.body)
    if known is None:
        raise LedgerDamaged(f"Entry {row.seq} charges {row.subject}, which no entry declares.")
    if row.kind in _LEASES:
        after = known
        _check_lease(row, body, charged.get(row.receipt))
    elif row.kind == "settle":
        paid = charged.pop(row.receipt, None)
        if paid is None or not (_whole(body["refund"]) and 0 <= body["refund"] <= paid.cost):
            raise LedgerDamaged(f"Entry {row.seq} returns what its receipt never paid.")
        if not (_whole(body["used"]) and paid.made <= body["used"] <= paid.releases):
            raise LedgerDamaged(f"Entry {row.seq} returns releases that may have been made.")
        after = known.minus(body["refund"])
    else:
        try:
            after = _recharged(known, row.seq, body)
            found = underpriced(known, row.seq, body)
        except ValueError as error:
            raise LedgerDamaged(f"Entry {row.seq} charges what cannot be charged: {error}") from None
        if low is not None and found is not None:
            low.append(found)
        charged[row.receipt] = Charged(cost=body["cost"] or 0, releases=releases(from_json(body["event"])))
    if body.get("state", after.fingerprint) != after.fingerprint:
        raise LedgerDamaged(f"Entry {row.seq} says another total of {row.subject} than the sum of its entries.")
    subjects[row.subject] = after


def _check_lease(row: sa.Row[tuple[object, ...]], body: dict[str, Any], paid: Charged | None) -> None:
    if paid is None:
        raise LedgerDamaged(f"Entry {row.seq} leases a receipt that no entry charges, or a settled one.")
    if not (_whole(body["upto"]) and paid.made <= body["upto"] <= paid.releases):
        raise LedgerDamaged(f"Entry {row.seq} leases what was not paid for, or takes back what may have been released.")
    if row.kind == "resumed":
        paid.made = body["upto"]


def _recharged(known: Subject, seq: int, body: dict[str, Any]) -> Subject:
    """The subject after a charge; refused if this version priced it and its event has another price."""
    cost = body["cost"]
    if not (cost is None or (_whole(cost) and cost >= 0)):
        raise LedgerDamaged(f"Entry {seq} costs less than nothing.")
    if known.terms.mode is Mode.PLAN:
        after = known.take_planned(body["event"])
        if after is None or cost != 0:
            raise LedgerDamaged(f"Entry {seq} is not in the plan of {known.name}.")
    else:
        if body.get("prices") == PRICES and not same(cost, price_of(known.terms, body)):
            raise LedgerDamaged(f"Entry {seq} was charged at another price than its event has.")
        if not fits(known.spent, cost, known.terms.cap):
            raise LedgerDamaged(f"Entry {seq} overspends {known.name}.")
        after = known.plus(cost)
    return after.marked(body["seeded"])


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _parse(head: str | None) -> tuple[int, str] | None:
    if head is None:
        return None
    seq, _, digest = head.partition(":")
    if not seq.isdigit() or len(digest) != 64:
        raise LedgerError("A head looks like 12:3fa9... (a number, a colon and 64 hexadecimal digits).")
    return int(seq), digest
