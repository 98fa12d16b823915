"""Epsilon from event trees and noise from targets, against closed forms, dp-accounting, opacus and brute force."""

import math
from random import Random

import numpy as np
import pytest
from dp_accounting import NeighboringRelation, dp_event
from dp_accounting.pld import PLDAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.accountants import PRVAccountant
from scipy.integrate import quad
from scipy.stats import norm

from tacit.privacy import Budget, Ledger, Neighbours, UnsupportedEvent, events, guarantee, noise_multiplier
from tacit.privacy import _pld as loss
from tacit.privacy._budget import epsilon_of, mu_of, mu_of_pure
from tacit.privacy.accounting import best_order, epsilon_of_renyi, pure_epsilon, renyi, renyi_of_epsilon

ADD, REPLACE, ZERO = Neighbours.ADD_REMOVE, Neighbours.REPLACE_ONE, Neighbours.ZERO_OUT
quick = settings(max_examples=25, deadline=None, derandomize=True)
noises = st.floats(0.5, 8.0)


def their_pld(event: dp_event.DpEvent, delta: float, relation: Neighbours = ADD, step: float = 1e-4) -> float:
    """dp-accounting's own PLD."""
    name = NeighboringRelation.REPLACE_ONE if relation is REPLACE else NeighboringRelation.ADD_OR_REMOVE_ONE
    accountant = PLDAccountant(name, step)
    accountant.compose(event)
    return float(accountant.get_epsilon(delta))


# The two checks of the design.


def test_a_gaussian_and_a_laplace_release_under_replace_one() -> None:
    event = events.compose([events.gaussian(2.0), events.laplace(5.0)])
    found = guarantee(event, delta=1e-6, neighbours=REPLACE)
    assert found.epsilon == pytest.approx(5.160, abs=1e-3)
    halved = events.compose([events.gaussian(1.0), events.laplace(2.5)])
    assert found.epsilon == pytest.approx(their_pld(halved, 1e-6), rel=1e-4)


def test_two_releases_of_one_draw_are_one_joint_gaussian_sampled_once() -> None:
    root = math.sqrt(2)
    one_draw = events.poisson(0.01, events.compose([events.gaussian(root), events.gaussian(root)]), 1000)
    assert guarantee(one_draw, delta=1e-5).epsilon == pytest.approx(1.828, abs=1e-3)
    by_joint = events.poisson(0.01, events.joint([root, root]), 1000)
    assert guarantee(by_joint, delta=1e-5).epsilon == guarantee(one_draw, delta=1e-5).epsilon
    two_draws = events.repeat(events.poisson(0.01, events.gaussian(root)), 2000)  # what a wrong reading would claim
    assert guarantee(two_draws, delta=1e-5).epsilon == pytest.approx(1.441, abs=2e-3)


# Against others.


@pytest.mark.parametrize("relation", list(Neighbours))
@pytest.mark.parametrize(
    ("rate", "noise", "steps"), [(0.01, 1.0, 1000), (0.3, 0.7, 20), (1e-3, 5.0, 100), (0.9, 2.0, 50)]
)
def test_sampled_gaussians_agree_with_dp_accounting(
    relation: Neighbours, rate: float, noise: float, steps: int
) -> None:
    event = events.poisson(rate, events.gaussian(noise), steps)
    mine, theirs = (
        guarantee(event, delta=1e-5, neighbours=relation).epsilon,
        their_pld(event, 1e-5, relation, 1e-4 if noise < 5 else 1e-5),
    )
    assert mine == pytest.approx(theirs, rel=1e-3)
    assert mine >= theirs * (1 - 1e-3)


@pytest.mark.parametrize(("rate", "noise"), [(0.2, 1.0), (0.5, 0.8), (0.05, 2.0)])
def test_one_sampled_release_under_replace_one_by_integration(rate: float, noise: float) -> None:
    def densities(x: float) -> tuple[float, float]:
        middle, up, down = (norm.pdf(x, m, noise) for m in (0, 1, -1))
        return (1 - rate) * middle + rate * up, (1 - rate) * middle + rate * down

    epsilon = guarantee(events.poisson(rate, events.gaussian(noise)), delta=1e-4, neighbours=REPLACE).epsilon
    excess = lambda x: max(0.0, densities(x)[0] - math.exp(epsilon) * densities(x)[1])  # noqa: E731
    delta = quad(excess, -12 * noise, 12 * noise + 1, limit=400, points=[0.0, 1.0])[0]
    assert delta == pytest.approx(1e-4, rel=2e-3)


