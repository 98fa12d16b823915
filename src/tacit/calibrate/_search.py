"""The searches: what to ask next, given what was answered. They see totals with noise in them and nothing else.

A search is a generator: it yields an ``Ask``, is sent the totals of all questions so far, the latest last, and returns
an ``Outcome``. Totals of earlier questions may have changed: what a source says later may show that it lied before. It
runs any number of independent ``trials`` side by side; the protocol with real sources is the case of one trial, and a
simulation drives the same code with thousands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tacit.calibrate._statistics import GapSlope, Statistic

GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, kw_only=True, eq=False)
class Ask:
    """A statistic, at one temperature per trial.

    Args:
        statistic: What is asked.
        temperatures: One per trial.
    """

    statistic: Statistic
    temperatures: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """What a search found, per trial: a temperature, or a confidence for each bin.

    Args:
        temperature: Per trial.
        confidences: Of each bin, for histogram binning.
        corrections: What is added to the confidence, at the middle of each bin.
        platt: Intercept and slope of the confidence's logit.
        low: The lower end of an interval for the temperature.
        high: The upper end.
        edge: Whether the search ended at an end of its range.
        kept: Whether T stayed 1 because the answers are no evidence against it.
        asked: All questions and totals.
    """

    temperature: Tensor
    confidences: Tensor | None = None
    corrections: Tensor | None = None
    platt: Tensor | None = None
    low: Tensor | None = None  # an interval for the temperature
    high: Tensor | None = None
    edge: Tensor | None = None  # whether the search ended at an end of its range
    kept: Tensor | None = None  # whether T stayed 1 because the answers are no evidence against it
    asked: list[tuple[Ask, Tensor]] = field(default_factory=list, repr=False)


Search = Generator[Ask, list[Tensor], Outcome]
Objective = Callable[[Tensor], Tensor]


def drive(search: Search, ask: Callable[[Ask], list[Tensor]]) -> Outcome:
    """Run a search; ``ask`` returns the totals of all questions so far (trials x values)."""
    asked: list[Ask] = []
    totals: list[Tensor] = []
    try:
        question = next(search)
        while True:
            totals = ask(question)
            asked.append(question)
            question = search.send(totals)
    except StopIteration as stop:
        outcome: Outcome = stop.value
        outcome.asked.extend(zip(asked, totals, strict=True))
        return outcome


def golden_section(
    statistic: Statistic, objective: Objective, *, low: float, high: float, iterations: int, trials: int
) -> Search:
    """Minimise a unimodal objective with ``iterations`` + 1 questions (Luo et al. 2020, algorithm 1, corrected).

    The printed algorithm computes new points from the old interval and asks one question more than it pays for, whose
    answer it does not use; here the new points come from the new interval, and that question is not asked.
    """
    below, above = torch.full((trials,), low, dtype=torch.float64), torch.full((trials,), high, dtype=torch.float64)
    left, right = above - GOLDEN * (above - below), below + GOLDEN * (above - below)
    at_left = objective((yield Ask(statistic=statistic, temperatures=left))[-1])
    at_right = objective((yield Ask(statistic=statistic, temperatures=right))[-1])
    for remaining in reversed(range(iterations)):
        up = at_left >= at_right
        below, above = torch.where(up, left, below), torch.where(up, above, right)
        new = torch.where(up, below + GOLDEN * (above - below), above - GOLDEN * (above - below))
        left, right = torch.where(up, right, new), torch.where(up, new, left)
        if remaining:
            value = objective((yield Ask(statistic=statistic, temperatures=new))[-1])
            at_left, at_right = torch.where(up, at_right, value), torch.where(up, value, at_left)
    return Outcome(temperature=(below + above) / 2, edge=(below == low) | (above == high))


# The gap as a function of t = log T is taken to be a + b t + c t^2 / 2. These are public guesses at a, b and c, for a
# classifier of which nothing is known: calibrated, give or take 15 points; the gap rises with t, ever faster.
_MEAN, _STD = (0.0, 0.2, 0.2), (0.15, 0.15, 0.2)
_SLOPE_MISFIT = 0.03  # of a slope that was cut, and of the parabola
_GAP_MISFIT = 0.02  # how far a gap may be from the parabola; intervals allow for it, the search does not
_FLATTEST = 0.03  # a curve that is known to rise is not solved as if it were flat
_STEP = 1 / 64  # temperatures are asked for on this grid of log T
_SURE = 0.87  # the gate: how probable it must be that T = 1 is wrong by more than half of the posterior mean


def fit_gap(
    *, low: float, high: float, steps: int, samples: float, stds: tuple[float, float], trials: int, z: float
) -> Search:
    """Follow the signed gap and its slope to where the gap is zero: ``steps`` questions.

    Each answer updates a Gaussian posterior of the curve (Bayesian linear regression: ``stds``, the deviations of the
    two totals over ``samples`` units, are known, so no variance is estimated); the next question is where the
    posterior mean crosses zero. What is uncertain stays near the prior, whose root is T = 1. The interval holds the
    temperatures around the one found at which the posterior gap is within ``z`` standard deviations of zero, of noise
    and sampling together, and a fixed allowance for the parabola; it ends where that is so no more, since the gap rises
    with T: beyond a temperature at which it is surely not zero it is even further from it.

    The gate: with m and s the posterior mean and deviation of the gap at T = 1, moving is kept only if Phi(|m| / (2 s))
    is at least ``_SURE``. A step that removes a gap m which is really g does harm where |g - m| > |g|, that is where g
    is beyond m/2 on the side of zero: with probability 1 - Phi(|m| / (2 s)). Otherwise T stays exactly 1.
    """
    grid = _grid(math.log(low), math.log(high))
    size = len(grid) - 1
    curve = torch.stack([torch.ones_like(grid), grid, grid**2 / 2], dim=1)
    first = torch.diag(torch.tensor(_STD, dtype=torch.float64) ** -2).expand(trials, 3, 3)
    gap_error, slope_error = ((std / samples) ** 2 + 1e-12 for std in stds)
    place = (grid - grid.mean()).abs().argmin().expand(trials)
    places: list[Tensor] = []
    for _ in range(steps):
        places.append(place)
        totals = yield Ask(statistic=GapSlope(), temperatures=grid[place].exp())
        precision, shift = first, (first @ torch.tensor(_MEAN, dtype=torch.float64)).clone()
        for at, found in zip(places, totals[-len(places) :], strict=True):
            where = grid[at]
            rise = torch.stack([torch.zeros_like(where), torch.ones_like(where), where], dim=1)
            for row, value, error in (
                (curve[at], found[:, 0] / samples, gap_error),
                (rise, found[:, 1] / samples, slope_error + _SLOPE_MISFIT**2),
            ):
                precision = precision + row[:, :, None] * row[:, None, :] / error
                shift = shift + row * (value / error)[:, None]
        covariance = torch.linalg.inv(precision)
        mean = (covariance @ shift[:, :, None])[:, :, 0]
        gap = _rising(mean, grid)
        place = gap.abs().argmin(dim=1)
    spread = torch.einsum("gi,tij,gj->tg", curve, covariance, curve).sqrt()
    surely_not = gap.abs() > z * spread + _GAP_MISFIT
    at, here = torch.arange(size + 1), place[:, None]
    lowest = torch.where(surely_not & (at < here), at + 1, 0).amax(dim=1)
    last = torch.where(surely_not & (at > here), at - 1, size).amin(dim=1)
    at_one = (grid == 0).nonzero()[:, 0]
    kept = torch.zeros(trials, dtype=torch.bool)
    if len(at_one):
        kept = torch.special.ndtr(mean[:, 0].abs() / (2 * covariance[:, 0, 0].sqrt())) < _SURE
        place = torch.where(kept, at_one, place)
        lowest, last = torch.minimum(lowest, place), torch.maximum(last, place)
    return Outcome(
        temperature=grid[place].exp(),
        low=grid[lowest].exp(),
        high=grid[last].exp(),
        edge=(place == 0) | (place == size),
        kept=kept,
    )


def _grid(start: float, stop: float) -> Tensor:
    """The multiples of ``_STEP`` in a range of log T, 0 among them, and the ends of the range."""
    inside = torch.arange(math.ceil(start / _STEP), math.floor(stop / _STEP) + 1, dtype=torch.float64) * _STEP
    ends = torch.tensor([start, stop], dtype=torch.float64)
    inside = inside[((inside[:, None] - ends).abs() > _STEP / 4).all(dim=1) | (inside == 0)]
    grid: Tensor = torch.unique(torch.cat([ends, inside]))
    return grid


def _rising(mean: Tensor, grid: Tensor) -> Tensor:
    """The posterior mean of the curve on the grid, its slope kept positive: integrated from its value at the middle."""
    slope = (mean[:, 1:2] + mean[:, 2:3] * grid).clamp_min(_FLATTEST)
    pieces = (slope[:, 1:] + slope[:, :-1]) / 2 * grid.diff()
    height = torch.cat([torch.zeros_like(pieces[:, :1]), pieces.cumsum(dim=1)], dim=1)
    anchor = int((grid - grid.mean()).abs().argmin())
    value = mean[:, 0] + mean[:, 1] * grid[anchor] + mean[:, 2] * grid[anchor] ** 2 / 2
    return value[:, None] + height - height[:, anchor : anchor + 1]
