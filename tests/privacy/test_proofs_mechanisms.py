"""Dominating pairs of the mechanisms as they are implemented, checked against docs/proofs.md by high-precision sums."""

import itertools
import math

import mpmath as mp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tacit.privacy import Budget, Ledger, events, grid_sum, mechanisms

ALPHAS = np.exp(np.linspace(-3, 3, 61))


# The grid: rounding commutes with the noise, and moves two sums apart by at most a step in each coordinate.


@settings(max_examples=200, deadline=None)
@given(st.integers(-(2**40), 2**40), st.floats(-1e6, 1e6), st.integers(-30, 10))
def test_a_grid_point_plus_rounded_noise_is_the_rounded_noisy_point(steps: int, noise: float, power: int) -> None:
    """Exactly, in rational numbers, but for ties, which normal noise meets with probability 0."""
    grid = mp.mpf(2) ** power
    exact = mp.mpf(noise) / grid
    if mp.frac(exact) == mp.mpf(0.5):
        return
    assert steps + mp.nint(exact) == mp.nint(steps + exact)


def test_rounding_moves_two_sums_apart_by_at_most_a_step_in_each_coordinate_and_can() -> None:
    random = np.random.default_rng(2)
    for size in (1, 7, 400):
        s, other = random.normal(size=(2, size))
        before, after = np.linalg.norm(s - other), np.linalg.norm(np.round(s) - np.round(other))
        assert after <= before + math.sqrt(size)
        low, high = np.full(size, 0.4999), np.full(size, 0.5001)
        assert np.linalg.norm(np.round(high) - np.round(low)) == pytest.approx(math.sqrt(size))


def test_releases_of_a_gradient_sized_sum_lie_on_a_grid_that_no_row_decides() -> None:
    """The low-order bits of what leaves are those of a public power of two, whatever the sum."""
    ledger = Ledger("sqlite://")
    ledger.subject("s", Budget(50.0, 1e-5))
    steps = []
    for scale in (0.0, 1e-9, 0.7):
        receipt = ledger.charge("s", events.gaussian(3.0), stage="test")
        values = scale * torch.linspace(-1, 1, 1000, dtype=torch.float64) / 20
        found = mechanisms.gaussian(_Sum(values), receipt)["a"]
        steps.append(min(_power(float(value)) for value in found[:200]))
    assert steps[0] == steps[1] == steps[2]


def _power(value: float) -> int:
    """The largest power of two that divides a float."""
    mantissa, exponent = math.frexp(value)
    whole = int(mantissa * 2**53)
    return exponent - 53 + ((whole & -whole).bit_length() - 1 if whole else 2000)


class _Sum:
    def __init__(self, values: torch.Tensor) -> None:
        self.sum, self.bounds, self.blocks = {"a": values}, {"a": 1.0}, {"a": ("a",)}


# gaussian_query: discrete Gaussian noise is post-processing of the continuous one.


@pytest.mark.parametrize("s", [0.3, 2.0])
def test_discrete_noise_of_variance_s2_plus_9_is_continuous_noise_of_s2_drawn_to_integers(s: float) -> None:
    """The law of the two steps against that of the one, by quadrature at 90 digits: a factor within 1e-76 of 1."""
    with mp.workdps(90):
        wide = mp.mpf(s) ** 2 + 9
        whole = mp.nsum(lambda k: mp.e ** (-(k**2) / (2 * wide)), [-mp.inf, mp.inf])
        reach = 20 * mp.mpf(s)

        def normaliser(x: mp.mpf) -> mp.mpf:
            nearest = int(mp.nint(x))
            return mp.fsum(mp.e ** (-((j - x) ** 2) / 18) for j in range(nearest - 62, nearest + 63))

        h = mp.mpf(s) / 5  # the trapezoidal rule is exact to e^(-2 pi^2 s'^2 / h^2), far below 1e-76
        grid = [h * i for i in range(-int(reach / h) - 1, int(reach / h) + 2)]
        weights = [(x, mp.e ** (-(x**2) / (2 * mp.mpf(s) ** 2)) / normaliser(x)) for x in grid]
        norm = h / (mp.mpf(s) * mp.sqrt(2 * mp.pi))
        for k in (0, -3, 8):
            two = norm * mp.fsum(weight * mp.e ** (-((k - x) ** 2) / 18) for x, weight in weights)
            one = mp.e ** (-(mp.mpf(k) ** 2) / (2 * wide)) / whole
            assert abs(two / one - 1) < mp.mpf(10) ** -76


