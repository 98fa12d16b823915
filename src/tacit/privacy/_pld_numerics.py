"""Privacy loss distributions of single releases as arrays: connect the dots of the two tails.

Formal guarantee: connecting the dots (Doroshenko et al. 2022) gives a distribution on the grid whose hockey-stick
divergence equals the mechanism's at every grid point and is above it in between, so it dominates. ``far`` is how many
standard deviations of a Gaussian are laid out; what lies beyond counts as infinite loss.

In floating point: a tail is computed for a loss that is off by a few units in its last place (``shift``, at most 8 u of
the largest loss) and then with a relative error of at most ``_slack`` u (the exponential in Phi(-x) alone costs x^2 u).
Differences of tails telescope, so every tail of the distribution on the grid keeps that relative error
(``relative``); how a cell's mass is shared among its two ends is a difference of differences, so its whole error
bound is moved to the upper end. ``tilted`` adds both allowances to what it returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

Array = NDArray[np.float64]
ULP = 2.0**-53


@dataclass(frozen=True)
class Losses:
    """Probabilities of the losses (first, first + 1, ...) x grid, and of an infinite one."""

    first: int
    probabilities: Array
    infinite: float
    relative: float = 0.0  # by what share a tail may be too small
    shift: float = 0.0  # by how much a loss may be too small


@dataclass(frozen=True)
class Tail:
    """The probability above and at most each grid point, each accurate where it is small."""

    above: Array
    below: Array

    def cells(self) -> Array:
        """The mass between neighbouring grid points."""
        return np.maximum(np.where(self.above[:-1] < 0.5, -np.diff(self.above), np.diff(self.below)), 0.0)

    def rounding(self) -> Array:
        """By how much the mass of each cell may be off: its ends' own errors."""
        small = np.minimum(self.above, self.below)
        off = ULP * _slack(small) * small
        return off[:-1] + off[1:]


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
        up = p + here.rounding() + (there.rounding() - q) * np.exp(points[:-1])
        up /= -math.expm1(-grid)
    up = np.clip(np.nan_to_num(up, nan=np.inf, posinf=np.inf), 0.0, p)
    mass = np.zeros(len(points))
    mass[1:] += up
    mass[:-1] += p - up
    mass[0] += here.below[0]
    relative = 2 * ULP * float(_slack(here.above[here.above > 0][-1:]).sum())
    return Losses(first, mass, float(here.above[-1]), relative, 8 * ULP * grid * max(abs(first), abs(last)))


def _slack(tail: Array) -> Array:
    """The relative error of a computed tail, in units in the last place."""
    with np.errstate(divide="ignore"):
        return 16 - 8 * np.log(np.maximum(tail, 1e-308))


def gaussian(mu: float, grid: float, far: float) -> Losses:
    """N(mu, 1) against N(0, 1)."""
    reach = far * mu + mu * mu / 2
    return connect(grid, mu * mu - reach, reach, lambda e: _normals(e / mu + mu / 2, [(1, mu)], [(1, 0)]))


def sampled_gaussian_remove(q: float, mu: float, grid: float, far: float) -> Losses:
    """(1-q) N(0, 1) + q N(mu, 1) against N(0, 1)."""

    def tails(e: Array) -> Tails:
        return _normals(_crossing(e, q, mu), [(1 - q, 0), (q, mu)], [(1, 0)])

    return connect(grid, loss_at(q, mu, -far), loss_at(q, mu, far + mu), tails)


def sampled_gaussian_add(q: float, mu: float, grid: float, far: float) -> Losses:
    """N(0, 1) against (1-q) N(0, 1) + q N(mu, 1), mirrored so that the loss rises with x."""

    def tails(e: Array) -> Tails:
        return _normals(-_crossing(-e, q, mu), [(1, 0)], [(1 - q, 0), (q, -mu)])

    return connect(grid, -loss_at(q, mu, far + mu), -loss_at(q, mu, -far), tails)


