"""Where a ledger's entries are stored: each operation of the ledger as one transaction.

``Ledger`` checks arguments and makes receipts live; a book stores the entries. ``DatabaseBook`` is the one in SQLite or
PostgreSQL; ``_remote.RemoteBook`` calls a service, which holds a ``DatabaseBook`` itself. What crosses a book is
public: terms, events, entries, names of holders, digests of secrets. Keys of noise never do.

Formal guarantee: every operation reads and writes within one transaction that makes all other writers wait, and is on
disk when it returns. Operations are idempotent: one that is repeated with the same receipt (or holder) is done once, so
a caller whose response was lost may retry.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from tacit.privacy import _chain as chain
from tacit.privacy import _fork
from tacit.privacy import _storage as storage
from tacit.privacy import _totals as totals
from tacit.privacy._chain import Entry
from tacit.privacy._filters import Mode, fits, to_units
from tacit.privacy._holders import given, held_by, last_word, note
from tacit.privacy._receipt_state import count
from tacit.privacy._receipts import ReceiptError
from tacit.privacy._repricing import PRICES, Standing, Underpriced
from tacit.privacy._storage import LedgerError
from tacit.privacy._subject import OtherTerms, Subject, canonical
from tacit.privacy._totals import BudgetExceeded
from tacit.privacy.events import StreamDpEvent, check, from_json, leaves, releases, to_json

_SAVE = sa.update(storage.subjects).where(storage.subjects.c.name == sa.bindparam("wanted"))
_WAY = (
    "Runs share a budget if the subject is declared with all of it before the first of them ({how}); data of other "
    "people are a subject of their own. Nothing was charged."
)


@dataclass(frozen=True, kw_only=True)
class Charge:
    """A requested charge.

    ``receipt`` is chosen by the caller: the same one twice is one charge.
    """

    receipt: str
    event: dict[str, Any]
    stage: str
    note: str
    bound: float | None
    seeded: bool


@dataclass(frozen=True, kw_only=True)
class Charged:
    """A charge as the chain has it, and its subject after it."""

    subject: Subject
    body: dict[str, Any]
    head: str


class Book(Protocol):
    """What a ledger needs of the place where its entries are stored."""

    url: str
    only: str | None  # the one subject that it shows; None: all

    @property
    def durable(self) -> bool: ...
    def declare(self, subject: Subject) -> Subject: ...
    def find(self, name: str) -> Subject | None: ...
    def subjects(self) -> list[Subject]: ...
    def standing(self, name: str) -> Subject: ...
    def charge(self, name: str, request: Charge) -> Charged: ...
    def settle(self, receipt: str, holder: str | None, used: int, kept: dict[str, Any]) -> None: ...
    def charged(self, receipt: str) -> Charged: ...
    def made_before(self, receipt: str) -> int: ...
    def held(self, receipt: str) -> tuple[str, dict[str, Any]] | None: ...
    def give(self, receipt: str, holder: str, kind: str, upto: int | None, facts: dict[str, Any]) -> int: ...
    def hand_over(self, receipt: str, holder: str, how: str, proof: str, used: int) -> tuple[int, bool]: ...
    def entries(self, subject: str | None) -> list[Entry]: ...
    def head(self) -> str: ...
    def verify(self, head: str | None) -> tuple[int, list[Underpriced]]: ...
    def close(self) -> None: ...


class DatabaseBook:
    """A book in SQLite or PostgreSQL."""

    only: str | None = None

    def __init__(self, url: str, *, create: bool) -> None:
        self.url = url
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._standings: dict[str, Standing] = {}
        self._engine: Engine = storage.connect(url, create=create)
        with storage.plain_errors(url):
            storage.prepare(self._engine, create=create)
        _fork.watch(self)

    @property
    def durable(self) -> bool:
        return storage.durable(self._engine)

    def close(self) -> None:
        with self._lock:
            self._engine.dispose()

    @property
    def engine(self) -> Engine:
        """The database, for what is kept beside the ledger."""
        return self._engine

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """A transaction that makes every other writer wait; on disk when it ends, or nothing of it."""
        if not self.durable and self._pid != os.getpid():
            raise LedgerError("A ledger in memory stays in the process that made it: give it a file.")
        with self._lock, storage.plain_errors(self.url), self._engine.begin() as connection:
            yield connection

    # -- subjects ----------------------------------------------------------------------------------------------------

    def declare(self, subject: Subject) -> Subject:
        """Write a new subject; one that exists must have these terms."""
        with self.transaction() as connection:
            known = chain.subject(connection, subject.name)
            if known is not None:
                if known.terms_json != subject.terms_json:
                    raise OtherTerms(
                        f"Subject {subject.name} exists with other terms; they cannot be changed. Choose a new name."
                    )
                return known
            for other in subject.disjoint_from:
                if chain.subject(connection, other) is None:
                    raise LedgerError(f"{subject.name} is declared disjoint from {other}, which is not in the ledger.")
            chain.append(connection, "subject", subject.name, None, subject.terms_json)
            connection.execute(
                sa.insert(storage.subjects).values(
                    name=subject.name, terms=subject.terms_json, state=subject.state_json
                )
            )
        return subject

    def find(self, name: str) -> Subject | None:
        with self.transaction() as connection:
            return chain.subject(connection, name)

    def subjects(self) -> list[Subject]:
        with self.transaction() as connection:
            names = connection.execute(sa.select(storage.subjects.c.name).order_by(storage.subjects.c.name))
            return [_get(connection, name) for name in names.scalars().all()]

    def standing(self, name: str) -> Subject:
        """The subject as it stands at today's prices; the entries that were looked at before are not read again."""
        with self.transaction() as connection:
            known = _get(connection, name)
            return chain.at_todays_prices(connection, known, self._standings.setdefault(name, Standing()))

    # -- spending ----------------------------------------------------------------------------------------------------

    def charge(self, name: str, request: Charge) -> Charged:
        """Reserve an event if it fits; the same receipt again is the charge that was made."""
        event = check(from_json(request.event), finite=True)
        if to_json(event) != request.event:
            raise ValueError("This event is not written as tacit writes it.")
        if not _counts(request.event):
            raise ValueError("This event releases nothing: there is nothing to charge.")
        if not isinstance(event, StreamDpEvent) and any(isinstance(leaf, StreamDpEvent) for leaf, _ in leaves(event)):
            raise ValueError("A stream is charged by itself, not as a part of something else.")
        if request.bound is not None and not 0 < request.bound < float("inf"):
            raise ValueError(f"A bound is above 0 and finite; got {request.bound:g}.")
        with self.transaction() as connection:
            known = _get(connection, name)
            before = chain.find_charge(connection, request.receipt)
            if before is not None:
                return _same(known, before, request)
            cost = to_units(known.terms.cost(event))
            after = _after(connection, known, request.event, cost).marked(request.seeded)
            body = {
                "event": request.event,
                "cost": cost,
                "prices": PRICES,
                "stage": request.stage,
                "note": request.note,
                "bound": request.bound,
                "seeded": request.seeded,
                "time": _now(),
                "state": after.fingerprint,
            }
            head = chain.append(connection, "charge", name, request.receipt, canonical(body))
            _save(connection, after)
        return Charged(subject=after, body=body, head=head)

    def settle(self, receipt: str, holder: str | None, used: int, kept: dict[str, Any]) -> None:
        """Return what is left when ``kept``, the ``used`` releases of a receipt, is paid for."""
        with self.transaction() as connection:
            row = chain.charge(connection, receipt)
            known, charged = _get(connection, row.subject), json.loads(row.body)
            last = chain.last_lease(connection, receipt)
            if last is not None and last[0] == "settle":
                if (last[1].get("holder"), last[1]["used"]) == (holder, used):
                    return  # a retry: the response was lost
                raise LedgerError(f"Receipt {receipt[:8]} was settled already.")
            if last is not None and last[1].get("holder") != holder:
                raise LedgerError(f"Another process has resumed receipt {receipt[:8]}: its charge stays spent.")
            before, least = charged["cost"], chain.made_before(connection, receipt)
            _check_kept(receipt, charged["event"], kept, used, least)
            refund, after = 0, to_units(known.terms.cost(from_json(kept)))
            if known.terms.mode is not Mode.PLAN and before is not None and after is not None:
                refund = max(0, before - after)
            settled = known.minus(refund)
            body = {"used": used, "refund": refund, "time": _now(), "state": settled.fingerprint, "holder": holder}
            chain.append(connection, "settle", known.name, receipt, canonical(body))
            _save(connection, settled)

    def charged(self, receipt: str) -> Charged:
        with self.transaction() as connection:
            row = chain.charge(connection, receipt)
            known = _get(connection, row.subject)
        return Charged(subject=known, body=json.loads(row.body), head=chain.head_of(row.seq, row.hash))

    # -- who holds a receipt: see ``leases`` and ``replay`` ------------------------------------------------------------

    def made_before(self, receipt: str) -> int:
        """The releases that earlier holders may have made; refused where the receipt cannot be settled anyway."""
        with self.transaction() as connection:
            _get(connection, chain.charge(connection, receipt).subject)
            return chain.made_before(connection, receipt)

    def held(self, receipt: str) -> tuple[str, dict[str, Any]] | None:
        with self.transaction() as connection:
            return chain.last_lease(connection, receipt)

    def give(self, receipt: str, holder: str, kind: str, upto: int | None, facts: dict[str, Any]) -> int:
        """The holder's word that releases up to ``upto`` are given away (None: as many as were before)."""
        with self.transaction() as connection:
            held_by(connection, receipt, holder)
            before = given(connection, receipt)
            upto = before if upto is None else upto if kind == "saved" else max(upto, before)
            note(connection, kind, receipt, {"upto": upto, "holder": holder} | facts)
        return upto

    def hand_over(self, receipt: str, holder: str, how: str, proof: str, used: int) -> tuple[int, bool]:
        """Make ``holder`` the one that holds a receipt; the releases made before it, and whether it goes on exactly.

        ``how``: "stream" (``proof`` is the digest of a saved state: it goes on exactly if that is the last word),
        "replay" (``proof`` is the digest of the kept key, without which it is refused), or "adopt" (nothing was ever
        given away).
        """
        with self.transaction() as connection:
            last = last_word(connection, receipt)
            if last is not None and last["holder"] == holder and "exact" in last:
                return int(last["upto"]), bool(last["exact"])
            upto, exact = given(connection, receipt), False
            if how == "stream":
                if last is None:
                    raise ReceiptError(f"Receipt {receipt[:8]} was never leased: what was released on it is unknown.")
                exact = bool(proof) and last.get("token") == proof
            elif how == "replay":
                if last is None or chain.kept_key(connection, receipt) != proof:
                    raise ReceiptError(
                        f"This is not the key of receipt {receipt[:8]}: its releases cannot be replayed."
                    )
                upto, exact = max(upto, used), True
            elif how != "adopt":
                raise ValueError(f"A receipt is handed over as a stream, for replay or to adopt it, not {how!r}.")
            elif upto:
                raise ReceiptError(f"Releases of receipt {receipt[:8]} were given away: it cannot be adopted.")
            note(connection, "resumed", receipt, {"upto": upto, "holder": holder, "exact": exact})
        return upto, exact

    # -- the chain -----------------------------------------------------------------------------------------------------

    def entries(self, subject: str | None, after: int = 0, most: int | None = None) -> list[Entry]:
        with self.transaction() as connection:
            return chain.entries(connection, subject, after, most)

    def head(self) -> str:
        with self.transaction() as connection:
            return chain.head_of(*chain.current(connection))

    def verify(self, head: str | None) -> tuple[int, list[Underpriced]]:
        with self.transaction() as connection:
            return chain.verify(connection, head)


