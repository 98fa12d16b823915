"""Epsilon is never below the truth, however small delta is; and no number makes the accountant fail.

The reference has no grid of losses and shares no code with the package. With M(z) the mean of e^(z loss) of one
release, for any c > 0

    delta(epsilon) = 1/(2 pi i) integral over c + iR of M(z)^T e^(-z epsilon) / (z (z + 1)) dz,

because 1/(z (z + 1)) is the Laplace transform of (1 - e^-x)+. Near the c where M(c)^T e^(-c epsilon) is least the
integrand is about as large as delta, so double precision gives many digits of it however small it is. All integrals are
of smooth functions over a line, by the trapezoidal rule.
"""

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from tacit.privacy import Budget, Guarantee, Neighbours, UnsupportedEvent, events, guarantee, noise_multiplier
from tacit.privacy import _pld_numerics as dots
from tacit.privacy import _tilted as tilted

ADD, REPLACE = Neighbours.ADD_REMOVE, Neighbours.REPLACE_ONE


def one_release(rate: float, noise: float, relation: Neighbours) -> tuple[np.ndarray, np.ndarray]:
    """Weights and losses of one Poisson-sampled Gaussian release at the nodes of the trapezoidal rule."""
    mu = 1 / noise
    x = np.linspace(-14 - (mu if relation is REPLACE else 0), 14 + mu, int((28 + 2 * mu) * max(16, 10 * mu)))
    up, down = (np.log1p(rate * np.expm1(sign * mu * x - mu * mu / 2)) for sign in (1, -1))
    loss = up - down if relation is REPLACE else up
    return np.exp(up - x * x / 2) * (x[1] - x[0]) / math.sqrt(2 * math.pi), loss


def delta_by_inversion(
    release: tuple[np.ndarray, np.ndarray], steps: int, epsilon: float, period: float, share: float
) -> float:
    weights, losses = release

    def log_moment(c: float) -> float:
        with np.errstate(over="ignore"):
            return float(steps * np.log1p(weights @ np.expm1(c * losses)))

    least = minimize_scalar(
        lambda s: min(log_moment(math.exp(s)) - math.exp(s) * epsilon, 1e9), bounds=(-3, 5), method="bounded"
    )
    c = share * math.exp(least.x)
    base, step = log_moment(c) - c * epsilon, 2 * math.pi / max(45 / c, period)
    total, block = 0.0, 512
    for start in range(0, 200 * block, block):
        z = c + 1j * step * np.arange(start, start + block)
        values = np.exp(steps * np.log1p(np.expm1(np.multiply.outer(z, losses)) @ weights) - z * epsilon - base)
        values /= z * (z + 1)
        total += float(values.real.sum()) - (float(values[0].real) / 2 if start == 0 else 0.0)
        if abs(values[-1]) * abs(z[-1]) < 1e-10 * abs(total):
            return total * step / math.pi * math.exp(base)
    raise AssertionError("the reference did not converge")


def check(rate: float, noise: float, steps: int, delta: float, relation: Neighbours, loose: float = 0.93) -> Guarantee:
    """The claim holds by the reference, and is not wasteful."""
    found = guarantee(events.poisson(rate, events.gaussian(noise), steps), delta=delta, neighbours=relation)
    assert found.accountant == "PLD, pessimistic"
    release = one_release(rate, noise, relation)
    truth = delta_by_inversion(release, steps, found.epsilon, 60, 0.7)
    assert truth == pytest.approx(delta_by_inversion(release, steps, found.epsilon, 90, 0.6), rel=1e-6)  # it is sure
    assert loose * delta <= truth <= delta * (1 + 1e-6)
    return found


def test_the_case_that_was_claimed_too_low() -> None:
    """Before: 5.05572, the rounding of the Fourier transform."""
    found = check(1.41e-4, 0.522, 4295, 1.95e-11, ADD)
    assert found.epsilon == pytest.approx(5.0652, abs=2e-4)


def test_a_million_rarely_sampled_steps() -> None:
    check(1e-5, 0.5, 10**6, 1e-6, ADD, loose=0.9)


