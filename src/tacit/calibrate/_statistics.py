"""What a source may be asked: sums over its units of bounded vectors.

The bounds belong to the type of a statistic, so a source derives by itself what an answer may reveal; nothing that an
asker sends states a sensitivity.

Formal guarantee: the unit is the source's (one row, or all rows of one unit label, averaged). ``Statistic.sum`` clamps
every unit's contribution to [low, high] per value and to ``l1`` and ``l2`` in all, on a public grid (``grid_sum``), so
between neighbours the sum moves, in L1 and in L2, by at most ``sensitivity`` (add-remove or zero-out / replace-one):

===============  ==========  ==============  ====================================================================
statistic        L1          L2              because one unit adds
===============  ==========  ==============  ====================================================================
``Gap``          1 / 2       1 / 2           correct - confidence, in [-1, 1]
``GapSlope``     1 / 2       1 / 2           the gap, and a slope cut to at most 1 - |gap|
``BinGaps``      1 / 2       1 / 2           correct - confidence to one bin
``GapCells``     1 / 2       1 / 2           to one bin: correct - confidence, and 1 less its absolute value
``LogitCells``   1 / 2       1 / 2           correct - confidence to a wide bin, 1 less its size to a narrow one
``Cells``        1 / 2       1 / √2          1 to one cell: a bin's correct or its wrong ones (never negative)
``Histogram``    2 / 4       √2 / 2          1 to one bin's total, and 1 or 0 to its correct (never negative)
``Loss``         B / B       B / B           a loss clipped to [0, B]; replaced within an interval of width B
``Count``        1 / 1       1 / 1           1
===============  ==========  ==============  ====================================================================

A row whose logits are not finite numbers adds zero to every value.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from tacit.calibrate._measures import check_bins
from tacit.calibrate._outputs import Outputs, bin_of
from tacit.calibrate._platt import NARROW, WIDE
from tacit.calibrate._wire import make
from tacit.privacy import GridSum, Neighbours, grid_sum

Noise = Literal["laplace", "gaussian"]
_COLDEST, _HOTTEST = 0.01, 100.0


@dataclass(frozen=True, kw_only=True)
class Statistic(ABC):
    """A bounded sum over the units of a source. ``rows`` are the contributions of single rows."""

    kind: ClassVar[str]
    low: ClassVar[float] = -1.0

    @property
    def high(self) -> float:
        return 1.0

    @property
    def size(self) -> int:
        """How many values an answer has."""
        return 1

    @property
    def l1(self) -> float:
        return math.inf

    @property
    def l2(self) -> float:
        return math.inf

    @property
    def spread(self) -> tuple[float, ...]:
        """A public guess at the variance of one unit's contribution, per value: it weighs answers, no more."""
        return (0.2,) * self.size

    @abstractmethod
    def rows(self, outputs: Outputs, temperature: float | Tensor) -> Tensor:
        """Each row's contribution (rows x size) at a temperature, or at one temperature per row."""

    @property
    def at_temperature(self) -> float:
        return float(getattr(self, "temperature", 1.0))

    def at(self, temperature: float) -> Statistic:
        """The same statistic at another temperature."""
        return replace(self, temperature=temperature) if hasattr(self, "temperature") else self  # type: ignore[call-arg]

    def contributions(self, outputs: Outputs, temperature: float | Tensor | None = None) -> Tensor:
        """Each row's contribution; zero for rows that are not finite numbers."""
        rows = self.rows(outputs, self.at_temperature if temperature is None else temperature)
        return rows * outputs.good[:, None]

    def sum(self, outputs: Outputs, units: Tensor | None = None, steps: int | None = None) -> GridSum:
        """The bounded sum over units: over rows, or over the means of the rows that share a unit label.

        ``steps`` is how many steps of the grid the largest contribution is (at most), by default 2^20.
        """
        rows = self.contributions(outputs)
        if units is not None and len(rows):
            _, place, sizes = torch.unique(units, return_inverse=True, return_counts=True)
            rows = torch.zeros(len(sizes), self.size, dtype=rows.dtype).index_add_(0, place, rows) / sizes[:, None]
        return self._bounded(rows, None if steps is None else self.step(steps))

    def step(self, steps: int) -> float:
        """The grid of which so many steps are the largest contribution, rounded up to a power of two."""
        return float(2.0 ** math.ceil(math.log2(max(abs(self.low), self.high)))) / steps

    def sensitivity(self, noise: Noise, neighbours: Neighbours) -> float:
        """By how much the sum may move between neighbours, in the norm that this noise is calibrated to."""
        empty = self._bounded(torch.zeros(0, self.size))
        return neighbours.factor * empty.bound("l1" if noise == "laplace" else "l2", neighbours)

    @property
    def grid(self) -> float:
        return self._bounded(torch.zeros(0, self.size)).grid

    def _bounded(self, rows: Tensor, grid: float | None = None) -> GridSum:
        return grid_sum(rows, low=self.low, high=self.high, l1=self.l1, l2=self.l2, grid=grid)

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind} | asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Statistic:
        kind = data.get("kind") if isinstance(data, Mapping) else data
        if not isinstance(kind, str) or kind not in KINDS:
            raise ValueError(f"There is no statistic called {kind!r}; choose one of {', '.join(KINDS)}.")
        return make(KINDS[kind], {key: value for key, value in data.items() if key != "kind"})


