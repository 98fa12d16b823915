"""How a calibrator reaches its sources, and what it makes of their replies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from tacit.calibrate._answers import Refused
from tacit.calibrate._queries import Answer, Price, Query
from tacit.calibrate._search import Ask
from tacit.calibrate._source import Source, Terms
from tacit.calibrate._statistics import Statistic
from tacit.privacy import LedgerError


class CalibrationError(Exception):
    """The run cannot give a right result; the sentence says why, and what was charged."""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A source that did not answer, and why; the reason may travel.

    Args:
        source: Its name.
        reason: May travel.
    """

    source: str
    reason: str


@runtime_checkable
class Transport(Protocol):
    """How the sources are reached. ``ask`` returns one entry per source that was told to answer."""

    def terms(self) -> Sequence[Terms]: ...
    def ask(self, query: Query) -> Sequence[Answer | Refusal]: ...


class InProcess:
    """Sources in this process, asked one after the other.

    Args:
        sources: The sources.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = list(sources)

    def terms(self) -> list[Terms]:
        return [source.terms for source in self.sources]

    def ask(self, query: Query) -> list[Answer | Refusal]:
        return [self._one(source, query) for source in self.sources]

    @staticmethod
    def _one(source: Source, query: Query) -> Answer | Refusal:
        try:
            return source.answer(query)
        except (Refused, LedgerError) as reason:
            return Refusal(source=source.name, reason=str(reason))


class Asker:
    """One search's questions, numbered; totals over the sources that answered."""

    def __init__(self, transport: Transport, terms: Sequence[Terms], price: Price, needed: int, run_id: str) -> None:
        self.transport, self.price, self.needed, self.run_id = transport, price, needed, run_id
        self.terms = {one.source: one for one in terms}
        self.asked, self.seeded = 0, False
        self.lost: dict[str, str] = {}

    def ask(self, asked: Ask) -> Tensor:
        statistic = asked.statistic.at(float(asked.temperatures[0]))
        query = Query(id=f"{self.run_id}/{self.asked}", statistic=statistic, price=self.price)
        self.asked += 1
        good: dict[str, Answer] = {}
        for reply in self.transport.ask(query):
            reason = reply.reason if isinstance(reply, Refusal) else self._wrong(reply, query)
            if reason is None and isinstance(reply, Answer):
                good[reply.source] = reply
            else:
                self.lost[reply.source] = reason or "it did not answer"
        missing = [name for name in self.terms if name not in good]
        if len(good) < self.needed:
            reason = self.lost.get(missing[0], "it did not answer")
            raise CalibrationError(
                f"{len(missing)} of {len(self.terms)} sources did not answer question {self.asked}, the first being "
                f"{missing[0]}: {reason} What was answered stays charged."
            )
        for name in missing:
            self.lost.setdefault(name, "it did not answer")
        self.seeded |= any(answer.seeded for answer in good.values())
        total = torch.tensor([answer.values for answer in good.values()], dtype=torch.float64).sum(dim=0)
        return (total * self._weight(good))[None]

    def _weight(self, good: dict[str, Answer]) -> float:
        """Totals of fewer sources stand for all: by their published sizes, or by their number."""
        if len(good) == len(self.terms):
            return 1.0
        sizes = {name: one.size for name, one in self.terms.items()}
        if any(size is None for size in sizes.values()):
            return len(self.terms) / len(good)
        return sum(size or 0 for size in sizes.values()) / max(1, sum(sizes[name] or 0 for name in good))

    def _wrong(self, answer: Answer, query: Query) -> str | None:
        """Why an answer cannot be right, from public quantities."""
        if answer.source not in self.terms or answer.query != query.id:
            return "it answered another question."
        if len(answer.values) != query.statistic.size or not all(map(math.isfinite, answer.values)):
            return f"its answer is not {query.statistic.size} finite number(s)."
        terms = self.terms[answer.source]
        if terms.size is not None and max(map(abs, answer.values)) > self._most(query.statistic, terms):
            return "its answer is larger than its published size allows."
        return None

    def _most(self, statistic: Statistic, terms: Terms) -> float:
        """A published size may be a round figure, and noise beyond sixty scales has a probability below 1e-26."""
        largest = max(abs(statistic.low), statistic.high)
        return largest * 10 * ((terms.size or 0) + 1) + 60 * self.price.scale(statistic, terms.neighbours)

    @property
    def notes(self) -> list[str]:
        return [f"{name} was left out at least once: {reason}" for name, reason in sorted(self.lost.items())]
