"""Thousands of trials at once, on data that is public: for studies, and for knowing beforehand what a budget will buy.

The searches are those of the real protocol (``search``); only the transport differs: the sums of all sources are one
operation, and for plain sums the noise of all sources is one number of the right distribution. It comes from numpy's
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

from tacit.calibrate._aggregate import Answers, totals
from tacit.calibrate._curve import corrected
from tacit.calibrate._methods import Aggregate, Method, OneSource, Setting
from tacit.calibrate._outputs import Outputs, bin_of
from tacit.calibrate._platt import platt
from tacit.calibrate._rows import CELLS, Rows, gathered
from tacit.calibrate._search import Ask, Outcome, drive
from tacit.calibrate._statistics import BinGaps, Gap, Histogram, Noise, Statistic
from tacit.privacy import Budget, Neighbours

Draw = Callable[[float, float, tuple[int, ...]], Tensor]
Tamper = Callable[[Tensor, Ask, float], Tensor]
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

    def repartitioned(self, *, sources: int, samples: int | Sequence[int]) -> Simulation:
        """The same outputs partitioned among other sources; what was computed about single rows serves both."""
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
        self.sources, self.samples, self.sizes = sources, used, tuple(sizes)
        self._whose = torch.arange(sources).repeat_interleave(torch.tensor(sizes))
        self.assigned = _orders(rows, self.trials, self._seed)[:, :used].contiguous()  # source after source
        self._first = self.assigned[:, : sizes[0]]
        self._before: Tensor | None = None

    def run(
        self,
        method: Method,
        *,
        budget: Budget,
        noise: Noise | None = None,
        neighbours: Neighbours | str = Neighbours.ADD_REMOVE,
        draw: Draw | None = None,
        aggregate: Aggregate = "robust",
        tamper: Tamper | None = None,
    ) -> Trials:
        """One method in every trial.

        ``draw(scale, sources, shape)`` gives the sum of so many sources' noise, if given (of one source's, where the
        aggregation is robust). ``tamper(answers, asked, scale)`` is what lying sources make of the answers (trials x
        sources x values).
        """
        setting = Setting(
            sources=self.sources,
            samples=self.samples,
            budget=budget,
            noise=noise or ("laplace" if budget.pure else "gaussian"),
            neighbours=Neighbours(neighbours),
            aggregate=aggregate,
            sizes=self.sizes,
        )
        return self.run_in(setting, method, draw=draw, tamper=tamper)

    def run_in(
        self, setting: Setting, method: Method, *, draw: Draw | None = None, tamper: Tamper | None = None
    ) -> Trials:
        """The same in a setting of more samples than are assigned: totals are scaled up to what these would give."""
        queries = method.queries(setting)
        stand_for = max(1, setting.samples or 0) / max(1, self.samples)
        draw = draw or self._draw(setting.noise)

        said: list[Answers] = []
        sums: list[Tensor] = []

        def ask(asked: Ask) -> list[Tensor]:
            scale = setting.price(queries).scale(asked.statistic, setting.neighbours) if queries else 0.0
            if isinstance(method, OneSource):
                sums.append(self._sums(asked, self._first))
            elif setting.aggregate != "robust" and tamper is None:
                exact = self._sums(asked, None) * stand_for
                sums.append(exact + draw(scale, setting.noises, tuple(exact.shape)))
            else:
                answers = self._sums(asked, None, self._whose) * stand_for
                answers = answers + draw(scale, 1, tuple(answers.shape))
                answers = answers if tamper is None else tamper(answers, asked, scale)
                if setting.aggregate == "robust":
                    sizes = torch.tensor(self.sizes, dtype=torch.float64) * stand_for
                    said.append(
                        Answers(
                            values=answers, sizes=sizes, statistic=asked.statistic, noise=setting.noise, scale=scale
                        )
                    )
                    return [one.value for one in totals(said)]
                sums.append(answers.sum(dim=1))
            return list(sums)

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

    def _sums(self, asked: Ask, rows: Tensor | None, whose: Tensor | None = None) -> Tensor:
        """The exact totals of each trial, over all its samples or over ``rows`` (trials x samples), or by source."""
        levels, place = torch.unique(asked.temperatures, return_inverse=True)
        picked = self.assigned if rows is None else rows
        shape = (asked.statistic.size,) if whose is None else (self.sources, asked.statistic.size)
        totals = torch.zeros(self.trials, *shape, dtype=torch.float64)
        if rows is not None or len(levels) * len(self.outputs) > 4 * picked.numel():
            chunk = max(1, CELLS // max(1, picked.shape[1] * self.outputs.classes))
            for start in range(0, self.trials, chunk):
                part = picked[start : start + chunk]
                each = asked.temperatures[start : start + chunk].repeat_interleave(part.shape[1])
                values = _on_grid(asked.statistic, self.outputs.take(part.flatten()), each)
                totals[start : start + chunk] = gathered(values.view(*part.shape, -1), whose)
            return totals * asked.statistic.grid
        for level, temperature in enumerate(levels.tolist()):
            here = place == level
            totals[here] = self._rows(asked.statistic.at(temperature), on_grid=True).over(self.assigned[here], whose)
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
        """The calibration error of each trial's result on the samples that no source has."""
        left_over = len(self.outputs) - self.samples
        if outcome.confidences is not None:
            return self._ece_of_bins(outcome.confidences) / left_over
        if outcome.corrections is not None:
            return self._ece_of_curves(outcome.temperature, outcome.corrections, corrected) / left_over
        if outcome.platt is not None:
            return self._ece_of_curves(outcome.temperature, outcome.platt, _scaled) / left_over
        levels, place = torch.unique(outcome.temperature, return_inverse=True)
        errors = torch.zeros(self.trials, dtype=torch.float64)
        for level, temperature in enumerate(levels.tolist()):
            here = place == level
            rows = self._rows(BinGaps(bins=self.bins, temperature=temperature), on_grid=False)
            errors[here] = (rows.total - rows.over(self.assigned[here])).abs().sum(dim=1)
        return errors / left_over

    def _ece_of_bins(self, confidences: Tensor) -> Tensor:
        """All rows of a bin get its confidence, so their counts are all that is needed."""
        old = confidences.shape[1]
        rows = self._rows(Histogram(bins=old), on_grid=False)
        counts = rows.total - rows.over(self.assigned)
        claimed = confidences.clamp_min(1 / self.outputs.classes)
        gaps = counts[:, :old] - counts[:, old:] * claimed
        sums = torch.zeros(self.trials, self.bins, dtype=torch.float64)
        return sums.scatter_add_(1, bin_of(claimed, self.bins), gaps).abs().sum(dim=1)

    def _ece_of_curves(
        self, temperature: Tensor, tables: Tensor, claim: Callable[[Tensor, Tensor, int], Tensor]
    ) -> Tensor:
        """Every trial has a curve of its own, so rows are looked at trial by trial."""
        outputs, errors = self.outputs, []
        known: dict[float, Tensor] = {}
        for level, table, rows in zip(temperature.tolist(), tables, self.assigned, strict=True):
            if level not in known:
                known[level] = outputs.confidence(level)
            claimed = claim(known[level], table, outputs.classes)
            gaps = (outputs.correct - claimed) * outputs.good
            gaps[rows] = 0.0
            errors.append(torch.bincount(bin_of(claimed, self.bins), gaps, minlength=self.bins).abs().sum())
        return torch.stack(errors)

    def _draw(self, noise: Noise) -> Draw:
        """The sum of independent noise of many sources: of Laplaces it is a difference of two gammas.

        Every run draws the same stream, so that methods are compared on the same partitions and the same noise.
        """
        rng = np.random.default_rng((self._seed, 1))

        def draw(scale: float, sources: float, shape: tuple[int, ...]) -> Tensor:
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
    """One method on public outputs; to compare several on the same partitions, keep a ``Simulation``.

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


def _scaled(confidence: Tensor, line: Tensor, classes: int) -> Tensor:
    return platt(confidence, line[0], line[1], classes)


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
        expected: How far the confidence of that classifier is above its accuracy.
    """

    before: float
    after: float
    expected: float = 0.05

    @property
    def worth(self) -> bool:
        return self.after < self.before

    @property
    def assumes(self) -> str:
        """What the forecast assumes, as half a sentence: nothing about the real classifier is known before asking."""
        return (
            f"assuming a classifier of ten classes that is right in 75 % of the cases and {100 * self.expected:.3g} "
            "points too confident, and sources that are alike and honest"
        )


@lru_cache(maxsize=64)
def forecast(method: Method, setting: Setting, *, expected: float = 0.05, trials: int = 200) -> Forecast:
    """What a method would do, on average, for a synthetic classifier that is ``expected`` too confident.

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
    samples_in_all = min(max(setting.samples, 1), len(labels) // 2)
    each = [samples_in_all // setting.sources + (i < samples_in_all % setting.sources) for i in range(setting.sources)]
    simulation = Simulation(logits=logits, labels=labels, sources=setting.sources, samples=each, trials=trials, seed=1)
    result = simulation.run_in(setting, method)
    return Forecast(before=float(result.ece_before.mean()), after=float(result.ece_after.mean()), expected=expected)


@lru_cache(maxsize=8)
def reference(expected: float, rows: int = 4000) -> tuple[Tensor, Tensor]:
    """Logits and labels of a synthetic classifier whose mean confidence is ``expected`` above its accuracy.

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
