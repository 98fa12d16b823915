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

    def event(self, neighbours: Neighbours, shares: Shares | None = None) -> DpEvent:
        """The release that costs this under a relation; noise is relative to one contribution's bound."""
        multiplier = neighbours.factor / self.amount
        if shares is not None:
            return events.shared_noise(self.noise, multiplier, shares.honest)
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
class Shares:
    """How one noise is divided over the sources of a total that alone is seen (secure aggregation).

    Args:
        needed: The total is of at least so many sources, or is not seen at all.
        honest: So many sources add enough noise between them: up to ``needed - honest`` of the others may collude.
        steps: The grid: so many steps are the largest contribution, rounded up to a power of two.
        bits: The total is taken modulo 2^bits.
    """

    needed: int
    honest: int
    steps: int = 256
    bits: int = 24

    def __post_init__(self) -> None:
        numbers = (self.needed, self.honest, self.steps, self.bits)
        if not all(isinstance(n, int) and not isinstance(n, bool) for n in numbers):
            raise ValueError("What is said about shares of noise are whole numbers.")
        if not (1 <= self.honest <= self.needed and self.needed >= 2):
            raise ValueError("A total has at least two sources, and between one and all of them are honest.")
        if self.steps not in {2**k for k in range(2, 21)} or not 8 <= self.bits <= 30:
            raise ValueError("The grid has 4 to 2^20 steps, a power of two, and a total has 8 to 30 bits.")

    def centred(self, total: int) -> int:
        """A total modulo 2^bits as the whole number next to zero that it stands for."""
        half = 1 << (self.bits - 1)
        return (total + half) % (1 << self.bits) - half

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Shares:
        return make(cls, data)


@dataclass(frozen=True, kw_only=True)
class Query:
    """A question with its name. The same ``id`` always gets the same answer.

    Args:
        id: Names the question.
        statistic: What is asked.
        price: What it may cost.
        shares: With secure aggregation: how the noise is divided.
    """

    id: str
    statistic: Statistic
    price: Price
    shares: Shares | None = None

    def __post_init__(self) -> None:
        if not self.id or len(self.id) > 200 or not self.id.isprintable():
            raise ValueError("A query has a printable id of at most 200 characters.")

    def to_json(self) -> dict[str, Any]:
        found = {"id": self.id, "statistic": self.statistic.to_json(), "price": self.price.to_json()}
        return found if self.shares is None else found | {"shares": self.shares.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Query:
        known = checked(cls, data)
        statistic, price = Statistic.from_json(known.get("statistic", {})), Price.from_json(known.get("price", {}))
        shares = None if known.get("shares") is None else Shares.from_json(known["shares"])
        return make(cls, {**known, "statistic": statistic, "price": price, "shares": shares})

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
