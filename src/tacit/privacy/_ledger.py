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

import os
import uuid
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import sqlalchemy as sa

from tacit._guard_rails import check_unit_name
from tacit.privacy import _totals as totals
from tacit.privacy import accounting
from tacit.privacy._book import Book, Charge, DatabaseBook
from tacit.privacy._budget import Budget, Guarantee, Neighbours, Unit
from tacit.privacy._chain import Entry
from tacit.privacy._filters import Mode, Terms
from tacit.privacy._noise import NoiseKey
from tacit.privacy._notebook import ledger_html
from tacit.privacy._receipts import Receipt, ReceiptError, check_charged, stated
from tacit.privacy._remote import RemoteBook
from tacit.privacy._repricing import PricedTooLow, Underpriced
from tacit.privacy._storage import LedgerError
from tacit.privacy._subject import OtherTerms, Subject
from tacit.privacy._totals import Remaining
from tacit.privacy.events import DpEvent, check, to_json

TOKEN = "TACIT_LEDGER_TOKEN"


class Ledger:
    """Durable record of subjects (private data sets and streams), their budgets, and every charge against them.

    Args:
        url: A database address for SQLAlchemy (SQLite, PostgreSQL) or a plain path to an SQLite file; ``"sqlite://"``
            is in memory. ``https://…`` is a service (``tacit ledger serve``).
        create: If False, the ledger must exist already.
        token: For a ledger behind a service (``https://…``, see ``tacit ledger serve``): what it may do there; by
            default the environment's ``TACIT_LEDGER_TOKEN``.

    Raises:
        LedgerError: The database cannot be opened, or is no ledger.

    Examples:
        >>> from tacit.privacy import Budget, Ledger, events
        >>> ledger = Ledger("sqlite://")  # in memory; a file for real data
        >>> clinic = ledger.subject("clinic-a", Budget(epsilon=2.0, delta=1e-6), unit="patient")
        >>> receipt = ledger.charge("clinic-a", events.gaussian(8.0), stage="finetune")
        >>> round(ledger.spent("clinic-a").epsilon, 2)
        0.5
    """

    def __init__(
        self, url: str | Path = "sqlite:///tacit.db", *, create: bool = True, token: str | None = None
    ) -> None:
        """Open a ledger by its address; a plain path is an SQLite file. ``create=False``: it must be there already."""
        url = str(url)
        if not url.strip():
            raise LedgerError("A ledger needs an address: a file, sqlite:///FILE or postgresql://USER@HOST/NAME.")
        self.url = url = url if "://" in url else f"sqlite:///{url}"
        if url.startswith(("https://", "http://")):
            self._book: Book = RemoteBook(url, token or os.environ.get(TOKEN))
        elif token is not None:
            raise LedgerError("A token is for a ledger behind a service: https://….")
        else:
            self._book = DatabaseBook(url, create=create)

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
        """Declare a data set or stream once; declaring it again with the same terms is a no-op.

        Args:
            name: The subject's name in the ledger.
            budget: What may be spent on it in all.
            unit: The privacy unit.
            neighbours: The neighbouring relation.
            mode: How charges compose: ``gaussian`` (a filter on sums of mu^2; the default), ``renyi`` (a filter at one
                order), ``plan`` (PLD over the events declared in ``plan``), ``pure`` (delta 0, sums of epsilon).
            order: The Renyi order of the ``renyi`` mode; by default the best one for plain Gaussians.
            plan: All events that will be charged, for the ``plan`` mode.
            disjoint_from: Subjects that share no unit with this one. Under replace-one this also asserts that the
                subject a unit is in does not depend on the values that are replaced (a record that moves from one to
                the other when its value changes is in both).

        Returns:
            The subject.

        Raises:
            LedgerError: It exists with other terms.
            ValueError: An invalid term.
        """
        totals.check_name(name)
        if self.get_subject(name) is None:
            totals.check_new_name(name)
            check_unit_name(unit)
        if plan is not None and isinstance(plan, DpEvent):
            plan = [plan]
        kind = Mode(mode) if mode else Mode.PLAN if plan is not None else Mode.PURE if budget.pure else Mode.GAUSSIAN
        if kind is Mode.RENYI and order is None and not budget.pure:
            order = accounting.best_order(budget)
        terms = Terms(budget=budget, unit=Unit(unit), neighbours=Neighbours(neighbours), mode=kind, order=order)
        if (plan is not None) != (kind is Mode.PLAN):
            raise ValueError("The plan mode, and only it, needs the plan: the list of all events.")
        subject = Subject.new(name, terms, plan or (), disjoint_from)
        totals.check_declared(subject)
        return self._book.declare(subject)

    def open_subject(
        self,
        name: str,
        budget: Budget,
        *,
        unit: Unit | str,
        neighbours: Neighbours | str,
        mode: Mode | str | None = None,
        order: float | None = None,
        plan: Sequence[DpEvent] | None = None,
        disjoint_from: Iterable[str] = (),
    ) -> Subject:
        """The subject of that name if its unit and relation are these; if there is none, it is declared as ``subject``
        does.

        An existing one keeps its own budget, mode and plan: what it cannot afford is refused when it is charged.

        Args:
            name: The subject's name in the ledger.
            budget: As in ``subject``.
            unit: The privacy unit.
            neighbours: The neighbouring relation.
            mode: As in ``subject``.
            order: As in ``subject``.
            plan: As in ``subject``.
            disjoint_from: As in ``subject``.

        Returns:
            The subject.

        Raises:
            OtherTerms: (a ``LedgerError`` and a ``ValueError``) it protects another unit or under another relation.
        """
        known = self.get_subject(name)
        if known is None:
            try:
                return self.subject(
                    name,
                    budget,
                    unit=unit,
                    neighbours=neighbours,
                    mode=mode,
                    order=order,
                    plan=plan,
                    disjoint_from=disjoint_from,
                )
            except OtherTerms:  # another process was faster
                known = self._book.standing(name)
        known.check_terms(unit=unit, neighbours=neighbours)
        return known

    def get_subject(self, name: str) -> Subject | None:
        """The subject of that name as it stands now; None if there is none.

        Args:
            name: The subject's name in the ledger.

        Returns:
            The subject, or None.
        """
        return self._book.find(name)

    def subjects(self) -> list[Subject]:
        """Every subject of the ledger.

        Returns:
            The subjects as they stand now, by name.
        """
        return self._book.subjects()

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

        Args:
            subject: The subject, or its name.
            event: What will be released (see ``privacy.events``).
            stage: Which stage spends it, for the record: "finetune", "adapt", …
            note: Free text for the record. Public: put no private value in it.
            bound: Sums with a larger sensitivity bound will be refused; None: the noise scales with each sum's bound.
            seed: Reproducible noise. The whole subject is then labelled "seeded: not private".

        Returns:
            A live receipt, valid in this process.

        Raises:
            BudgetExceeded: The event does not fit; nothing was charged, and ``remaining`` says what still fits.
            LedgerError: No such subject, or the ledger cannot be written.
        """
        name = _name(subject)
        request = Charge(
            receipt=uuid.uuid4().hex,
            event=to_json(check(event, finite=True)),
            stage=stage,
            note=note,
            bound=bound,
            seeded=seed is not None,
        )
        made = self._book.charge(name, request)
        key = NoiseKey() if seed is None else NoiseKey((seed, name, made.subject.charges))
        return stated(made.subject, request.receipt, made.body, made.head).issued(key)

    def settle(self, receipt: Receipt, used: int | None = None) -> None:
        """Return the unused part of a reservation, of which only ``used`` releases were made, and close the receipt.

        Only the process that holds the live receipt can settle it, and never below what ``mechanisms`` released on it.
        Releases that were leased to earlier processes count as used, since they may have been made. A stream costs the
        same from its first step on, and a plan refunds nothing; both are simply closed. If the ledger cannot be
        written, the receipt is closed all the same and its charge stays spent.

        Args:
            receipt: A live receipt of this ledger.
            used: The number of releases made; by default those that ``mechanisms`` counted.

        Raises:
            ReceiptError: The receipt is not live, or ``used`` is less than what was released.
        """
        if not receipt.live:
            raise LedgerError(
                f"Receipt {receipt.id[:8]} is closed or belongs to another process: its charge stays spent."
            )
        check_charged(receipt)
        try:
            used = receipt.counted(used, least=self._book.made_before(receipt.id))
            kept = receipt.close(used)
        except ReceiptError as error:
            raise LedgerError(str(error)) from None
        self._book.settle(receipt.id, receipt._state.holder, used, to_json(kept))

    # -- asking ------------------------------------------------------------------------------------------------------

    def receipt(self, receipt_id: str) -> Receipt:
        """A receipt read back from the ledger: it states what was paid for, and releases nothing.

        Args:
            receipt_id: The receipt's ``id``.

        Returns:
            A receipt that is not live.
        """
        made = self._book.charged(receipt_id)
        return stated(made.subject, receipt_id, made.body, made.head)

    def spent(self, subject: str | Subject, *, promised: bool = False) -> Guarantee:
        """What was spent on one subject so far; ``promised``: its cap, for what stops or chooses by releases.

        Args:
            subject: The subject, or its name.
            promised: The guarantee of the whole budget instead, which also holds if releases decided when to stop or
                what to charge next.

        Returns:
            The guarantee of all charges so far.
        """
        return totals.spent(self._book.standing(_name(subject)), cap=promised)

    def stopped(self, subject: str | Subject) -> bool:
        """Whether a part of a charge was returned: if releases chose when, only the cap holds.

        Args:
            subject: The subject, or its name.

        Returns:
            True if ``settle`` returned a part of a charge.
        """
        entries = self.entries(_name(subject))
        return any(entry.kind == "settle" and entry.body["refund"] for entry in entries)

    def remaining(self, subject: str | Subject) -> Remaining:
        """The largest single Gaussian release (or, in pure mode, the largest epsilon) that still fits.

        Args:
            subject: The subject, or its name.

        Returns:
            What still fits; ``noise_multiplier`` is the least noise of one more Gaussian release.
        """
        return totals.remaining(self._book.standing(_name(subject)))

    def total(self, delta: float | None = None, *, promised: bool = False) -> Guarantee:
        """What one person may lose over all subjects, unless these are declared disjoint: the headline.

        It composes what was spent so far. That is the guarantee of charges that were fixed in advance; if later ones
        were chosen by what earlier ones released, the budgets are what holds: ``promised=True`` composes those.

        Args:
            delta: The delta to report at.
            promised: Compose the budgets instead of what was spent so far.

        Returns:
            One guarantee over all subjects.
        """
        found = totals.total([self._book.standing(each.name) for each in self.subjects()], delta, cap=promised)
        if self._book.only is None:
            return found
        return replace(found, notes=(*found.notes, f"over {self._book.only} alone: the token shows no other subject"))

    def entries(self, subject: str | None = None) -> list[Entry]:
        """Every row, oldest first.

        Args:
            subject: Only the entries of this subject.

        Returns:
            The entries; they are public.
        """
        return self._book.entries(subject)

    @property
    def head(self) -> str:
        """The end of the chain: whoever keeps it can tell later whether anything before it was changed."""
        return self._book.head()

    def verify(self, head: str | None = None) -> int:
        """Check every row and total, and that ``head`` is in the hash chain.

        Args:
            head: The chain's head that a receipt, a checkpoint or a card carries.

        Returns:
            The number of entries.

        Raises:
            LedgerDamaged: At the first thing that does not hold.

        Warns:
            PricedTooLow: A charge of an earlier version was recorded below today's price; ``underpriced`` lists them,
                and ``spent``, ``remaining`` and ``total`` count the higher price (``charge`` holds the record to the
                cap, in a few rows). A record above today's price (a bound got tighter since) stays as it is.
        """
        count, low = self._book.verify(head)
        if low:
            sentences = "; ".join(str(each) for each in low)
            warnings.warn(f"{sentences}. Guarantees count the higher price.", PricedTooLow, stacklevel=2)
        return count

    def underpriced(self) -> list[Underpriced]:
        """The charges that earlier versions priced below what they cost today.

        Returns:
            One item per charge, oldest first, with what is missing; empty for a ledger of this version.

        Raises:
            LedgerDamaged: The ledger is not what was written.
        """
        return self._book.verify(None)[1]

    def close(self) -> None:
        """Let go of the database; the next use opens it again."""
        self._book.close()

    def __repr__(self) -> str:
        return f"Ledger({sa.engine.make_url(self.url).render_as_string(hide_password=True)!r})"

    def _repr_html_(self) -> str:
        return ledger_html(self)

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def durable(self) -> bool:
        """Whether the ledger outlives the process (one in memory does not)."""
        return self._book.durable


def ledger_of(book: Book) -> Ledger:
    """The ledger whose entries are in this book."""
    ledger = Ledger.__new__(Ledger)
    ledger.url, ledger._book = book.url, book
    return ledger


def _name(subject: str | Subject) -> str:
    return str(getattr(subject, "name", subject))
