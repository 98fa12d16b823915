"""Privacy loss distributions: dp-accounting's, on a grid chosen so that the answer is tight and the work bounded.

Formal guarantee: with ``pessimistic`` (the default) every discretisation rounds towards more loss, so the epsilon is
an upper bound whatever the grid; the grid decides only how close it is.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import attr
import numpy as np
from dp_accounting import NeighboringRelation, dp_event
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.pld.common import DifferentialPrivacyParameters
from numpy.typing import NDArray
from scipy.special import ndtr

from tacit.privacy.budget import Neighbours, epsilon_of
from tacit.privacy.events import DpEvent, NoisyMaxDpEvent

Array = NDArray[np.float64]
FINEST, COARSEST, CELLS = 1e-9, 1.0, 4e6
FLOOR, TAIL = 1e-11, 1e-15
DISTINCT = 128  # more different releases than this are rounded, towards less noise, to so many


class CannotTakeError(Exception):
    """PLD cannot serve; the message says why."""


def epsilon(
    mu_squared: float,
    others: Counter[DpEvent],
    neighbours: Neighbours,
    delta: float,
    *,
    deadline: float,
    pessimistic: bool = True,
) -> float:
    """Epsilon at ``delta`` of a Gaussian of ``mu_squared`` together with ``others``, composed by PLD."""
    if delta < FLOOR:
        raise CannotTakeError(f"a delta below {FLOOR:g} is lost in the rounding of PLD's Fourier transforms")
    others = rounded(others, pessimistic)
    grid = _grid(mu_squared, others, delta)
    total, truncated = None, 0.0
    if mu_squared > 0:
        others = Counter({dp_event.GaussianDpEvent(mu_squared**-0.5): 1}) + others
    for event, times in others.items():
        if time.monotonic() > deadline:
            raise CannotTakeError("PLD reached its time limit")
        part = _single(event, neighbours, grid, pessimistic)
        part = part if times == 1 else part.self_compose(times, TAIL)
        total = part if total is None else total.compose(part, TAIL)
        truncated += 2 * TAIL  # dp-accounting counts cut tails as infinite loss, which a lower bound must not
    if total is None:
        return 0.0
    return float(total.get_epsilon_for_delta(delta if pessimistic else delta + truncated))


def _single(event: DpEvent, neighbours: Neighbours, grid: float, pessimistic: bool) -> Any:
    common = {"value_discretization_interval": grid, "pessimistic_estimate": pessimistic}
    dots = common | {"use_connect_dots": pessimistic}
    match event:
        case dp_event.GaussianDpEvent():
            return pld.from_gaussian_mechanism(event.noise_multiplier, **dots)
        case dp_event.LaplaceDpEvent():
            return pld.from_laplace_mechanism(event.noise_multiplier, **dots)
        case dp_event.DiscreteLaplaceDpEvent():
            return pld.from_discrete_laplace_mechanism(event.noise_parameter, event.sensitivity, **dots)
        case NoisyMaxDpEvent():
            return pld.from_privacy_parameters(
                DifferentialPrivacyParameters(2 / event.noise_multiplier, 0.0), value_discretization_interval=grid
            )
        case dp_event.RandomizedResponseDpEvent():
            return pld.from_randomized_response(event.noise_parameter, event.num_buckets, **dots)
        case dp_event.PoissonSampledDpEvent():
            q, inner = event.sampling_probability, event.event
            if q == 0:
                return pld.identity(value_discretization_interval=grid)
            if isinstance(inner, dp_event.LaplaceDpEvent):
                return pld.from_laplace_mechanism(inner.noise_multiplier, sampling_prob=q, **dots)
            if pessimistic:
                return _sampled_gaussian(q, 1 / inner.noise_multiplier, neighbours, grid)
            replace_one = neighbours is Neighbours.REPLACE_ONE
            relation = NeighboringRelation.REPLACE_ONE if replace_one else NeighboringRelation.ADD_OR_REMOVE_ONE
            return pld.from_gaussian_mechanism(
                inner.noise_multiplier, sampling_prob=q, neighboring_relation=relation, **dots
            )
    raise CannotTakeError(f"PLD cannot take {type(event).__name__}")


def _sampled_gaussian(q: float, mu: float, neighbours: Neighbours, grid: float) -> Any:
    """The PLD of a Gaussian release from a Poisson draw, by connecting the dots of its hockey-stick divergences.

    The dominating pairs: (1-q) N(0, 1) + q N(mu, 1) against N(0, 1), in both directions; under REPLACE_ONE against
    (1-q) N(0, 1) + q N(-mu, 1), where the two directions mirror each other (Zhu, Dong & Wang 2022; Lebeda et al.
    2024). dp-accounting solves for the same thresholds one by one in Python; this is the same, as arrays.
    """
    far = 10.5  # beyond so many standard deviations lies less than 1e-25
    if neighbours is Neighbours.REPLACE_ONE:
        top = float(_mixture_loss(q, mu, far + mu) - _mixture_loss(q, -mu, far + mu))
        return pld.PrivacyLossDistribution(_dots(grid, -top, top, lambda e: _replace_delta(q, mu, e)))
    low, high = float(_mixture_loss(q, mu, -far)), float(_mixture_loss(q, mu, far + mu))
    return pld.PrivacyLossDistribution(
        _dots(grid, low, high, lambda e: _remove_delta(q, mu, e)),
        _dots(grid, -high, -low, lambda e: _add_delta(q, mu, e)),
    )


def _dots(grid: float, low: float, high: float, delta_of: Callable[[Array], Array]) -> Any:
    first, last = math.floor(low / grid), math.ceil(high / grid)
    deltas = np.clip(delta_of(np.arange(first, last + 1, dtype=np.float64) * grid), 0.0, 1.0)
    return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(grid, first, last, np.minimum.accumulate(deltas))


def _mixture_loss(q: float, mu: float, x: float) -> float:
    """log of ((1-q) N(0, 1) + q N(mu, 1)) / N(0, 1) at x."""
    return float(np.logaddexp(math.log1p(-q), math.log(q) + mu * x - mu * mu / 2))


def _remove_delta(q: float, mu: float, epsilon: Array) -> Array:
    rest = np.expm1(epsilon) + q  # e^epsilon - (1 - q)
    with np.errstate(divide="ignore", invalid="ignore"):
        x = np.where(rest > 0, (np.log(rest / q) + mu * mu / 2) / mu, -np.inf)
    return np.asarray(q * ndtr(mu - x) - rest * ndtr(-x))


def _add_delta(q: float, mu: float, epsilon: Array) -> Array:
    rest = np.expm1(-epsilon) + q
    with np.errstate(divide="ignore", invalid="ignore"):
        x = np.where(rest > 0, (np.log(rest / q) + mu * mu / 2) / mu, -np.inf)
    return np.asarray(np.exp(epsilon) * (rest * ndtr(x) - q * ndtr(x - mu)))


def _replace_delta(q: float, mu: float, epsilon: Array) -> Array:
    # the threshold solves a quadratic in y = e^(mu x); multiplied through by e^(-epsilon/2) it cannot overflow
    tilt, lift = (1 - q) * np.sinh(epsilon / 2), q * math.exp(-mu * mu / 2)
    root = np.sqrt(tilt**2 + lift**2)
    y = np.where(tilt > 0, tilt + root, lift**2 / (root - tilt)) / lift
    x = (epsilon / 2 + np.log(y)) / mu
    mine = (1 - q) * ndtr(-x) + q * ndtr(mu - x)
    return np.asarray(mine - np.exp(epsilon) * ((1 - q) * ndtr(-x) + q * ndtr(-mu - x)))


def rounded(others: Counter[DpEvent], pessimistic: bool = True) -> Counter[DpEvent]:
    """A long schedule of different Gaussians as a few, each a little less noisy (more, if optimistic) than it was."""
    if len(others) <= DISTINCT:
        return others
    noises = [_noise(event) for event in others]
    if any(noise is None for noise in noises):
        raise CannotTakeError(f"PLD would have to convolve {len(others)} different releases")
    low = min(noise for noise in noises if noise is not None)
    high = max(noise for noise in noises if noise is not None)
    ratio = (high / low) ** (1 / DISTINCT)
    rounded: Counter[DpEvent] = Counter()
    for event, times in others.items():
        place = math.log((_noise(event) or low) / low) / math.log(ratio)
        step = math.floor(place + 1e-9) if pessimistic else math.ceil(place - 1e-9)
        rounded[_with_noise(event, low * ratio**step)] += times
    return rounded


def _noise(event: DpEvent) -> float | None:
    inner = event.event if isinstance(event, dp_event.PoissonSampledDpEvent) else event
    return getattr(inner, "noise_multiplier", None)


def _with_noise(event: DpEvent, noise: float) -> DpEvent:
    if isinstance(event, dp_event.PoissonSampledDpEvent):
        return attr.evolve(event, event=_with_noise(event.event, noise))
    return attr.evolve(event, noise_multiplier=noise)


def _grid(mu_squared: float, others: Counter[DpEvent], delta: float) -> float:
    """A grid step well below the typical loss of one release, yet coarse enough for ``CELLS`` cells in all.

    Rounding each of n losses adds a variance of up to n grid^2/4 to the total's sum of variances, so a twentieth of
    the root-mean-square loss costs less than a tenth of a percent of it.
    """
    spreads = [(times, *_spread(event, delta)) for event, times in others.items()]
    variance = mu_squared + sum(times * spread**2 for times, spread, _ in spreads)
    releases = sum(times for times, _, _ in spreads) + 1
    reach = epsilon_of(math.sqrt(mu_squared), delta * 1e-3) + max((reach for _, _, reach in spreads), default=0.0)
    reach += 12 * math.sqrt(variance) + variance
    fine = min(0.05 * math.sqrt(variance / releases), 5e-4 * max(1.0, math.sqrt(variance)))
    return min(max(fine, reach / CELLS, FINEST), COARSEST)


def _spread(event: DpEvent, delta: float) -> tuple[float, float]:
    """The standard deviation of one release's privacy loss, roughly, and how large it may get."""
    match event:
        case dp_event.PoissonSampledDpEvent():
            q, noise = event.sampling_probability, event.event.noise_multiplier
            spread, reach = _spread(event.event, delta)
            small = q * math.sqrt(math.expm1(min(noise**-2, 50.0)))
            return max(min(small, spread), 1e-12), reach
        case dp_event.GaussianDpEvent():
            mu = 1 / event.noise_multiplier
            return mu, mu * mu / 2 + 10 * mu
        case dp_event.LaplaceDpEvent():
            return 1 / event.noise_multiplier, 1 / event.noise_multiplier
        case NoisyMaxDpEvent():
            return 2 / event.noise_multiplier, 2 / event.noise_multiplier
        case dp_event.DiscreteLaplaceDpEvent():
            return event.noise_parameter * event.sensitivity, event.noise_parameter * event.sensitivity
        case dp_event.RandomizedResponseDpEvent():
            loss = math.log1p((1 - event.noise_parameter) * event.num_buckets / event.noise_parameter)
            return loss, loss
    raise CannotTakeError(f"PLD cannot take {type(event).__name__}")
