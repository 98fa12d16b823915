"""Small queries: what is released is post-processing of the continuous mechanism that is charged, in every mode."""

import math
from collections import Counter

import mpmath
import numpy as np
import pytest
from scipy import integrate, stats

from tacit.privacy import accounting, events
from tacit.privacy._budget import Neighbours, Unit
from tacit.privacy._noise import NoiseKey
from tacit.privacy._queries import GridSum
from tacit.privacy._receipts import Receipt, ReceiptError
from tacit.privacy.mechanisms import _mechanisms, laplace

ALARM = 1e-7


def paid(event: events.DpEvent, seed: object = None) -> Receipt:
    facts = {"id": "0123456789abcdef", "subject": "s", "stage": "test", "note": "", "mode": "gaussian", "head": "1:x"}
    receipt = Receipt(**facts, event=event, neighbours=Neighbours.ADD_REMOVE, unit=Unit.SAMPLE, seeded=seed is not None)
    return receipt.issued(NoiseKey(seed))


def mass(k: int, scale: float) -> float:
    """P(round(L) = k) for continuous Laplace noise L of this scale, from its distribution function."""
    upper, lower = stats.laplace.sf((abs(k) - 0.5) / scale), stats.laplace.sf((abs(k) + 0.5) / scale)
    return float(upper - lower)


def deviation(found: list[int], scale: float) -> float:
    """The p-value of a chi-square test against round(L), with cells of 20 expected values and more."""
    count, seen = len(found), Counter(found)
    cells = [k for k in range(-200, 201) if mass(k, scale) * count >= 20]
    observed = [seen[k] for k in cells]
    expected = [mass(k, scale) * count for k in cells]
    observed.append(count - sum(observed))
    expected.append(count - sum(expected))
    return float(stats.chisquare(observed, expected).pvalue)


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("scale", [0.2, 0.7, 2.0, 9.0])
def test_laplace_noise_is_continuous_noise_rounded(scale: float, seed: int | None) -> None:
    query = GridSum(total=(0,) * 60_000, grid=1.0, low=0.0, high=1.0, l1=1.0)
    found = [round(value) for value in laplace(query, paid(events.laplace(scale), seed)).tolist()]
    assert deviation(found, scale) > ALARM


def test_discrete_laplace_noise_is_found_out() -> None:
    """What was released before: at one grid step per contribution and scale 2 its zero has 0.245, not 0.221."""
    y = math.exp(-1 / 2)
    assert ((1 - y) / (1 + y), mass(0, 2.0)) == pytest.approx((0.24492, 0.22120), abs=1e-5)
    generator = np.random.default_rng(1)
    discrete = generator.geometric(1 - y, 60_000) - generator.geometric(1 - y, 60_000)
    assert deviation(discrete.tolist(), 2.0) < 1e-20


def pair(scale: float, shift: int) -> tuple[np.ndarray, np.ndarray]:
    ks = range(-round(60 * scale) - 60, round(60 * scale) + 60)
    return np.array([mass(k, scale) for k in ks]), np.array([mass(k - shift, scale) for k in ks])


@pytest.mark.parametrize(("scale", "shift"), [(2.0, 1), (1.0, 1), (0.4, 1), (3.0, 2), (8.0, 5)])
def test_the_charged_price_is_above_what_is_released(scale: float, shift: int) -> None:
    """Hockey sticks at every epsilon, and the Renyi divergences that the renyi mode charges."""
    p, q = pair(scale, shift)
    charged = shift / scale
    for a in np.linspace(-charged, charged, 41):
        assert np.maximum(p - math.exp(a) * q, 0).sum() <= 1 - math.exp((a - charged) / 2) + 1e-9
    orders = [1.5, 2.0, 8.0]
    price = accounting.renyi(events.laplace(1 / charged), Neighbours.ADD_REMOVE, orders)
    for order, most in zip(orders, price, strict=True):
        assert math.log(np.sum(p * (p / q) ** (order - 1))) / (order - 1) <= most * (1 + 1e-9)


