"""Conversions against mpmath and the golden numbers; guarantees as sentences that never promise too much."""

import math
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tacit.privacy._budget import (
    Budget,
    Guarantee,
    Neighbours,
    Unit,
    delta_of,
    epsilon_of,
    log_delta_of,
    mu_of,
    mu_of_pure,
    round_up,
)

mpmath.mp.dps = 60

mus = st.floats(math.log(1e-4), math.log(50)).map(math.exp)
epsilons = st.one_of(st.just(0.0), st.floats(math.log(1e-6), math.log(1000)).map(math.exp))
deltas = st.floats(math.log(1e-15), math.log(0.99)).map(math.exp)


def exact_delta(epsilon: float, mu: float) -> mpmath.mpf:
    e, m = mpmath.mpf(epsilon), mpmath.mpf(mu)
    return mpmath.ncdf(-e / m + m / 2) - mpmath.exp(e) * mpmath.ncdf(-e / m - m / 2)


@pytest.mark.parametrize("kind", [np.float16, np.float32, torch.tensor])
def test_a_budget_in_few_bits_is_converted_before_it_is_computed_with(kind: Any) -> None:
    """In 16 bits mu would be 0.03% more than epsilon and delta pay for."""
    budget = Budget(kind(1.1), kind(1e-5))
    assert (type(budget.epsilon), type(budget.delta)) == (float, float)
    assert budget.mu == Budget(float(kind(1.1)), float(kind(1e-5))).mu


# The three directions


@settings(deadline=None, max_examples=150)
@given(epsilons, mus)
def test_delta_agrees_with_mpmath(epsilon: float, mu: float) -> None:
    exact = exact_delta(epsilon, mu)
    log = float(mpmath.log(exact))
    assert abs(log_delta_of(epsilon, mu) - log) <= 1e-9 * max(1.0, abs(log))
    if exact > 1e-15:
        assert abs(delta_of(epsilon, mu) / exact - 1) <= 1e-9


@settings(deadline=None, max_examples=150)
@given(mus, deltas)
def test_epsilon_agrees_with_mpmath(mu: float, delta: float) -> None:
    epsilon = epsilon_of(mu, delta)
    if epsilon == 0:
        assert exact_delta(0, mu) <= delta * (1 + 1e-12)
        return
    e, m = mpmath.mpf(epsilon), mpmath.mpf(mu)
    slope = mpmath.exp(e) * mpmath.ncdf(-e / m - m / 2)  # -d delta / d epsilon
    error = float(abs(exact_delta(epsilon, mu) - delta) / slope)  # one Newton step away from the exact root
    unavoidable = 1e-13 * float(delta / slope)  # what the last bits of delta and mu decide, where epsilon is near 0
    assert error <= 1e-9 * epsilon + unavoidable


@settings(deadline=None, max_examples=150)
@given(epsilons, deltas)
def test_mu_agrees_with_mpmath(epsilon: float, delta: float) -> None:
    mu = mu_of(epsilon, delta)
    slope = mpmath.npdf(-mpmath.mpf(epsilon) / mu + mpmath.mpf(mu) / 2)  # d delta / d mu
    assert float(abs(exact_delta(epsilon, mu) - delta) / slope) <= 1e-9 * mu


@settings(deadline=None, max_examples=100)
@given(st.floats(math.log(1e-12), math.log(690)).map(math.exp))
def test_dominating_mu_of_pure_epsilon_agrees_with_mpmath(epsilon: float) -> None:
    mu, e = mpmath.mpf(mu_of_pure(epsilon)), mpmath.mpf(epsilon)
    error = (mpmath.ncdf(-mu / 2) - 1 / (1 + mpmath.exp(e))) / (mpmath.npdf(mu / 2) / 2)
    assert abs(float(error)) <= 1e-12 * float(mu)


@pytest.mark.parametrize("epsilon", [700.0, 1000.0, 1e6])
def test_dominating_mu_of_a_huge_pure_epsilon_is_an_upper_bound(epsilon: float) -> None:
    tail = mpmath.ncdf(-mpmath.mpf(mu_of_pure(epsilon)) / 2)
    assert tail <= 1 / (1 + mpmath.exp(epsilon))
    assert mu_of_pure(epsilon) <= 1.02 * 2 * math.sqrt(2 * epsilon - math.log(4 * math.pi * epsilon))


@settings(deadline=None, max_examples=100)
@given(st.floats(0.01, 20), st.floats(1e-6, 1 - 1e-6))
def test_the_dominating_gaussian_is_nowhere_harder_to_tell_apart_than_pure_epsilon(eps: float, alpha: float) -> None:
    pure = max(0.0, 1 - math.exp(eps) * alpha, math.exp(-eps) * (1 - alpha))  # the trade-off function of pure epsilon
    mu = mpmath.mpf(mu_of_pure(eps))
    gaussian = mpmath.ncdf(mpmath.sqrt(2) * mpmath.erfinv(1 - 2 * mpmath.mpf(alpha)) - mu)
    assert float(gaussian) <= pure * (1 + 1e-9) + 1e-12


