"""One ledger for every stage: a charge is durable before anything is released, and never more than the budget.

    ledger = Ledger("sqlite:///tacit.db")
    ledger.subject("clinic-a", budget=Budget(1.0, 1e-6), unit="patient", neighbours="replace-one")
    receipt = ledger.charge("clinic-a", events.gaussian(20.0), stage="calibrate", note="mean confidence")

Formal guarantee: the sum of what was charged to a subject (less what ``settle`` returned unused) never passes the cap
of its composition mode (see ``filters``), whatever number of processes charge at once and whenever any is killed; a
receipt exists only after its charge is on disk. Entries are hash-chained, and receipts carry the chain's head, so
that ``verify`` finds an edited row, a cut tail and an old copy put back; a charge is accepted only if the subject's
total is the one that its last entry says. That is evidence: it cannot stop the owner of the file.

No charge costs less than nothing, and none that cannot be priced is written. What comes back is settled against the
chain's own record: what an earlier holder of a receipt was given (see ``leases`` and ``replay``) stays spent.
"""

from __future__ import annotations

import json
import os
import threading
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from tacit.privacy import _chain as chain
from tacit.privacy import _fork, accounting
from tacit.privacy import _storage as storage
from tacit.privacy import _totals as totals
from tacit.privacy._budget import Budget, Guarantee, Neighbours, Unit
from tacit.privacy._chain import Entry
from tacit.privacy._filters import Mode, Terms, count, fits, to_units
from tacit.privacy._noise import NoiseKey
from tacit.privacy._notebook import ledger_html
from tacit.privacy._receipts import Receipt, ReceiptError, check_charged, stated
from tacit.privacy._storage import LedgerError
from tacit.privacy._subject import Subject, canonical
from tacit.privacy._totals import BudgetExceeded, Remaining
from tacit.privacy.events import DpEvent, StreamDpEvent, check, from_json, leaves, to_json

_SAVE = sa.update(storage.subjects).where(storage.subjects.c.name == sa.bindparam("wanted"))


