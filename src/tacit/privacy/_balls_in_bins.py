"""The privacy loss of balls-in-bins sampling as arrays: sums of log-normals, rounded to a lattice in convex order.

Formal guarantee (docs/proofs.md, lemma 13b): both arrays dominate, whatever the lattice; a finer one is only closer.
The likelihood ratio of the worst pair is S / b, S the sum of b independent X = exp(mu z - mu^2 / 2), one per bin, and
its divergences are means of convex functions of S. So each X is cut at a far point and then replaced by one of the two
lattice points around it, its mean kept; the law of the sum is a product of Fourier transforms. What may hide, with
u = 2^-53:

- the cut costs at most the mean of what is cut off when the unit is removed, nothing when it is added;
- shares are rounded up when the unit is removed and down when it is added, by the whole bound on their error;
- errors of the cells' own masses, of the transforms (``tilted`` has the bound of one; b of them are multiplied) and
  Chernoff's bound on what lies outside the window count as infinite loss;
- a lattice point or its logarithm rounds by a few u of itself, which moves a loss by as much; bins are drawn with the
  probabilities 1/b (1 +- 2 b u), which moves it by at most 4 b u.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.fft import irfft, next_fast_len, rfft
from scipy.special import ndtr, ndtri

from tacit.privacy import _tilted as tilted
from tacit.privacy._pld_numerics import ULP, Array, Losses, Tail, gaussian

MOST_CELLS = 2**18
_COARSE = 2**13  # cells for the window
_LEAST_RATIO = 50.0  # a bin beyond it makes the loss of a unit that is added very negative: how much hardly matters
_Spectrum = NDArray[np.complexfloating[Any, Any]]


@dataclass(frozen=True)
class Lattice:
    """The law of one bin's factor X on evenly spaced points, and the same weighted by X.

    ``masses`` and ``biased`` (masses times points) are computed; their sums of absolute errors are at most ``off`` and
    ``biased_off``. ``beyond``: no less than the mean of what was cut off.
    """

    points: Array
    masses: Array
    biased: Array
    off: float
    biased_off: float
    beyond: float

    def log_mgf(self, order: float) -> tuple[float, float]:
        """log E exp(order (X - low)), and of the weighted law; at least that, whatever floating point hides."""
        weights = np.exp(order * (self.points - self.points[0]))
        plain, weighted = float(self.masses @ weights), float(self.biased @ weights)
        return _log(plain) + 1e-9, _log(weighted) + 1e-9


Factors = list[tuple[int, Lattice]]  # how many bins there are of a kind


def balls_in_bins(
    noise: float, bins: int, steps: int, grid: float, far: float, *, fine: float = 1.0
) -> tuple[Losses, Losses]:
    """The losses of ``steps`` steps when a unit that is in one of ``bins`` bins, used in turns, is removed, and added.

    Args:
        noise: The noise multiplier of a step.
        bins: How many bins; bin i serves the steps i, i + bins, ...
        steps: The number of steps; the last round may be cut short.
        grid: The distance of losses.
        far: How many standard deviations are laid out.
        fine: A factor on the lattice's step.

    Returns:
        The losses of both directions.
    """
    rounds, more = divmod(steps, bins)
    kinds = [(count, math.sqrt(often) / noise) for count, often in ((more, rounds + 1), (bins - more, rounds)) if count]
    mu, delta = kinds[0][1], min(1e4 * float(ndtr(-far)), 0.5)
    plain = gaussian(mu, grid, far)
    if not 1 < bins < 2**40 or mu < 1e-9 or mu * (far + mu) > 300:  # a lattice of floats holds no less and no more
        return plain, plain
    added = min(0.2, 0.002 * bins)  # the least of few log-normals is far below their mean: finer
    sides = [_side(kinds, bins, grid, far, fine * 0.2, True), _side(kinds, bins, grid, far, fine * added, False)]
    alone = [tilted.epsilon(tilted.compose([(each, 1)], delta), grid, delta) for each in (*sides, plain)]
    return sides[0] if alone[0] <= alone[2] else plain, sides[1] if alone[1] <= alone[2] else plain


def _side(kinds: list[tuple[int, float]], bins: int, grid: float, far: float, fine: float, removed: bool) -> Losses:
    """One direction, on a lattice of ``fine`` times the width of a log-normal's bulk, or coarser if need be."""
    mu, level = kinds[0][1], float(ndtr(-far))
    step = fine * mu * math.exp(-mu * mu / 2)
    low = math.exp(mu * float(ndtri(level / bins)) - mu * mu / 2)
    cut = math.exp(mu * far + mu * mu / 2) if removed else min(math.exp(mu * far - mu * mu / 2), _LEAST_RATIO * bins)
    cut -= low
    coarse = step * 2.0 ** max(0, math.ceil(math.log2(cut / step / _COARSE)))
    while True:
        cells = math.ceil(cut / coarse)
        factors = [(count, _lattice(each, low, coarse, cells, removed)) for count, each in kinds if each > 0]
        least, most = _window(factors, bins, level, removed)
        while max(most - least, cut) / step > MOST_CELLS and step < coarse:
            step *= 2
        if max(most - least, cut) / step <= MOST_CELLS:
            break
        step = coarse = 2 * coarse
    first = max(0, math.floor(least / step) - 1)
    cells = round(cells * coarse / step)
    size = next_fast_len(max(math.ceil(most / step) + 2 - first, cells + 1), real=True)
    factors = [(count, _lattice(each, low, step, cells, removed)) for count, each in kinds if each > 0]
    law, lost, hidden = _sum(factors, bins, size, removed)
    if hidden > 100 * level:  # long floats are slow, and the same as plain ones on some machines
        law, lost, hidden = _sum(factors, bins, size, removed, np.longdouble)
    drawn = sum(count for count, _ in factors)
    ratio = (bins - drawn + drawn * low + step * (first + np.arange(size))) / bins
    return _losses(ratio, np.roll(law, -(first % size)), lost + hidden + 2 * level, grid, bins, removed)