def sampled_gaussian_replace(q: float, mu: float, grid: float, far: float) -> Losses:
    """(1-q) N(0, 1) + q N(mu, 1) against (1-q) N(0, 1) + q N(-mu, 1): one row for another, in the same draw."""

    def tails(e: Array) -> Tails:
        # where they cross is the root of a quadratic in e^(mu x): e^(mu x) = e^(e/2) (r + sqrt(r^2 + 1)) with
        # r = (1-q)/q sinh(e/2) e^(mu^2/2), whose logarithm cannot overflow
        size = np.abs(e) / 2
        with np.errstate(divide="ignore"):
            log_r = math.log1p(-q) - math.log(q) + mu * mu / 2 + size + np.log(-np.expm1(-2 * size)) - math.log(2)
            root = np.where(log_r > 20, log_r + math.log(2), np.arcsinh(np.exp(np.minimum(log_r, 20))))
        x = (e / 2 + np.sign(e) * root) / mu
        return _normals(x, [(1 - q, 0), (q, mu)], [(1 - q, 0), (q, -mu)])

    top = loss_at(q, mu, far + mu) - loss_at(q, -mu, far + mu)
    return connect(grid, -top, top, tails)


def sampled_gaussian_fixed(q: float, mu: float, grid: float, far: float) -> Losses:
    """A sample of fixed size, one row for another: losses above 0 as if it was removed, below 0 as if it was added.

    The divergences of the two are the worst there are above and below a ratio of 1 (docs/proofs.md, lemma 13a); a loss
    of exactly 0 has what is left of the mass.
    """

    def tails(e: Array) -> Tails:
        gone = _normals(_crossing(e, q, mu), [(1 - q, 0), (q, mu)], [(1, 0)])
        come = _normals(-_crossing(-e, q, mu), [(1, 0)], [(1 - q, 0), (q, -mu)])
        here, there = (
            Tail(np.where(e >= 0, one.above, other.above), np.where(e >= 0, one.below, other.below))
            for one, other in zip(gone, come, strict=True)
        )
        return here, there

    top = loss_at(q, mu, far + mu)
    return connect(grid, -top, top, tails)


def laplace(epsilon: float, grid: float) -> Losses:
    """Laplace noise whose centre moves by ``epsilon`` of its scale: the loss lies in [-epsilon, epsilon]."""

    def tails(e: Array) -> Tails:
        here, there = np.exp((e - epsilon) / 2) / 2, np.exp(-(e + epsilon) / 2) / 2
        return _between(e, epsilon, 1 - here, here), _between(e, epsilon, there, 1 - there)

    return connect(grid, -epsilon, epsilon, tails)


def pure(epsilon: float, grid: float) -> Losses:
    """The worst pure-epsilon mechanism, randomised response: the loss is epsilon or -epsilon."""
    often, rare = 1 / (1 + math.exp(-epsilon)), math.exp(-epsilon) / (1 + math.exp(-epsilon))

    def tails(e: Array) -> Tails:
        ones = np.ones_like(e)
        return _between(e, epsilon, often * ones, rare * ones), _between(e, epsilon, rare * ones, often * ones)

    return connect(grid, -epsilon, epsilon, tails)


def loss_at(q: float, mu: float, x: float) -> float:
    """log of ((1-q) N(0, 1) + q N(mu, 1)) / N(0, 1) at x."""
    exponent = mu * x - mu * mu / 2
    if exponent < 30:
        return math.log1p(q * math.expm1(exponent))
    return float(np.logaddexp(math.log1p(-q), math.log(q) + exponent))


def _crossing(e: Array, q: float, mu: float) -> Array:
    """Where (1-q) + q e^(mu x - mu^2/2) passes e^e."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = np.where(e < 40, np.log1p(np.expm1(np.minimum(e, 40)) / q), e - math.log(q))
        return np.nan_to_num((ratio + mu * mu / 2) / mu, nan=-np.inf, posinf=np.inf, neginf=-np.inf)


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