class Ledger:
    """Subjects, what they may spend, and everything that was ever charged to them."""

    def __init__(self, url: str | Path = "sqlite:///tacit.db", *, create: bool = True) -> None:
        """Open a ledger by its address; a plain path is an SQLite file. ``create=False``: it must be there already."""
        url = str(url)
        if not url.strip():
            raise LedgerError("A ledger needs an address: a file, sqlite:///FILE or postgresql://USER@HOST/NAME.")
        self.url = url = url if "://" in url else f"sqlite:///{url}"
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._engine: Engine = storage.connect(url, create=create)
        with storage.plain_errors(url):
            storage.prepare(self._engine, create=create)
        _fork.watch(self)

    # -- declaring ---------------------------------------------------------------------------------------------------

    def subject(
        self,
        name: str,
        budget: Budget,
        *,
        unit: Unit | str = Unit.SAMPLE,
        neighbours: Neighbours | str = Neighbours.ADD_REMOVE,
        mode: Mode | str | None = None,
        order: float | None = None,
        plan: Sequence[DpEvent] | None = None,
        disjoint_from: Iterable[str] = (),
    ) -> Subject:
        """Declare a data set or stream, once and for all; declaring it again with the same terms changes nothing.

        ``mode`` is ``gaussian`` unless the budget is pure or a ``plan`` is given. ``order`` fixes the renyi mode's
        order (by default the best one for plain Gaussians). ``disjoint_from`` names subjects that share nobody with it;
        under replace-one that also says that which subject a unit is in does not depend on the values that are
        replaced (a record that moves from one to the other when its value changes is in both).
        """
        if not name or len(name) > 200 or not name.isprintable():
            raise ValueError("A subject has a printable name of at most 200 characters.")
        if plan is not None and isinstance(plan, DpEvent):
            plan = [plan]
        kind = Mode(mode) if mode else Mode.PLAN if plan is not None else Mode.PURE if budget.pure else Mode.GAUSSIAN
        if kind is Mode.RENYI and order is None and not budget.pure:
            order = accounting.best_order(budget)
        terms = Terms(budget=budget, unit=Unit(unit), neighbours=Neighbours(neighbours), mode=kind, order=order)
        if (plan is not None) != (kind is Mode.PLAN):
            raise ValueError("The plan mode, and only it, needs the plan: the list of all events.")
        subject = Subject.new(name, terms, plan or (), disjoint_from)
        if plan is not None and terms.private:
            promised = subject.planned_guarantee()
            if promised.epsilon > budget.epsilon * (1 + 1e-12):
                raise BudgetExceeded(f"The plan of {name} costs epsilon {promised.epsilon:.6g}, above {budget}.")
        with self._transaction() as connection:
            known = self._find(connection, name)
            if known is not None:
                if known.terms_json != subject.terms_json:
                    raise LedgerError(
                        f"Subject {name} exists with other terms; they cannot be changed. Choose a new name."
                    )
                return known
            for other in subject.disjoint_from:
                if self._find(connection, other) is None:
                    raise LedgerError(f"{name} is declared disjoint from {other}, which is not in the ledger.")
            chain.append(connection, "subject", name, None, subject.terms_json)
            connection.execute(
                sa.insert(storage.subjects).values(name=name, terms=subject.terms_json, state=subject.state_json)
            )
        return subject

    def subjects(self) -> list[Subject]:
        with self._transaction() as connection:
            names = connection.execute(sa.select(storage.subjects.c.name).order_by(storage.subjects.c.name))
            return [self._get(connection, name) for name in names.scalars().all()]

    # -- spending ----------------------------------------------------------------------------------------------------

    def charge(
        self,
        subject: str | Subject,
        event: DpEvent,
        *,
        stage: str,
        note: str = "",
        bound: float | None = None,
        seed: int | None = None,
    ) -> Receipt:
        """Reserve an event, durably, and return the receipt that lets ``mechanisms`` release it.

        ``bound``: contributions above it will be refused (None: the noise follows each sum's bound). ``seed`` makes the
        noise reproducible and the whole subject "seeded: not private". Raises ``BudgetExceeded``, with what is left, if
        it does not fit; nothing has changed then.
        """
        name = str(getattr(subject, "name", subject))
        if bound is not None and not 0 < bound < float("inf"):
            raise ValueError(f"A bound is above 0 and finite; got {bound:g}.")
        event_json = to_json(check(event, finite=True))
        event = from_json(event_json)  # what is written is what is priced and released
        if count(event) == 0:
            raise ValueError("This event releases nothing: there is nothing to charge.")
        if not isinstance(event, StreamDpEvent) and any(isinstance(leaf, StreamDpEvent) for leaf, _ in leaves(event)):
            raise ValueError("A stream is charged by itself, not as a part of something else.")
        with self._transaction() as connection:
            known = self._get(connection, name)
            cost = to_units(known.terms.cost(event))
            if known.terms.mode is Mode.PLAN:
                after = known.take_planned(event_json)
                if after is None:
                    left = totals.remaining(known)
                    raise BudgetExceeded(
                        f"This event is not, or no longer, in the plan of {name}; what is left is {left}. "
                        "Nothing was charged.",
                        left,
                    )
            elif not fits(known.spent, cost, known.terms.cap):
                left = totals.remaining(known)
                raise BudgetExceeded(
                    f"{name} cannot afford this: it would cost {known.describe(cost)}, and what is left is {left}. "
                    "Nothing was charged.",
                    left,
                )
            else:
                after = known.plus(cost)
            after = after.marked(seed is not None)
            receipt_id = uuid.uuid4().hex
            body = {
                "event": event_json,
                "cost": cost,
                "stage": stage,
                "note": note,
                "bound": bound,
                "seeded": seed is not None,
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "state": after.fingerprint,
            }
            head = chain.append(connection, "charge", name, receipt_id, canonical(body))
            self._save(connection, after)
        key = NoiseKey() if seed is None else NoiseKey((seed, name, after.charges))
        return stated(known, receipt_id, body, head).issued(key)

    def settle(self, receipt: Receipt, used: int | None = None) -> None:
        """Return what was reserved and not used: only ``used`` releases of the receipt were made. It is closed then.

        By default ``used`` is what ``mechanisms`` released on it; give more if a loop counts steps of its own.
        Only the process that holds the live receipt can settle it, and never below what ``mechanisms`` released on it.
        What the chain says was given to earlier holders counts as used, whatever ``used`` says: they may have made it.
        A stream costs the same from its first step on, and a plan refunds nothing; both are simply closed. If the
        ledger cannot be written, the receipt is closed all the same and its charge stays spent.
        """
        if not receipt.live:
            raise LedgerError(
                f"Receipt {receipt.id[:8]} is closed or belongs to another process: its charge stays spent."
            )
        with self._transaction() as connection:
            known = self._get(connection, receipt.subject)
            check_charged(receipt)
            before = json.loads(chain.charge(connection, receipt.id).body)["cost"]
            last = chain.last_lease(connection, receipt.id)
            if last is not None and last[0] == "settle":
                raise LedgerError(f"Receipt {receipt.id[:8]} was settled already.")
            if last is not None and last[1].get("holder") != receipt._use.get("holder"):
                raise LedgerError(f"Another process has taken up receipt {receipt.id[:8]}: its charge stays spent.")
            try:
                used = receipt.counted(used, least=chain.made_before(connection, receipt.id))
                kept = receipt.close(used)
            except ReceiptError as error:
                raise LedgerError(str(error)) from None
            refund, after = 0, to_units(known.terms.cost(kept))
            if known.terms.mode is not Mode.PLAN and before is not None and after is not None:
                refund = max(0, before - after)
            settled = known.minus(refund)
            body = {
                "used": used,
                "refund": refund,
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "state": settled.fingerprint,
            }
            chain.append(connection, "settle", receipt.subject, receipt.id, canonical(body))
            self._save(connection, settled)

    # -- asking ------------------------------------------------------------------------------------------------------

    def receipt(self, receipt_id: str) -> Receipt:
        """A receipt read back from the ledger: it states what was paid for, and releases nothing."""
        with self._transaction() as connection:
            row = chain.charge(connection, receipt_id)
            known = self._get(connection, row.subject)
        return stated(known, row.receipt, json.loads(row.body), chain.head_of(row.seq, row.hash))

    def spent(self, subject: str | Subject, *, promised: bool = False) -> Guarantee:
        """What was spent on one subject so far; ``promised``: its cap, for what stops or chooses by releases."""
        return totals.spent(self._read(subject), cap=promised)

    def stopped(self, subject: str | Subject) -> bool:
        """Whether a part of a charge was returned: if releases chose when, only the cap holds."""
        name = subject if isinstance(subject, str) else subject.name
        return any(entry.kind == "settle" and entry.body["refund"] for entry in self.entries(name))

    def remaining(self, subject: str | Subject) -> Remaining:
        """The largest single Gaussian release (or, in pure mode, the largest epsilon) that still fits."""
        return totals.remaining(self._read(subject))

    def total(self, delta: float | None = None, *, promised: bool = False) -> Guarantee:
        """What one person may lose over all subjects, unless these are declared disjoint: the headline.

        It composes what was spent so far. That is the guarantee of charges that were fixed in advance; if later ones
        were chosen by what earlier ones released, the budgets are what holds: ``promised=True`` composes those.
        """
        return totals.total(self.subjects(), delta, cap=promised)

    def entries(self, subject: str | None = None) -> list[Entry]:
        """Every row, oldest first."""
        with self._transaction() as connection:
            return chain.entries(connection, subject)

    @property
    def head(self) -> str:
        """The end of the chain: whoever keeps it can tell later whether anything before it was changed."""
        with self._transaction() as connection:
            return chain.head_of(*chain.current(connection))

    def verify(self, head: str | None = None) -> int:
        """Check every row and total, and that ``head`` (from a receipt, a checkpoint or a card) is in the chain.

        Returns the number of entries; raises ``LedgerDamaged`` at the first thing that does not hold.
        """
        with self._transaction() as connection:
            return chain.verify(connection, head)

    def close(self) -> None:
        """Let go of the database; the next use opens it again."""
        with self._lock:
            self._engine.dispose()

    def __repr__(self) -> str:
        return f"Ledger({sa.engine.make_url(self.url).render_as_string(hide_password=True)!r})"

    def _repr_html_(self) -> str:
        return ledger_html(self)

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside ------------------------------------------------------------------------------------------------------

    @property
    def durable(self) -> bool:
        """Whether the ledger outlives the process (one in memory does not)."""
        return storage.durable(self._engine)

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        if not self.durable and self._pid != os.getpid():
            raise LedgerError("A ledger in memory stays in the process that made it: give it a file.")
        with self._lock, storage.plain_errors(self.url), self._engine.begin() as connection:
            yield connection

    def _find(self, connection: Connection, name: str) -> Subject | None:
        return chain.subject(connection, name)

    def _get(self, connection: Connection, name: str) -> Subject:
        known = self._find(connection, name)
        if known is None:
            raise LedgerError(f"There is no subject {name!r} in this ledger: declare it with Ledger.subject first.")
        return known

    def _read(self, subject: str | Subject) -> Subject:
        with self._transaction() as connection:
            return self._get(connection, str(getattr(subject, "name", subject)))

    def _save(self, connection: Connection, subject: Subject) -> None:
        connection.execute(_SAVE, {"wanted": subject.name, "state": subject.state_json})