@pytest.mark.parametrize(
    "event", [events.laplace(3.0, 20), events.compose([events.laplace(2.0, 3), events.gaussian(1.5)])]
)
def test_laplace_agrees_with_dp_accounting(event: dp_event.DpEvent) -> None:
    mine, theirs = guarantee(event, delta=1e-5).epsilon, their_pld(event, 1e-5)
    assert theirs * (1 - 1e-6) <= mine <= theirs * (1 + 1e-4)


@pytest.mark.parametrize(("rate", "noise", "steps"), [(0.01, 1.0, 1000), (0.004, 0.8, 5000), (0.05, 2.0, 300)])
def test_pld_lies_inside_the_bracket_of_opacus_prv(rate: float, noise: float, steps: int) -> None:
    accountant = PRVAccountant()
    accountant.history = [(noise, rate, steps)]
    error = 1e-3
    dprv = accountant._get_dprv(eps_error=error, delta_error=1e-8)
    low, _, high = dprv.compute_epsilon(1e-5, 1e-8, error)
    mine = guarantee(events.poisson(rate, events.gaussian(noise), steps), delta=1e-5).epsilon
    assert low <= mine <= high


def test_independent_numerical_convolution_of_a_mixture() -> None:
    """A sampled Gaussian, a Gaussian and two Laplace releases, by brute-force convolution of histograms of the loss."""
    rate, noise, step = 0.1, 1.0, 1e-3
    x = np.linspace(-12, 13, 2_000_001)
    weights = {
        "sampled": ((1 - rate) * norm.pdf(x, 0, noise) + rate * norm.pdf(x, 1, noise), norm.pdf(x, 0, noise)),
        "plain": (norm.pdf(x, 0.5), norm.pdf(x)),
        "laplace": (np.exp(-np.abs(x - 0.25)) / 2, np.exp(-np.abs(x)) / 2),
    }

    def histogram(p: np.ndarray, q: np.ndarray) -> np.ndarray:
        place = np.rint(np.log(p / q) / step).astype(int) + 20_000
        return np.bincount(np.clip(place, 0, 39_999), p * (x[1] - x[0]), 40_000)

    total = np.ones(1)
    for name in ("sampled", "plain", "laplace", "laplace"):
        total = (
            np.convolve(total, histogram(*weights[name]))
            if len(total) == 1
            else _convolve(total, histogram(*weights[name]))
        )
    losses = (np.arange(len(total)) - 4 * 20_000) * step
    event = events.compose([events.poisson(rate, events.gaussian(noise)), events.gaussian(2.0), events.laplace(4.0, 2)])
    epsilon = guarantee(event, delta=1e-3).epsilon
    delta = float(total @ np.maximum(0.0, -np.expm1(epsilon - losses)))
    assert delta == pytest.approx(1e-3, rel=5e-3)


def _convolve(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    size = len(a) + len(b) - 1
    return np.fft.irfft(np.fft.rfft(a, size) * np.fft.rfft(b, size), size)


# Laws.

GRID = [
    events.gaussian(1.5, 10),
    events.laplace(4.0, 5),
    events.noisy_max(6.0),
    events.poisson(0.02, events.gaussian(1.2), 200),
    events.schedule([1.0, 2.0, 4.0], 0.1),
    events.compose([events.gaussian(3.0), events.laplace(6.0), events.poisson(0.1, events.gaussian(2.0), 10)]),
    events.repeat(dp_event.DiscreteLaplaceDpEvent(0.2, 1), 4),
]


@pytest.mark.parametrize("relation", list(Neighbours))
@pytest.mark.parametrize("event", GRID, ids=range(len(GRID)))
@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-9])
def test_pld_is_never_above_rdp(event: dp_event.DpEvent, relation: Neighbours, delta: float) -> None:
    by_pld = guarantee(event, delta=delta, neighbours=relation)
    if events.is_sampled(event) and relation is REPLACE:
        with pytest.raises(UnsupportedEvent, match="PLD only"):
            guarantee(event, delta=delta, neighbours=relation, accountant="rdp")
    else:
        assert by_pld.epsilon <= guarantee(event, delta=delta, neighbours=relation, accountant="rdp").epsilon * (
            1 + 1e-9
        )


@quick
@given(st.lists(noises, min_size=1, max_size=5), st.randoms(use_true_random=False), st.sampled_from(list(Neighbours)))
def test_order_does_not_matter_and_more_never_costs_less(
    parts: list[float], random: Random, relation: Neighbours
) -> None:
    kinds = [events.gaussian, events.laplace, lambda s: events.poisson(0.1, events.gaussian(s), 3)]
    tree = [kinds[i % 3](noise) for i, noise in enumerate(parts)]
    shuffled = list(tree)
    random.shuffle(shuffled)
    cost = guarantee(events.compose(tree), delta=1e-6, neighbours=relation).epsilon
    assert guarantee(events.compose(shuffled), delta=1e-6, neighbours=relation).epsilon == pytest.approx(cost, rel=1e-6)
    more = guarantee(events.compose([*tree, events.gaussian(5.0)]), delta=1e-6, neighbours=relation).epsilon
    assert more >= cost


