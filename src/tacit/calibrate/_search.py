"""The searches: what to ask next, given what was answered. They see totals with noise in them and nothing else.

A search is a generator: it yields an ``Ask``, is sent the totals, and returns an ``Outcome``. It runs any number of
independent ``trials`` side by side; the protocol with real sources is the case of one trial, and a simulation drives
the same code with thousands.
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
        low: The lower end of an interval for the temperature.
        high: The upper end.
        edge: Whether the search ended at an end of its range.
        asked: All questions and totals.
    """

    temperature: Tensor
    confidences: Tensor | None = None
    low: Tensor | None = None  # an interval for the temperature
    high: Tensor | None = None
    edge: Tensor | None = None  # whether the search ended at an end of its range
    asked: list[tuple[Ask, Tensor]] = field(default_factory=list, repr=False)


Search = Generator[Ask, Tensor, Outcome]
Objective = Callable[[Tensor], Tensor]


def drive(search: Search, ask: Callable[[Ask], Tensor]) -> Outcome:
    """Run a search against whoever answers; ``ask`` returns the totals (trials x values)."""
    asked: list[tuple[Ask, Tensor]] = []
    try:
        question = next(search)
        while True:
            totals = ask(question)
            asked.append((question, totals))
            question = search.send(totals)
    except StopIteration as stop:
        outcome: Outcome = stop.value
        outcome.asked.extend(asked)
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
    at_left = objective((yield Ask(statistic=statistic, temperatures=left)))
    at_right = objective((yield Ask(statistic=statistic, temperatures=right)))
    for remaining in reversed(range(iterations)):
        up = at_left >= at_right
        below, above = torch.where(up, left, below), torch.where(up, above, right)
        new = torch.where(up, below + GOLDEN * (above - below), above - GOLDEN * (above - below))
        left, right = torch.where(up, right, new), torch.where(up, new, left)
        if remaining:
            value = objective((yield Ask(statistic=statistic, temperatures=new)))
            at_left, at_right = torch.where(up, at_right, value), torch.where(up, value, at_left)
    return Outcome(temperature=(below + above) / 2, edge=(below == low) | (above == high))


# The gap as a function of t = log T is taken to be a + b t + c t^2 / 2. These are public guesses at a, b and c, for a
# classifier of which nothing is known: calibrated, give or take 15 points; the gap rises with t, ever faster.
_MEAN, _STD = (0.0, 0.2, 0.2), (0.15, 0.15, 0.2)
_SLOPE_MISFIT = 0.03  # of a slope that was cut, and of the parabola
_GAP_MISFIT = 0.02  # how far a gap may be from the parabola; intervals allow for it, the search does not
_FLATTEST = 0.03  # a curve that is known to rise is not solved as if it were flat
_STEP = 1 / 64  # temperatures are asked for on this grid of log T
_SAMPLING = 0.2  # the variance of correct - confidence: mean p (1 - p) of a calibrated classifier, at most 1/4


def fit_gap(*, low: float, high: float, steps: int, samples: float, noise_std: float, trials: int, z: float) -> Search:
    """Follow the signed gap and its slope to where the gap is zero: ``steps`` questions.

    Each answer updates a Gaussian belief about the curve (Bayesian linear regression: the noise is known exactly, so no
    variance is estimated); the next question is where the curve is believed to cross zero. What is
    uncertain stays near the prior, whose root is T = 1. The interval holds every temperature at which the believed gap
    is within ``z`` standard deviations of zero, of noise and sampling together, and a fixed allowance for the parabola.
    """
    start, stop = math.log(low), math.log(high)
    size = max(1, round((stop - start) / _STEP))
    grid = torch.linspace(start, stop, size + 1, dtype=torch.float64)
    curve = torch.stack([torch.ones_like(grid), grid, grid**2 / 2], dim=1)
    precision = torch.diag(torch.tensor(_STD, dtype=torch.float64) ** -2).expand(trials, 3, 3)
    shift = (precision @ torch.tensor(_MEAN, dtype=torch.float64)).clone()
    variance = max(noise_std**2, 1e-12)
    place = torch.full((trials,), size // 2)
    for _ in range(steps):
        where = grid[place]
        totals = yield Ask(statistic=GapSlope(), temperatures=where.exp())
        rise = torch.stack([torch.zeros_like(where), torch.ones_like(where), where], dim=1)
        for row, value, error in (
            (curve[place], totals[:, 0] / samples, variance + _SAMPLING / samples),
            (rise, totals[:, 1] / samples, variance + _SLOPE_MISFIT**2),
        ):
            precision = precision + row[:, :, None] * row[:, None, :] / error
            shift = shift + row * (value / error)[:, None]
        covariance = torch.linalg.inv(precision)
        belief = (covariance @ shift[:, :, None])[:, :, 0]
        gap = _rising(belief, grid)
        place = gap.abs().argmin(dim=1)
    spread = torch.einsum("gi,tij,gj->tg", curve, covariance, curve).sqrt()
    possible = (gap.abs() <= z * spread + _GAP_MISFIT).double()
    possible.scatter_(1, place[:, None], 1.0)
    first, last = possible.argmax(dim=1), size - possible.flip(1).argmax(dim=1)
    return Outcome(
        temperature=grid[place].exp(),
        low=grid[first].exp(),
        high=grid[last].exp(),
        edge=(place == 0) | (place == size),
    )


def _rising(belief: Tensor, grid: Tensor) -> Tensor:
    """The believed curve on the grid, with its slope kept positive: integrated from its value at the middle."""
    slope = (belief[:, 1:2] + belief[:, 2:3] * grid).clamp_min(_FLATTEST)
    pieces = (slope[:, 1:] + slope[:, :-1]) / 2 * (grid[1] - grid[0])
    height = torch.cat([torch.zeros_like(pieces[:, :1]), pieces.cumsum(dim=1)], dim=1)
    anchor = int((grid - grid.mean()).abs().argmin())
    value = belief[:, 0] + belief[:, 1] * grid[anchor] + belief[:, 2] * grid[anchor] ** 2 / 2
    return value[:, None] + height - height[:, anchor : anchor + 1]
