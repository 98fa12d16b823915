"""What a run spent: a ledger read once into plain data, as a table and as the sentence above everything else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tacit.privacy import Guarantee, Ledger, Mode, PlainWords, Subject, canonical, from_units, plain_words, round_up
from tacit.report import _describe_events as words
from tacit.report._tables import Column, Table

NOT_DURABLE = "not durable: this ledger was in memory and is gone"
SEEDED = "seeded: not private"


@dataclass(frozen=True, kw_only=True)
class Charges:
    """Equal charges to one subject: what was released, how often it was charged, and the epsilon of it all.

    ``spent`` is these charges alone, ``total`` the subject with everything above; None in a plan, which is priced as a
    whole.
    """

    subject: str
    stage: str
    what: str
    note: str
    times: int
    seeded: bool
    spent: float | None
    total: float | None


@dataclass(frozen=True, kw_only=True)
class Account:
    """One subject: its terms and where it stands."""

    name: str
    unit: str
    relation: str
    mode: str
    epsilon: float  # spent
    delta: float
    budget: float
    disjoint_from: tuple[str, ...]
    seeded: bool


@dataclass(frozen=True, kw_only=True)
class Book:
    """A ledger as it stood when it was read: plain data that outlives the ledger."""

    name: str
    epsilon: float
    delta: float
    sentence: str  # the total, in full
    promised: float  # the epsilon that holds even if later charges were chosen by earlier releases
    private: bool
    seeded: bool
    durable: bool
    head: str
    accounts: tuple[Account, ...]
    charges: tuple[Charges, ...]
    mu: float | None = None  # where the total is one Gaussian release
    kept: bool = True  # False: the guarantee of a result whose ledger is elsewhere

    @classmethod
    def of(cls, ledger: Ledger | Book, name: str = "ledger") -> Book:
        """Read a ledger; a book stays as it is."""
        if isinstance(ledger, Book):
            return ledger
        subjects = ledger.subjects()
        total = ledger.total(promised=any(ledger.stopped(subject) for subject in subjects))
        charges = [line for subject in subjects for line in _charges(ledger, subject)]
        sentence = str(total) if charges else "Nothing was charged to this ledger."
        return cls(
            name=name,
            epsilon=total.epsilon,
            delta=total.delta,
            sentence=sentence,
            promised=ledger.total(promised=True).epsilon,
            private=total.private,
            seeded=total.seeded,
            durable=ledger.durable,
            head=ledger.head,
            accounts=tuple(_account(ledger, subject) for subject in subjects),
            charges=tuple(charges),
            mu=total.mu,
        )

    @classmethod
    def of_guarantee(cls, promise: Guarantee, name: str = "result") -> Book:
        """A guarantee by itself, without the charges behind it."""
        relation = None if promise.neighbours is None else promise.neighbours.value
        account = Account(
            name=name,
            unit=str(promise.unit),
            relation=relation or "",
            mode="",
            epsilon=promise.epsilon,
            delta=promise.delta,
            budget=math.inf,
            disjoint_from=(),
            seeded=promise.seeded,
        )
        return cls(
            name=name,
            epsilon=promise.epsilon,
            delta=promise.delta,
            sentence=str(promise),
            promised=promise.epsilon,
            private=promise.private,
            seeded=promise.seeded,
            durable=False,
            head="",
            accounts=(account,),
            charges=(),
            mu=promise.mu,
            kept=False,
        )

    @classmethod
    def from_facts(cls, facts: dict[str, Any]) -> Book:
        """The book that ``facts`` described, also after it was JSON (which has no infinity, so that it is text)."""
        accounts = [Account(**_floats(one, "epsilon", "delta", "budget")) for one in facts["accounts"]]
        charges = [Charges(**_floats(one, "spent", "total")) for one in facts["charges"]]
        return cls(
            **{
                **_floats({"mu": None, **facts}, "epsilon", "delta", "promised", "mu"),
                "accounts": tuple(accounts),
                "charges": tuple(charges),
            }
        )

    def facts(self) -> dict[str, Any]:
        """Everything, as plain data."""
        return asdict(self)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What must not be overlooked."""
        found = [SEEDED] if self.seeded else []
        if not math.isfinite(self.epsilon):
            found.append("not private: epsilon is infinite")
        return tuple(found + ([] if self.durable or not self.kept else [NOT_DURABLE]))

    @property
    def plain_words(self) -> PlainWords:
        """Who is protected, from what and how strongly, for people who do not know what epsilon is."""
        units = sorted({account.unit for account in self.accounts})
        relations = {account.relation for account in self.accounts}
        return plain_words(
            epsilon=self.epsilon,
            delta=self.delta,
            mu=self.mu,
            unit=" or ".join(units) if len(units) <= 2 else "unit",
            relation=relations.pop() if len(relations) == 1 else None,
            private=self.private,
            charged=bool(self.charges) or not self.kept,
        )

    @property
    def promise(self) -> str:
        """The total in a few signs."""
        return f"ε = {number(self.epsilon)}, δ = {round_up(self.delta, 6)}"

    def headline(self) -> str:
        """The total as a sentence, with what must not be overlooked in front."""
        loud = [warning for warning in self.warnings if warning not in self.sentence and SEEDED not in warning]
        return " ".join([*(f"[{warning}]" for warning in loud), self.sentence])

    def table(self) -> Table:
        """One row per kind of charge."""
        accounts = {account.name: account for account in self.accounts}
        rows = []
        for line in self.charges:
            account = accounts[line.subject]
            what = (f"{line.times:,} charges, each " if line.times > 1 else "") + line.what
            what += f" ({line.note})" if line.note else ""
            what += f" [{SEEDED}]" if line.seeded else ""
            rows.append((line.subject, account.unit, account.relation, line.stage, what, line.spent, line.total))
        columns = ("subject", "unit", "relation", "stage", "what", Column("spent ε", number), Column("total ε", number))
        notes = [
            f"{a.name}: {number(a.epsilon)} of {a.budget:g} at δ = {a.delta:g}, mode {a.mode}" for a in self.accounts
        ]
        return Table(f"Charged to {self.name}", columns, rows, note="; ".join(notes) + "." if notes else "")


