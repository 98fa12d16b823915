"""The methods: which statistic is asked, how often, and what is made of the answers.

``AccT``, ``NLLT``, ``ECET`` and ``HistogramBinning`` are those of Luo et al. (2020), ``OneSource`` and ``Nothing``
their baselines; ``SignedGap`` is tacit's own and the default, and ``GapCurve`` corrects what its temperature leaves,
``Platt`` scales the logit of the confidence. A method is a frozen value of settings, never of data.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from scipy.special import ndtri
from torch import Tensor

from tacit.calibrate._accuracy_curve import NODES, TEMPERATURE, accuracy_curve
from tacit.calibrate._aggregate import deviation
from tacit.calibrate._curve import corrections, middles
from tacit.calibrate._measures import check_bins
from tacit.calibrate._platt import fit_platt
from tacit.calibrate._queries import Price
from tacit.calibrate._search import Ask, Objective, Outcome, Search, fit_gap, golden_section
from tacit.calibrate._statistics import (
    BinGaps,
    Cells,
    Count,
    Gap,
    GapCells,
    GapSlope,
    Histogram,
    LogitCells,
    Loss,
    Noise,
    Statistic,
)
from tacit.privacy import Budget, Neighbours

_CURVE_NOISE = 0.0065  # of all units: with more noise in a bin than that, a temperature is all that is asked for
_ONCE_NOISE = 0.01  # the same where one question with the whole budget is all (``steps=1``)
Aggregate = Literal["robust", "sum", "secure"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is public before anything is asked.

    Args:
        sources: How many.
        samples: Units in all sources together, or None if not published.
        budget: Of each source.
        noise: "laplace" or "gaussian".
        neighbours: The neighbouring relation.
        extra: Questions that are paid for besides those of the method.
        level: Of the intervals.
        aggregate: "robust", the location of the answers, which a few lying sources cannot decide; their "sum"; or
            "secure": the sum alone is seen, with one noise for all (secure aggregation).
        sizes: The units of each source, if they are published; otherwise they count as equal.
        honest: With secure aggregation: the sources whose shares of the noise suffice; the others' come on top.
    """

    sources: int
    samples: int | None
    budget: Budget
    noise: Noise
    neighbours: Neighbours = Neighbours.ADD_REMOVE
    extra: int = 0
    level: float = 0.95
    aggregate: Aggregate = "robust"
    sizes: tuple[int, ...] | None = None
    honest: int | None = None

    @property
    def noises(self) -> float:
        """How many times a total has the noise of one answer: once for each source, or one for all and what is over."""
        return self.sources / (self.honest or self.sources) if self.aggregate == "secure" else self.sources

    @property
    def z(self) -> float:
        """How many standard deviations the level is."""
        return float(ndtri((1 + self.level) / 2))

    def price(self, queries: int) -> Price:
        """The budget of one source over so many answers: of Laplace noise epsilon adds up, of Gaussian noise mu^2."""
        times = queries + self.extra
        if self.noise == "laplace":
            return Price(noise="laplace", amount=self.budget.epsilon / times)
        return Price(noise="gaussian", amount=self.budget.mu / math.sqrt(times))

    def noise_std(self, statistic: Statistic, queries: int) -> float:
        """The standard deviation of the noise in a total over all sources."""
        each = self.price(queries).scale(statistic, self.neighbours)
        return each * math.sqrt(self.noises * (2 if self.noise == "laplace" else 1))

    def stds(self, statistic: Statistic, queries: int, samples: float) -> tuple[float, ...]:
        """The standard deviation of each value of a total over so many units, of noise and samples together."""
        if self.aggregate != "robust":
            own = self.noise_std(statistic, queries)
            return tuple(math.hypot(own, math.sqrt(samples * variance)) for variance in statistic.spread)
        sizes = torch.full((self.sources,), samples / self.sources) if self.sizes is None else torch.tensor(self.sizes)
        scale = self.price(queries).scale(statistic, self.neighbours)
        spread = statistic.spread
        return tuple(
            deviation(sizes, variance, noise=self.noise, scale=scale, values=len(spread)) for variance in spread
        )


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """How to recalibrate. ``queries`` is exactly how many questions ``search`` asks of each source."""

    name: ClassVar[str]
    private: ClassVar[bool] = True  # whether what it finds may leave

    @abstractmethod
    def queries(self, setting: Setting) -> int: ...

    @abstractmethod
    def search(self, setting: Setting, trials: int = 1) -> Search: ...