@quick
@given(st.lists(noises, min_size=1, max_size=6), st.sampled_from(list(Neighbours)))
def test_unsampled_gaussians_compose_exactly(parts: list[float], relation: Neighbours) -> None:
    found = guarantee(events.schedule(parts), delta=1e-6, neighbours=relation)
    mu = relation.factor * math.sqrt(sum(noise**-2 for noise in parts))
    assert found.mu == pytest.approx(mu, rel=1e-12)
    assert found.epsilon == pytest.approx(epsilon_of(mu, 1e-6), rel=1e-12)
    assert found.lower == found.upper == found.epsilon


def test_a_pure_release_counts_by_its_dominating_mu_under_gdp() -> None:
    found = guarantee(events.compose([events.gaussian(2.0), events.laplace(5.0)]), delta=1e-6, accountant="gdp")
    assert found.mu == pytest.approx(math.hypot(0.5, mu_of_pure(0.2)))
    with pytest.raises(UnsupportedEvent, match="neither a plain Gaussian nor pure"):
        guarantee(events.poisson(0.1, events.gaussian(1.0)), delta=1e-6, accountant="gdp")


# Pure epsilon.


def test_pure_epsilon_is_a_plain_sum() -> None:
    event = events.compose([events.laplace(5.0, 3), events.noisy_max(4.0)])
    assert guarantee(event, delta=0).epsilon == pytest.approx(3 / 5 + 2 / 4)
    assert guarantee(event, delta=0, neighbours=REPLACE).epsilon == pytest.approx(6 / 5 + 4 / 4)
    with pytest.raises(UnsupportedEvent, match="no pure epsilon"):
        guarantee(events.gaussian(5.0), delta=0)
    assert noise_multiplier(Budget(2, 0), lambda b: events.laplace(b, 10)) == pytest.approx(5.0)


# Refusals.


def test_what_has_no_bound_is_refused() -> None:
    with pytest.raises(UnsupportedEvent, match="replace-one or zero-out"):
        guarantee(events.stream(2.0, 100), delta=1e-6)
    with pytest.raises(UnsupportedEvent, match="no known bound"):
        guarantee(events.poisson(0.1, events.laplace(1.0)), delta=1e-6, neighbours=REPLACE)
    with pytest.raises(UnsupportedEvent, match="RandomizedResponse"):
        guarantee(dp_event.RandomizedResponseDpEvent(0.5, 2), delta=1e-6)
    with pytest.raises(ValueError, match="Unknown accountant"):
        guarantee(events.gaussian(1.0), delta=1e-6, accountant="magic")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not negative"):
        guarantee(events.gaussian(-1.0), delta=1e-6)


def test_a_stream_is_one_release_however_long() -> None:
    for steps in (1, 10_000):
        assert guarantee(events.stream(2.0, steps), delta=1e-6, neighbours=ZERO).mu == 0.5
        assert guarantee(events.stream(2.0, steps), delta=1e-6, neighbours=REPLACE).mu == 1.0


def test_no_noise_is_not_private() -> None:
    for event in (events.gaussian(0.0), dp_event.NonPrivateDpEvent(), events.poisson(0.1, events.gaussian(0.0))):
        found = guarantee(event, delta=1e-6)
        assert math.isinf(found.epsilon)
        assert not found.private
        assert "not private" in str(found)


# The fall-back and its reason.


def test_rdp_serves_and_says_why() -> None:
    sampled = events.poisson(0.01, events.gaussian(1.0), 1000)
    late = guarantee(sampled, delta=1e-5, time_limit=-1.0)
    assert "time limit" in str(late)
    assert late.epsilon == guarantee(sampled, delta=1e-5, accountant="rdp").epsilon
    assert "delta below" in str(guarantee(sampled, delta=1e-120))
    best = dp_event.RepeatAndSelectDpEvent(events.gaussian(10.0), 5.0, 1.0)
    assert "PLD cannot take RepeatAndSelectDpEvent" in str(guarantee(best, delta=1e-6))
    drawn = dp_event.SampledWithoutReplacementDpEvent(1000, 10, events.gaussian(2.0))  # by PLD: test_fixed_size.py
    assert "time limit" in str(guarantee(drawn, delta=1e-6, neighbours=REPLACE, time_limit=-1.0))


def test_no_call_hangs() -> None:
    """Twenty thousand different releases: with no time for PLD it answers by RDP, and it answers."""
    hard = events.schedule([0.5 + k * 1e-5 for k in range(20_000)], 0.001)
    found = guarantee(hard, delta=1e-6, time_limit=0.0)
    assert "RDP because" in str(found)


