"""Which correlation: the strategies by name, and coefficients that are optimised for what training follows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from scipy.optimize import minimize
from scipy.signal import lfilter
from scipy.special import expit

from tacit.privacy.correlated._correlated import Strategy, Vector
from tacit.privacy.events import strategy_parts


def independent(horizon: int) -> Strategy:
    """C = I: fresh noise at every step and no buffer; k contributions cost sqrt(k).

    Args:
        horizon: The number of steps.

    Returns:
        The strategy.
    """
    return Strategy(name="independent", horizon=horizon)


def square_root(horizon: int) -> Strategy:
    """The square root of the matrix of ones, c_k = binom(2k, k) / 4^k (Fichtenberger et al., 2023): n - 1 buffers.

    Args:
        horizon: The number of steps.

    Returns:
        The strategy.
    """
    return Strategy(name="full", horizon=horizon, taps=_root(horizon))


def banded(horizon: int, bands: int = 32) -> Strategy:
    """The square root cut off after `bands` coefficients (Kalinin and Lampert, 2024): bands - 1 buffers.

    Units whose steps are at least `bands` apart cost sqrt(k), as with independent noise. For one step per unit prefer
    `buffered`: over 11,730 steps 32 bands leave a running sum of 17.8 (14.3 with optimised bands), four buffers 3.8.

    Args:
        horizon: The number of steps.
        bands: The number of coefficients kept.

    Returns:
        The strategy.
    """
    if bands < 1:
        raise ValueError(f"{bands} bands leave no matrix; give at least 1 (independent noise).")
    return Strategy(name="banded", horizon=horizon, taps=_root(min(bands, horizon)))


@lru_cache(maxsize=64)
def toeplitz(horizon: int, bands: int = 32, *, momentum: float = 0.0) -> Strategy:
    """Banded coefficients that minimise the noise in the weights for units whose steps are at least `bands` apart.

    Such units cost one column's norm each time, so what is minimised is that norm times the root-mean-square of the
    rows of (A C^-1), over non-increasing coefficients, where A adds up the steps (see `running_sum_rms`); the start is
    `banded`.

    Args:
        horizon: The number of steps.
        bands: The number of coefficients.
        momentum: Of the gradient descent that adds up the steps.

    Returns:
        The strategy.

    Examples:
        >>> from tacit.privacy import correlated
        >>> cut, best = correlated.banded(500, 16), correlated.toeplitz(500, 16)
        >>> correlated.running_sum_rms(best) < correlated.running_sum_rms(cut)
        True
    """
    start = banded(horizon, bands)
    if not start.taps:
        return Strategy(name="toeplitz", horizon=horizon)

    def made(free: Vector) -> Strategy:
        taps = np.cumprod(expit(free))  # each at most the one before
        return Strategy(name="toeplitz", horizon=horizon, taps=_plain(taps))

    ratios = np.array(start.taps) / np.array([1.0, *start.taps[:-1]])
    return made(_least(made, np.log(ratios / (1 - ratios)), [(-30, 30)] * len(ratios), momentum=momentum))


@lru_cache(maxsize=64)
def buffered(
    horizon: int, buffers: int = 4, *, momentum: float = 0.0, contributions: int = 1, separation: int = 1
) -> Strategy:
    """Buffered linear Toeplitz, c_k = sum_i a_i lambda_i^(k-1) (Dvijotham et al., 2024): a handful of buffers.

    The parameters minimise the noise in the weights, for one contribution per unit unless said otherwise. The
    optimisation starts from the square root, c_k = 1/pi int_0^1 x^k / sqrt(x (1-x)) dx, by the trapezoidal rule in
    log(x / (1-x)), which spreads the decay times evenly over the scales from 1 to n. Four buffers end 1 % *below* the
    full square root at 11,730 and at 100,000 steps; more buffers gain at most 0.3 %.

    Args:
        horizon: The number of steps.
        buffers: The number of model-sized buffers.
        momentum: Of the gradient descent that adds up the steps.
        contributions: The most participations of a unit.
        separation: The least distance between two of them, in steps.

    Returns:
        The strategy.

    Examples:
        >>> from tacit.privacy import correlated
        >>> fresh, mixed = correlated.independent(100), correlated.buffered(100)
        >>> correlated.running_sum_rms(mixed) < correlated.running_sum_rms(fresh) / 2
        True
    """
    if buffers < 1:
        raise ValueError(f"{buffers} buffers keep nothing; give at least 1, or use independent noise.")
    count = min(buffers, horizon - 1)
    if count < 1:
        return Strategy(name="buffered", horizon=horizon)
    gaps = np.linspace(-np.log(horizon), 0, count)
    decays = expit(-gaps)
    shares = decays * np.sqrt(decays * (1 - decays))
    bounds = [(-np.log(horizon) - 7, 7)] * count + [(-30, 7)] * count
    best = minimize(
        _log_rms,
        np.concatenate([gaps, np.log(shares / shares.sum())]),  # c_1 = 1/2, as in the square root
        args=(horizon,),
        method="L-BFGS-B",
        bounds=bounds,
        options={"ftol": 1e-13, "maxfun": 4000},
    ).x

    def made(free: Vector) -> Strategy:
        gap, weights = _unpack(free)
        return Strategy(name="buffered", horizon=horizon, weights=_plain(weights), decays=_plain(1 - gap))

    if not momentum and contributions == 1:
        return made(best)
    often = {"contributions": contributions, "separation": separation}
    return made(_least(made, best, bounds, momentum=momentum, **often))


def by_name(
    name: str, horizon: int, *, bands: int = 32, buffers: int = 4, contributions: int = 1, separation: int = 1
) -> Strategy:
    """The strategy that a recipe, a ledger entry or a command line calls by name.

    Args:
        name: "independent", "full", "banded", "toeplitz" or "buffered"; the last three with a size if one is said
            ("banded:16"). "toeplitz:8@0.9" and "buffered@0.9" are optimised for a momentum, and "buffered@0.9" for the
            contributions, too; without "@" they are for plain sums and one contribution.
        horizon: The number of steps.
        bands: Of "banded" and "toeplitz", if the name has no size.
        buffers: Of "buffered", if the name has no size.
        contributions: The most participations of a unit.
        separation: The least distance between two of them, in steps.

    Returns:
        The strategy.

    Raises:
        ValueError: An unknown name.

    Examples:
        >>> from tacit.privacy import correlated
        >>> plain, fit = (correlated.by_name(name, 200) for name in ("buffered", "buffered@0.9"))
        >>> correlated.running_sum_rms(fit, momentum=0.9) < 0.9 * correlated.running_sum_rms(plain, momentum=0.9)
        True
    """
    kind, size, momentum = strategy_parts(name)
    match kind:
        case "independent":
            return independent(horizon)
        case "full":
            return square_root(horizon)
        case "banded":
            return banded(horizon, size or bands)
        case "toeplitz":
            return toeplitz(horizon, size or bands, momentum=momentum or 0.0)
    if momentum is None:
        return buffered(horizon, size or buffers)
    often = {"contributions": contributions, "separation": separation}
    return buffered(horizon, size or buffers, momentum=momentum, **often)


def running_sum_rms(strategy: Strategy, contributions: int = 1, separation: int = 1, *, momentum: float = 0.0) -> float:
    """Root-mean-square over the steps of the noise in the weights, in units of sigma * clip * learning rate.

    The weights are the running sum of the steps, and with momentum b step t is noise_t + b times the step before:
    what was added j steps ago has counted (1 - b^(j+1)) / (1 - b) times by now. The sensitivity is included.

    Args:
        strategy: The strategy.
        contributions: The most participations of a unit.
        separation: The least distance between two of them.
        momentum: Of the gradient descent that adds up the steps.

    Returns:
        The root mean square.
    """
    column = np.cumsum(strategy.inverse())  # of (ones) C^-1
    if momentum:
        column = lfilter([1.0], [1.0, -momentum], column)
    rows = np.cumsum(column**2)  # squared norm of each row
    return strategy.sensitivity(contributions, separation) * float(np.sqrt(rows.mean()))


def _least(
    made: Callable[[Vector], Strategy],
    start: Vector,
    bounds: Sequence[tuple[float, float]],
    *,
    momentum: float,
    contributions: int = 1,
    separation: int = 1,
) -> Vector:
    """The free parameters with the least noise in the weights."""

    def cost(free: Vector) -> float:
        return float(np.log(running_sum_rms(made(free), contributions, separation, momentum=momentum)))

    return np.asarray(minimize(cost, start, method="L-BFGS-B", bounds=bounds, options={"ftol": 1e-8}).x)


def _plain(values: Vector) -> tuple[float, ...]:
    return tuple(values.tolist())


def _root(length: int) -> tuple[float, ...]:
    k = np.arange(1, length)
    return tuple(np.cumprod((2 * k - 1) / (2 * k)).tolist())


def _unpack(parameters: Vector) -> tuple[Vector, Vector]:
    """Free parameters to 1 - lambda, between 0 and 1, and a, positive and below 1 in all: every point is a strategy."""
    gaps, logs = parameters.reshape(2, -1)
    odds = np.exp(logs)
    return np.asarray(expit(gaps)), odds / (1 + odds.sum())


def _log_rms(parameters: Vector, n: int) -> float:
    """log(column norm * running-sum noise) of a buffered strategy, in closed form for any n.

    Solving C y = z turns the state matrix diag(lambda) into M = diag(lambda) - sqrt(a) sqrt(a)^T, up to a similarity,
    and w_k = -sqrt(a)^T M^(k-1) sqrt(a). With the eigenvalues 1 - r_i of M, the prefix sums of w are
    floor + sum_i part_i (1 - r_i)^j, so that row norms, like the column norm, are sums of geometric series. Working
    with the gaps 1 - lambda and r keeps the precision near 1.
    """
    gap, weights = _unpack(parameters)
    column = 1 + weights @ _geometric(_product(gap), n - 1) @ weights
    root = np.sqrt(weights)
    r, vectors = np.linalg.eigh(np.diag(gap) + np.outer(root, root))
    part = (vectors.T @ root) ** 2 / r
    floor = 1 - part.sum()
    rows = floor**2 * n * (n + 1) / 2 + 2 * floor * part @ _falling(r, n) + part @ _falling(_product(r), n) @ part
    return float(np.log(column * rows / n) / 2)


def _product(gap: Vector) -> Vector:  # the gaps of all pairwise products, 1 - (1 - x)(1 - y)
    return gap[:, None] + gap - np.outer(gap, gap)


def _geometric(gap: Vector, n: int) -> Vector:  # sum_{j<n} (1 - gap)^j
    small = -np.expm1(n * np.log1p(-np.minimum(gap, 0.5)))
    return np.asarray(np.where(gap < 0.5, small, 1 - (1 - gap) ** n) / gap)


def _falling(gap: Vector, n: int) -> Vector:  # sum_{j<n} (n - j) (1 - gap)^j
    return np.asarray((n - (1 - gap) * _geometric(gap, n)) / gap)