@dataclass(frozen=True, kw_only=True)
class AtTemperature(Statistic):
    """A statistic of the outputs at one temperature."""

    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not _COLDEST <= self.temperature <= _HOTTEST:
            raise ValueError(f"A temperature lies between {_COLDEST} and {_HOTTEST:g}; got {self.temperature!r}.")


@dataclass(frozen=True, kw_only=True)
class Gap(AtTemperature):
    """The sum of correct - confidence (Acc-T).

    Args:
        temperature: The temperature at which it is computed.
    """

    kind: ClassVar[str] = "gap"

    def rows(self, outputs: Outputs, temperature: float | Tensor) -> Tensor:
        return (outputs.correct - outputs.confidence(temperature))[:, None]


@dataclass(frozen=True, kw_only=True)
class GapSlope(AtTemperature):
    """The gap, and its slope in log T, clipped to what the gap leaves of an L1 norm of 1: it costs nothing.

    Args:
        temperature: The temperature at which it is computed.
    """

    kind: ClassVar[str] = "gap-slope"

    @property
    def size(self) -> int:
        return 2

    @property
    def l1(self) -> float:
        return 1.0

    @property
    def spread(self) -> tuple[float, ...]:
        return (0.2, 0.03)

    def rows(self, outputs: Outputs, temperature: float | Tensor) -> Tensor:
        gap = outputs.correct - outputs.confidence(temperature)
        slope = torch.minimum(outputs.slope(temperature), 1 - gap.abs())
        slope = torch.floor(slope / self.grid) * self.grid  # so that rounding the gap never passes the norm
        return torch.stack([gap, slope], dim=1)


@dataclass(frozen=True, kw_only=True)
class BinGaps(AtTemperature):
    """The sum of correct - confidence in each equal-width bin of the confidence (ECE-T).

    Args:
        temperature: The temperature at which it is computed.
        bins: The number of bins.
    """

    kind: ClassVar[str] = "bin-gaps"
    bins: int = 15

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bins(self.bins)

    @property
    def size(self) -> int:
        return self.bins

    @property
    def l1(self) -> float:
        return 1.0

    @property
    def spread(self) -> tuple[float, ...]:
        return (0.2 / self.bins,) * self.size

    def rows(self, outputs: Outputs, temperature: float | Tensor) -> Tensor:
        confidence = outputs.confidence(temperature)
        rows = torch.zeros(len(outputs), self.bins, dtype=torch.float64)
        return rows.scatter_(1, bin_of(confidence, self.bins)[:, None], (outputs.correct - confidence)[:, None])


@dataclass(frozen=True, kw_only=True)
class GapCells(AtTemperature):
    """The sum of correct - confidence in each confidence bin, then of what that leaves of 1: how many there are.

    Like ``BinGaps``, and the second half costs nothing: a unit adds 1 in all.

    Args:
        temperature: The temperature at which it is computed.
        bins: The number of bins.
    """

    kind: ClassVar[str] = "gap-cells"
    bins: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bins(self.bins)

    @property
    def size(self) -> int:
        return 2 * self.bins

    @property
    def l1(self) -> float:
        return 1.0

    @property
    def spread(self) -> tuple[float, ...]:
        return (0.2 / self.bins,) * self.size

    def pairs(self, outputs: Outputs, confidence: Tensor) -> Tensor:
        """The two numbers that each row adds to its bin."""
        gap = outputs.correct - confidence
        left = torch.floor((1 - gap.abs()) / self.grid) * self.grid  # so that rounding the gap never passes the norm
        return torch.stack([gap, left], dim=1)

    def rows(self, outputs: Outputs, temperature: float | Tensor) -> Tensor:
        confidence = outputs.confidence(temperature)
        place = bin_of(confidence, self.bins)[:, None]
        rows = torch.zeros(len(outputs), self.size, dtype=torch.float64)
        return rows.scatter_(1, torch.cat([place, place + self.bins], dim=1), self.pairs(outputs, confidence))