def test_a_long_schedule_is_rounded_to_the_safe_side(monkeypatch: pytest.MonkeyPatch) -> None:
    event = events.schedule([math.exp(-k / 60) * 3 for k in range(60)], 0.1)
    exact = guarantee(event, delta=1e-6).epsilon
    monkeypatch.setattr(loss, "DISTINCT", 20)
    rounded = guarantee(event, delta=1e-6).epsilon
    assert exact <= rounded <= exact * 1.08


# From a target to the noise.


@pytest.mark.parametrize(("epsilon", "sigma"), [(1, 8.4494), (5, 1.9601), (10, 1.0822), (15, 0.7763), (20, 0.6182)])
def test_golden_noise_of_one_release_under_replace_one(epsilon: float, sigma: float) -> None:
    assert noise_multiplier(Budget(epsilon, 1e-6), neighbours=REPLACE) == pytest.approx(sigma, abs=5e-5)


def test_full_batch_steps_by_closed_form() -> None:
    found = noise_multiplier(Budget(0.01, 1e-5), lambda s: events.gaussian(s, 100))
    assert found == pytest.approx(10 / mu_of(0.01, 1e-5), rel=1e-12)
    assert found == pytest.approx(2437.9, abs=0.05)


PLANS = {
    "poisson": lambda s: events.poisson(0.01, events.gaussian(s), 1000),
    "decaying": lambda s: events.schedule([s * math.exp(-k / 20) for k in range(20)], 0.1),
    "laplace": lambda s: events.laplace(s, 7),
    "mixture": lambda s: events.compose(
        [events.poisson(0.02, events.gaussian(s), 50), events.laplace(20.0, 2), events.gaussian(3 * s)]
    ),
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("epsilon", [0.5, 4.0])
def test_the_noise_meets_its_target_from_below(name: str, epsilon: float) -> None:
    budget = Budget(epsilon, 1e-5)
    found = guarantee(PLANS[name](noise_multiplier(budget, PLANS[name])), delta=budget.delta).epsilon
    assert epsilon * (1 - 2e-4) <= found <= epsilon


def test_calibrated_noise_holds_on_a_finer_grid_of_dp_accounting() -> None:
    event = PLANS["poisson"](noise_multiplier(Budget(2, 1e-5), PLANS["poisson"]))
    assert 1.97 <= their_pld(event, 1e-5, step=5e-5) <= 2.0005


def test_a_target_below_the_fixed_part_is_refused() -> None:
    with pytest.raises(UnsupportedEvent, match="No amount of noise"):
        noise_multiplier(Budget(0.5, 1e-5), lambda s: events.compose([events.laplace(0.5), events.gaussian(s)]))


def test_infinite_epsilon_needs_no_noise() -> None:
    assert noise_multiplier(Budget(math.inf, 1e-5)) == 0.0


# Renyi.


@quick
@given(st.floats(1.5, 100), st.floats(0.1, 10), st.floats(1e-12, 1e-2))
def test_renyi_conversion_is_its_own_inverse(order: float, epsilon: float, delta: float) -> None:
    divergence = renyi_of_epsilon(order, Budget(epsilon, delta))
    if divergence > 0:
        assert epsilon_of_renyi(order, divergence, delta) == pytest.approx(epsilon, rel=1e-9)


def test_renyi_divergence_of_a_gaussian_is_order_mu_squared_over_two() -> None:
    assert renyi(events.gaussian(2.0, 3), REPLACE, [4.0])[0] == pytest.approx(3 * 4.0 * 1.0 / 2)


def test_the_best_order_pays_for_the_most() -> None:
    budget, event = Budget(2.0, 1e-5), events.poisson(0.01, events.gaussian(1.0), 100)
    best = best_order(budget, event)
    value = renyi_of_epsilon(best, budget) / renyi(event, ADD, [best])[0]
    for order in (2.0, 4.0, 16.0, 64.0):
        assert value >= renyi_of_epsilon(order, budget) / renyi(event, ADD, [order])[0]


@pytest.mark.parametrize("noise", [1e155, 1e163, 1e300, 1.7e308])
def test_a_gaussian_is_never_pure_however_large_its_noise(noise: float) -> None:
    """The square of its mu underflowed: a pure budget paid for it, with nothing."""
    with pytest.raises(UnsupportedEvent):
        pure_epsilon(events.gaussian(noise), Neighbours.ADD_REMOVE)
    ledger = Ledger("sqlite://")
    ledger.subject("a", Budget(1.0, 1e-5), unit="sample", neighbours="add-remove")
    ledger.charge("a", events.gaussian(noise), stage="x")
    assert ledger._book.standing("a").spent > 0
