"""A subject of the ledger: what it declared, and where its filter stands."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tacit.privacy import accounting
from tacit.privacy._budget import Budget, Guarantee, Neighbours, Unit
from tacit.privacy._filters import Mode, Terms, from_units
from tacit.privacy._storage import LedgerError
from tacit.privacy.events import DpEvent, compose, from_json, repeat, to_json


def canonical(value: Any) -> str:
    """The one JSON text of a value, so that equal things have equal hashes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


class OtherTerms(LedgerError, ValueError):
    """A subject of that name exists, declared with other terms than those requested."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A data set or stream with its unit, relation and budget."""

    name: str
    terms: Terms
    terms_json: str
    plan: tuple[tuple[str, int], ...]  # the declared events and how often each, in the plan mode
    disjoint_from: tuple[str, ...]
    spent: int | None = 0  # in units of filters; None is infinite
    taken: tuple[int, ...] = ()  # how often each of them was charged
    charges: int = 0
    seeded: bool = False
    repriced: int = 0  # charges of earlier versions that count at today's, higher price in ``spent``

    @classmethod
    def new(cls, name: str, terms: Terms, plan: Sequence[DpEvent], disjoint_from: Iterable[str]) -> Subject:
        declared = {
            "epsilon": terms.budget.epsilon,
            "delta": terms.budget.delta,
            "unit": str(terms.unit),
            "neighbours": terms.neighbours.value,
            "mode": terms.mode.value,
            "order": terms.order,
            "plan": sorted(Counter(canonical(to_json(event)) for event in plan).items()),
            "disjoint_from": sorted(set(disjoint_from)),
        }
        return cls.read(name, canonical(declared), "{}")

    @classmethod
    def read(cls, name: str, terms_json: str, state_json: str) -> Subject:
        declared, state = json.loads(terms_json), json.loads(state_json)
        terms = Terms(
            budget=Budget(declared["epsilon"], declared["delta"]),
            unit=Unit(declared["unit"]),
            neighbours=Neighbours(declared["neighbours"]),
            mode=Mode(declared["mode"]),
            order=declared["order"],
        )
        return cls(
            name=name,
            terms=terms,
            terms_json=terms_json,
            plan=tuple((event, times) for event, times in declared["plan"]),
            disjoint_from=tuple(declared["disjoint_from"]),
            spent=state.get("spent", 0),
            taken=tuple(state.get("taken", [0] * len(declared["plan"]))),
            charges=state.get("charges", 0),
            seeded=state.get("seeded", False),
        )

    def check_terms(self, *, unit: Unit | str, neighbours: Neighbours | str) -> None:
        """Refuse to let this subject pay for a promise to another unit or under another neighbouring relation.

        Raises:
            OtherTerms: naming both.
        """
        terms, wanted = self.terms, (Unit(unit), Neighbours(neighbours))
        if (terms.unit, terms.neighbours) != wanted:
            raise OtherTerms(
                f"The subject {self.name} promises something to a {terms.unit} under {terms.neighbours.value}, but "
                f"a {wanted[0]} under {wanted[1].value} was requested: the terms must agree."
            )

    @property
    def state_json(self) -> str:
        return canonical(
            {"spent": self.spent, "taken": list(self.taken), "charges": self.charges, "seeded": self.seeded}
        )

    @property
    def fingerprint(self) -> str:
        """What every entry of the chain says of the subject's terms and total as they stand after it."""
        return hashlib.sha256(f"{self.terms_json}\n{self.state_json}".encode()).hexdigest()

    def plus(self, cost: int | None) -> Subject:
        spent = None if self.spent is None or cost is None else self.spent + cost
        return replace(self, spent=spent, charges=self.charges + 1)

    def minus(self, refund: int) -> Subject:
        return self if self.spent is None else replace(self, spent=self.spent - refund)

    def marked(self, seeded: bool) -> Subject:
        return replace(self, seeded=self.seeded or seeded)

    def take_planned(self, event: dict[str, Any]) -> Subject | None:
        """With one entry of the plan that equals this event taken off; None if there is none left."""
        text = canonical(event)
        for place, (planned, times) in enumerate(self.plan):
            if planned == text and self.taken[place] < times:
                taken = (*self.taken[:place], self.taken[place] + 1, *self.taken[place + 1 :])
                return replace(self, taken=taken, charges=self.charges + 1)
        return None

    @property
    def planned(self) -> int:
        """Entries of the plan that were not charged yet."""
        return sum(times for _, times in self.plan) - sum(self.taken)

    def planned_guarantee(self, delta: float | None = None, *, taken_only: bool = False) -> Guarantee:
        """What the plan, or the part of it that was charged, promises by PLD."""
        counts = self.taken if taken_only else [times for _, times in self.plan]
        declared = zip(self.plan, counts, strict=True)
        events = [repeat(from_json(json.loads(text)), times) for (text, _), times in declared if times]
        found = accounting.guarantee(
            compose(events),
            delta=self.terms.budget.delta if delta is None else delta,
            neighbours=self.terms.neighbours,
            unit=self.terms.unit,
        )
        note = "mode plan: the schedule was fixed in advance"
        if taken_only and self.planned:
            budget = self.terms.budget
            note = (
                "mode plan, the part of the plan that was charged so far: if that part was chosen by earlier releases, "
                f"the budget ({budget.epsilon:g}, {budget.delta:g}) holds"
            )
        return replace(found, notes=(*found.notes, note), seeded=self.seeded)

    def describe(self, cost: int | None) -> str:
        """A cost of this subject's filter in words."""
        unit = {Mode.GAUSSIAN: "mu^2", Mode.RENYI: "Renyi divergence", Mode.PURE: "epsilon"}.get(self.terms.mode, "")
        return f"{unit} {from_units(cost):.6g}"
