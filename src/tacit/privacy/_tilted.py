"""Composition of privacy loss distributions by tilted Fourier transforms, with a proved bound on the rounding.

Formal guarantee: the epsilon returned is not below that of the distributions handed in, composed in real numbers. A
plain Fourier transform has an error of about 1e-16 x sqrt(T) in every probability, whatever its size, so a tiny delta
drowns in it. Here every distribution is first tilted, t(k) = p(k) e^(tilt k) / M, with the tilt at which Chernoff's
bound on delta is least: the composed tilted distribution has its bulk around the epsilon that is sought, and an error
there is small *relative to delta*. What is added to delta, with u = 2^-53, n cells, T releases:

- a transform of length n with factors 2, 3, 4 and 5 has a 2-norm error of at most eta = 8 u log2 n times the norm
  (Higham 2002, theorem 24.2: 6.7 u per level for radix 2; radix 3 needs 6.8 u, radix 5 7.4 u). The modulus of a
  spectrum of probabilities is at most 1, so a T-th power carries T eta |t|_2, plus 16 T u for taking it, and the
  inverse one eta more: |error|_2 <= sum_i T_i (eta |t_i|_2 e^(T eta sqrt n) + 16 u) + eta. By Cauchy and Schwarz
  delta at cell j is off by at most M e^(-tilt j) |error|_2 |w|_2 with w(k) = e^(-tilt k) (1 - e^(-grid k));
- tilting, and tails computed with a relative error r per release, change every composed probability by a factor
  within e^(+-T r); a loss computed with a shift s per release moves epsilon by T s (stochastic dominance: delta is the
  mean of an increasing function of the loss);
- losses above the window have a probability of at most ``TAIL`` delta (Chernoff): infinite loss. What wraps around,
  from either end, only adds mass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.fft import irfft, next_fast_len, rfft

from tacit.privacy._pld_numerics import ULP, Array, Losses

TAIL = 1e-6  # of delta
MOST_CELLS = 2**25


class TooManyCellsError(Exception):
    """The sum of the losses does not fit into an array on this grid."""


@dataclass(frozen=True)
class Composed:
    """Tilted probabilities of the losses (first, first + 1, ...) x grid; p(k) = e^(log_scale - tilt k) t(k)."""

    first: int
    tilted: Array
    tilt: float
    log_scale: float
    infinite: float
    error: float = 0.0  # the 2-norm of what ``tilted`` may be off
    relative: float = 0.0  # by what share every probability may be off
    shift: float = 0.0  # by how much the sum of losses may be off
    whole: bool = True  # whether no finite loss lies above


def compose(parts: Sequence[tuple[Losses, int]], delta: float) -> Composed:
    """All parts, each so many times, as one distribution that is accurate around the epsilon of ``delta``."""
    relative = sum(times * part.relative for part, times in parts)
    shift = sum(times * part.shift for part, times in parts)
    infinite = -math.expm1(sum(times * _log1m(part.infinite) for part, times in parts))
    if len(parts) == 1 and parts[0][1] == 1:
        part = parts[0][0]
        return Composed(part.first, part.probabilities, 0.0, 0.0, infinite, 0.0, relative, shift)
    tilt, high = _aim(parts, max(delta - infinite, delta / 2))
    bent = [(*_tilted(part, tilt), times) for part, times in parts]
    log_scale = math.fsum(times * log_mean for _, log_mean, times in bent)
    far = max(abs(tilt) * (abs(part.first) + len(part.probabilities)) for part, _ in parts)
    releases = sum(times for _, times in parts)
    relative += 8 * ULP * releases * (far + 800) + 8 * ULP * abs(log_scale)  # exponents, and logarithms of 1e-308
    pieces = [(part, times) for part, _, times in bent]
    low = min(_bottom(parts, tilt, log_scale), high - 1)
    if high - low > MOST_CELLS:
        raise TooManyCellsError
    longest = max(len(part.probabilities) for part, _ in pieces)
    size = next_fast_len(max(high - low + 1, longest), real=True)
    spectrum = np.ones(size // 2 + 1, dtype=np.complex128)
    for part, times in pieces:
        spectrum *= rfft(part.probabilities, size) ** times
    start = sum(times * part.first for part, times in pieces)
    found = np.roll(irfft(spectrum, size), (start - low) % size)[: high - low + 1]
    eta = 8 * ULP * math.log2(size)
    error = sum(times * float(np.linalg.norm(part.probabilities)) for part, times in pieces) * eta
    error = error * _exp(releases * eta * math.sqrt(size)) + 16 * ULP * releases + eta
    whole = high == sum(times * (part.first + len(part.probabilities) - 1) for part, times in pieces)
    if not whole:
        infinite = min(1.0, infinite + TAIL * delta)
    return Composed(low, found, tilt, log_scale, infinite, error, relative, shift, whole)


def epsilon(losses: Composed, grid: float, delta: float) -> float:
    """The smallest epsilon at which the hockey-stick divergence is at most ``delta``, whatever rounding hides."""
    if losses.infinite >= delta:
        return math.inf
    tilted, tilt = losses.tilted, losses.tilt
    most = len(tilted) if tilt * len(tilted) < 740 else math.ceil(740 / tilt)  # beyond it weights are below 1e-321
    k = np.arange(most)
    weights = np.exp(-tilt * k)
    rises, discounts = weights * -np.expm1(-grid * k), weights * np.exp(-grid * k)
    hidden = losses.error * float(np.linalg.norm(rises)) * (1 + 1e-6)
    share = _exp(losses.relative + 4 * ULP * (most + 800))  # the sums below have as many terms
    shift = losses.shift + 4 * ULP * (most + 800)

    def scale(place: int) -> float:
        return _exp(losses.log_scale - tilt * (losses.first + place))

    def divergence(place: int) -> float:
        tail = tilted[place : place + most]
        return losses.infinite + scale(place) * share * max(float(tail @ rises[: len(tail)]) + hidden, 0.0)

    low, high = max(0, -losses.first), len(tilted) - 1  # epsilon is not sought below 0
    if low >= high or divergence(low) <= delta:
        return max(0.0, (losses.first + min(low, high)) * grid + shift)
    if losses.error > 0 and divergence(high) > delta:  # rounding hides all: only the largest loss is certain
        return (losses.first + high) * grid + shift if losses.whole else math.inf
    while high - low > 1:  # the divergence is above delta at low, not at high
        middle = (low + high) // 2
        low, high = (middle, high) if divergence(middle) > delta else (low, middle)
    tail = tilted[high : low + most]  # between the two cells only what is above counts
    mass, discounted = float(tail @ weights[1 : 1 + len(tail)]), float(tail @ discounts[1 : 1 + len(tail)])
    excess = mass + hidden - (delta - losses.infinite) / scale(low) / share
    inside = math.log(excess / discounted) if excess > 0 and discounted > 0 else 0.0
    return max(0.0, (losses.first + low) * grid + min(max(inside, 0.0), grid) + shift)


def _aim(parts: Sequence[tuple[Losses, int]], delta: float) -> tuple[float, int]:
    """A tilt, per cell, and the last cell of the window.

    Above it the composed losses have less than ``TAIL`` delta of mass, which is what counts, and hardly any when
    tilted, so that little wraps around. The tilt is the least at which Chernoff's bound on delta, at the epsilon where
    it is sharpest, is within e^4 of delta: a heavy tail is then lifted no more than needed. Any tilt is sound.
    """
    bell, longest = _widths(parts)
    tilts = np.geomspace(min(0.5 * bell, 0.5 / longest), max(60 * bell, 600 / longest), 60)
    logs = sum(times * _log_mgf(part, tilts) for part, times in parts)
    logs = logs + 1e-9 * np.abs(logs)
    sharpest = float(np.min((logs - math.log(delta)) / tilts))
    best = float(tilts[np.argmax(logs - tilts * sharpest <= math.log(delta) + 4)])
    lifted = float(logs[tilts == best][0])
    more = tilts > best
    beyond = float(np.min((logs - math.log(TAIL * delta)) / tilts))
    wrapped = float(np.min((logs - lifted - math.log(0.01 * TAIL))[more] / (tilts - best)[more], initial=math.inf))
    high = sum(times * (part.first + len(part.probabilities) - 1) for part, times in parts)
    reach = max(beyond, wrapped)
    return best, min(high, math.ceil(reach) + 1) if math.isfinite(reach) else high


def _bottom(parts: Sequence[tuple[Losses, int]], tilt: float, log_scale: float) -> int:
    """A cell below which the composed tilted losses have hardly any mass."""
    bell, longest = _widths(parts)
    steps = np.geomspace(min(bell, 1 / longest), max(40 * bell, 40 / longest), 16)
    logs = sum(times * _log_mgf(part, tilt - steps) for part, times in parts)
    low = sum(times * part.first for part, times in parts)
    return max(low, math.floor(float(np.max((log_scale - logs + math.log(TAIL)) / steps))) - 1)


def _tilted(part: Losses, tilt: float) -> tuple[Losses, float]:
    """t(k) = p(k) e^(tilt k) / M, and log M."""
    with np.errstate(divide="ignore"):
        logs = np.log(part.probabilities) + tilt * (part.first + np.arange(len(part.probabilities)))
    top = float(logs.max())
    bent = np.exp(logs - top)
    total = float(bent.sum())
    return Losses(part.first, bent / total, 0.0), top + math.log(total)


def _widths(parts: Sequence[tuple[Losses, int]]) -> tuple[float, int]:
    """One over the standard deviation of the composed loss, in cells, and the length of the longest part."""
    variance = 0.0
    for part, times in parts:
        k = np.arange(len(part.probabilities))
        centre = float(part.probabilities @ k)
        variance += times * max(float(part.probabilities @ (k - centre) ** 2), 1e-6)
    return 1 / math.sqrt(variance), max(len(part.probabilities) for part, _ in parts)


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


def _log1m(value: float) -> float:
    return math.log1p(-value) if value < 1 else -math.inf


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
