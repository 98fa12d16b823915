"""The calibrator: it asks the sources, searches, and returns a calibrated classifier. It sees noisy sums only.

Sources may be of different sizes without anybody learning them. They release sums, not means, and sums of sums are
what every search needs: the temperature at which a total gap is zero does not depend on how many samples are in it.
Where a denominator is needed (the signed gap's noise relative to its signal, intervals), it is the published sizes, or
a noisy count that is charged like any other question.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tacit.calibrate._calibrated import Result
from tacit.calibrate._intervals import bracket, ece_interval
from tacit.calibrate._methods import (
    AccT,
    Aggregate,
    GapCurve,
    HistogramBinning,
    Method,
    Nothing,
    OneSource,
    Platt,
    Setting,
    SignedGap,
)
from tacit.calibrate._queries import Price, Shares
from tacit.calibrate._search import Ask, Outcome, drive
from tacit.calibrate._simulation import Forecast, forecast
from tacit.calibrate._source import TRUSTS, Source, Terms, Trust
from tacit.calibrate._statistics import BinGaps, Count, Gap, Noise
from tacit.calibrate._transport import Asker, CalibrationError, InProcess, SecureTransport, Transport
from tacit.privacy import Budget

_WIDE = 0.9  # of the range that was searched, in log T: an interval that wide is no information


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What will be asked and paid, decided from public quantities before anything is asked.

    Args:
        setting: What is public.
        queries: Questions to each source.
        price: Of each answer.
        go: Whether anything is asked.
        reason: Why.
        forecast: What to expect.
    """

    setting: Setting
    queries: int
    price: Price | None
    go: bool
    reason: str
    forecast: Forecast | None = None


