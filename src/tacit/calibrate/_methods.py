"""The methods: which statistic is asked, how often, and what is made of the answers.

``AccT``, ``NLLT``, ``ECET`` and ``HistogramBinning`` are those of Luo et al. (2020), ``OneSource`` and ``Nothing``
their baselines; ``SignedGap`` is tacit's own and the default. A method is a frozen value of settings, never of data.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from scipy.special import ndtri
from torch import Tensor

from tacit.calibrate._measures import check_bins
from tacit.calibrate._queries import Price
from tacit.calibrate._search import Ask, Objective, Outcome, Search, fit_gap, golden_section
from tacit.calibrate._statistics import BinGaps, Count, Gap, GapSlope, Histogram, Loss, Noise, Statistic
from tacit.privacy import Budget, Neighbours


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
    """

    sources: int
    samples: int | None
    budget: Budget
    noise: Noise
    neighbours: Neighbours = Neighbours.ADD_REMOVE
    extra: int = 0
    level: float = 0.95

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
        return each * math.sqrt(self.sources * (2 if self.noise == "laplace" else 1))


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
    more question asks for their number of units, at the same price.

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
        samples: float | None = setting.samples
        if samples is None:
            ones = torch.ones(trials, dtype=torch.float64)
            counted = yield Ask(statistic=Count(), temperatures=ones)
            samples = max(1.0, float(counted[0, 0]))  # one trial: a simulation always declares its sizes
        samples = max(1.0, samples)
        std = setting.noise_std(GapSlope(), self.queries(setting)) / samples
        search = fit_gap(
            low=self.low,
            high=self.high,
            steps=self._steps(setting),
            samples=samples,
            noise_std=std,
            trials=trials,
            z=setting.z,
        )
        return (yield from search)


@dataclass(frozen=True, kw_only=True)
class HistogramBinning(Method):
    """Each confidence bin gets the accuracy that was seen in it; one question.

    A bin whose noisy count is not positive keeps its middle, which depends on no data.

    Args:
        bins: The number of bins.
    """

    name: ClassVar[str] = "histogram"
    bins: int = 15

    def __post_init__(self) -> None:
        check_bins(self.bins)

    def queries(self, setting: Setting) -> int:  # noqa: ARG002
        return 1

    def search(self, setting: Setting, trials: int = 1) -> Search:  # noqa: ARG002
        ones = torch.ones(trials, dtype=torch.float64)
        totals = yield Ask(statistic=Histogram(bins=self.bins), temperatures=ones)
        correct, count = totals[:, : self.bins], totals[:, self.bins :]
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


def _nothing(trials: int) -> Generator[Ask, Tensor, Outcome]:
    yield from ()
    return Outcome(temperature=torch.ones(trials, dtype=torch.float64))


METHODS: dict[str, type[Method]] = {
    method.name: method for method in (SignedGap, AccT, NLLT, ECET, HistogramBinning, OneSource, Nothing)
}