@dataclass(frozen=True, kw_only=True)
class LogitCells(AtTemperature):
    """The sum of correct - confidence in wide bins of the confidence's logit, and what it leaves of 1 in narrow ones.

    Like ``GapCells``, with two sets of bins, which are fixed (``_platt``): a unit adds to one wide bin and to one
    narrow one, 1 in all.

    Args:
        temperature: The temperature at which it is computed.
    """

    kind: ClassVar[str] = "logit-cells"

    @property
    def size(self) -> int:
        return len(WIDE) + len(NARROW) + 2

    @property
    def l1(self) -> float:
        return 1.0

    @property
    def spread(self) -> tuple[float, ...]:
        return (0.2 / (len(WIDE) + 1),) * (len(WIDE) + 1) + (0.2 / (len(NARROW) + 1),) * (len(NARROW) + 1)

    def pairs(self, outputs: Outputs, confidence: Tensor) -> tuple[Tensor, Tensor]:
        """The two numbers that each row adds, and to which values."""
        gap = outputs.correct - confidence
        left = torch.floor((1 - gap.abs()) / self.grid) * self.grid  # so that rounding the gap never passes the norm
        wide, narrow = (
            torch.bucketize(confidence, torch.sigmoid(torch.tensor(edges, dtype=torch.float64)))
            for edges in (WIDE, NARROW)
        )
        return torch.stack([gap, left], dim=1), torch.stack([wide, narrow + len(WIDE) + 1], dim=1)

    def rows(self, outputs: Outputs, temperature: float | Tensor) -> Tensor:
        values, place = self.pairs(outputs, outputs.confidence(temperature))
        return torch.zeros(len(outputs), self.size, dtype=torch.float64).scatter_(1, place, values)


@dataclass(frozen=True, kw_only=True)
class Cells(AtTemperature):
    """The number of correct predictions in each confidence bin, then the number of wrong ones: cells without overlap.

    They say what ``Histogram`` says, and a unit is in one of them only: half the sensitivity.

    Args:
        temperature: The temperature at which it is computed.
        bins: The number of bins.
    """

    kind: ClassVar[str] = "cells"
    low: ClassVar[float] = 0.0
    bins: int = 15

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bins(self.bins)

    @property
    def size(self) -> int:
        return 2 * self.bins

    @property
    def l1(self) -> float:
        return 1.0

    @property
    def spread(self) -> tuple[float, ...]:
        return (0.2 / self.bins,) * self.size

    def rows(self, outputs: Outputs, temperature: float | Tensor) -> Tensor:
        place = bin_of(outputs.confidence(temperature), self.bins)[:, None]
        place = place + self.bins * (1 - outputs.correct.long()[:, None])
        return torch.zeros(len(outputs), self.size, dtype=torch.float64).scatter_(1, place, 1.0)


@dataclass(frozen=True, kw_only=True)
class Histogram(AtTemperature):
    """The number of correct predictions in each confidence bin, then the number of predictions in each.

    Luo et al. (2020) release it so; ``Cells`` says the same at half the sensitivity.

    Args:
        temperature: The temperature at which it is computed.
        bins: The number of bins.
    """

    kind: ClassVar[str] = "histogram"
    low: ClassVar[float] = 0.0
    bins: int = 15

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bins(self.bins)

    @property
    def size(self) -> int:
        return 2 * self.bins

    @property
    def l1(self) -> float:
        return 2.0

    @property
    def spread(self) -> tuple[float, ...]:
        return (0.2 / self.bins,) * self.size

    @property
    def l2(self) -> float:
        return math.sqrt(2)

    def rows(self, outputs: Outputs, temperature: float | Tensor) -> Tensor:
        place = bin_of(outputs.confidence(temperature), self.bins)[:, None]
        rows = torch.zeros(len(outputs), 2 * self.bins, dtype=torch.float64)
        rows.scatter_(1, place, outputs.correct[:, None])
        return rows.scatter_(1, place + self.bins, 1.0)


@dataclass(frozen=True, kw_only=True)
class Loss(AtTemperature):
    """The sum of negative log likelihoods, each clipped to [0, bound] (NLL-T).

    Args:
        temperature: The temperature at which it is computed.
        bound: The largest loss of a sample that counts.
    """

    kind: ClassVar[str] = "loss"
    low: ClassVar[float] = 0.0
    bound: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.bound <= 1000:
            raise ValueError(f"The bound of a loss is above 0 and at most 1000; got {self.bound!r}.")

    @property
    def high(self) -> float:
        return self.bound

    @property
    def spread(self) -> tuple[float, ...]:
        return (min(1.5, self.bound**2 / 4),)

    def rows(self, outputs: Outputs, temperature: float | Tensor) -> Tensor:
        return outputs.loss(temperature).clamp(0.0, self.bound)[:, None]


@dataclass(frozen=True, kw_only=True)
class Count(Statistic):
    """The number of units."""

    kind: ClassVar[str] = "count"
    low: ClassVar[float] = 0.0

    def rows(self, outputs: Outputs, temperature: float | Tensor) -> Tensor:  # noqa: ARG002
        return torch.ones(len(outputs), 1, dtype=torch.float64)


KINDS: dict[str, type[Statistic]] = {
    cls.kind: cls for cls in (Gap, GapSlope, BinGaps, GapCells, LogitCells, Cells, Histogram, Loss, Count)
}
