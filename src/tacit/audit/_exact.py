"""Prices computed anew in extended precision, to hold the accountant against: no code is shared with it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Long = np.longdouble


def erfc(x: float) -> Any:
    """The complementary error function in extended precision: a series near zero, a continued fraction beyond."""
    value = Long(x)
    if value < 0:
        return Long(2) - erfc(float(-value))
    if value < 1:
        term, total, n = value, value, 0
        while abs(term) > Long(1e-25):
            n += 1
            term *= -value * value / n
            total += term / (2 * n + 1)
        return Long(1) - Long(2) / np.sqrt(Long(math.pi) + Long(1.2246467991473532e-16)) * total
    fraction = value
    for n in range(600, 0, -1):
        fraction = value + Long(n) / 2 / fraction
    root = np.sqrt(Long(math.pi) + Long(1.2246467991473532e-16))
    return np.exp(-value * value) / (root * fraction)


def tail(x: float) -> Any:
    """P(N(0, 1) > x)."""
    return erfc(float(Long(x) / np.sqrt(Long(2)))) / 2


def sampled_delta(rate: float, noise: float, epsilon: float) -> float:
    """delta(epsilon) of one Poisson-subsampled Gaussian release under add-remove, by its definition.

    With P = (1 - q) N(0, z^2) + q N(1, z^2) and Q = N(0, z^2), the larger of the two hockey-stick divergences; the
    likelihood ratio 1 - q + q exp((2y - 1) / 2z^2) is monotone, so each is a tail.
    """
    grow = math.expm1(epsilon) + rate  # of the ratio, above 1 - q
    cut = noise**2 * math.log(grow / rate) + 0.5 if grow > 0 else -math.inf
    added = (
        (1 - Long(rate)) * tail(cut / noise)
        + Long(rate) * tail((cut - 1) / noise)
        - np.exp(Long(epsilon)) * tail(cut / noise)
    )
    shrink = math.expm1(-epsilon) + rate
    removed = Long(0)
    if shrink > 0:
        low = noise**2 * math.log(shrink / rate) + 0.5
        q_below, p_below = tail(-low / noise), tail(-(low - 1) / noise)
        removed = q_below - np.exp(Long(epsilon)) * ((1 - Long(rate)) * q_below + Long(rate) * p_below)
    return float(max(added, removed, Long(0)))


def sampled_epsilon(rate: float, noise: float, delta: float) -> float:
    """The epsilon at which ``sampled_delta`` is ``delta``."""
    low, high = 0.0, 1.0
    while sampled_delta(rate, noise, high) > delta:
        low, high = high, 2 * high
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if sampled_delta(rate, noise, middle) > delta else (low, middle)
    return high