@dataclass(frozen=True, kw_only=True)
class Calibrator:
    """Asks every source for the same statistics, at `budget` in all from each, and recalibrates.

    Formal guarantee: each source keeps its own promise (``Source.answer``), also against a calibrator and other sources
    that collude; what is made of the answers is post-processing. A person who is in several sources is charged at each.
    With secure aggregation (``Source.share``) the promise assumes that the total alone is seen and that no more of the
    sources collude than each of them stated.

    Args:
        budget: What each source may spend.
        method: How to recalibrate.
        noise: "laplace" or "gaussian"; by default Laplace for a pure budget.
        cautious: Where the sources publish their sizes and the forecast is that the noise would do more harm than a
            miscalibration of `expected`, nothing is asked and T stays 1.
        expected: The miscalibration that `cautious` assumes.
        check: One more question, at the same price, measures the calibration error that is left.
        quorum: The share of sources that must answer every question.
        level: Of the intervals.
        aggregate: "robust": answers are put together by their location, so that a few lying sources decide little, and
            what is impossible is left out and named; "sum": they are added, as in the paper.
        trust: "local", or "secure-aggregation": the total alone is seen, with one noise for all. Then nothing protects
            against lying sources: a total does not show them.

    Examples:
        >>> import torch
        >>> from tacit.calibrate import Calibrator, Source, reference
        >>> from tacit.privacy import Budget
        >>> logits, labels = reference(0.1)  # a synthetic classifier, ten points too confident
        >>> budget = Budget(1.0, 0.0)
        >>> sources = [Source(f"clinic-{i}", logits=logits[i::2], labels=labels[i::2], budget=budget) for i in range(2)]
        >>> result = Calibrator(budget=budget).run(sources)
        >>> result.temperature > 1.0, result.epsilon <= 1.0
        (True, True)
    """

    budget: Budget
    method: Method = field(default_factory=SignedGap)
    noise: Noise | None = None
    cautious: bool = True
    expected: float = 0.05
    check: bool = False
    quorum: float = 1.0
    level: float = 0.95
    aggregate: Aggregate = "robust"
    trust: Trust = "local"

    def __post_init__(self) -> None:
        if not 0 < self.quorum <= 1 or not 0 < self.level < 1:
            raise ValueError("The quorum is a share above 0 and at most 1, the level lies between 0 and 1.")
        if self.trust not in TRUSTS:
            raise ValueError(f"Trust is {' or '.join(TRUSTS)}; got {self.trust!r}.")
        if self.trust != "local" and isinstance(self.method, OneSource):
            raise ValueError("One source calibrates for itself: there is nothing to aggregate.")
        if self.aggregate not in ("robust", "sum"):
            raise ValueError(f"Answers are put together by the robust location or their sum; got {self.aggregate!r}.")
        if self.check and isinstance(self.method, GapCurve | Platt | HistogramBinning | Nothing | OneSource):
            raise ValueError(f"The check measures a temperature alone, and {self.method.name} has more or none.")

    def plan(self, terms: Sequence[Terms], *, resume: bool = False) -> Plan:
        """What will be asked; raises ``CalibrationError`` if the sources cannot be asked it. Costs nothing.

        ``resume``: some of it may have been answered and paid already, so what sources have left is not looked at.

        Args:
            terms: What each source publishes about itself.
            resume: Some of it may have been answered and paid already, so what sources have left is not looked at.

        Returns:
            What will be asked.

        Raises:
            CalibrationError: The sources cannot be asked it.
        """
        if not terms:
            raise CalibrationError("There are no sources to ask.")
        names = [one.source for one in terms]
        if len(set(names)) < len(names):
            raise CalibrationError("Two sources have the same name: answers are distinguished by it.")
        for what in ("unit", "neighbours", "classes", "noise", "trust"):
            found = {str(getattr(one, what)) for one in terms}
            if len(found) > 1:
                raise CalibrationError(f"The sources disagree on {what}: {', '.join(sorted(found))}.")
        noise: Noise = self.noise or ("laplace" if self.budget.pure else "gaussian")
        if noise != terms[0].noise:
            raise CalibrationError(f"The sources answer with {terms[0].noise} noise, and {noise} is asked for.")
        if terms[0].trust != self.trust and not isinstance(self.method, Nothing | OneSource):
            raise CalibrationError(f"The sources trust {terms[0].trust}, and {self.trust} is asked for.")
        shares = self._shares(terms) if self.trust != "local" else None
        sizes = [one.size for one in terms]
        known = sum(size for size in sizes if size is not None) if None not in sizes else None
        setting = Setting(
            sources=len(terms),
            samples=known,
            budget=self.budget,
            noise=noise,
            neighbours=terms[0].neighbours,
            extra=int(self.check),
            level=self.level,
            aggregate=self.aggregate if shares is None else "secure",
            honest=None if shares is None else shares.honest,
            sizes=None if known is None else tuple(size or 0 for size in sizes),
        )
        if isinstance(self.method, Nothing | OneSource):
            return Plan(setting=setting, queries=0, price=None, go=True, reason="Nothing is asked.")
        price = setting.price(self.method.queries(setting))
        queries = self.method.queries(setting) + setting.extra
        poor = [one.source for one in terms if not one.affords(price, queries)]
        if not resume and len(terms) - len(poor) < self._needed(len(terms)):
            raise CalibrationError(
                f"{poor[0]} cannot afford {queries} answers for {self.budget} in all "
                f"({len(poor)} of {len(terms)} sources cannot). Nothing was charged."
            )
        if not self.cautious or known is None:
            return Plan(setting=setting, queries=queries, price=price, go=True, reason="")
        expect = forecast(self.method, setting, expected=self.expected)
        reason = ""
        if not expect.worth:
            reason = (
                f"This budget is too small for this much data: a calibration error of {expect.before:.3f} would become "
                f"{expect.after:.3f}, {expect.assumes}. T stays 1; nothing was asked or charged."
            )
        return Plan(setting=setting, queries=queries, price=price, go=expect.worth, reason=reason, forecast=expect)

    def run(self, sources: Sequence[Source] | Transport | SecureTransport, *, run_id: str | None = None) -> Result:
        """Ask, search, and return what was found.

        A ``run_id`` names the run: after an interruption, the same run goes on with the answers that were given, free
        of charge, and asks what was not asked yet.

        Args:
            sources: The sources, or how to reach them.
            run_id: Names the run: after an interruption, the same run resumes with the answers that were given, free of
                charge.

        Returns:
            The recalibration. Public.

        Raises:
            CalibrationError: No right result is possible; the sentence says what was charged.
        """
        transport = InProcess(sources) if isinstance(sources, Sequence) else sources
        terms = list(transport.terms())
        plan = self.plan(terms, resume=run_id is not None)
        base = Result(
            method=self.method.name,
            neighbours=terms[0].neighbours.value,
            unit=terms[0].unit,
            sources=len(terms),
            noise=plan.setting.noise,
            private=self.budget.private,
            trust=self.trust,
            honest=plan.setting.honest or 0,
            colluding=max(0, self._needed(len(terms)) - (plan.setting.honest or self._needed(len(terms)))),
        )
        if isinstance(self.method, OneSource):
            return self._one_source(transport, plan, base)
        if self.trust != "local" and not isinstance(transport, SecureTransport):
            raise CalibrationError("These sources cannot be reached through secure aggregation. Nothing was asked.")
        if not plan.go or plan.price is None:
            return replace(base, notes=(plan.reason,) if plan.reason else ())
        shares = self._shares(terms, plan) if self.trust != "local" else None
        needed, name = self._needed(len(terms)), run_id or uuid.uuid4().hex
        asker = Asker(transport, terms, plan.price, needed, name, self.aggregate, shares)
        outcome = drive(self.method.search(plan.setting), asker.ask)
        result = replace(
            base,
            temperature=float(outcome.temperature[0]),
            confidences=None if outcome.confidences is None else tuple(outcome.confidences[0].tolist()),
            corrections=None if outcome.corrections is None else tuple(outcome.corrections[0].tolist()),
            platt=None if outcome.platt is None else tuple(outcome.platt[0].tolist()),
            interval=self._interval(outcome, plan, asker.sums),
            queries=plan.queries,
            epsilon=self.budget.epsilon,
            delta=self.budget.delta if plan.setting.noise == "gaussian" else 0.0,
        )
        if self.check:
            result = replace(result, ece_interval=self._left_over(asker, result, outcome, plan.setting, plan.price))
        if asker.lost:  # the noise of fewer sources, scaled up, is not what the intervals were computed for
            result = replace(result, interval=None, ece_interval=None)
        notes = asker.notes + self._notes(outcome, result.interval)
        private = self.budget.private and not asker.seeded
        return replace(result, private=private, seeded=asker.seeded, notes=tuple(notes), queries=asker.asked)

    def _shares(self, terms: Sequence[Terms], plan: Plan | None = None) -> Shares:
        """How the noise is divided: so that it suffices if as many collude as the most careful source reckons with."""
        sources = len(terms)
        needed = self._needed(sources)
        if needed < 2:
            raise CalibrationError("A total of fewer than two sources hides nothing: secure aggregation needs more.")
        honest = needed - math.floor(max(one.colluding for one in terms) * needed + 1e-9)
        bits = min(30, int(math.log2((2**32 - 1) / sources)))
        steps = 256
        if plan is not None and plan.price is not None:
            scale = max(1.0, plan.setting.noises) * 40 * _scale(plan)
            largest = 1.5 * (plan.setting.samples or 0) + scale
            while steps > 4 and steps * largest >= 2 ** (bits - 1):
                steps //= 2
            if steps * largest >= 2 ** (bits - 1):
                raise CalibrationError("So many samples do not fit into the totals of secure aggregation.")
        return Shares(needed=needed, honest=honest, steps=steps, bits=bits)

    def _needed(self, sources: int) -> int:
        return max(1, math.ceil(self.quorum * sources - 1e-9))

    def _interval(self, outcome: Outcome, plan: Plan, sums: list[tuple[Ask, Tensor]]) -> tuple[float, float] | None:
        if outcome.low is not None and outcome.high is not None:
            return float(outcome.low[0]), float(outcome.high[0])
        if not isinstance(self.method, AccT) or plan.price is None:
            return None
        setting = plan.setting
        low, high = bracket(
            sums,
            noise=setting.noise,
            scale=plan.price.scale(Gap(), setting.neighbours),
            sources=setting.noises,
            low=self.method.low,
            high=self.method.high,
            level=setting.level,
        )
        return float(low[0]), float(high[0])

    def _left_over(
        self, asker: Asker, result: Result, outcome: Outcome, setting: Setting, price: Price
    ) -> tuple[float, float] | None:
        """One more question, at the temperature found: the gaps of the bins."""
        temperature = torch.tensor([result.temperature], dtype=torch.float64)
        asker.ask(Ask(statistic=BinGaps(), temperatures=temperature))
        totals = asker.sums[-1][1]  # what is known about their noise is true of plain sums
        counted = [float(t[0, 0]) for ask, t in outcome.asked if isinstance(ask.statistic, Count)]
        samples = setting.samples or (counted[0] if counted else None)
        if not samples or samples < 1:
            return None
        return ece_interval(
            totals[0],
            noise=setting.noise,
            scale=price.scale(BinGaps(), setting.neighbours),
            sources=setting.noises,
            samples=samples,
            z=setting.z,
        )

    def _notes(self, outcome: Outcome, interval: tuple[float, float] | None) -> list[str]:
        notes = []
        if outcome.kept is not None and bool(outcome.kept[0]):
            notes.append("T stays 1: the answers are too little evidence that another temperature would be better.")
        elif outcome.edge is not None and bool(outcome.edge[0]):
            notes.append("The temperature is at an end of the range that was searched.")
        low, high = getattr(self.method, "low", 1.0), getattr(self.method, "high", 1.0)
        if interval is not None and math.log(interval[1] / interval[0]) >= _WIDE * math.log(high / low):
            notes.append(
                f"The interval says next to nothing: it is most of the range that was searched, {low:g} to {high:g}."
            )
        return notes

    def _one_source(self, transport: Transport | SecureTransport, plan: Plan, base: Result) -> Result:
        if not isinstance(transport, InProcess):
            raise CalibrationError("One source calibrates for itself: run it there, with that source alone.")
        source = transport.sources[0]
        sums: list[Tensor] = []

        def exactly(asked: Ask) -> list[Tensor]:
            sums.append(source.exactly(asked))
            return sums

        outcome = drive(self.method.search(plan.setting), exactly)
        note = f"Found without noise at {source.name}, for use there."
        return replace(base, temperature=float(outcome.temperature[0]), sources=1, private=False, notes=(note,))


def _scale(plan: Plan) -> float:
    """The scale of one answer's noise, for a unit that moves it by the relation's factor."""
    price, setting = plan.price, plan.setting
    return setting.neighbours.factor / price.amount if price is not None else 0.0
