"""One total from the answers of many sources, of which some may lie.

A plain sum is at the mercy of its largest term. But the noise of an answer is known exactly, and how far samples
scatter is known well enough, so the total can be estimated as a location instead: an answer of a source of n units is

    x = n mu + N(0, n v) + noise,

and mu is where the score of all answers together is zero. What is made of answers is post-processing: it costs nothing.

The score
---------
With s^2 = n v and Laplace noise of scale b, the density of a residual r = x - n mu is a constant times A + B, with
A = e^(-r/b) Phi(r/s - s/b) and B = e^(r/b) Phi(-r/s - s/b). Both have the same derivative besides -A/b and B/b (the two
products of exponential and normal density are the same function of r), so that the score is

    psi(r) = -f'(r) / f(r) = tanh((log A - log B) / 2) / b,

odd, increasing and below 1/b: no answer counts for more than that, however large it is. For Gaussian noise of deviation
b the density is N(0, s^2 + b^2) and its score r / (s^2 + b^2) has no bound. So every score is cut at ``_CUT`` times
sqrt(E psi^2): for Gaussian noise that is Huber's estimator (95 % efficient where nobody lies, and the best there is
against a given share of arbitrary answers), for Laplace noise it changes nothing unless the noise is small beside s.

Sources of different sizes: d/dmu of log f(x - n mu) is n psi(r), so mu solves sum_i w_i psi_i(x_i - n_i mu) = 0 with
w_i = n_i. A size is a claim as well, so w_i is at most ``_LARGEST`` times the median size. With K = E[psi psi_cut] (=
E[psi_cut'], by parts) and V = E[psi_cut^2], the estimate has variance sum w^2 V / (sum w n K)^2; without the cut and
with equal sizes that is 1 / (S n^2 E psi^2).

What noise cannot explain, and no difference between honest sources of up to ``_APART`` of the largest contribution per
unit, has no weight at all in a second pass: honest noise is taken for a lie with a probability below ``_RARE``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from scipy.special import ndtri
from torch import Tensor

from tacit.calibrate._statistics import Noise, Statistic

_CUT = 1.345  # standard deviations: Huber's choice, 95 % efficient under Gaussian noise
_LARGEST = 10.0  # times the median size: the most that a source counts for
_STEPS = 60  # of the search for the root; it ends earlier
_FINE = 4001  # points of the integrals
_APART = 0.25  # of the largest contribution: honest sources may differ from each other by so much, per unit
_RARE = 1e-9  # the probability that honest noise alone passes for a lie


@dataclass(frozen=True, kw_only=True, eq=False)
class Total:
    """A total over all units, per trial and value.

    Args:
        value: The estimate, trials x values.
        far: Whether an answer is so far from it that it was left out, trials x sources x values.
    """

    value: Tensor
    far: Tensor


def total(
    answers: Tensor,
    sizes: Tensor,
    statistic: Statistic,
    *,
    noise: Noise,
    scale: float,
    spread: Sequence[float] | None = None,
) -> Total:
    """The total over all units of answers with noise (trials x sources x values), each value by itself.

    Args:
        answers: What the sources said.
        sizes: The number of units of each source, as far as it is known.
        statistic: What they were asked.
        noise: "laplace" or "gaussian".
        scale: Of the noise of one answer: the Laplace scale, or the standard deviation.
        spread: The variance of one unit's contribution, for each value; by default the statistic's guess.

    Returns:
        The estimate, and which answers are too far from it to count.
    """
    counted = sizes.double().clamp_min(0.0)
    mass, middle = float(counted.sum()), float(counted.median())
    if scale == 0 or middle == 0:  # no noise to hide behind, or nobody to compare with: the sum
        return Total(value=answers.sum(dim=1), far=torch.zeros_like(answers, dtype=torch.bool))
    weight = counted.clamp_max(_LARGEST * middle)
    largest = max(abs(statistic.low), statistic.high)
    found, far = [], []
    for column, variance in zip(answers.unbind(dim=2), spread or statistic.spread, strict=True):
        score = _Score.of(counted, variance, noise, scale)
        mean = _root(column, counted, weight.expand_as(column), score)
        allowed = _APART * largest * counted + 7 * score.std + tail(_RARE, noise, scale)
        off = (column - counted * mean[:, None]).abs() > allowed
        again = off.any(dim=1) & ~off.all(dim=1)
        if again.any():
            mean[again] = _root(column[again], counted, weight * ~off[again], score)
        found.append(mean * mass)
        far.append(off)
    return Total(value=torch.stack(found, dim=1), far=torch.stack(far, dim=2))


def tail(probability: float, noise: Noise, scale: float) -> float:
    """What noise of this scale passes with this probability, on either side."""
    return scale * (-math.log(probability) if noise == "laplace" else float(-ndtri(probability / 2)))


def deviation(sizes: Tensor, variance: float, *, noise: Noise, scale: float) -> float:
    """The standard deviation of the estimate of a total, of noise and samples together, where nobody lies."""
    counted = sizes.double().clamp_min(0.0)
    mass, middle = float(counted.sum()), float(counted.median())
    if scale == 0 or middle == 0:
        each = scale * math.sqrt(len(sizes) * (2 if noise == "laplace" else 1))
        return math.hypot(each, math.sqrt(mass * variance))
    weight, score = counted.clamp_max(_LARGEST * middle), _Score.of(counted, variance, noise, scale)
    slope = float((weight * counted * score.slope).sum())
    return mass * math.sqrt(float((weight**2 * score.square).sum())) / slope


def shrunk(counts: Tensor, *, noise: Noise, scale: float) -> Tensor:
    """The sizes of sources from noisy counts: each is drawn to the middle as far as noise explains the difference."""
    middle = float(counts.median().clamp_min(0.0))
    low, high = torch.quantile(counts, torch.tensor([0.16, 0.84], dtype=counts.dtype)).tolist()
    spread = (high - low) / 2  # of a normal distribution, its standard deviation
    own = (2 if noise == "laplace" else 1) * scale**2
    kept = max(0.0, 1 - own / spread**2) if spread > 0 else 0.0
    return (middle + kept * (counts - middle)).clamp(0.0, _LARGEST * max(middle, 1.0))


@dataclass(frozen=True, eq=False)
class _Score:
    """The cut score of each source, with E[psi psi_cut] and E[psi_cut^2]."""

    std: Tensor  # s, one per source
    noise: Noise
    scale: float
    cut: Tensor
    slope: Tensor
    square: Tensor

    @staticmethod
    def of(sizes: Tensor, variance: float, noise: Noise, scale: float) -> _Score:
        std = (sizes * variance).sqrt().clamp_min(1e-6 * scale)
        levels, place = torch.unique(std, return_inverse=True)
        facts = torch.tensor([_facts(level / scale, noise) for level in levels.tolist()], dtype=torch.float64)[place]
        return _Score(std, noise, scale, facts[:, 0] / scale, facts[:, 1] / scale**2, facts[:, 2] / scale**2)

    def __call__(self, residual: Tensor) -> Tensor:
        return torch.clamp(
            _psi(residual / self.scale, self.std / self.scale, self.noise) / self.scale, -self.cut, self.cut
        )


def _psi(r: Tensor, s: Tensor, noise: Noise) -> Tensor:
    """The score in units of the noise's scale (b = 1)."""
    if noise == "gaussian":
        return r / (s**2 + 1)
    log_a = torch.special.log_ndtr(r / s - s) - r
    log_b = torch.special.log_ndtr(-r / s - s) + r
    return torch.tanh((log_a - log_b) / 2)


