"""How a calibrator reaches its sources, and what it makes of their replies."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from tacit.calibrate._aggregate import Answers, shrunk, tail, totals
from tacit.calibrate._answers import Refused
from tacit.calibrate._methods import Aggregate
from tacit.calibrate._queries import Answer, Price, Query, Shares
from tacit.calibrate._search import Ask
from tacit.calibrate._source import Source, Terms
from tacit.calibrate._statistics import Count, Statistic
from tacit.privacy import LedgerError

_NEVER = 1e-12  # the probability that noise alone makes an answer impossible


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
    """How the sources are reached. ``ask`` returns one entry per source that was asked."""

    def terms(self) -> Sequence[Terms]: ...
    def ask(self, query: Query) -> Sequence[Answer | Refusal]: ...


@dataclass(frozen=True, kw_only=True)
class Summed:
    """A total that alone was seen.

    Args:
        values: In grid steps, modulo 2^bits.
        sources: Whose shares are in it.
        seeded: Some noise was reproducible: not private.
        lost: Why others are not in it.
    """

    values: tuple[int, ...]
    sources: tuple[str, ...]
    seeded: bool = False
    lost: dict[str, str] = field(default_factory=dict)


@runtime_checkable
class SecureTransport(Protocol):
    """How sources are reached that give shares: ``total`` returns their sum, of which it shows no part."""

    def terms(self) -> Sequence[Terms]: ...
    def total(self, query: Query) -> Summed: ...


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

    def total(self, query: Query) -> Summed:
        """Shares of sources in this process, added up: only this function sees them."""
        found: dict[str, tuple[int, ...]] = {}
        lost: dict[str, str] = {}
        for source in self.sources:
            try:
                found[source.name] = source.share(query)
            except (Refused, LedgerError) as reason:
                lost[source.name] = str(reason)
        if query.shares is None or len(found) < query.shares.needed:
            who, why = next(iter(lost.items()), ("none", "there are too few."))
            raise CalibrationError(
                f"{len(found)} sources gave shares, which are too few to see their total; of {who}: {why} "
                "What was given stays charged."
            )
        values = tuple(sum(parts) % (1 << query.shares.bits) for parts in zip(*found.values(), strict=True))
        seeded = any(source.seed is not None for source in self.sources if source.name in found)
        return Summed(values=values, sources=tuple(found), seeded=seeded, lost=lost)

    @staticmethod
    def _one(source: Source, query: Query) -> Answer | Refusal:
        try:
            return source.answer(query)
        except (Refused, LedgerError) as reason:
            return Refusal(source=source.name, reason=str(reason))


class Asker:
    """One search's questions, numbered; totals over the sources that answered."""

    def __init__(
        self,
        transport: Transport | SecureTransport,
        terms: Sequence[Terms],
        price: Price,
        needed: int,
        run_id: str,
        aggregate: Aggregate = "robust",
        shares: Shares | None = None,
    ) -> None:
        self.transport, self.price, self.needed, self.run_id = transport, price, needed, run_id
        self.terms, self.aggregate, self.shares = {one.source: one for one in terms}, aggregate, shares
        self.asked, self.seeded = 0, False
        self.lost: dict[str, str] = {}
        self.far: dict[str, int] = {}  # sources whose answers are far from the others', and to how many questions
        self.sums: list[tuple[Ask, Tensor]] = []  # plain sums, for what is true of them alone
        self._counted: dict[str, float] = {}  # what sources said when they were asked for their number of units
        self._units: list[Tensor] = []  # the total number of units, if they were asked for it: the first question
        self._said: list[tuple[Answers, float]] = []  # and what their totals are multiplied with to stand for all

    def ask(self, asked: Ask) -> list[Tensor]:
        """Ask all sources; returns the totals of all questions so far."""
        statistic = asked.statistic.at(float(asked.temperatures[0]))
        query = Query(id=f"{self.run_id}/{self.asked}", statistic=statistic, price=self.price, shares=self.shares)
        self.asked += 1
        if self.shares is not None:
            self._summed(asked, query, self.shares)
            return [total for _, total in self.sums]
        good: dict[str, Answer] = {}
        impossible = 0
        assert isinstance(self.transport, Transport)
        for reply in self.transport.ask(query):
            reason = reply.reason if isinstance(reply, Refusal) else self._wrong(reply, query)
            if reason is None and isinstance(reply, Answer) and self._too_large(reply, statistic):
                reason, impossible = "its answer is impossible: larger than its published size allows.", impossible + 1
            if reason is None and isinstance(reply, Answer):
                good[reply.source] = reply
            else:
                self.lost[reply.source] = reason or "it did not answer"
        missing = [name for name in self.terms if name not in good]
        if len(good) + impossible < self.needed or len(good) <= impossible:
            reason = self.lost.get(missing[0], "it did not answer.")
            charged = " What was answered stays charged." if good or self.asked > 1 else ""
            raise CalibrationError(
                f"{len(missing)} of {len(self.terms)} sources did not answer question {self.asked}, the first being "
                f"{missing[0]}: {reason}{charged}"
            )
        for name in missing:
            self.lost.setdefault(name, "it did not answer")
        self.seeded |= any(answer.seeded for answer in good.values())
        values = torch.tensor([answer.values for answer in good.values()], dtype=torch.float64)
        self.sums.append((asked, (values.sum(dim=0) * self._weight(good))[None]))
        if self.aggregate == "sum":
            return [total for _, total in self.sums]
        return self._located(statistic, list(good), values)

    def _summed(self, asked: Ask, query: Query, shares: Shares) -> None:
        """The total of a secure aggregation: nothing else is known, so nothing about single sources is checked."""
        assert isinstance(self.transport, SecureTransport)
        found = self.transport.total(query)
        self.seeded |= found.seeded
        for name in self.terms:
            if name not in found.sources:
                self.lost[name] = found.lost.get(name, "it dropped out of the total.")
        values = torch.tensor([shares.centred(value) for value in found.values], dtype=torch.float64)
        total = values * query.statistic.step(shares.steps) * self._weight(set(found.sources))
        self.sums.append((asked, total[None]))

    def _located(self, statistic: Statistic, names: list[str], values: Tensor) -> list[Tensor]:
        """The totals of all sources by the location of all their answers (``_aggregate``)."""
        neighbours = next(iter(self.terms.values())).neighbours
        scale, noise = self.price.scale(statistic, neighbours), self.price.noise
        if isinstance(statistic, Count):
            sizes = shrunk(values[:, 0], noise=noise, scale=scale)
            self._counted = dict(zip(names, sizes.tolist(), strict=True))
            self._units.append((sizes.sum() * len(self.terms) / len(names))[None, None])
            return list(self._units)
        known, everybody = self._sizes(names)
        sizes = torch.ones(len(names), dtype=torch.float64) if known is None else known
        spread: list[float] | None = None
        if known is None:  # nothing is known about sizes: answers are compared as they are
            everybody = float(len(self.terms))
            middle = 1.4826 * (values - values.median(dim=0).values).abs().median(dim=0).values
            spread = (middle**2 - (2 if noise == "laplace" else 1) * scale**2).clamp_min(0.0).tolist()
        places = torch.tensor([list(self.terms).index(name) for name in names])
        said = torch.zeros(1, len(self.terms), values.shape[1], dtype=torch.float64)
        counted = torch.zeros(len(self.terms), dtype=torch.float64)  # 0: it did not answer
        said[0, places], counted[places] = values, sizes
        answers = Answers(values=said, sizes=counted, statistic=statistic, noise=noise, scale=scale, spread=spread)
        mass = float(sizes.sum())
        self._said.append((answers, everybody / mass if mass else 1.0))
        found = totals([one for one, _ in self._said])
        for name, far in zip(self.terms, found[-1].far[0].any(dim=1).tolist(), strict=True):
            if far:
                self.far[name] = self.far.get(name, 0) + 1
        return self._units + [one.value * stand for one, (_, stand) in zip(found, self._said, strict=True)]

    def _sizes(self, names: Sequence[str]) -> tuple[Tensor | None, float]:
        """The sizes of these sources and of all of them, published or counted; None if nothing is known."""
        known: dict[str, float] = {}
        for name, one in self.terms.items():
            size = one.size if one.size is not None else self._counted.get(name)
            if size is None and name in names:
                return None, 0.0
            known[name] = float("nan") if size is None else float(size)
        own = torch.tensor([known[name] for name in names], dtype=torch.float64)
        silent = [size for name, size in known.items() if name not in names]
        mean = float(own.mean())
        return own, float(own.sum()) + math.fsum(mean if math.isnan(size) else size for size in silent)

    def _weight(self, good: Collection[str]) -> float:
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
        return None

    def _too_large(self, answer: Answer, statistic: Statistic) -> bool:
        """Whether no data of the published size (which may be a round figure: twice that) could have given it.

        Noise passes the limit with a probability below 1e-12, for each value.
        """
        terms = self.terms[answer.source]
        if terms.size is None:
            return False
        scale = self.price.scale(statistic, terms.neighbours)
        largest = max(abs(statistic.low), statistic.high)
        return max(map(abs, answer.values)) > 2 * largest * (terms.size + 1) + tail(_NEVER, self.price.noise, scale)

    @property
    def notes(self) -> list[str]:
        left = [f"{name} was left out at least once: {reason}" for name, reason in sorted(self.lost.items())]
        return left + [
            f"{name} is far from what the others say, in {times} of {self.asked} answers, which did not count."
            for name, times in sorted(self.far.items())
        ]