@settings(deadline=None, max_examples=60)
@given(epsilons, mus, st.floats(1.0001, 3.0))
def test_more_mu_costs_more_and_more_epsilon_leaves_less_delta(epsilon: float, mu: float, more: float) -> None:
    assert log_delta_of(epsilon, mu * more) >= log_delta_of(epsilon, mu)
    assert log_delta_of(epsilon * more, mu) <= log_delta_of(epsilon, mu)


@settings(deadline=None, max_examples=60)
@given(mus, deltas, st.floats(1.0001, 3.0))
def test_epsilon_and_mu_are_monotone(mu: float, delta: float, more: float) -> None:
    assert epsilon_of(mu * more, delta) >= epsilon_of(mu, delta)
    assert epsilon_of(mu, min(delta * more, 0.999)) <= epsilon_of(mu, delta)
    assert mu_of(mu * more, delta) > mu_of(mu, delta)
    assert mu_of(mu, min(delta * more, 0.999)) >= mu_of(mu, delta)


def test_limits() -> None:
    assert [delta_of(1.0, 0.0), delta_of(1.0, math.inf), delta_of(math.inf, 1.0)] == [0, 1, 0]
    assert [epsilon_of(mu, 1e-6) for mu in (0.0, 1e200, math.inf)] == [0, math.inf, math.inf]
    assert [epsilon_of(1.0, 0.0), epsilon_of(1e-4, 0.5)] == [math.inf, 0]
    assert [mu_of(1.0, 0.0), mu_of(math.inf, 1e-6)] == [0, math.inf]
    assert [mu_of_pure(0.0), mu_of_pure(math.inf)] == [0, math.inf]
    for wrong in (lambda: epsilon_of(-1.0, 0.1), lambda: epsilon_of(1.0, 1.0), lambda: mu_of(-1.0, 0.1)):
        with pytest.raises(ValueError, match="must"):
            wrong()


# Golden numbers


@pytest.mark.parametrize(("epsilon", "sigma"), [(1, 8.4494), (5, 1.9601), (10, 1.0822), (15, 0.7763), (20, 0.6182)])
def test_exact_sigma_under_replace_one(epsilon: float, sigma: float) -> None:
    assert Neighbours.REPLACE_ONE.factor / mu_of(epsilon, 1e-6) == pytest.approx(sigma, abs=5.1e-5)


@pytest.mark.parametrize(
    ("sigma", "epsilon"), [(8.594, 0.982), (1.966, 4.983), (1.084, 9.980), (0.777, 14.984), (0.619, 19.966)]
)
def test_rounded_sigmas_of_the_paper(sigma: float, epsilon: float) -> None:
    assert epsilon_of(2 / sigma, 1e-6) == pytest.approx(epsilon, abs=5.1e-4)


@pytest.mark.parametrize(
    ("first", "second", "final", "total"),
    [
        (0.1, 0.2, 0.88, 0.9963),
        (0.05, 0.1, 0.96, 0.9917),
        (0.05, 0.2, 0.9, 0.9972),
        (0.01, 0.05, 0.99, 0.9973),
        (0.2, 0.3, 0.7, 1.0050),
    ],
)
def test_linear_scaling_rows(first: float, second: float, final: float, total: float) -> None:
    mu = math.sqrt(3 * mu_of(first, 1e-5) ** 2 + 3 * mu_of(second, 1e-5) ** 2 + mu_of(final, 1e-5) ** 2)
    assert epsilon_of(mu, 1e-5) == pytest.approx(total, abs=5.1e-5)


def test_full_batch_descent() -> None:
    assert math.sqrt(100) / mu_of(0.01, 1e-5) == pytest.approx(2437.9, abs=0.051)


# Guarantees


@settings(deadline=None, max_examples=60)
@given(st.floats(0.01, 10), deltas, st.integers(1, 6))
def test_a_group_of_a_gaussian_release_multiplies_mu(mu: float, delta: float, size: int) -> None:
    one = Guarantee(epsilon=epsilon_of(mu, delta), delta=delta, mu=mu)
    group = one.group(size)
    assert group.mu == pytest.approx(size * mu)
    assert group.delta == delta
    assert group.epsilon == pytest.approx(epsilon_of(size * mu, delta))


@settings(deadline=None, max_examples=60)
@given(st.floats(0.01, 5), st.floats(1e-12, 1e-3), st.integers(1, 6))
def test_a_group_without_mu_is_a_chain_of_neighbours(epsilon: float, delta: float, size: int) -> None:
    group = Guarantee(epsilon=epsilon, delta=delta).group(size)
    grown = 0.0
    for _ in range(size):  # P(S) <= e^eps Q(S) + delta, applied along the chain
        grown = grown * math.exp(epsilon) + delta
    assert group.epsilon == pytest.approx(size * epsilon)
    assert group.delta == pytest.approx(min(1.0, grown), rel=1e-12)
    assert Guarantee(epsilon=epsilon, delta=0.0).group(size).delta == 0


