"""Privacy loss distributions as arrays: connect the dots of the two tails, multiply in Fourier space.

Formal guarantee: connecting the dots (Doroshenko et al. 2022) gives a distribution on the grid whose hockey-stick
divergence equals the mechanism's at every grid point and is above it in between, so it dominates. Composition
convolves; the tails that a window cannot hold, and an allowance for the rounding of the Fourier transforms, are counted
as infinite loss. ``far`` is how many standard deviations of a Gaussian are laid out; what lies beyond counts as
infinite loss, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.fft import irfft, next_fast_len, rfft
from scipy.special import ndtr

Array = NDArray[np.float64]
TAIL = 1e-15


@dataclass(frozen=True)
class Losses:
    """Probabilities of the losses (first, first + 1, ...) x grid, and of an infinite one."""

    first: int
    probabilities: Array
    infinite: float


@dataclass(frozen=True)
class Tail:
    """The probability above and at most each grid point, each accurate where it is small."""

    above: Array
    below: Array

    def cells(self) -> Array:
        """The mass between neighbouring grid points."""
        return np.maximum(np.where(self.above[:-1] < 0.5, -np.diff(self.above), np.diff(self.below)), 0.0)


Tails = tuple[Tail, Tail]  # of the privacy loss, under the data set and under its neighbour


def connect(grid: float, low: float, high: float, tails: Callable[[Array], Tails]) -> Losses:
    """The distribution on the grid that has these tails of the loss under both data sets at every grid point.

    The mass p (under one) and q (under the other) of a cell goes to the cell's two ends such that both are kept; no
    share can pass what the cell holds, so that rounding never makes up mass.
    """
    first = math.floor(low / grid)
    last = max(math.ceil(high / grid), first + 1)
    points = np.arange(first, last + 1, dtype=np.float64) * grid
    here, there = tails(points)
    p, q = here.cells(), there.cells()
    with np.errstate(over="ignore", invalid="ignore"):
        up = (p - q * np.exp(points[:-1])) / -math.expm1(-grid)
    up = np.clip(np.nan_to_num(up, nan=np.inf, posinf=np.inf), 0.0, p)
    mass = np.zeros(len(points))
    mass[1:] += up
    mass[:-1] += p - up
    mass[0] += here.below[0]
    return Losses(first, mass, float(here.above[-1]))


def gaussian(mu: float, grid: float, far: float) -> Losses:
    """N(mu, 1) against N(0, 1)."""
    reach = far * mu + mu * mu / 2
    return connect(grid, mu * mu - reach, reach, lambda e: _normals(e / mu + mu / 2, [(1, mu)], [(1, 0)]))


def sampled_gaussian_remove(q: float, mu: float, grid: float, far: float) -> Losses:
    """(1-q) N(0, 1) + q N(mu, 1) against N(0, 1)."""

    def tails(e: Array) -> Tails:
        return _normals(_crossing(np.expm1(e) + q, q, mu), [(1 - q, 0), (q, mu)], [(1, 0)])

    return connect(grid, loss_at(q, mu, -far), loss_at(q, mu, far + mu), tails)


def sampled_gaussian_add(q: float, mu: float, grid: float, far: float) -> Losses:
    """N(0, 1) against (1-q) N(0, 1) + q N(mu, 1), mirrored so that the loss rises with x."""

    def tails(e: Array) -> Tails:
        return _normals(-_crossing(np.expm1(-e) + q, q, mu), [(1, 0)], [(1 - q, 0), (q, -mu)])

    return connect(grid, -loss_at(q, mu, far + mu), -loss_at(q, mu, -far), tails)


def sampled_gaussian_replace(q: float, mu: float, grid: float, far: float) -> Losses:
    """(1-q) N(0, 1) + q N(mu, 1) against (1-q) N(0, 1) + q N(-mu, 1): one row for another, in the same draw."""

    def tails(e: Array) -> Tails:
        # where they cross is the root of a quadratic in e^(mu x); multiplied by e^(-e/2) it cannot overflow
        tilt, lift = (1 - q) * np.sinh(e / 2), q * math.exp(-mu * mu / 2)
        root = np.hypot(tilt, lift)
        with np.errstate(divide="ignore"):
            y = np.where(tilt > 0, tilt + root, lift**2 / (root - tilt)) / lift
            x = (e / 2 + np.log(y)) / mu
        return _normals(x, [(1 - q, 0), (q, mu)], [(1 - q, 0), (q, -mu)])

    top = loss_at(q, mu, far + mu) - loss_at(q, -mu, far + mu)
    return connect(grid, -top, top, tails)


def laplace(epsilon: float, grid: float) -> Losses:
    """Laplace noise whose centre moves by ``epsilon`` of its scale: the loss lies in [-epsilon, epsilon]."""

    def tails(e: Array) -> Tails:
        here, there = np.exp((e - epsilon) / 2) / 2, np.exp(-(e + epsilon) / 2) / 2
        return _between(e, epsilon, 1 - here, here), _between(e, epsilon, there, 1 - there)

    return connect(grid, -epsilon, epsilon, tails)


def pure(epsilon: float, grid: float) -> Losses:
    """The worst pure-epsilon mechanism, randomised response: the loss is epsilon or -epsilon."""
    often = 1 / (1 + math.exp(-epsilon))

    def tails(e: Array) -> Tails:
        ones = np.ones_like(e)
        return _between(e, epsilon, often * ones, (1 - often) * ones), _between(
            e, epsilon, (1 - often) * ones, often * ones
        )

    return connect(grid, -epsilon, epsilon, tails)


def compose(parts: Sequence[tuple[Losses, int]]) -> Losses:
    """All parts, each so many times, as one distribution."""
    if len(parts) == 1 and parts[0][1] == 1:
        return parts[0][0]
    start = sum(times * part.first for part, times in parts)
    low, high = _window(parts)
    longest = max(len(part.probabilities) for part, _ in parts)
    size = next_fast_len(max(high - low + 1, longest), real=True)
    spectrum = np.ones(size // 2 + 1, dtype=np.complex128)
    finite = 0.0
    for part, times in parts:
        spectrum *= rfft(part.probabilities, size) ** times
        finite += times * math.log1p(-part.infinite)
    mass = np.roll(irfft(spectrum, size), (start - low) % size)[: high - low + 1]
    rounding = 1e-16 * sum(times for _, times in parts)
    return Losses(low, mass, min(1.0, -math.expm1(finite) + TAIL + rounding))


def epsilon(losses: Losses, grid: float, delta: float) -> float:
    """The smallest epsilon at which the hockey-stick divergence is at most ``delta``."""
    if losses.infinite >= delta:
        return math.inf

    def divergence(place: int) -> float:
        above = losses.probabilities[place + 1 :]
        return losses.infinite - float(above @ np.expm1(-grid * np.arange(1, len(above) + 1)))

    low, high = max(-1, -losses.first - 1), len(losses.probabilities) - 1  # epsilon is not sought below 0
    if high < 0 or low >= high or divergence(low) <= delta:
        return max(0.0, (losses.first + low) * grid)
    while high - low > 1:  # the divergence is above delta at low, not at high
        middle = (low + high) // 2
        low, high = (middle, high) if divergence(middle) > delta else (low, middle)
    tail = losses.probabilities[high:]
    mass = losses.infinite + float(tail.sum()) - delta
    weight = float(tail @ np.exp(-grid * np.arange(len(tail))))
    return max(0.0, (losses.first + high) * grid + math.log(mass / weight))


def _window(parts: Sequence[tuple[Losses, int]]) -> tuple[int, int]:
    """Grid points outside which the composed losses have less than ``TAIL`` of mass, by Chernoff bounds."""
    low = sum(times * part.first for part, times in parts)
    high = low + sum(times * (len(part.probabilities) - 1) for part, times in parts)
    mean = variance = 0.0
    for part, times in parts:
        k = np.arange(len(part.probabilities))
        centre = float(part.probabilities @ k)
        mean += times * (part.first + centre)
        variance += times * max(float(part.probabilities @ (k - centre) ** 2), 1e-6)
    # A bell wants orders near 8 standard deviations, a heavy tail of single releases some ten over its own length.
    bell, longest = 1 / math.sqrt(variance), max(len(part.probabilities) for part, _ in parts)
    positive = np.geomspace(min(2 * bell, 2 / longest), max(20 * bell, 40 / longest), 10)
    orders = np.concatenate([-positive, positive])
    logs = np.zeros_like(orders)
    for part, times in parts:
        logs += times * _log_mgf(part, orders)
    bounds = (logs + math.log(2 / TAIL)) / orders
    up, down = bounds[orders > 0], bounds[orders < 0]
    return max(low, math.floor(down.max())), min(high, math.ceil(up.min()))


def _log_mgf(part: Losses, orders: Array) -> Array:
    """An upper bound on log E e^(order x loss), exact around the mean and by chords of the exponential further out."""
    mass = np.abs(part.probabilities)
    size, k = len(mass), np.arange(len(mass))
    centre = int(mass @ k / mass.sum())
    near = np.arange(max(0, centre - 512), min(size, centre + 512))
    stride = max(1, size // 1024)
    starts = np.unique(np.concatenate([np.arange(0, near[0] + 1, stride), near, np.arange(near[-1] + 1, size, stride)]))
    ends = np.append(starts[1:], size) - 1
    held = np.add.reduceat(mass, starts)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(ends > starts, (np.add.reduceat(mass * k, starts) / held - starts) / (ends - starts), 0.0)
        low, high = np.log(held * (1 - share)), np.log(held * share)
    ends_of = np.concatenate([starts, ends]) + part.first
    terms = np.outer(orders, ends_of) + np.nan_to_num(np.append(low, high), nan=-np.inf)
    largest = terms.max(axis=1)
    return np.asarray(largest + np.log(np.exp(terms - largest[:, None]).sum(axis=1)))  # scipy's takes twice as long


def loss_at(q: float, mu: float, x: float) -> float:
    """log of ((1-q) N(0, 1) + q N(mu, 1)) / N(0, 1) at x."""
    return float(np.logaddexp(math.log1p(-q), math.log(q) + mu * x - mu * mu / 2))


def _crossing(rest: Array, q: float, mu: float) -> Array:
    """Where (1-q) + q e^(mu x - mu^2/2) passes rest + (1-q)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(rest > 0, (np.log(rest / q) + mu * mu / 2) / mu, -np.inf)


def _normals(x: Array, here: Sequence[tuple[float, float]], there: Sequence[tuple[float, float]]) -> Tails:
    """The tails of two mixtures of unit normals, given as (weight, mean), around x."""

    def around(mixture: Sequence[tuple[float, float]]) -> Tail:
        above = sum(weight * ndtr(mean - x) for weight, mean in mixture)
        return Tail(np.asarray(above), np.asarray(sum(weight * ndtr(x - mean) for weight, mean in mixture)))

    return around(here), around(there)


def _between(e: Array, epsilon: float, above: Array, below: Array) -> Tail:
    """Tails that hold for -epsilon <= e < epsilon; all mass is within, with atoms at both ends."""
    inside = [e < -epsilon, e >= epsilon]
    return Tail(np.select(inside, [1.0, 0.0], above), np.select(inside, [0.0, 1.0], below))
