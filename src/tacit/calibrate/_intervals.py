"""What noisy answers allow to be said: intervals, decided from the known noise and from nothing else."""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.special import erf, roots_genlaguerre
from torch import Tensor

from tacit.calibrate._search import Ask
from tacit.calibrate._statistics import Gap, Noise


def noise_quantile(noise: Noise, scale: float, sources: float, level: float) -> float:
    """The bound that the absolute noise of a total keeps with probability ``level``.

    The sum of m Laplaces of scale b is N(0, 2 b^2 G) with G ~ Gamma(m): an integral of normals, by Gauss-Laguerre.
    """
    if scale == 0:
        return 0.0
    if noise == "gaussian" or sources > 100:
        std = scale * math.sqrt(sources * (2 if noise == "laplace" else 1))
        return std * math.sqrt(2) * float(torch.erfinv(torch.tensor(level, dtype=torch.float64)))
    if sources == 1:
        return -scale * math.log(1 - level)
    nodes, weights = roots_genlaguerre(64, sources - 1)
    weights = weights / weights.sum()

    def within(bound: float) -> float:
        return float(weights @ erf(bound / (2 * scale * np.sqrt(nodes))))

    low, high = 0.0, 100.0 * scale * sources
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle) < level else (low, middle)
    return high


def bracket(
    asked: list[tuple[Ask, Tensor]],
    *,
    noise: Noise,
    scale: float,
    sources: float,
    low: float,
    high: float,
    level: float,
) -> tuple[Tensor, Tensor]:
    """An interval for the temperature that the same samples would give without noise, from signed gaps alone.

    Formal guarantee: it holds with probability ``level`` for any data. The gap rises with T, so a gap that its noise
    cannot explain says on which side the zero lies; the noise of all answers is bounded at once (union bound).
    """
    gaps = [(ask, totals[:, 0]) for ask, totals in asked if isinstance(ask.statistic, Gap)]
    limit = noise_quantile(noise, scale, sources, 1 - (1 - level) / max(1, len(gaps)))
    trials = len(asked[0][1])
    below, above = torch.full((trials,), low, dtype=torch.float64), torch.full((trials,), high, dtype=torch.float64)
    for ask, gap in gaps:
        below = torch.where(gap < -limit, torch.maximum(below, ask.temperatures), below)
        above = torch.where(gap > limit, torch.minimum(above, ask.temperatures), above)
    return torch.minimum(below, above), torch.maximum(below, above)


def ece_interval(
    totals: Tensor, *, noise: Noise, scale: float, sources: float, samples: float, z: float
) -> tuple[float, float]:
    """An interval for the binned calibration error of the samples, from noisy sums of each bin.

    E |g + noise| lies between |g| and |g| + E |noise|, and the sum over bins of |g + noise| is near its expectation:
    its variance is at most that of the noise. The sum of all bins bounds the error from below as well.
    """
    std = scale * math.sqrt(sources * (2 if noise == "laplace" else 1))
    seen, bins = float(totals.abs().sum()), totals.numel()
    spread = z * std * math.sqrt(bins)
    low = max(seen - bins * std * math.sqrt(2 / math.pi) - spread, abs(float(totals.sum())) - spread, 0.0)
    high = seen + spread
    return min(1.0, low / samples), min(1.0, high / samples)
