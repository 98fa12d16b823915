"""Thousands of trials at once, on data that is public: for studies, and for knowing beforehand what a budget will buy.

The searches are those of the real protocol (``search``); only the transport differs: sums over all sources are one
matrix product, and the noise of all sources is drawn as one number of the right distribution. It comes from numpy's
generator with a seed, so everything here is marked "seeded: not private".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from tacit.calibrate._methods import Method, OneSource, Setting
from tacit.calibrate._outputs import Outputs, bin_of
from tacit.calibrate._rows import CELLS, Rows
from tacit.calibrate._search import Ask, Outcome, drive
from tacit.calibrate._statistics import BinGaps, Gap, Histogram, Noise, Statistic
from tacit.privacy import Budget, Neighbours

Draw = Callable[[float, int, tuple[int, ...]], Tensor]
_KEPT = 2**25  # numbers of contributions that are kept from one question to the next


@dataclass(frozen=True, kw_only=True, eq=False)
class Trials:
    """What came out, one entry per trial; the errors are those on the samples that no source had.

    Args:
        temperature: Per trial.
        ece_before: Per trial.
        ece_after: Per trial.
        queries: Questions per source.
        outcome: What the search found.
    """

    temperature: Tensor
    ece_before: Tensor
    ece_after: Tensor
    queries: int
    outcome: Outcome
    note: ClassVar[str] = "seeded: not private"


class Simulation:
    """Public outputs, split at random over sources in every trial; what is left over is for evaluation.

    Args:
        logits: Logits, rows x classes; or give `probs`.
        probs: Probabilities, rows x classes.
        labels: The true class of each row.
        sources: How many.
        samples: Per source: one number, or one for each source.
        trials: How many splits.
        seed: Of the splits and the noise.
        bins: The number of bins.
    """

    def __init__(
        self,
        *,
        logits: Any = None,
        probs: Any = None,
        labels: Any,
        sources: int,
        samples: int | Sequence[int],
        trials: int = 500,
        seed: int = 0,
        bins: int = 15,
    ) -> None:
        """``samples`` per source: one number, or one for each source."""
        self.outputs = Outputs.of(logits=logits, probs=probs, labels=labels)
        self.trials, self.bins, self._seed = trials, bins, seed
        self._memo: dict[tuple[Statistic, bool], Rows] = {}
        self._deal(sources, samples)

    def redealt(self, *, sources: int, samples: int | Sequence[int]) -> Simulation:
        """The same outputs dealt to other sources; what was computed about single rows serves both."""
        other = copy(self)
        other._deal(sources, samples)
        return other

    def _deal(self, sources: int, samples: int | Sequence[int]) -> None:
        sizes = [samples] * sources if isinstance(samples, int) else list(samples)
        if sources < 1 or self.trials < 1 or len(sizes) != sources or min(sizes) < 0:
            raise ValueError("A simulation has at least one source and one trial, and a number of samples per source.")
        rows, used = len(self.outputs), sum(sizes)
        if used >= rows:
            raise ValueError(
                f"{sources} sources take {used} samples and there are {rows}: none is left for evaluation."
            )
        self.sources, self.samples = sources, used
        self.dealt = _orders(rows, self.trials, self._seed)[:, :used].contiguous()  # source after source
        self._first = self.dealt[:, : sizes[0]]
        self._before: Tensor | None = None

    def run(
        self,
        method: Method,
        *,
        budget: Budget,
        noise: Noise | None = None,
        neighbours: Neighbours | str = Neighbours.ADD_REMOVE,
        draw: Draw | None = None,
    ) -> Trials:
        """One method in every trial. ``draw(scale, sources, shape)`` gives the sum of the sources' noise, if given."""
        setting = Setting(
            sources=self.sources,
            samples=self.samples,
            budget=budget,
            noise=noise or ("laplace" if budget.pure else "gaussian"),
            neighbours=Neighbours(neighbours),
        )
        return self.run_in(setting, method, draw=draw)

    def run_in(self, setting: Setting, method: Method, *, draw: Draw | None = None) -> Trials:
        """The same in a setting of more samples than are dealt: totals are scaled up to what these would give."""
        queries = method.queries(setting)
        stand_for = max(1, setting.samples or 0) / max(1, self.samples)
        draw = draw or self._draw(setting.noise)

        def ask(asked: Ask) -> Tensor:
            if isinstance(method, OneSource):
                return self._sums(asked, self._first)
            totals = self._sums(asked, None) * stand_for
            scale = setting.price(queries).scale(asked.statistic, setting.neighbours)
            return totals + draw(scale, setting.sources, tuple(totals.shape))

        outcome = drive(method.search(setting, self.trials), ask)
        if self._before is None:
            self._before = self._ece(Outcome(temperature=torch.ones(self.trials, dtype=torch.float64)))
        return Trials(
            temperature=outcome.temperature,
            ece_before=self._before,
            ece_after=self._ece(outcome),
            queries=queries,
            outcome=outcome,
        )

    def _sums(self, asked: Ask, rows: Tensor | None) -> Tensor:
        """The exact totals of each trial, over all its samples or over ``rows`` (trials x samples)."""
        levels, place = torch.unique(asked.temperatures, return_inverse=True)
        picked = self.dealt if rows is None else rows
        totals = torch.zeros(self.trials, asked.statistic.size, dtype=torch.float64)
        if rows is not None or len(levels) * len(self.outputs) > 4 * picked.numel():
            chunk = max(1, CELLS // max(1, picked.shape[1] * self.outputs.classes))
            for start in range(0, self.trials, chunk):
                part = picked[start : start + chunk]
                each = asked.temperatures[start : start + chunk].repeat_interleave(part.shape[1])
                values = _on_grid(asked.statistic, self.outputs.take(part.flatten()), each)
                totals[start : start + chunk] = values.view(*part.shape, -1).sum(dim=1)
            return totals * asked.statistic.grid
        for level, temperature in enumerate(levels.tolist()):
            here = place == level
            totals[here] = self._rows(asked.statistic.at(temperature), on_grid=True).over(self.dealt[here])
        return totals * asked.statistic.grid

    def _rows(self, statistic: Statistic, *, on_grid: bool) -> Rows:
        """Each row's contribution, remembered: searches come back to the same temperatures."""
        known = self._memo.get((statistic, on_grid))
        if known is not None:
            return known
        rows = Rows.of(statistic, self.outputs, on_grid=on_grid)
        if 2 * (len(self._memo) + 1) * len(self.outputs) <= _KEPT:
            self._memo[statistic, on_grid] = rows
        return rows

    def _ece(self, outcome: Outcome) -> Tensor:
        """The calibration error of each trial's result on the samples that were not dealt."""
        left_over = len(self.outputs) - self.samples
        if outcome.confidences is not None:
            return self._ece_of_bins(outcome.confidences) / left_over
        levels, place = torch.unique(outcome.temperature, return_inverse=True)
        errors = torch.zeros(self.trials, dtype=torch.float64)
        for level, temperature in enumerate(levels.tolist()):
            here = place == level
            rows = self._rows(BinGaps(bins=self.bins, temperature=temperature), on_grid=False)
            errors[here] = (rows.total - rows.over(self.dealt[here])).abs().sum(dim=1)
        return errors / left_over

    def _ece_of_bins(self, confidences: Tensor) -> Tensor:
        """All rows of a bin get its confidence, so their counts are all that is needed."""
        old = confidences.shape[1]
        rows = self._rows(Histogram(bins=old), on_grid=False)
        counts = rows.total - rows.over(self.dealt)
        claimed = confidences.clamp_min(1 / self.outputs.classes)
        gaps = counts[:, :old] - counts[:, old:] * claimed
        sums = torch.zeros(self.trials, self.bins, dtype=torch.float64)
        return sums.scatter_add_(1, bin_of(claimed, self.bins), gaps).abs().sum(dim=1)

    def _draw(self, noise: Noise) -> Draw:
        """The sum of independent noise of many sources: of Laplaces it is a difference of two gammas.

        Every run draws the same stream, so that methods are compared on the same deals and the same luck.
        """
        rng = np.random.default_rng((self._seed, 1))

        def draw(scale: float, sources: int, shape: tuple[int, ...]) -> Tensor:
            if noise == "laplace":
                value = rng.gamma(sources, size=shape) - rng.gamma(sources, size=shape)
            else:
                value = rng.standard_normal(shape) * math.sqrt(sources)
            return torch.from_numpy(value * scale)

        return draw


@lru_cache(maxsize=2)
def _orders(rows: int, trials: int, seed: int) -> Tensor:
    """A shuffle of all rows for each trial; sources get what comes first."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(np.stack([rng.permutation(rows) for _ in range(trials)]))


def simulate(
    method: Method,
    *,
    logits: Any = None,
    probs: Any = None,
    labels: Any,
    sources: int,
    samples: int | Sequence[int],
    budget: Budget,
    trials: int = 500,
    seed: int = 0,
    noise: Noise | None = None,
    neighbours: Neighbours | str = Neighbours.ADD_REMOVE,
) -> Trials:
    """One method on public outputs; to compare several on the same deals, keep a ``Simulation``.

    Args:
        method: How to recalibrate.
        logits: Logits, rows x classes; or give `probs`.
        probs: Probabilities, rows x classes.
        labels: The true class of each row.
        sources: How many.
        samples: Per source: one number, or one for each source.
        budget: Of each source.
        trials: How many splits.
        seed: Of the splits and the noise.
        noise: "laplace" or "gaussian".
        neighbours: The neighbouring relation.

    Returns:
        Temperatures and errors, per trial.
    """
    simulation = Simulation(
        logits=logits, probs=probs, labels=labels, sources=sources, samples=samples, trials=trials, seed=seed
    )
    return simulation.run(method, budget=budget, noise=noise, neighbours=neighbours)


def _on_grid(statistic: Statistic, outputs: Outputs, temperature: float | Tensor) -> Tensor:
    """Each row's contribution in whole grid steps, as ``grid_sum`` rounds it."""
    return (statistic.contributions(outputs, temperature) / statistic.grid).round()


# -- what a budget will buy --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The calibration error to expect on a public reference classifier, without and with recalibration.

    Args:
        before: Without recalibration.
        after: With it.
    """

    before: float
    after: float

    @property
    def worth(self) -> bool:
        return self.after < self.before


@lru_cache(maxsize=64)
def forecast(method: Method, setting: Setting, *, expected: float = 0.05, trials: int = 200) -> Forecast:
    """What a method would do, on average, for a made-up classifier that is ``expected`` too confident.

    Decided from public quantities only (sources, declared samples, budget), before anything is asked. The reference is
    a ten-class problem of 75 % accuracy, so it says whether the noise would drown a miscalibration of that size.

    Args:
        method: How to recalibrate.
        setting: What is public.
        expected: How far confidence is above accuracy.
        trials: Simulated runs.

    Returns:
        The calibration error before and after.
    """
    if setting.samples is None:
        raise ValueError("A forecast needs the number of samples: let the sources declare their sizes.")
    logits, labels = reference(expected)
    dealt = min(max(setting.samples, 1), len(labels) // 2)
    each = [dealt // setting.sources + (i < dealt % setting.sources) for i in range(setting.sources)]
    simulation = Simulation(logits=logits, labels=labels, sources=setting.sources, samples=each, trials=trials, seed=1)
    result = simulation.run_in(setting, method)
    return Forecast(before=float(result.ece_before.mean()), after=float(result.ece_after.mean()))


@lru_cache(maxsize=8)
def reference(expected: float, rows: int = 4000) -> tuple[Tensor, Tensor]:
    """Logits and labels of a made-up classifier whose mean confidence is ``expected`` above its accuracy.

    Scores x = m onehot(y) + N(0, 1) have the true posterior softmax(m x); sharpening that makes it overconfident.

    Args:
        expected: How far confidence is above accuracy.
        rows: How many.

    Returns:
        Logits and labels.
    """
    if not 0 < expected < 0.2:
        raise ValueError(f"The expected miscalibration lies between 0 and 0.2; got {expected:g}.")
    rng = np.random.default_rng(2020)
    labels = torch.from_numpy(rng.integers(0, 10, rows))
    scores = torch.from_numpy(rng.standard_normal((rows, 10)))
    scores[torch.arange(rows), labels] += 2.2
    low, high = 0.1, 20.0
    for _ in range(40):
        sharpness = (low + high) / 2
        gap = Gap().contributions(Outputs.of(logits=scores * sharpness, labels=labels)).mean()
        low, high = (sharpness, high) if float(gap) > -expected else (low, sharpness)
    return scores * high, labels
