"""Epsilon by privacy loss distributions, on a grid chosen so that the answer is tight and the work bounded.

Formal guarantee: every discretisation rounds towards more loss, so the epsilon is an upper bound whatever the grid; the
grid decides only how close it is. The arithmetic is ``dots`` (one release) and ``tilted`` (composition), each with its
own bound on what floating point may hide; dp-accounting serves what is rare, and the tests compare the rest with it.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import attr
import numpy as np
from dp_accounting import dp_event
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy.special import ndtri

from tacit.privacy import _pld_numerics as dots
from tacit.privacy import _tilted as tilted
from tacit.privacy._balls_in_bins import balls_in_bins
from tacit.privacy._budget import Neighbours, sampled_pure
from tacit.privacy._pld_numerics import Losses
from tacit.privacy.events import BallsInBinsDpEvent, DpEvent, NoisyMaxDpEvent

FINEST, COARSEST, CELLS = 1e-9, 1.0, 2e6
FLOOR = 1e-100  # below it the tails of single releases leave the range of floating point
DISTINCT = 256  # more different releases than this are rounded, towards less noise, to so many


class CannotTakeError(Exception):
    """PLD cannot serve; the message says why."""


def epsilon(
    mu_squared: float,
    others: Counter[DpEvent],
    neighbours: Neighbours,
    delta: float,
    *,
    deadline: float,
) -> float:
    """Epsilon at ``delta`` of a Gaussian of ``mu_squared`` together with ``others``, composed by PLD."""
    if delta < FLOOR:
        raise CannotTakeError(f"a delta below {FLOOR:g} is lost in PLD's floating point")
    others = rounded(others)
    if len(others) > 2 * DISTINCT:
        raise CannotTakeError(f"PLD would have to convolve {len(others)} different releases")
    far = -float(ndtri(1e-4 * delta / (1 + sum(others.values()))))  # cut tails cost a ten-thousandth of delta
    grid = _grid(mu_squared, others, far)
    parts = [(_both(dots.gaussian(math.sqrt(mu_squared), grid, far)), 1)] if mu_squared > 0 else []
    for event, times in others.items():
        if time.monotonic() > deadline:
            raise CannotTakeError("PLD reached its time limit")
        parts.append((_pair(event, neighbours, grid, far), times))
    if not parts:
        return 0.0
    symmetric = all(remove is add for (remove, add), _ in parts)
    try:
        found = max(
            tilted.epsilon(tilted.compose([(pair[side], n) for pair, n in parts], delta), grid, delta)
            for side in ([0] if symmetric else [0, 1])
        )
    except tilted.TooManyCellsError:
        raise CannotTakeError("the losses are too large for PLD's grid") from None
    if not math.isfinite(found):
        raise CannotTakeError("what PLD cuts off and may round away reaches delta")
    return found


def _pair(event: DpEvent, neighbours: Neighbours, grid: float, far: float) -> tuple[Losses, Losses]:
    """The losses of one release when the unit is removed and when it is added."""
    match event:
        case dp_event.LaplaceDpEvent():
            return _both(dots.laplace(1 / event.noise_multiplier, grid))
        case NoisyMaxDpEvent():
            return _both(dots.pure(2 / event.noise_multiplier, grid))
        case dp_event.DiscreteLaplaceDpEvent():
            return _from(pld.from_discrete_laplace_mechanism(event.noise_parameter, event.sensitivity, True, grid))
        case dp_event.RandomizedResponseDpEvent():
            return _from(pld.from_randomized_response(event.noise_parameter, event.num_buckets, True, grid))
        case dp_event.PoissonSampledDpEvent():
            q, inner = event.sampling_probability, event.event
            if isinstance(inner, dp_event.LaplaceDpEvent):
                return _from(pld.from_laplace_mechanism(inner.noise_multiplier, 1, True, grid, q))
            mu = 1 / inner.noise_multiplier
            if neighbours is Neighbours.REPLACE_ONE:
                return _both(dots.sampled_gaussian_replace(q, mu, grid, far))
            return dots.sampled_gaussian_remove(q, mu, grid, far), dots.sampled_gaussian_add(q, mu, grid, far)
        case dp_event.SampledWithoutReplacementDpEvent():
            q, mu = event.sample_size / event.source_dataset_size, 1 / event.event.noise_multiplier
            return _both(dots.sampled_gaussian_fixed(q, mu, grid, far))
        case BallsInBinsDpEvent():
            return _balls_in_bins(event.noise_multiplier, event.bins, event.steps, grid, far)
    raise CannotTakeError(f"PLD cannot take {type(event).__name__}")


@lru_cache(maxsize=8)  # a search for the noise asks again
def _balls_in_bins(noise: float, bins: int, steps: int, grid: float, far: float) -> tuple[Losses, Losses]:
    return balls_in_bins(noise, bins, steps, grid, far)


def _both(losses: Losses) -> tuple[Losses, Losses]:
    return losses, losses


def _from(found: Any) -> tuple[Losses, Losses]:
    """dp-accounting's own distribution, as arrays."""
    remove, add = (side.to_dense_pmf() for side in (found._pmf_remove, found._pmf_add))
    reach = max(abs(side._lower_loss) + len(side._probs) for side in (remove, add)) * found._pmf_remove._discretization
    pair = [
        Losses(side._lower_loss, np.asarray(side._probs), side._infinity_mass, 1e3 * dots.ULP, 8 * dots.ULP * reach)
        for side in (remove, add)
    ]
    return _both(pair[0]) if found._symmetric else (pair[0], pair[1])


