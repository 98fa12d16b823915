"""Charges of earlier versions at today's prices.

A price can change with a version: a bound gets tighter, or one turns out to have been too low. What the chain recorded
stays as it was written; an entry says by which version of the prices (``PRICES``) it was priced.

Formal guarantee: a subject stands at no less than today's price of every charge (``Standing.raised``). Where the record
is higher, the record counts. Of a receipt that was settled the whole difference counts unless nothing was released on
it, which is never too little where no part of its event became cheaper.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from tacit.privacy._decompose import UnsupportedEvent
from tacit.privacy._filters import Mode, Terms, from_units, to_units
from tacit.privacy._subject import Subject, canonical
from tacit.privacy.events import from_json

PRICES = 1  # raised with every change of what an event costs; a charge of earlier versions says none


class PricedTooLow(UserWarning):
    """A ledger holds charges that an earlier version priced below what they cost today."""


@dataclass(frozen=True, kw_only=True)
class Underpriced:
    """A charge whose recorded cost is below today's price; both as the subject's filter counts them.

    Args:
        seq: The charge's number in the ledger.
        subject: Which subject was charged.
        recorded: The cost that the ledger has.
        price: What the same event costs today.
    """

    seq: int
    subject: str
    recorded: float
    price: float

    @property
    def missing(self) -> float:
        return self.price - self.recorded

    def __str__(self) -> str:
        return (
            f"Entry {self.seq} on {self.subject} was priced by an earlier version: {self.recorded:.6g}, and its event "
            f"costs {self.price:.6g} today, so it is too low by {self.missing:.6g}"
        )


def price_of(terms: Terms, body: dict[str, Any]) -> int | None:
    """What a charge's event costs today, in units of the filter; None is infinite."""
    return _price(terms, canonical(body["event"]))


@lru_cache(maxsize=4096)
def _price(terms: Terms, event: str) -> int | None:
    try:
        return to_units(terms.cost(from_json(json.loads(event))))
    except UnsupportedEvent:
        return None  # an earlier version priced what no bound holds for


def same(recorded: int | None, price: int | None) -> bool:
    """Whether two prices differ in their last digits at most, as they may between machines."""
    if recorded is None or price is None:
        return recorded is price
    return abs(price - recorded) <= price * 1e-9 + 1


def below(recorded: int | None, price: int | None) -> bool:
    """Whether a recorded cost is too low."""
    return recorded is not None and not same(recorded, price) and (price is None or recorded < price)


def underpriced(known: Subject, seq: int, body: dict[str, Any]) -> Underpriced | None:
    """The charge of an entry, if it was too low. A plan is priced as a whole, anew whenever it is asked for."""
    if known.terms.mode is Mode.PLAN:
        return None
    price = price_of(known.terms, body)
    if not below(body["cost"], price):
        return None
    return Underpriced(seq=seq, subject=known.name, recorded=from_units(body["cost"]), price=from_units(price))


@dataclass
class Standing:
    """What a subject's charges up to entry ``seq`` lack at today's prices, by receipt."""

    seq: int = 0
    missing: dict[str, int | None] = field(default_factory=dict)

    def add(self, known: Subject, seq: int, kind: str, receipt: str | None, body: dict[str, Any]) -> None:
        """Take one more entry of the subject into account."""
        self.seq = seq
        if kind == "settle" and body["used"] == 0:
            self.missing.pop(str(receipt), None)
        elif kind == "charge" and body.get("prices") != PRICES and known.terms.mode is not Mode.PLAN:
            recorded, price = body["cost"], price_of(known.terms, body)
            if recorded is not None and below(recorded, price):
                self.missing[str(receipt)] = None if price is None else price - recorded

    def raised(self, known: Subject) -> Subject:
        """The subject with what is missing added to what was spent."""
        if not self.missing:
            return known
        more = list(self.missing.values())
        known_sum = sum(each for each in more if each is not None)
        spent = None if known.spent is None or None in more else known.spent + known_sum
        return replace(known, spent=spent, repriced=len(more))