def _lattice(mu: float, low: float, step: float, cells: int, up: bool) -> Lattice:
    """The factor of one bin, cut at both ends and rounded to a lattice, its mean no less with ``up``, else no more."""
    points = low + step * np.arange(cells + 1, dtype=np.float64)
    scaled = np.log(points) / mu
    plain = Tail(ndtr(-scaled - mu / 2), ndtr(scaled + mu / 2))
    weighted = Tail(ndtr(-scaled + mu / 2), ndtr(scaled - mu / 2))
    inside, means, left = plain.cells(), weighted.cells(), points[:-1]
    off = plain.rounding()
    slack = weighted.rounding() + left * off + 8 * ULP * (means + left * inside)
    share = (means - left * inside + (slack if up else -slack)) / step + (off if up else -off)
    share = np.clip(share, 0.0, inside)
    masses = np.zeros(len(points))
    masses[:-1] += inside - share
    masses[1:] += share
    masses[0] += plain.below[0] if up else 0.0  # a larger sum when the unit is removed; else an infinite loss
    masses[-1] += plain.above[-1]
    ends = 1e3 * ULP * (plain.below[0] * points[0] + plain.above[-1] * points[-1])
    return Lattice(
        points=points,
        masses=masses,
        biased=points * masses,
        off=float(off.sum() + 1e3 * ULP * (plain.below[0] + plain.above[-1]) + (0.0 if up else plain.below[0])),
        biased_off=float(off @ points[1:] + ends),
        beyond=float(weighted.above[-1]),
    )