def cases(count: int) -> list[tuple[float, float, int, float, Neighbours]]:
    chance = random.Random(20)
    drawn = []
    while len(drawn) < count:
        rate, noise = 10 ** chance.uniform(-4, -0.5), 10 ** chance.uniform(-0.3, 1.3)
        steps, relation = int(10 ** chance.uniform(1.7, 4.5)), chance.choice([ADD, REPLACE])
        low, high = chance.choice([(-11, -10.3), (-18, -5)])
        size = rate * math.sqrt(steps * math.expm1(min(noise**-2, 5.0)))  # neither nothing nor everything is lost
        if 0.03 < size < 2:
            drawn.append((rate, noise, steps, 10 ** chance.uniform(low, high), relation))
    return drawn


@pytest.mark.parametrize(("rate", "noise", "steps", "delta", "relation"), cases(24))
def test_the_claim_is_not_below_the_truth(
    rate: float, noise: float, steps: int, delta: float, relation: Neighbours
) -> None:
    check(rate, noise, steps, delta, relation)


@pytest.mark.parametrize("delta", [1e-5, 1e-12, 1e-30, 1e-90])
def test_gaussians_through_the_grid_agree_with_the_closed_form(delta: float) -> None:
    """A thousand Gaussians of mu = 0.05 on a grid are one of mu = 0.05 sqrt(1000), at any delta."""
    grid, mu = 2e-3, 0.05
    one = dots.gaussian(mu, grid, 40.0 if delta < 1e-20 else 12.0)
    found = tilted.epsilon(tilted.compose([(one, 1000)], delta), grid, delta)
    exact = guarantee(events.gaussian(1 / mu, 1000), delta=delta).epsilon
    assert exact <= found <= exact * 1.002


def test_the_stated_error_covers_the_fourier_transform() -> None:
    """What the composed tilted distribution lacks, in the 2-norm, against direct convolution in long double.

    What it has too much wrapped around, and is on the safe side.
    """
    rng = np.random.default_rng(0)
    mass = rng.random(40) ** 8
    mass /= mass.sum()
    composed = tilted.compose([(dots.Losses(-7, mass, 0.0), 64)], 1e-9)
    exact = np.ones(1, dtype=np.longdouble)
    for _ in range(64):
        exact = np.convolve(exact, mass.astype(np.longdouble))
    k = composed.first + np.arange(len(composed.tilted))
    there = exact[k + 7 * 64] * np.exp(composed.tilt * k.astype(np.longdouble) - np.longdouble(composed.log_scale))
    lacking = float(np.linalg.norm(np.maximum(there - composed.tilted, 0).astype(float)))
    assert lacking <= composed.error


def test_many_rare_steps_no_longer_answer_infinity() -> None:
    """Before: epsilon = inf, as 1e-16 per step had reached delta."""
    found = guarantee(events.poisson(1.36e-4, events.gaussian(72.8), 256_191), delta=1.76e-11)
    assert found.epsilon == pytest.approx(0.004913, rel=1e-3)
    by_rdp = guarantee(events.poisson(1.36e-4, events.gaussian(72.8), 256_191), delta=1.76e-11, accountant="rdp")
    assert found.epsilon < by_rdp.epsilon


def test_the_noise_of_rare_draws_under_replace_one() -> None:
    """Before: "cannot convert float NaN to integer"."""
    budget = Budget(0.714, 6.8e-6)
    plan = lambda s: events.poisson(3.06e-4, events.gaussian(s), 84)  # noqa: E731
    noise = noise_multiplier(budget, plan, neighbours=REPLACE)
    assert budget.epsilon * (1 - 2e-4) <= guarantee(plan(noise), delta=6.8e-6, neighbours=REPLACE).epsilon <= 0.714


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_many_rates_on_one_noise_are_rounded_up(accountant: str) -> None:
    """Before: a division by zero with more than 256 of them."""
    rates = [0.001 * (1 + k / 300) for k in range(300)]
    event = events.compose(events.poisson(rate, events.gaussian(1.0)) for rate in rates)
    found = guarantee(event, delta=1e-6, accountant=accountant).epsilon  # type: ignore[arg-type]
    least, most = (
        guarantee(events.poisson(rate, events.gaussian(1.0), 300), delta=1e-6, accountant=accountant).epsilon  # type: ignore[arg-type]
        for rate in (rates[0], rates[-1])
    )
    assert least < found < most