@dataclass(frozen=True, kw_only=True)
class _InRange(Method):
    low: float = 0.5
    high: float = 3.0

    def __post_init__(self) -> None:
        if not 0.01 <= self.low < self.high <= 100:
            raise ValueError(
                f"The temperatures searched are low < high within [0.01, 100]; got {self.low:g} to {self.high:g}."
            )


@dataclass(frozen=True, kw_only=True)
class _Golden(_InRange):
    """Golden-section search: ``iterations`` (K) + 1 questions."""

    iterations: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.iterations <= 100:
            raise ValueError(f"A search makes between 1 and 100 iterations; got {self.iterations}.")

    @property
    @abstractmethod
    def statistic(self) -> Statistic: ...

    @abstractmethod
    def objective(self, totals: Tensor) -> Tensor: ...

    def queries(self, setting: Setting) -> int:  # noqa: ARG002
        return self.iterations + 1

    def search(self, setting: Setting, trials: int = 1) -> Search:  # noqa: ARG002
        goal: Objective = self.objective
        return golden_section(
            self.statistic, goal, low=self.low, high=self.high, iterations=self.iterations, trials=trials
        )


@dataclass(frozen=True, kw_only=True)
class AccT(_Golden):
    """Accuracy temperature scaling: mean confidence as close as possible to accuracy (algorithm 1).

    Args:
        low: The smallest temperature of the search.
        high: The largest temperature.
        iterations: Questions asked.
    """

    name: ClassVar[str] = "acc-t"

    @property
    def statistic(self) -> Statistic:
        return Gap()

    def objective(self, totals: Tensor) -> Tensor:
        return totals[:, 0].abs()


@dataclass(frozen=True, kw_only=True)
class NLLT(_Golden):
    """Temperature scaling by the likelihood; each sample's loss really is clipped to [0, ``bound``].

    Args:
        low: The smallest temperature of the search.
        high: The largest temperature.
        iterations: Questions asked.
        bound: The largest loss of a sample that counts.
    """

    name: ClassVar[str] = "nll-t"
    bound: float = 10.0

    @property
    def statistic(self) -> Statistic:
        return Loss(bound=self.bound)

    def objective(self, totals: Tensor) -> Tensor:
        return totals[:, 0]


@dataclass(frozen=True, kw_only=True)
class ECET(_Golden):
    """Temperature scaling by the binned calibration error itself.

    Args:
        low: The smallest temperature of the search.
        high: The largest temperature.
        iterations: Questions asked.
        bins: The number of bins.
    """

    name: ClassVar[str] = "ece-t"
    bins: int = 15

    @property
    def statistic(self) -> Statistic:
        return BinGaps(bins=self.bins)

    def objective(self, totals: Tensor) -> Tensor:
        return totals.abs().sum(dim=1)


@dataclass(frozen=True, kw_only=True)
class SignedGap(_InRange):
    """Follow the signed gap and its slope in log T; one to three questions, as the noise allows.

    Acc-T's gap (accuracy - confidence) rises with T, so its sign says where to go, and its size and slope how far. A
    source can add the slope without moving the sum further than the gap alone may. ``steps=None`` chooses the number
    of questions from public quantities: the noise that one question would have. If the sources publish no sizes, one
    more question asks for their number of units, at the same price. T stays exactly 1 unless the answers make it
    probable enough that moving does good (the gate of ``fit_gap``).

    Args:
        low: The smallest temperature of the search.
        high: The largest temperature.
        steps: The number of questions; None chooses it from public quantities.
    """

    name: ClassVar[str] = "signed-gap"
    steps: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is not None and not 1 <= self.steps <= 20:
            raise ValueError(f"The signed gap takes between 1 and 20 steps; got {self.steps}.")

    def _steps(self, setting: Setting) -> int:
        if self.steps is not None:
            return self.steps
        if setting.samples is None:
            return 2
        noise = {steps: setting.noise_std(GapSlope(), steps) / max(setting.samples, 1) for steps in (2, 3)}
        return 3 if noise[3] <= 0.006 else 2 if noise[2] <= 0.06 else 1

    def queries(self, setting: Setting) -> int:
        return self._steps(setting) + (setting.samples is None)

    def search(self, setting: Setting, trials: int = 1) -> Search:
        samples = yield from _counted(setting, trials)
        return (yield from self._fit(setting, trials, samples, self._steps(setting)))

    def _fit(self, setting: Setting, trials: int, samples: float, steps: int) -> Search:
        gap, slope = setting.stds(GapSlope(), self.queries(setting), samples)
        search = fit_gap(
            low=self.low, high=self.high, steps=steps, samples=samples, stds=(gap, slope), trials=trials, z=setting.z
        )
        return (yield from search)