def number(epsilon: float) -> str:
    """An epsilon for people: never below the truth."""
    return round_up(epsilon) if math.isfinite(epsilon) else "∞"


def alike(books: Sequence[Book]) -> list[Book]:
    """Books that differ in nothing but name and head as one, whose name says how many there are."""
    groups: dict[Book, list[Book]] = {}
    for book in books:
        groups.setdefault(replace(book, name="", head=""), []).append(book)
    more = [f" and {len(group) - 1:,} alike" if len(group) > 1 else "" for group in groups.values()]
    return [replace(group[0], name=group[0].name + text) for group, text in zip(groups.values(), more, strict=True)]


def overview(books: Sequence[Book]) -> Table:
    """One row per ledger, those alike together."""
    rows = [
        (
            book.name,
            _listed(account.unit for account in book.accounts),
            _listed(account.relation for account in book.accounts),
            _listed(account.mode for account in book.accounts),
            book.epsilon,
            book.delta,
            "; ".join(warning if warning == SEEDED else warning.partition(":")[0] for warning in book.warnings),
        )
        for book in alike(books)
    ]
    delta = Column("δ", lambda value: round_up(value, 6))
    return Table("Ledgers", ("ledger", "unit", "relation", "mode", Column("ε", number), delta, "remarks"), rows)


def heads(books: Sequence[Book]) -> list[str]:
    """The heads that are worth keeping: those of ledgers that are still there, or the only one."""
    return [f"{book.name}: {book.head}" for book in books if book.kept and (book.durable or len(books) == 1)]


def overall(books: Sequence[Book]) -> str:
    """What all ledgers of a run promise, in one sentence."""
    if not books:
        return "No ledger was kept: this run makes no privacy guarantee, which is right only if all its data is public."
    if len(books) == 1:
        return books[0].headline()
    worst = max(books, key=lambda book: (book.seeded, book.epsilon))
    epsilon, delta = math.fsum(book.epsilon for book in books), min(1.0, math.fsum(book.delta for book in books))
    return (
        f"{len(books)} ledgers, each a promise of its own. The weakest, {worst.name}: {worst.headline()} Whoever is in "
        f"the data of all of them loses at most the sum, epsilon {number(epsilon)} and delta {round_up(delta)}."
    )


def _account(ledger: Ledger, subject: Subject) -> Account:
    spent = ledger.spent(subject, promised=ledger.stopped(subject))
    return Account(
        name=subject.name,
        unit=str(subject.terms.unit),
        relation=subject.terms.neighbours.value,
        mode=subject.terms.mode.value,
        epsilon=spent.epsilon,
        delta=spent.delta,
        budget=subject.terms.budget.epsilon,
        disjoint_from=subject.disjoint_from,
        seeded=subject.seeded,
    )


def _charges(ledger: Ledger, subject: Subject) -> Iterable[Charges]:
    """The charges of a subject, equal ones together, in the order in which they first came."""
    entries = ledger.entries(subject.name)
    settled = {entry.receipt: entry.body for entry in entries if entry.kind == "settle"}
    groups: dict[tuple[str, ...], list[tuple[dict[str, Any], float]]] = {}
    for entry in entries:
        if entry.kind != "charge":
            continue
        body, settlement = entry.body, settled.get(entry.receipt)
        cost = from_units(body["cost"])
        used = ""
        if settlement is not None and settlement["refund"]:
            cost = max(0.0, cost - from_units(settlement["refund"]))
            used = words.settlement(settlement, body)
        note = "; ".join(part for part in (body["note"], used) if part)
        key = (body["stage"], canonical(body["event"]), note, str(body["seeded"]))
        groups.setdefault(key, []).append((body, cost))
    running = 0.0
    for place, ((stage, _, note, _), members) in enumerate(groups.items(), 1):
        costs = math.fsum(cost for _, cost in members)
        running += costs
        spent, total = _epsilon(subject, costs), _epsilon(subject, running)
        if place == len(groups):
            total = ledger.spent(subject).epsilon  # which a plan knows as well
        body = members[0][0]
        yield Charges(
            subject=subject.name,
            stage=stage,
            what=words.event(body["event"]),
            note=note,
            times=len(members),
            seeded=body["seeded"],
            spent=spent,
            total=total,
        )


def _epsilon(subject: Subject, cost: float) -> float | None:
    """What a cost of the subject's filter is as an epsilon."""
    return None if subject.terms.mode is Mode.PLAN else subject.terms.guarantee(cost).epsilon


def _floats(facts: dict[str, Any], *names: str) -> dict[str, Any]:
    numbers = {name: None if facts[name] is None else float(facts[name]) for name in names}
    return {key: tuple(value) if isinstance(value, list) else value for key, value in facts.items()} | numbers


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(names)))