@lru_cache(maxsize=4096)
def _facts(s: float, noise: Noise) -> tuple[float, float, float]:
    """The cut, E[psi psi_cut] and E[psi_cut^2] at b = 1, by the trapezoidal rule."""
    std = torch.tensor(s, dtype=torch.float64)
    r = torch.linspace(-1, 1, _FINE, dtype=torch.float64) * (40 + 12 * s)
    if noise == "gaussian":
        density = torch.exp(-(r**2) / (2 * (s**2 + 1)))
    else:
        log_a, log_b = torch.special.log_ndtr(r / std - std) - r, torch.special.log_ndtr(-r / std - std) + r
        both = torch.logaddexp(log_a, log_b)
        density = torch.exp(both - both.max())
    density = density / density.sum()
    psi = _psi(r, std, noise)
    cut = _CUT * float((density * psi**2).sum().sqrt())
    clipped = psi.clamp(-cut, cut)
    return cut, float((density * psi * clipped).sum()), float((density * clipped**2).sum())


def _root(answers: Tensor, sizes: Tensor, weight: Tensor, score: _Score) -> Tensor:
    """Where the weighted scores add up to zero, for each trial: scoring steps, halving where they leave the bracket.

    The sum falls as mu rises, so its zero lies between the smallest and the largest mean of a source.
    """
    real = (weight > 0) & (sizes > 0)
    means = torch.where(real, answers / sizes.clamp_min(1e-300), math.nan)
    below, above = (torch.where(real, means, end).aminmax(dim=1) for end in (math.inf, -math.inf))
    low, high, mean = below.min, above.max, means.nanmedian(dim=1).values
    slope = (weight * sizes * score.slope).sum(dim=1)
    near = 1e-7 * (weight**2 * score.square).sum(dim=1).sqrt() / slope
    for _ in range(_STEPS):
        push = (weight * score(answers - sizes * mean[:, None])).sum(dim=1)
        low, high = torch.where(push > 0, mean, low), torch.where(push < 0, mean, high)
        new = mean + push / slope
        new = torch.where((new >= low) & (new <= high), new, (low + high) / 2)
        moved, mean = (new - mean).abs(), new
        if bool((moved < near).all()):
            break
    return mean