def _counted(setting: Setting, trials: int) -> Generator[Ask, list[Tensor], float]:
    """The number of units in all: as published, or from one more question."""
    if setting.samples is not None:
        return max(1.0, setting.samples)
    counted = yield Ask(statistic=Count(), temperatures=torch.ones(trials, dtype=torch.float64))
    return max(1.0, float(counted[-1][0, 0]))  # one trial: a simulation always declares its sizes


@dataclass(frozen=True, kw_only=True)
class GapCurve(SignedGap):
    """The signed gap's temperature, and a smooth correction of what it leaves; as many questions as the signed gap.

    The last question is not for the gap at one more temperature but for its curve over the confidence (``_curve``), at
    the temperature found. That is decided by public quantities: where the noise of a bin would be more than
    ``_CURVE_NOISE`` of all units, it is the signed gap and nothing else. With ``steps=1`` and secure aggregation the
    one question, with the whole budget, is for the accuracy as a curve (``_accuracy_curve``), up to a noise of
    ``_ONCE_NOISE``: better under strong shifts, and worse where a temperature is all that is needed. What it finds is
    not a temperature alone, so it cannot be merged into a model's weights.

    Args:
        low: The smallest temperature of the search.
        high: The largest temperature.
        steps: The number of questions; None chooses it from public quantities.
        bins: Of the confidence.
    """

    name: ClassVar[str] = "gap-curve"
    bins: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bins(self.bins)

    def _at_once(self, setting: Setting) -> bool:
        """Whether the one question is for the accuracy as a curve: decided by public quantities."""
        if self.steps != 1 or setting.aggregate != "secure" or setting.samples is None:
            return False
        return setting.noise_std(GapCells(bins=self.bins), 1) <= _ONCE_NOISE * max(1, setting.samples)

    def _once(self, setting: Setting, trials: int, samples: float) -> Search:
        statistic, asked = GapCells(bins=self.bins), torch.full((trials,), TEMPERATURE, dtype=torch.float64)
        totals = yield Ask(statistic=statistic, temperatures=asked)
        probability, accuracy = accuracy_curve(
            totals[-1], samples=samples, noise=setting.noise_std(statistic, self.queries(setting))
        )
        kept = probability > 0.5
        found = (accuracy - middles(NODES)).masked_fill(kept[:, None], 0.0)
        return Outcome(
            temperature=asked.masked_fill(kept, 1.0), corrections=None if bool(kept.all()) else found, kept=kept
        )

    def search(self, setting: Setting, trials: int = 1) -> Search:
        steps, queries, statistic = self._steps(setting), self.queries(setting), GapCells(bins=self.bins)
        samples = yield from _counted(setting, trials)
        if self._at_once(setting):
            return (yield from self._once(setting, trials, samples))
        noise = setting.noise_std(statistic, queries)
        if setting.aggregate == "robust":
            both = setting.stds(statistic, queries, samples)[0]
            noise = math.sqrt(max(0.0, both**2 - samples * statistic.spread[0]))
        if steps == 1 or noise > _CURVE_NOISE * samples:
            return (yield from self._fit(setting, trials, samples, steps))
        found = yield from self._fit(setting, trials, samples, steps - 1)
        totals = yield Ask(statistic=statistic, temperatures=found.temperature)
        constant = setting.stds(GapSlope(), queries, samples)[0] / samples
        return replace(found, corrections=corrections(totals[-1], samples=samples, noise=noise, constant=constant))