def test_many_rates_and_many_noises_are_rounded_to_the_safe_side(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(3)
    pairs = [(10 ** chance.uniform(-3, -2), chance.uniform(1, 2)) for _ in range(80)]
    event = events.compose(events.poisson(rate, events.gaussian(noise)) for rate, noise in pairs)
    exact = guarantee(event, delta=1e-6).epsilon
    monkeypatch.setattr("tacit.privacy._pld.DISTINCT", 64)
    assert exact <= guarantee(event, delta=1e-6).epsilon <= exact * 1.5


@pytest.mark.parametrize("noise", [1e308, 1e200, 1e160, math.inf])
def test_huge_noise_costs_next_to_nothing(noise: float) -> None:
    for event in (events.gaussian(noise), events.laplace(noise), events.joint([noise, noise]), events.noisy_max(noise)):
        assert guarantee(event, delta=1e-6).epsilon < 1e-8
    for event in (events.gaussian(noise), events.laplace(noise)):
        assert guarantee(events.poisson(0.1, event), delta=1e-6).epsilon < 1e-8


@pytest.mark.parametrize("noise", [5e-324, 1e-308, 1e-160, 0.0])
def test_noise_that_is_none_is_not_private(noise: float) -> None:
    for event in (
        events.gaussian(noise, 3),
        events.laplace(noise),
        events.joint([noise, 1.0]),
        events.noisy_max(noise),
    ):
        assert math.isinf(guarantee(event, delta=1e-6).epsilon)
    assert math.isinf(guarantee(events.poisson(0.1, events.gaussian(noise)), delta=1e-6).epsilon)


def test_what_pld_cannot_take_falls_back_and_says_so() -> None:
    sampled = events.poisson(0.01, events.gaussian(1.0), 1000)
    assert "RDP because a delta below" in str(guarantee(sampled, delta=1e-120))
    loud = guarantee(events.poisson(0.5, events.gaussian(1e-4), 10), delta=1e-6)
    assert "too large for PLD's grid" in str(loud)
    plain = guarantee(events.gaussian(1e-4, 10), delta=1e-6).epsilon
    assert loud.epsilon <= plain


wide = st.floats(-6, 6).map(lambda e: 10.0**e)
odd = st.sampled_from([5e-324, 1e-308, 1e-100, 1e-20, 1e20, 1e100, 1e308, math.inf])


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    noise=st.one_of(wide, odd),
    rate=st.one_of(st.floats(-9, 0).map(lambda e: 10.0**e), st.sampled_from([5e-324, 1 - 1e-16, 0.999])),
    steps=st.floats(0, 7).map(lambda e: int(10**e)),
    delta=st.one_of(st.floats(-20, -0.01).map(lambda e: 10.0**e), st.sampled_from([5e-324, 1e-300, 1e-99, 0.999999])),
    relation=st.sampled_from(list(Neighbours)),
    kind=st.integers(0, 4),
)
def test_every_number_gets_an_answer_and_more_never_costs_less(
    noise: float, rate: float, steps: int, delta: float, relation: Neighbours, kind: int
) -> None:
    def cost(noise: float, rate: float, steps: int, delta: float) -> float:
        event = [
            lambda: events.gaussian(noise, steps),
            lambda: events.laplace(noise, steps),
            lambda: events.noisy_max(noise),
            lambda: events.poisson(rate, events.gaussian(noise), steps),
            lambda: events.compose([events.poisson(rate, events.gaussian(noise)), events.laplace(noise)]),
        ][kind]()
        found = guarantee(event, delta=delta, neighbours=relation)
        assert found.epsilon >= 0
        return found.epsilon if found.accountant in ("PLD, pessimistic", "exact Gaussian") else math.nan

    try:
        here = cost(noise, rate, steps, delta)
        others = [
            cost(noise / 1.3, rate, steps, delta),
            cost(noise, min(1.0, rate * 1.3), steps, delta),
            cost(noise, rate, steps + 1 + steps // 4, delta),
            cost(noise, rate, steps, delta / 1.3),
        ]
    except UnsupportedEvent:
        return
    for other in others:
        if not math.isnan(here) and not math.isnan(other):
            assert other >= here * (1 - 2e-3) - 1e-9
