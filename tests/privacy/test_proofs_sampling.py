"""Poisson sampling, checked against docs/proofs.md by quadrature: any two contributions in a plane, each relation."""

import math

import numpy as np
import pytest
from scipy.special import ndtr, ndtri

from tacit.privacy import Neighbours, events, guarantee
from tacit.privacy import _pld_numerics as dots

STEP = 0.02
AXIS = np.arange(-9.5, 9.5, STEP) + STEP / 2
X, Y = np.meshgrid(AXIS, AXIS, indexing="ij")
ALPHAS = [0.05, 0.5, 0.9, 1.0, 1.1, 1.5, 2.0, 5.0, 20.0]


def bell(mean: tuple[float, float]) -> np.ndarray:
    return np.exp(-((X - mean[0]) ** 2 + (Y - mean[1]) ** 2) / 2) / (2 * math.pi)


def mixture(q: float, mean: tuple[float, float]) -> np.ndarray:
    return (1 - q) * bell((0, 0)) + q * bell(mean)


def hockey(p: np.ndarray, q: np.ndarray, alpha: float) -> float:
    """sup over sets of P - alpha Q, in the plane, by the midpoint rule."""
    return float(np.maximum(p - alpha * q, 0).sum() * STEP**2)


def by_half_lines(q: float, mu: float, alpha: float) -> float:
    """The best half-line {x > -Phi^-1(a)} against contributions mu and -mu."""
    a = np.concatenate([[0.0, 1.0], ndtr(np.linspace(-9, 9, 200_001))])
    with np.errstate(invalid="ignore"):
        up, down = ndtr(ndtri(a) + mu), ndtr(ndtri(a) - mu)
    return float(((1 - q) * (1 - alpha) * a + q * up - alpha * q * down).max())


@pytest.mark.parametrize(("q", "mu"), [(0.1, 1.0), (0.5, 2.0), (0.9, 0.7)])
def test_under_replace_one_no_two_contributions_in_the_plane_are_worse_than_opposite_ones(q: float, mu: float) -> None:
    random = np.random.default_rng(1)
    bounds = {alpha: by_half_lines(q, mu, alpha) for alpha in ALPHAS}
    for _ in range(6):
        angles, lengths = random.uniform(0, 2 * math.pi, 2), mu * np.sqrt(random.uniform(0, 1, 2))
        u, v = [(r * math.cos(t), r * math.sin(t)) for r, t in zip(lengths, angles, strict=True)]
        p, other = mixture(q, u), mixture(q, v)
        for alpha in ALPHAS:
            assert hockey(p, other, alpha) <= bounds[alpha] + 1e-6
    u = (mu * math.cos(1), mu * math.sin(1))
    p, other = mixture(q, u), mixture(q, (-u[0], -u[1]))
    for alpha in ALPHAS:
        assert hockey(p, other, alpha) == pytest.approx(bounds[alpha], abs=2e-5)


@pytest.mark.parametrize(("q", "z"), [(0.01, 0.8), (0.2, 1.5)])
def test_the_accountants_pair_under_replace_one_is_that_of_half_lines(q: float, z: float) -> None:
    for epsilon in (0.05, 0.3, 1.0):
        delta = by_half_lines(q, 1 / z, math.exp(epsilon))
        if delta > 1e-9:
            event = events.poisson(q, events.gaussian(z))
            found = guarantee(event, delta=delta, neighbours=Neighbours.REPLACE_ONE).epsilon
            assert epsilon * (1 - 1e-6) <= found <= epsilon * 1.01 + 1e-3


@pytest.mark.parametrize(("q", "mu"), [(0.1, 1.0), (0.5, 2.0)])
def test_under_add_remove_the_longest_contribution_is_the_worst(q: float, mu: float) -> None:
    """Both directions, at every alpha; and shorter ones are post-processing of longer ones."""
    absent = bell((0, 0))
    worst = mixture(q, (mu * math.cos(2), mu * math.sin(2)))
    for length in (0.3 * mu, 0.9 * mu):
        p = mixture(q, (0.0, length))
        for alpha in ALPHAS:
            assert hockey(p, absent, alpha) <= hockey(worst, absent, alpha) + 1e-6
            assert hockey(absent, p, alpha) <= hockey(absent, worst, alpha) + 1e-6


def test_a_lower_rate_never_costs_more() -> None:
    for relation in (Neighbours.ADD_REMOVE, Neighbours.REPLACE_ONE):
        found = [
            guarantee(events.poisson(q, events.gaussian(1.0), steps=50), delta=1e-5, neighbours=relation).epsilon
            for q in (0.001, 0.01, 0.05, 0.2, 0.7)
        ]
        assert found == sorted(found)


@pytest.mark.parametrize(("q", "mu"), [(0.1, 1.0), (0.02, 2.5)])
def test_the_arrays_of_losses_have_the_divergence_of_their_pair_at_grid_points(q: float, mu: float) -> None:
    """Connecting the dots: at every grid point the divergence of the pair, above it in between."""
    grid = 0.01
    losses = dots.sampled_gaussian_replace(q, mu, grid, 12.0)
    levels = grid * (losses.first + np.arange(len(losses.probabilities)))
    for epsilon in (0.0, 0.1, 0.105, 0.5):
        share = np.where(levels > epsilon, -np.expm1(epsilon - levels), 0.0)
        found = losses.infinite + float(losses.probabilities @ share)
        exact = by_half_lines(q, mu, math.exp(epsilon))
        assert exact - 1e-9 <= found <= exact + 1e-5 * grid + (0 if epsilon != 0.105 else grid * exact)


def test_two_releases_of_one_draw_in_the_plane_are_one_release_of_their_joint_noise() -> None:
    """A unit that adds (1/2, 1) standard deviations to two sums of one draw, against one sum moved by sqrt(1.25)."""
    q, u = 0.2, (0.5, 1.0)
    p, absent, size = mixture(q, u), bell((0, 0)), math.hypot(*u)
    line = np.arange(-12, 12, 1e-4)
    zero, one = (np.exp(-((line - m) ** 2) / 2) / math.sqrt(2 * math.pi) for m in (0.0, size))
    for alpha in (1.0, 1.5, 3.0):
        joint = float(np.maximum((1 - q) * zero + q * one - alpha * zero, 0).sum() * 1e-4)
        assert hockey(p, absent, alpha) == pytest.approx(joint, abs=2e-5)