def test_the_normaliser_is_constant_to_1e_76() -> None:
    with mp.workdps(120):
        values = [mp.fsum(mp.e ** (-((j - mp.mpf(x)) ** 2) / 18) for j in range(-130, 131)) for x in (0, 0.25, 0.5)]
        assert abs(values[2] / values[0] - 1) == pytest.approx(4 * mp.e ** (-18 * mp.pi**2), rel=1e-6)
        assert abs(values[1] / (3 * mp.sqrt(2 * mp.pi)) - 1) < 2 * mp.e ** (-18 * mp.pi**2)


# laplace: a contribution that is spread over several values costs no more than one of the same L1 norm in one.


def laplace_loss(shift: float) -> list[tuple[float, float]]:
    """The exact masses of cells of the line under Laplace noise of scale 1, and when it is moved by a shift."""
    edges = np.concatenate([[-math.inf], np.linspace(0, shift, 61), [math.inf]])
    tail = lambda x: np.where(x < 0, np.exp(np.minimum(x, 0)) / 2, 1 - np.exp(-np.maximum(x, 0)) / 2)  # noqa: E731
    return list(zip(np.diff(tail(edges)), np.diff(tail(edges - shift)), strict=True))


def hockey(rows: list[tuple[float, float]], alpha: float) -> float:
    return sum(max(p - alpha * q, 0.0) for p, q in rows)


@pytest.mark.parametrize("shifts", [(0.5, 0.5), (0.2, 1.3), (1.0, 1.0, 1.0)])
def test_spreading_a_contribution_over_values_costs_no_more(shifts: tuple[float, ...]) -> None:
    """Cells are post-processing, so the product is below its truth by a little; one shift is by its closed form."""
    rows = [
        (math.prod(p for p, _ in cells), math.prod(q for _, q in cells))
        for cells in itertools.product(*map(laplace_loss, shifts))
    ]
    p, q = np.array(rows).T
    total = sum(shifts)
    for alpha in ALPHAS:
        a = math.log(alpha)
        one = max(0.0, 1 - alpha) if abs(a) >= total else 1 - math.exp((a - total) / 2)
        assert float(np.maximum(p - alpha * q, 0).sum()) <= one + 1e-9


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_the_divergence_of_one_shift_is_the_closed_form(epsilon: float) -> None:
    x = np.arange(-40, 40, 1e-4) + 5e-5
    p, q = np.exp(-np.abs(x)) / 2, np.exp(-np.abs(x - epsilon)) / 2
    for a in np.linspace(-epsilon, epsilon, 9):
        found = float(np.maximum(p - math.exp(a) * q, 0).sum() * 1e-4)
        assert found == pytest.approx(1 - math.exp((a - epsilon) / 2), abs=1e-6)


def test_laplace_noise_on_the_coarsest_grid_is_rounded_continuous_noise() -> None:
    """Counts on a grid of 1, bound 1, scale 1: P(0) = 1 - e^(-1/2), where discrete Laplace noise has tanh(1/2).

    Of 20,000 draws the share of zeros is off by more than 0.02 with a probability below 1e-7 (Hoeffding).
    """
    ledger = Ledger("sqlite://")
    ledger.subject("s", Budget(1e6, 0.0))
    size = 20_000
    receipt = ledger.charge("s", events.laplace(1.0), stage="test")
    query = grid_sum(torch.zeros(0, size), low=0.0, high=1.0, grid=1.0, l1=1.0)
    found = mechanisms.laplace(query, receipt)
    assert float((found == 0).double().mean()) == pytest.approx(-math.expm1(-0.5), abs=0.02)