def _get(connection: Connection, name: str) -> Subject:
    known = chain.subject(connection, name)
    if known is None:
        raise LedgerError(f"There is no subject {name!r} in this ledger: declare it with Ledger.subject first.")
    return known


def _save(connection: Connection, subject: Subject) -> None:
    connection.execute(_SAVE, {"wanted": subject.name, "state": subject.state_json})


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _after(connection: Connection, known: Subject, event: dict[str, Any], cost: int | None) -> Subject:
    """The subject after a charge; refused if it cannot afford it."""
    if known.terms.mode is Mode.PLAN:
        after = known.take_planned(event)
        if after is None:
            left = totals.remaining(known)
            if left.planned == 0:
                how = "Ledger.subject, with everything that they charge as its plan="
                raise BudgetExceeded(
                    f"The budget of {known.name} is spent: every entry of its plan was charged. {_WAY.format(how=how)}",
                    left,
                )
            raise BudgetExceeded(
                f"This event is not, or no longer, in the plan of {known.name}; what is left is {left}. "
                "Nothing was charged.",
                left,
            )
        return after
    now = chain.counted(connection, known)
    if not fits(now.spent, cost, known.terms.cap):
        left = totals.remaining(now)
        if left.mu == 0:
            raise BudgetExceeded(
                f"{known.name} cannot afford this: it would cost {known.describe(cost)}, and its budget is spent, with "
                f"nothing left. {_WAY.format(how='Ledger.subject')}",
                left,
            )
        raise BudgetExceeded(
            f"{known.name} cannot afford this: it would cost {known.describe(cost)}, and what is left is {left}. "
            "Nothing was charged.",
            left,
        )
    return known.plus(cost)