def _window(factors: Factors, bins: int, level: float, removed: bool) -> tuple[float, float]:
    """Two numbers beyond either of which the sum of X - low lies with a probability of at most ``level``, by Chernoff.

    A lattice that is coarser by a power of two will do, as means of convex functions are no less there: of e^(tx), and
    of x e^(tx) for t > 0. Below its mean the weighted law has no more than the plain one.
    """
    reach = float(factors[0][1].points[-1] - factors[0][1].points[0])
    drawn = sum(count for count, _ in factors)
    least, most = 0.0, drawn * reach
    for order in np.geomspace(1e-3, 600, 60) / reach:
        logs = [lattice.log_mgf(order) for _, lattice in factors]
        total = sum(count * plain for (count, _), (plain, _) in zip(factors, logs, strict=True))
        if removed:
            more = sum(count * math.exp(own - plain) for (count, _), (plain, own) in zip(factors, logs, strict=True))
            total += math.log((more + bins - drawn) / bins)
        most = min(most, (total - math.log(level)) / order)
    for order in np.geomspace(1e-3, 600, 60) / min(reach, 1.0):
        total = sum(count * lattice.log_mgf(-order)[0] for count, lattice in factors)
        least = max(least, (math.log(level) - total) / order)
    return least, most


def _sum(factors: Factors, bins: int, size: int, removed: bool, kind: type = np.float64) -> tuple[Array, float, float]:
    """The law of the sum on a circle of ``size`` points, weighted by sum / bins if the unit is removed.

    Then what may be off in it besides the transforms, and what may be off by them, in floating point of this ``kind``.
    """
    counts = [count for count, _ in factors]
    spectra = [rfft(lattice.masses.astype(kind), size) for _, lattice in factors]
    norms = [float(np.linalg.norm(lattice.masses)) for _, lattice in factors]
    off, beyond = sum(count * lattice.off for count, lattice in factors), 0.0
    if removed:
        total = (bins - sum(counts)) * _product(spectra, counts)
        for place, (count, lattice) in enumerate(factors):
            others = [each - (place == where) for where, each in enumerate(counts)]
            total += count * rfft(lattice.biased.astype(kind), size) * _product(spectra, others)
            norms.append(float(np.linalg.norm(lattice.biased)))
            off += count / bins * lattice.biased_off
            beyond += count / bins * lattice.beyond
        total /= bins
    else:
        total = _product(spectra, counts)
    unit = float(np.finfo(kind).eps) / 2
    hidden = (bins + 2) * (8 * math.log2(size) + 32) * unit * math.sqrt(size) * max(norms)
    law = np.maximum(irfft(total, size), 0.0).astype(np.float64)
    return law, beyond + _grown(off), _grown(hidden)


def _grown(error: float) -> float:
    """What an error in first order amounts to, when every other factor may be off as well."""
    return 1.001 * error * math.exp(min(error, 9.0))


def _product(spectra: list[_Spectrum], counts: list[int]) -> _Spectrum:
    found = np.ones_like(spectra[0])
    for spectrum, count in zip(spectra, counts, strict=True):
        found *= spectrum**count
    return found


def _losses(ratio: Array, law: Array, infinite: float, grid: float, bins: int, removed: bool) -> Losses:
    """The loss, log of the ratio or its negative, connected to the grid's points: both laws are kept."""
    loss = np.log(ratio) if removed else -np.log(ratio)
    cell = np.floor(loss / grid)
    first, last = int(cell.min()), int(cell.max()) + 1
    reach = grid * max(abs(first), abs(last))
    up = np.minimum(np.expm1(cell * grid - loss) / math.expm1(-grid) + 16 * ULP * (reach / grid + 1), 1.0)
    place, length = (cell - first).astype(np.int64), last - first + 1
    masses = np.zeros(length)
    masses += np.bincount(place, law * (1 - up), length)
    masses += np.bincount(place + 1, law * up, length)
    infinite = min(1.0, infinite)
    total = np.cumsum(masses)
    spare = max(0.0, float(total[-1]) + infinite - 1)  # in all it is at most 1: the least losses go
    bottom = int(np.searchsorted(total, spare))
    masses[bottom : bottom + 1] = total[bottom : bottom + 1] - spare
    masses[:bottom] = 0.0
    return Losses(first, masses, infinite, 4 * ULP * (len(law) + 16), 16 * ULP * (reach + 1) + 4 * bins * ULP)


def _log(value: float) -> float:
    return math.log(value) if value > 0 else math.inf