def rounded(others: Counter[DpEvent], distinct: int | None = None) -> Counter[DpEvent]:
    """A long schedule of different releases as a few, each with a little less noise or a higher rate than it had.

    Formal guarantee: less noise costs more; so does a higher rate, as a draw at a lower one is a mixture of it with no
    draw at all. What has no noise multiplier stays as it is.
    """
    distinct = distinct or DISTINCT
    if len(others) <= distinct:
        return others
    noises = {noise for event in others if (noise := _noise(event)) is not None}
    rarities = {1 / rate for event in others if (rate := _rate(event)) is not None}
    cells = distinct if min(len(noises), len(rarities)) <= 1 else math.isqrt(distinct)
    less_noise, less_rare = _floor(noises, cells), _floor(rarities, cells)
    few: Counter[DpEvent] = Counter()
    for event, times in others.items():
        noise, rate = _noise(event), _rate(event)
        if noise is None:
            few[event] += times
            continue
        more = None if rate is None else min(max(rate, 1 / less_rare(1 / rate)), 1.0)
        few[_with(event, less_noise(noise), more)] += times
    return few


def _floor(values: set[float], cells: int) -> Callable[[float], float]:
    """Rounds down to one of ``cells`` numbers that lie evenly in the logarithm; exact where there are no more."""
    low, high = min(values, default=1.0), max(values, default=1.0)
    step = math.log(high / low) / cells
    if len(values) <= cells or not 0 < step < math.inf:
        return lambda value: value
    return lambda value: min(value, low * math.exp(step * math.floor(math.log(value / low) / step)))


def _noise(event: DpEvent) -> float | None:
    inner = event.event if isinstance(event, dp_event.PoissonSampledDpEvent) else event
    return getattr(inner, "noise_multiplier", None)


def _rate(event: DpEvent) -> float | None:
    return float(event.sampling_probability) if isinstance(event, dp_event.PoissonSampledDpEvent) else None


def _with(event: DpEvent, noise: float, rate: float | None) -> DpEvent:
    if rate is not None:
        return dp_event.PoissonSampledDpEvent(rate, attr.evolve(event.event, noise_multiplier=noise))
    return attr.evolve(event, noise_multiplier=noise)


def _grid(mu_squared: float, others: Counter[DpEvent], far: float) -> float:
    """A grid step well below the typical loss of one release, yet coarse enough for ``CELLS`` cells in all.

    Rounding each of n losses adds a variance of up to n grid^2/4 to the total's sum of variances, so a twentieth of
    the root-mean-square loss costs less than a tenth of a percent of it.
    """
    spreads = [(times, *_spread(event, far)) for event, times in others.items()]
    variance = mu_squared + sum(times * spread**2 for times, spread, _ in spreads)
    releases = sum(times for times, _, _ in spreads) + 1
    reach = max([far * math.sqrt(mu_squared), *(reach for _, _, reach in spreads), 12 * math.sqrt(variance) + variance])
    fine = min(0.05 * math.sqrt(variance / releases), 5e-4 * max(1.0, math.sqrt(variance)))
    edges = [
        (times, reach) for (event, _), (times, _, reach) in zip(others.items(), spreads, strict=True) if _edged(event)
    ]
    if edges:  # a loss with a hard edge is rounded up there by half a step each time, not evened out
        together = sum(times * reach for times, reach in edges) + math.sqrt(variance)
        fine = min(fine, max(1e-4 * together / sum(times for times, _ in edges), together / 3e5))
    if not reach <= CELLS * COARSEST:
        raise CannotTakeError("the losses are too large for PLD's grid")
    return min(max(fine, reach / CELLS, FINEST), COARSEST)


def _edged(event: DpEvent) -> bool:
    sampled = dp_event.PoissonSampledDpEvent | dp_event.SampledWithoutReplacementDpEvent
    inner = event.event if isinstance(event, sampled) else event
    return not isinstance(inner, dp_event.GaussianDpEvent | BallsInBinsDpEvent)


def _spread(event: DpEvent, far: float) -> tuple[float, float]:
    """The standard deviation of one release's privacy loss, roughly, and how large it may get."""
    match event:
        case dp_event.PoissonSampledDpEvent() if isinstance(event.event, dp_event.GaussianDpEvent):
            return _sampled_spread(event.sampling_probability, 1 / event.event.noise_multiplier, far)
        case dp_event.SampledWithoutReplacementDpEvent():
            rate = event.sample_size / event.source_dataset_size
            return _sampled_spread(rate, 1 / event.event.noise_multiplier, far)
        case BallsInBinsDpEvent():
            mu = math.sqrt(-(-event.steps // event.bins)) / event.noise_multiplier
            return min(math.sqrt(math.expm1(min(mu * mu, 50.0)) / event.bins), mu), far * mu + mu * mu / 2
        case dp_event.PoissonSampledDpEvent():
            loss = sampled_pure(event.sampling_probability, 1 / event.event.noise_multiplier)
        case dp_event.LaplaceDpEvent():
            loss = 1 / event.noise_multiplier
        case NoisyMaxDpEvent():
            loss = 2 / event.noise_multiplier
        case dp_event.DiscreteLaplaceDpEvent():
            loss = event.noise_parameter * event.sensitivity
        case dp_event.RandomizedResponseDpEvent():
            loss = math.log1p((1 - event.noise_parameter) * event.num_buckets / event.noise_parameter)
        case _:
            raise CannotTakeError(f"PLD cannot take {type(event).__name__}")
    return loss, loss


def _sampled_spread(q: float, mu: float, far: float) -> tuple[float, float]:
    return min(q * math.sqrt(math.expm1(min(mu * mu, 50.0))), mu), dots.loss_at(q, mu, far + mu)