def _same(known: Subject, row: sa.Row[Any], request: Charge) -> Charged:
    """The charge that was made under this receipt, if it is the one that was requested."""
    body = json.loads(row.body)
    recorded = Charge(receipt=row.receipt, **{key: body[key] for key in ("event", "stage", "note", "bound", "seeded")})
    if row.subject != known.name or recorded != request:
        raise LedgerError(f"Receipt {request.receipt[:8]} was charged for something else.")
    return Charged(subject=known, body=body, head=chain.head_of(row.seq, row.hash))


def _check_kept(receipt: str, event: dict[str, Any], kept: dict[str, Any], used: int, least: int) -> None:
    """Refuse to settle for what is not a part of the event, or for fewer releases than may have been made."""
    paid, made = _counts(event), _counts(kept)
    if any(times > paid.get(leaf, 0) for leaf, times in made.items()):
        raise LedgerError(f"Receipt {receipt[:8]} did not pay for what it is settled for: its charge stays spent.")
    if not least <= used <= releases(from_json(event)) or sum(made.values()) < used:
        raise LedgerError(f"Receipt {receipt[:8]} is settled for fewer releases than may have been made.")


def _counts(event: dict[str, Any]) -> dict[str, int]:
    """How often each leaf of an event is released."""
    found: dict[str, int] = {}
    for leaf, times in leaves(from_json(event)):
        key = canonical(to_json(leaf))
        found[key] = found.get(key, 0) + count(leaf, times)
    return found