@dataclass(frozen=True, kw_only=True)
class Platt(SignedGap):
    """Platt scaling of the confidence, an intercept and a slope of its logit: one question with the whole budget.

    For secure aggregation and published sizes. With local noise, without sizes, or where the noise of a number is more
    than ``_ONCE_NOISE`` of all units, which public quantities decide, it is the signed gap and nothing else. It
    goes as far from "calibrated as it is" as harm is improbable (``_platt``). What it finds is not a temperature, so it
    cannot be merged into a model's weights.

    Formal guarantee: one answer for ``LogitCells``, of L1 and L2 sensitivity 1 (2 under replace-one), which costs the
    whole budget; the rest is post-processing.

    Args:
        low: The smallest temperature of the signed gap's search.
        high: The largest temperature.
        steps: The number of questions of the signed gap; None chooses it from public quantities.
    """

    name: ClassVar[str] = "platt"

    def at_once(self, setting: Setting) -> bool:
        """Whether it is Platt scaling and not the signed gap."""
        if setting.aggregate == "robust" or setting.samples is None:
            return False
        return setting.noise_std(LogitCells(), 1) <= _ONCE_NOISE * max(1, setting.samples)

    def queries(self, setting: Setting) -> int:
        return 1 if self.at_once(setting) else super().queries(setting)

    def search(self, setting: Setting, trials: int = 1) -> Search:
        if not self.at_once(setting):
            return (yield from super().search(setting, trials))
        ones = torch.ones(trials, dtype=torch.float64)
        totals = yield Ask(statistic=LogitCells(), temperatures=ones)
        line, gone = fit_platt(totals[-1], noise=setting.noise_std(LogitCells(), 1))
        kept = gone == 0
        return Outcome(temperature=ones, platt=None if bool(kept.all()) else line, kept=kept)


@dataclass(frozen=True, kw_only=True)
class HistogramBinning(Method):
    """Each confidence bin gets the accuracy that was seen in it; one question.

    A bin whose noisy count is not positive keeps its middle, which depends on no data.

    Args:
        bins: The number of bins.
        ask: "cells", the correct and the wrong predictions of each bin (L1 sensitivity 1), or "totals", the correct
            ones and all (L1 sensitivity 2: the form of Luo et al.).
    """

    name: ClassVar[str] = "histogram"
    bins: int = 15
    ask: Literal["cells", "totals"] = "cells"

    def __post_init__(self) -> None:
        check_bins(self.bins)
        if self.ask not in ("cells", "totals"):
            raise ValueError(f"Histogram binning asks for cells or for totals; got {self.ask!r}.")

    def queries(self, setting: Setting) -> int:  # noqa: ARG002
        return 1

    def search(self, setting: Setting, trials: int = 1) -> Search:  # noqa: ARG002
        ones = torch.ones(trials, dtype=torch.float64)
        statistic = Cells(bins=self.bins) if self.ask == "cells" else Histogram(bins=self.bins)
        (totals,) = yield Ask(statistic=statistic, temperatures=ones)
        correct, count = totals[:, : self.bins], totals[:, self.bins :]
        if self.ask == "cells":
            count = correct + count
        middle = (torch.arange(self.bins, dtype=torch.float64) + 0.5) / self.bins
        filled = count > 0
        share = torch.where(filled, correct / torch.where(filled, count, 1.0), middle)
        return Outcome(temperature=ones, confidences=share.clamp(0.0, 1.0))


@dataclass(frozen=True, kw_only=True)
class OneSource(_Golden):
    """One source calibrates for itself, without noise: private only as long as the result stays there.

    Args:
        low: The smallest temperature of the search.
        high: The largest temperature.
        iterations: Questions asked.
        goal: What is minimised.
    """

    name: ClassVar[str] = "one-source"
    private: ClassVar[bool] = False
    goal: Literal["nll", "gap", "ece"] = "nll"
    iterations: int = 12

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.goal not in _GOALS:
            raise ValueError(f"One source minimises one of {', '.join(_GOALS)}; got {self.goal!r}.")

    @property
    def statistic(self) -> Statistic:
        return _GOALS[self.goal].statistic

    def objective(self, totals: Tensor) -> Tensor:
        return _GOALS[self.goal].objective(totals)


_GOALS: dict[str, _Golden] = {"nll": NLLT(bound=1000.0), "gap": AccT(), "ece": ECET()}


@dataclass(frozen=True, kw_only=True)
class Nothing(Method):
    """Leave the classifier as it is: no question, T = 1."""

    name: ClassVar[str] = "nothing"

    def queries(self, setting: Setting) -> int:  # noqa: ARG002
        return 0

    def search(self, setting: Setting, trials: int = 1) -> Search:  # noqa: ARG002
        return _nothing(trials)


def _nothing(trials: int) -> Search:
    yield from ()
    return Outcome(temperature=torch.ones(trials, dtype=torch.float64))


METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (SignedGap, GapCurve, Platt, AccT, NLLT, ECET, HistogramBinning, OneSource, Nothing)
}