def test_replacing_is_removing_and_adding() -> None:
    plain = Guarantee(epsilon=0.5, delta=1e-6).under(Neighbours.REPLACE_ONE)
    assert (plain.epsilon, plain.delta) == pytest.approx((1.0, 1e-6 * (1 + math.exp(0.5))))
    assert plain.neighbours is Neighbours.REPLACE_ONE
    gaussian = Guarantee(epsilon=epsilon_of(0.3, 1e-6), delta=1e-6, mu=0.3, neighbours=Neighbours.ZERO_OUT)
    assert gaussian.under(Neighbours.REPLACE_ONE).mu == pytest.approx(0.6)
    assert gaussian.under(Neighbours.ZERO_OUT) is gaussian
    for here, there in [("replace-one", "add-remove"), ("zero-out", "add-remove"), ("add-remove", "zero-out")]:
        with pytest.raises(ValueError, match="account under that relation"):
            Guarantee(epsilon=1.0, delta=1e-6, neighbours=Neighbours(here)).under(Neighbours(there))
    with pytest.raises(ValueError, match="says nothing"):
        Guarantee(epsilon=1.0, delta=0.0, neighbours=None).under(Neighbours.REPLACE_ONE)
    with pytest.raises(ValueError, match="at least one unit"):
        plain.group(0)


@settings(deadline=None, max_examples=300)
@given(st.floats(1e-12, 1e12), st.integers(1, 8))
def test_rounding_for_people_is_close_and_never_below(value: float, digits: int) -> None:
    shown = float(round_up(value, digits))
    assert shown >= value * (1 - 1e-12)
    assert shown <= value * (1 + 10.0 ** (1 - digits)) * (1 + 1e-12)


def test_rounding_of_round_and_odd_numbers() -> None:
    assert [round_up(x) for x in (1.0, 0.5, 1000.0, 0.0, math.inf)] == ["1", "0.5", "1000", "0", "inf"]
    assert [round_up(x) for x in (1.00001, 9.9991, 9.9999, 0.30000000000000004)] == ["1.001", "10", "10", "0.3"]


def test_a_guarantee_is_a_sentence() -> None:
    promise = Guarantee(
        epsilon=1.00004, delta=1.0000004e-6, mu=0.23671, neighbours=Neighbours.REPLACE_ONE, unit="patient", notes=("x",)
    )
    assert str(promise) == (
        "(1.001, 1.00001e-06)-differential privacy: when one patient is replaced by any other, no set of outcomes "
        "becomes more than e^1.001 times as likely, plus a probability of 1.00001e-06. mu = 0.2368; "
        "accountant: exact; x."
    )
    assert promise.private
    assert promise.upper == promise.epsilon
    pure = str(Guarantee(epsilon=2.0, delta=0.0, neighbours=None))
    assert "plus" not in pure
    assert "each under its own relation" in pure


def test_what_is_not_private_says_so_first() -> None:
    for promise in (Guarantee(epsilon=math.inf, delta=1e-6), Guarantee(epsilon=1.0, delta=1.0)):
        assert str(promise).startswith("not private")
        assert not promise.private
    seeded = Guarantee(epsilon=1.0, delta=1e-6, seeded=True)
    assert str(seeded).startswith("seeded: not private. (1, 1e-06)-differential privacy")
    assert not seeded.private
    assert str(Budget(math.inf, 1e-6)).endswith("(not private)")
    assert str(Budget(1.0, 1e-6)) == "epsilon 1, delta 1e-06"


# Validation


@pytest.mark.parametrize(
    ("epsilon", "delta"), [(0, 0.1), (-1, 0.1), (math.nan, 0.1), (1, -0.1), (1, 1), (1, 2), (1, math.nan)]
)
def test_budgets_that_make_no_sense(epsilon: float, delta: float) -> None:
    with pytest.raises(ValueError, match=r"^(Epsilon|Delta) must .*; got .*\.$"):
        Budget(epsilon, delta)


def test_budgets() -> None:
    assert Budget(1, 0).pure
    assert Budget(1, 0).mu == 0
    assert Budget(1.0, 1e-6).mu == mu_of(1.0, 1e-6)
    assert not Budget(math.inf, 1e-6).private
    assert Budget(math.inf, 1e-6).mu == math.inf


def test_relations() -> None:
    assert [n.factor for n in Neighbours] == [1, 2, 1]
    assert Neighbours("replace-one") is Neighbours.REPLACE_ONE
    with pytest.raises(ValueError, match="'swap': choose one of add-remove, replace-one, zero-out"):
        Neighbours("swap")


def test_units() -> None:
    assert [Unit.SAMPLE, Unit.VIDEO, Unit.PATIENT, Unit.USER] == ["sample", "video", "patient", "user"]
    assert Unit("household") == "household"
    for wrong in ("", "  ", "x" * 41, "a\nb", 3):
        with pytest.raises(ValueError, match="short noun"):
            Unit(wrong)  # type: ignore[arg-type]