def test_the_price_of_one_count_at_epsilon_one() -> None:
    """Order 2: 0.619 is charged. Discrete Laplace noise at one step per contribution costs 0.735: not covered."""
    charged = accounting.renyi(events.laplace(1.0), Neighbours.ADD_REMOVE, [2.0])[0]
    p, q = pair(1.0, 1)
    y = math.exp(-1.0)
    discrete = np.array([(1 - y) / (1 + y) * y ** abs(k) for k in range(-300, 300)])
    assert charged == pytest.approx(0.619, abs=5e-4)
    assert math.log(np.sum(p**2 / q)) < charged
    assert math.log(np.sum(discrete[1:] ** 2 / discrete[:-1])) == pytest.approx(0.735, abs=5e-4)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5])
@pytest.mark.parametrize("total", [0.5, 1.0, 4.0])
def test_a_contribution_spread_over_two_values_costs_no_more_than_in_one(total: float, share: float) -> None:
    """H_a of the pair is the mean over the first value's loss of the second's H at what is left, by quadrature."""
    first, second = share * total, (1 - share) * total

    def stick(a: float, shift: float) -> float:
        return max(0.0, 1 - math.exp(min(a, (a - shift) / 2)))

    for a in np.linspace(-total, total, 9):
        inner, _ = integrate.quad(
            lambda x, a=a: 0.5 * math.exp(-x) * stick(a - first + 2 * x, second), 0, first, epsabs=1e-12, limit=200
        )
        joint = 0.5 * stick(a - first, second) + 0.5 * math.exp(-first) * stick(a + first, second) + inner
        assert joint <= stick(a, total) + 1e-9


def test_noise_that_no_integer_holds_is_refused() -> None:
    query = GridSum(total=(0,), grid=2.0**-50, low=0.0, high=1.0)
    for noise in (2.0**6, math.inf):
        with pytest.raises(ReceiptError, match="coarser grid"):
            laplace(query, paid(events.laplace(noise)))
    wide = laplace(GridSum(total=(0,) * 2000, grid=2.0**-50, low=0.0, high=1.0, l1=1.0), paid(events.laplace(16.0)))
    assert stats.kstest(wide.numpy(), "laplace", args=(0, 16.0)).pvalue > ALARM


def test_the_normaliser_of_the_smoothing_gaussian_is_constant() -> None:
    """Sum over k of exp(-(k - y)^2 / 18), which ``gaussian_query`` takes for sqrt(18 pi): to a factor of 2e-77."""
    with mpmath.workdps(120):
        variance = mpmath.mpf(_mechanisms.SMOOTHING) ** 2
        for y in (0, 0.25, 0.5, 0.9):
            total = mpmath.fsum(mpmath.exp(-((k - mpmath.mpf(y)) ** 2) / (2 * variance)) for k in range(-120, 121))
            assert abs(total / mpmath.sqrt(2 * mpmath.pi * variance) - 1) < 2e-77


def test_noisy_max_is_priced_as_what_dominates_every_pure_release() -> None:
    """Randomised response of the same epsilon: P = e^eps / (1 + e^eps), in Renyi divergences and in PLD."""
    event, epsilon = events.noisy_max(3.0), 2 / 3
    p = np.array([math.exp(epsilon), 1.0]) / (1 + math.exp(epsilon))
    for order, price in zip([2.0, 5.0], accounting.renyi(event, Neighbours.ADD_REMOVE, [2.0, 5.0]), strict=True):
        assert price >= math.log(np.sum(p**order * p[::-1] ** (1 - order))) / (order - 1) - 1e-9
    delta = 0.01
    exact = math.log((p[0] - delta) / p[1])  # of (p, reversed p)
    assert exact - 1e-9 <= accounting.guarantee(event, delta=delta).epsilon <= exact * 1.01
