"""Replacing a unit is two steps: what that does to concentrated differential privacy, by brute force."""

import math

import numpy as np
import pytest
from dp_accounting import dp_event

from tacit.privacy import Neighbours, accounting

ORDERS = np.concatenate([1 + np.geomspace(1e-3, 1, 20), np.geomspace(2.1, 400, 30)])


def divergences(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    logs = np.log(p)[:, None] * ORDERS + np.log(q)[:, None] * (1 - ORDERS)
    top = logs.max(axis=0)
    return np.asarray((top + np.log(np.exp(logs - top).sum(axis=0))) / (ORDERS - 1))


def charged(xi: float, rho: float) -> np.ndarray:
    event = dp_event.ZCDpEvent(rho=rho, xi=xi)
    return np.array(accounting.renyi(event, Neighbours.REPLACE_ONE, ORDERS.tolist()))


def least_xi(chain: list[np.ndarray], rho: float) -> float:
    """The xi of a mechanism whose outputs on three data sets, each a unit from the next, are these."""
    steps = [(0, 1), (1, 0), (1, 2), (2, 1)]
    return max(0.0, float((np.max([divergences(chain[i], chain[j]) for i, j in steps], axis=0) - rho * ORDERS).max()))


def test_twice_xi_is_too_little() -> None:
    chain = [np.array([p, 1 - p]) for p in (0.00127, 0.11165, 0.86939)]
    rho = 1.0
    xi = least_xi(chain, rho)
    apart = np.maximum(divergences(chain[0], chain[2]), divergences(chain[2], chain[0]))
    assert (apart - (2 * xi + 4 * rho * ORDERS)).max() > 0.3  # what was charged before
    assert (apart <= charged(xi, rho) * (1 + 1e-12)).all()


@pytest.mark.parametrize("seed", range(4))
def test_no_mechanism_of_a_few_outputs_passes_what_is_charged(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(150):
        size, shape = rng.integers(2, 5), rng.choice([0.1, 0.3, 1.0])
        chain = [(p := rng.dirichlet(np.full(size, shape)) + 1e-9) / p.sum() for _ in range(3)]
        rho = rng.uniform(0.01, 3)
        apart = np.maximum(divergences(chain[0], chain[2]), divergences(chain[2], chain[0]))
        assert (apart <= charged(least_xi(chain, rho), rho) * (1 + 1e-9)).all()


def test_a_gaussian_needs_four_rho_and_no_less() -> None:
    """xi = 0: mean 1 apart is rho = 1/2, mean 2 apart is order x 2."""
    assert charged(0.0, 0.5) == pytest.approx(2 * ORDERS)
    plain = accounting.renyi(dp_event.ZCDpEvent(rho=0.5, xi=0.3), Neighbours.ADD_REMOVE, [3.0])
    assert plain[0] == pytest.approx(0.3 + 1.5)
    assert math.isfinite(charged(1.0, 0.0)[0])
