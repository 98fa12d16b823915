"""A question and its answer, as values that travel: what is asked, what it may cost, and the noisy values that left.

An asker states only what it is ready to pay (``Price``); the source computes the noise from that and from the bounds of
the statistic's type.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tacit._json import to_number, to_plain
from tacit.calibrate._statistics import Noise, Statistic
from tacit.calibrate._wire import checked, make
from tacit.privacy import Neighbours, events
from tacit.privacy.events import DpEvent

NOISES: tuple[Noise, ...] = ("laplace", "gaussian")
_LEAST = 1e-6  # what costs less drowns in its noise


@dataclass(frozen=True, kw_only=True)
class Price:
    """What one answer may cost.

    Args:
        noise: "laplace" or "gaussian".
        amount: Its epsilon (laplace) or its mu (gaussian); inf is no noise at all.
    """

    noise: Noise
    amount: float

    def __post_init__(self) -> None:
        if self.noise not in NOISES:
            raise ValueError(f"The noise is one of {', '.join(NOISES)}; got {self.noise!r}.")
        if not self.amount >= _LEAST:
            raise ValueError(f"An answer costs at least {_LEAST:g}; got {self.amount!r}.")

    def event(self, neighbours: Neighbours) -> DpEvent:
        """The release that costs this under a relation; noise is relative to one contribution's bound."""
        multiplier = neighbours.factor / self.amount
        return events.laplace(multiplier) if self.noise == "laplace" else events.gaussian(multiplier)

    def scale(self, statistic: Statistic, neighbours: Neighbours) -> float:
        """The Laplace scale, or the Gaussian standard deviation, of each value of an answer."""
        return statistic.sensitivity(self.noise, neighbours) / self.amount

    def to_json(self) -> dict[str, Any]:
        return {"noise": self.noise, "amount": to_plain(self.amount)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Price:
        known = checked(cls, data)
        return make(cls, {**known, "amount": to_number(known.get("amount"))})


@dataclass(frozen=True, kw_only=True)
class Query:
    """A question with its name. The same ``id`` always gets the same answer.

    Args:
        id: Names the question.
        statistic: What is asked.
        price: What it may cost.
    """

    id: str
    statistic: Statistic
    price: Price

    def __post_init__(self) -> None:
        if not self.id or len(self.id) > 200 or not self.id.isprintable():
            raise ValueError("A query has a printable id of at most 200 characters.")

    def to_json(self) -> dict[str, Any]:
        return {"id": self.id, "statistic": self.statistic.to_json(), "price": self.price.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Query:
        known = checked(cls, data)
        statistic, price = Statistic.from_json(known.get("statistic", {})), Price.from_json(known.get("price", {}))
        return make(cls, {**known, "statistic": statistic, "price": price})

    @property
    def text(self) -> str:
        """The one JSON text of this query."""
        return json.dumps(self.to_json(), sort_keys=True)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The noisy values that a source released: public.

    Args:
        query: The query's id.
        source: The source's name.
        values: The released values.
        scale: Of the noise on each value.
        receipt: The receipt's id.
        head: The source's ledger after the charge.
        seeded: The noise was reproducible: not private.
    """

    query: str
    source: str
    values: tuple[float, ...]
    scale: float
    receipt: str
    head: str
    seeded: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"values": list(self.values)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Answer:
        known = checked(cls, data)
        values = known.get("values")
        if not isinstance(values, list | tuple) or not all(isinstance(v, int | float) for v in values):
            raise ValueError("The values of an answer are a list of numbers.")
        if not all(isinstance(known.get(name), str) for name in ("query", "source", "receipt", "head")):
            raise ValueError("An answer names its query, its source, its receipt and the head of the ledger.")
        return make(cls, {**known, "values": tuple(float(value) for value in values)})
