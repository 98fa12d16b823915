"""Repeat and select: how often, at which price, and that only the winner's releases are paid for."""

import copy
import math
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant
from scipy import integrate, optimize, stats

from tacit.privacy import (
    Budget,
    Ledger,
    LedgerError,
    Neighbours,
    Unit,
    accounting,
    events,
    guarantee,
    leases,
    mechanisms,
    rehearsal,
    replay,
    selection,
)
from tacit.privacy._noise import NoiseKey
from tacit.privacy._queries import grid_sum
from tacit.privacy._receipts import Receipt, ReceiptError
from tacit.privacy.accounting import ORDERS, UnsupportedEvent, halting, renyi
from tacit.privacy.events import DpEvent
from tacit.privacy.selection import SelectionTrials, best, number_of_trials

ALARM = 1e-7  # the false-alarm probability of each statistical test
SHAPES = [0.0, 0.5, 1.0, 3.0, math.inf]
INNER = events.compose([events.gaussian(6.0, 4), events.gaussian(4.0)])  # four steps and a score: joint noise 2.4


def search(inner: DpEvent = INNER, *, mean: float = 10.0, shape: float = 1.0) -> DpEvent:
    return events.repeat_and_select(inner, mean=mean, shape=shape)


def charged(event: DpEvent | None = None, *, seed: int | None = 1, **terms: Any) -> Receipt:
    event = search() if event is None else event
    ledger = Ledger("sqlite://")
    ledger.subject("s", Budget(1e4, 1e-5), plan=[event], **terms)
    return ledger.charge("s", event, stage="tune", seed=seed)


def charge_on(ledger: Ledger, event: DpEvent, **terms: Any) -> Receipt:
    ledger.subject("s", Budget(8.0, 1e-5), **terms)
    return ledger.charge("s", event, stage="tune")


def release(receipt: Receipt, size: int = 1) -> torch.Tensor:
    return mechanisms.gaussian_query(grid_sum(torch.zeros(1, size), low=0.0, high=1.0, grid=2.0**-20), receipt)


# The number of trials


def gamma_of(mean: float, shape: float) -> float:
    """The halting probability, from the paper's formulas for the mean (definition 1)."""

    def mean_of(gamma: float) -> float:
        if shape == 0:
            return (1 / gamma - 1) / math.log(1 / gamma)
        return shape * (1 - gamma) / float(gamma * (1 - gamma**shape))

    return float(optimize.brentq(lambda gamma: mean_of(gamma) - mean, 1e-7, 1 - 1e-9, xtol=1e-16))


def pmf(k: np.ndarray[Any, Any], mean: float, shape: float) -> np.ndarray[Any, Any]:
    """The closed forms, through scipy's own distributions."""
    if math.isinf(shape):
        return np.asarray(stats.poisson.pmf(k, mean))
    gamma = gamma_of(mean, shape)
    if shape == 0:
        return np.asarray(stats.logser.pmf(k, 1 - gamma))
    return np.asarray(np.where(k > 0, stats.nbinom.pmf(k, shape, gamma) / (1 - gamma**shape), 0.0))


@lru_cache
def drawn(mean: float, shape: float, runs: int) -> np.ndarray[Any, Any]:
    key, event = NoiseKey(("number", mean, shape)), search(mean=mean, shape=shape)
    return np.array([number_of_trials(event, *key.uniforms(i, 2, 3).tolist()) for i in range(runs)])


@pytest.mark.parametrize("mean", [1.5, 10.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_number_has_the_distribution_that_was_charged(shape: float, mean: float) -> None:
    """Chi-square over the numbers that are likely enough, the tail as one cell; and a z-test of the mean."""
    runs = 3_000
    found = drawn(mean, shape, runs)
    numbers = np.arange(0, 2000)
    shares = pmf(numbers, mean, shape)
    assert shares.sum() == pytest.approx(1, abs=1e-9)
    assert (numbers * shares).sum() == pytest.approx(mean, rel=1e-7)
    likely = runs * shares > 20
    expected = runs * np.append(shares[likely], max(1 - shares[likely].sum(), 0.0))
    counts = np.array([(found == k).sum() for k in numbers[likely]])
    counts = np.append(counts, runs - counts.sum())
    rare = expected < 5
    assert counts[rare].sum() < 40  # at most 5 expected: below 1e-20 by Poisson's tail
    cells = ~rare
    statistic = ((counts[cells] - expected[cells]) ** 2 / expected[cells]).sum()
    assert stats.chi2.sf(statistic, cells.sum() - 1) > ALARM
    spread = math.sqrt((numbers**2 * shares).sum() - mean**2)
    assert abs(found.mean() - mean) < 6.5 * spread / math.sqrt(runs)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_number_is_the_inverse_of_the_distribution_function(shape: float) -> None:
    """Between two values of the closed form's distribution function, and right up to both of them."""
    event, numbers = search(mean=7.0, shape=shape), np.arange(0, 60)
    upto = np.cumsum(pmf(numbers, 7.0, shape))
    for number in range(0 if math.isinf(shape) else 1, 20):
        above = upto[number - 1] if number else 0.0
        for place in (1e-4, 0.5, 1 - 1e-4):
            assert number_of_trials(event, above + place * (upto[number] - above), 0.5) == number


def test_the_far_tail_is_that_of_the_closed_form() -> None:
    """At the last of 2^106 values the geometric number is log(2^-107)/log(1 - gamma), rounded up; then the first."""
    event = search(mean=10.0, shape=1.0)
    assert number_of_trials(event, 1.0, 1.0) == math.ceil(107 * math.log(2) / -math.log1p(-0.1))
    assert number_of_trials(event, 2**-53, 2**-53) == 1
    assert number_of_trials(search(mean=10.0, shape=math.inf), 2**-53, 2**-53) == 0
    tail = number_of_trials(search(mean=10.0, shape=math.inf), 1.0, 2**-53)  # one part in 2^53 is left
    assert stats.poisson.sf(tail - 1, 10.0) >= 2**-53 * 0.999 >= stats.poisson.sf(tail, 10.0) * 0.999


@pytest.mark.parametrize("shape", SHAPES[:-1])
def test_a_mean_of_one_is_one_trial(shape: float) -> None:
    event = search(mean=1.0, shape=shape)
    assert {number_of_trials(event, high, 0.7) for high in (1e-9, 0.5, 1 - 1e-12)} == {1}


@pytest.mark.parametrize("shape", SHAPES[:-1])
@pytest.mark.parametrize("mean", [1.0001, 3.0, 400.0, 1e6])
def test_the_mean_is_met_and_not_passed(mean: float, shape: float) -> None:
    stop = halting(mean, shape)
    reached = math.expm1(stop) * (shape / -math.expm1(-shape * stop) if shape else 1 / stop)
    assert reached <= mean * (1 + 1e-15)
    assert reached == pytest.approx(mean, rel=1e-12)


# The price


def by_the_paper(mu: float, mean: float, shape: float, delta: float, extra: Callable[[float], float]) -> float:
    """Epsilon of the winner by theorems 2 and 6; one trial is a Gaussian of ``mu`` and something of RDP ``extra``."""

    def one(order: float) -> float:
        return order * mu**2 / 2 + extra(order)

    def epsilon(order: float) -> float:
        if math.isinf(shape):
            near = math.log(1 + 1 / (order - 1))
            if extra(2.0) == 0:
                delta_hat = stats.norm.cdf(-near / mu + mu / 2) - math.exp(near) * stats.norm.cdf(-near / mu - mu / 2)
            else:
                delta_hat = min(
                    1.0,
                    *(math.exp((o - 1) * (one(o) - near)) * (1 - 1 / o) ** (o - 1) / o for o in ORDERS if o < 64),
                )
            bound = one(order) + mean * delta_hat + math.log(mean) / (order - 1)
        else:
            gamma = gamma_of(mean, shape)
            bound = min(
                one(order)
                + (1 + shape) * (1 - 1 / other) * one(other)
                + (1 + shape) * math.log(1 / gamma) / other
                + math.log(mean) / (order - 1)
                for other in ORDERS
            )
        return float(bound) + math.log((order - 1) / order) - (math.log(delta) + math.log(order)) / (order - 1)

    return min(epsilon(order) for order in ORDERS)


def laplace_rdp(scale: float) -> Callable[[float], float]:
    """Mironov (2017), proposition 6."""

    def divergence(a: float) -> float:
        weights = math.log(a / (2 * a - 1)), math.log((a - 1) / (2 * a - 1))
        return float(np.logaddexp(weights[0] + (a - 1) / scale, weights[1] - a / scale)) / (a - 1)

    return divergence


@pytest.mark.parametrize("neighbours", list(Neighbours))
@pytest.mark.parametrize("shape", SHAPES)
def test_epsilon_is_that_of_the_paper(shape: float, neighbours: Neighbours) -> None:
    """Four steps and a score, all Gaussian: one joint Gaussian of the relation's factor over the joint noise."""
    mu = neighbours.factor * math.sqrt(4 / 6.0**2 + 1 / 4.0**2)
    found = guarantee(search(shape=shape), delta=1e-6, neighbours=neighbours)
    assert found.epsilon == pytest.approx(by_the_paper(mu, 10.0, shape, 1e-6, lambda _: 0.0), rel=1e-9)
    assert "RDP because PLD cannot take RepeatAndSelectDpEvent" in str(found)


@pytest.mark.parametrize("neighbours", [Neighbours.ADD_REMOVE, Neighbours.REPLACE_ONE])
@pytest.mark.parametrize("shape", SHAPES)
def test_epsilon_with_a_score_of_another_kind(shape: float, neighbours: Neighbours) -> None:
    """Gaussian steps and a Laplace score: their divergences add inside the search."""
    inner = events.compose([events.gaussian(8.0, 4), events.laplace(5.0)])
    mu, scale = neighbours.factor / 4.0, 5.0 / neighbours.factor
    found = guarantee(search(inner, shape=shape), delta=1e-6, neighbours=neighbours).epsilon
    assert found == pytest.approx(by_the_paper(mu, 10.0, shape, 1e-6, laplace_rdp(scale)), rel=1e-7)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("inner", [events.gaussian(2.0), events.poisson(0.05, events.gaussian(1.0), 100)])
def test_epsilon_is_dp_accountings(inner: DpEvent, shape: float) -> None:
    """The same as its RDP accountant, or lower for Poisson and Gaussians, where a run's delta is known exactly."""
    event = search(inner, shape=shape)
    accountant = RdpAccountant(list(ORDERS))
    accountant.compose(event)
    theirs, ours = accountant.get_epsilon(1e-6), guarantee(event, delta=1e-6).epsilon
    if math.isinf(shape):
        assert 0.5 * theirs < ours <= theirs * (1 + 1e-9)
    else:
        assert ours == pytest.approx(theirs, rel=1e-7)


def test_ten_trials_cost_more_than_one_and_less_than_ten() -> None:
    """Golden numbers at delta 1e-6 and noise 2: one run, the best of ten in the mean, all ten."""
    one, ten = (guarantee(events.gaussian(2.0, steps), delta=1e-6).epsilon for steps in (1, 10))
    prices = {shape: guarantee(search(events.gaussian(2.0), shape=shape), delta=1e-6).epsilon for shape in SHAPES}
    for shape, price in prices.items():
        assert one < price < ten
        assert price == pytest.approx(by_the_paper(0.5, 10.0, shape, 1e-6, lambda _: 0.0), rel=1e-9)
    assert prices[0.0] < prices[0.5] < prices[1.0] < prices[3.0]


def test_one_order_may_look_at_all_others() -> None:
    """Asked for a single order (as a renyi ledger does) the second one is still the best of all."""
    alone = renyi(search(), Neighbours.ADD_REMOVE, [4.25])[0]
    other = renyi(search(), Neighbours.ADD_REMOVE, [*ORDERS, 4.25])[-1]
    assert alone == other < renyi(search(), Neighbours.ADD_REMOVE, [60.0])[0]


@pytest.mark.parametrize("mode", ["plan", "renyi"])
def test_sampling_under_replace_one_is_refused_inside_a_search_as_outside(mode: str) -> None:
    event = search(events.poisson(0.01, events.gaussian(1.0), 100))
    with pytest.raises(UnsupportedEvent, match="account under add-remove or zero-out"):
        guarantee(event, delta=1e-5, neighbours=Neighbours.REPLACE_ONE)
    ledger = Ledger("sqlite://")
    plan: Any = {"plan": [event]} if mode == "plan" else {"mode": mode}
    with pytest.raises(UnsupportedEvent, match="account under add-remove or zero-out"):
        charge_on(ledger, event, neighbours="replace-one", **plan)


@pytest.mark.parametrize(("mean", "shape"), [(0.5, 1.0), (0.0, math.inf), (math.nan, 1.0), (3.0, -1.0)])
def test_the_accountant_believes_no_impossible_numbers(mean: float, shape: float) -> None:
    with pytest.raises(ValueError, match=r"at least one trial|shape is 0"):
        guarantee(dp_event.RepeatAndSelectDpEvent(INNER, mean, shape), delta=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_search_that_shows_nothing_costs_next_to_nothing(shape: float) -> None:
    """Infinite noise: what remains are the bounds' own logarithms, which the largest orders make small."""
    assert 0 <= guarantee(search(events.gaussian(math.inf)), delta=1e-5).epsilon < 0.01
    assert renyi(search(events.gaussian(math.inf), shape=shape), Neighbours.ADD_REMOVE, [4096.0])[0] < 0.01


def test_a_long_schedule_inside_a_search_is_rounded_towards_less_noise() -> None:
    """A hundred different releases cost no less than they do one by one, and hardly more."""
    scales = [10.0 + 0.2 * step for step in range(100)]
    found = guarantee(search(events.compose(map(events.laplace, scales))), delta=1e-5).epsilon
    one = lru_cache(None)(lambda order: sum(laplace_rdp(scale)(order) for scale in scales))
    exact = by_the_paper(0.0, 10.0, 1.0, 1e-5, one)
    assert exact <= found < 1.05 * exact


def test_a_search_without_noise_is_not_private() -> None:
    assert guarantee(search(events.gaussian(0.0)), delta=1e-5).epsilon == math.inf


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mean": 0.5}, "at least one trial"),
        ({"mean": math.inf}, "finitely many"),
        ({"mean": math.nan}, "at least one trial"),
        ({"shape": -0.1}, "shape is 0"),
        ({"shape": math.nan}, "shape is 0"),
        ({"inner": events.compose([])}, "releases nothing"),
        ({"inner": events.stream(2.0, 10)}, "no stream"),
        ({"inner": search()}, "no other search"),
    ],
)
def test_searches_that_make_no_sense_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        search(**arguments)


# What the price must cover: the exact density of the best of K noisy scores


def log_generating_slope(shape: float, mean: float, s: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The log of G'(s), G(s) = E[s^K]: the best of K scores with density f and distribution F has density G'(F) f."""
    if math.isinf(shape):
        return np.asarray(math.log(mean) + mean * (s - 1))
    gamma = gamma_of(mean, shape)
    whole = math.log(1 / gamma) if shape == 0 else (gamma**-shape - 1) / shape
    return np.asarray(math.log(1 - gamma) - (1 + shape) * np.log(1 - (1 - gamma) * s) - math.log(whole))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_best_of_many_scores_stays_within_its_price(shape: float, sign: float) -> None:
    """Exact, by integration: the winner's noisy score when one unit moves every trial's score by the bound.

    Divergences at several orders and delta at the charged epsilon; one score may be the larger or the smaller.
    """
    noise, mean, delta = 2.0, 10.0, 1e-6
    event = search(events.gaussian(noise), mean=mean, shape=shape)
    y = np.linspace(-14, 14, 200_001)
    shift = sign / noise
    logs = [
        stats.norm.logpdf(y - by) + log_generating_slope(shape, mean, stats.norm.cdf(y - by)) for by in (0.0, shift)
    ]
    zero_sum = math.exp(-mean) if math.isinf(shape) else 0.0
    assert integrate.simpson(np.exp(logs[0]), x=y) + zero_sum == pytest.approx(1, abs=1e-9)
    exact = []
    for order in (1.5, 2.0, 4.0, 8.0):
        mass = integrate.simpson(np.exp(order * logs[0] + (1 - order) * logs[1]), x=y) + zero_sum
        exact.append(math.log(mass) / (order - 1))
    bounds = renyi(event, Neighbours.ADD_REMOVE, [1.5, 2.0, 4.0, 8.0])
    assert all(found <= bound for found, bound in zip(exact, bounds, strict=True))
    epsilon = guarantee(event, delta=delta).epsilon
    lost = integrate.simpson(np.maximum(np.exp(logs[0]) - math.exp(epsilon) * np.exp(logs[1]), 0), x=y)
    assert lost <= delta


# The audit


def epsilon_lower(more: int, fewer: int, runs: int, delta: float) -> float:
    """A lower bound on epsilon from counts of one event under two neighbours (Clopper-Pearson, 1 - 1e-7 each)."""
    low = stats.beta.ppf(ALARM, more, runs - more + 1)
    high = stats.beta.isf(ALARM, fewer + 1, runs - fewer)
    return math.log(max(low - delta, 1e-12) / high)


def audited(numbers: np.ndarray[Any, Any], noise: float, threshold: float, delta: float) -> float:
    """Every score is 1 higher with one unit there: how much more often is the winner's at most the threshold without?

    ``numbers`` of trials are drawn by the mechanism; the scores' noise is drawn here, for speed.
    """
    generator, runs = np.random.default_rng(5), len(numbers)
    starts = np.concatenate([[0], np.cumsum(numbers)[:-1]])
    without, with_it = (
        np.maximum.reduceat(move + noise * generator.standard_normal(numbers.sum()), starts) for move in (0.0, 1.0)
    )
    return epsilon_lower(int((without <= threshold).sum()), int((with_it <= threshold).sum()), runs, delta)


def test_the_audit_finds_a_search_within_its_price_and_twenty_runs_outside_that_of_one() -> None:
    """A fixed number of 20 runs, of which the best leaves, sold at the price of one run is found out."""
    noise, delta, runs = 2.0, 1e-2, 8_000
    one = guarantee(events.gaussian(noise), delta=delta).epsilon
    price = guarantee(search(events.gaussian(noise), mean=10.0, shape=1.0), delta=delta).epsilon
    honest = [audited(drawn(10.0, 1.0, runs), noise, at, delta) for at in (-4.0, -2.0, 0.0, 2.0)]
    assert 0 < max(honest) <= price
    broken = audited(np.full(runs, 20), noise, 2.5, delta)
    assert broken > one


# Trials and their receipts


def test_a_search_runs_as_many_trials_as_its_key_says() -> None:
    receipt = charged(search(mean=4.0), seed=3)
    assert receipt.used == 0
    trials = SelectionTrials(receipt)
    assert receipt.used == 1 == receipt.releases
    uniforms = NoiseKey((3, "s", 1)).uniforms(0, 2, 3).tolist()
    assert len(list(trials)) == number_of_trials(receipt.event, *uniforms)
    assert list(trials) == []


def test_a_poisson_search_may_have_no_trial_and_no_winner() -> None:
    event = search(mean=1.0, shape=math.inf)
    seed = next(seed for seed in range(100) if NoiseKey((seed, "s", 1)).uniforms(0, 2, 3)[0] < 0.36)
    assert best((1.0, trial) for trial in SelectionTrials(charged(event, seed=seed))) is None


def first_trial(receipt: Receipt | None = None) -> selection.SelectionTrial:
    return next(SelectionTrials(receipt or charged()))


def test_an_inner_receipt_states_what_the_search_states() -> None:
    receipt = charged(neighbours="replace-one", unit="patient", seed=None)
    inner = first_trial(receipt).pay()
    assert inner.live
    assert inner.event == INNER
    assert inner.releases == 5
    for name in ("subject", "stage", "note", "neighbours", "unit", "mode", "head", "bound", "seeded"):
        assert getattr(inner, name) == getattr(receipt, name)
    assert inner.id != receipt.id
    for _ in range(5):
        release(inner)
    with pytest.raises(ReceiptError, match="No GaussianDpEvent is left"):
        release(inner)


@pytest.mark.parametrize("steps", [1, 7, 400])
def test_other_numbers_of_steps_at_the_same_price_are_paid(steps: int) -> None:
    """T steps of noise sqrt(T)/mu cost what four of noise 6 cost: mu = 1/3."""
    trial = first_trial()
    training, score = trial.pay(events.gaussian(3 * math.sqrt(steps), steps)), trial.pay(events.gaussian(4.0))
    assert training.releases == steps
    assert score.releases == 1
    with pytest.raises(ReceiptError, match="costs more than one trial"):
        trial.pay(events.gaussian(1000.0))


LAPLACE = events.compose([events.gaussian(6.0, 4), events.laplace(5.0)])
SAMPLED = events.compose([events.poisson(0.1, events.gaussian(1.0), 50), events.gaussian(4.0)])


@pytest.mark.parametrize(
    ("inner", "event"),
    [
        (INNER, events.gaussian(2.39)),
        (INNER, events.compose([INNER, events.gaussian(1e5)])),
        (INNER, events.laplace(1e6)),
        (INNER, events.gaussian(0.0)),
        (LAPLACE, events.compose([events.gaussian(3.0), events.laplace(4.9)])),
        (LAPLACE, events.laplace(5.0, 2)),
        (SAMPLED, events.poisson(0.1, events.gaussian(1.0), 51)),
        (SAMPLED, events.poisson(0.11, events.gaussian(1.0), 40)),
        (SAMPLED, events.gaussian(3.9)),
        (INNER, dp_event.NonPrivateDpEvent()),
    ],
)
def test_what_costs_more_than_one_trial_is_refused(inner: DpEvent, event: DpEvent) -> None:
    trial = first_trial(charged(search(inner)))
    with pytest.raises(ReceiptError, match="costs more than one trial"):
        trial.pay(event)
    assert trial.pay().live  # nothing was paid for what was refused


@pytest.mark.parametrize(
    ("inner", "event"),
    [
        (INNER, events.gaussian(2.4)),
        (LAPLACE, events.compose([events.laplace(5.0), events.gaussian(3.0)])),
        (SAMPLED, events.compose([events.gaussian(4.0), *[events.poisson(0.1, events.gaussian(1.0), 25)] * 2])),
    ],
)
def test_what_costs_as_much_or_less_is_paid(inner: DpEvent, event: DpEvent) -> None:
    paid = first_trial(charged(search(inner))).pay(event)
    assert paid.event == event
    for order in (1.5, 8.0, 64.0):
        costs = [renyi(e, Neighbours.ADD_REMOVE, [order])[0] for e in (event, inner)]
        assert costs[0] <= costs[1] * (1 + 1e-9)


def test_every_receipt_of_every_trial_has_noise_of_its_own() -> None:
    """Seeded, so that all noise is from the keys: no two streams share a value, and their correlations are small."""
    trials = list(SelectionTrials(charged(search(mean=30.0), seed=next(_long()))))[:5]
    streams = [
        part._key.normals(0, 4000)
        for t in trials
        for part in (t.pay(events.gaussian(9.0)), t.pay(events.gaussian(9.0)))
        if part._key
    ]
    streams += [trial.uniforms(4000) - 0.5 for trial in trials]
    values = torch.cat(streams).tolist()
    assert len(set(values)) == len(values)
    correlations = torch.corrcoef(torch.stack(streams)) - torch.eye(len(streams))
    assert float(correlations.abs().max()) < 7.2 / math.sqrt(4000)  # 105 pairs of standard normals, nearly: below 1e-10


def _long() -> Iterator[int]:
    """Seeds of searches with at least five trials."""
    event = search(mean=30.0)
    for seed in range(100):
        if number_of_trials(event, *NoiseKey((seed, "s", 1)).uniforms(0, 2, 3).tolist()) >= 5:
            yield seed


def test_settings_are_drawn_from_the_key_and_stay_the_same_within_a_trial() -> None:
    first, again = (first_trial(charged(seed=8)) for _ in range(2))
    assert torch.equal(first.uniforms(3), again.uniforms(3))
    assert torch.equal(first.uniforms(3), first.uniforms(5)[:3])
    assert not torch.equal(first.uniforms(3), first_trial(charged(seed=None)).uniforms(3))


def test_seeded_searches_reproduce_and_say_so() -> None:
    def winner(seed: int | None) -> tuple[float, tuple[float, str]] | None:
        def run(trial: selection.SelectionTrial) -> tuple[torch.Tensor, tuple[float, str]]:
            inner = trial.pay()
            model = sum(float(release(inner)) for _ in range(4))
            return release(inner), (model, str(inner))

        found = best(run(trial) for trial in SelectionTrials(charged(seed=seed)))
        return found and (found[0], (found[1][0], found[1][1][16:]))

    assert winner(4) == winner(4) != winner(None)
    assert "(seeded: not private)" in str(first_trial(charged(seed=4)).pay())
    assert "seeded" not in str(first_trial(charged(seed=None)).pay())


def test_one_receipt_serves_one_search() -> None:
    receipt = charged()
    SelectionTrials(receipt)
    with pytest.raises(ReceiptError, match="1 of 1 releases were used"):
        SelectionTrials(receipt)


@pytest.mark.parametrize("event", [INNER, events.compose([search(), events.gaussian(9.0)]), events.repeat(search(), 2)])
def test_only_the_receipt_of_one_search_starts_one(event: DpEvent) -> None:
    receipt = charged(event)
    with pytest.raises(ReceiptError, match="receipt for one search"):
        SelectionTrials(receipt)
    with pytest.raises(ReceiptError, match="receipt for one search"):
        SelectionTrials(None)  # type: ignore[arg-type]
    assert receipt.used == 0


def test_the_searchs_own_receipt_releases_nothing() -> None:
    receipt = charged()
    with pytest.raises(ReceiptError, match="it paid for RepeatAndSelectDpEvent"):
        release(receipt)


def test_a_search_made_by_hand_is_checked() -> None:
    with pytest.raises(ValueError, match="no stream"):
        SelectionTrials(
            charged(dp_event.RepeatAndSelectDpEvent(events.stream(2.0, 5), 3.0, 1.0), neighbours="zero-out")
        )


def test_contributions_beyond_the_searchs_bound_are_refused() -> None:
    ledger = Ledger("sqlite://")
    ledger.subject("s", Budget(1e4, 1e-5), plan=[search()])
    receipt = ledger.charge("s", search(), stage="tune", bound=0.5)
    with pytest.raises(ReceiptError, match=r"contributions up to 0\.5"):
        release(first_trial(receipt).pay())


def test_the_end_of_a_search_is_the_end_of_its_trials() -> None:
    receipt = charged(search(mean=30.0), seed=next(_long()))
    trials = SelectionTrials(receipt)
    trial = next(trials)
    inner = trial.pay(events.gaussian(10.0, 2))
    release(inner)
    receipt.close()
    assert not inner.live
    for call in (lambda: release(inner), lambda: trial.pay(events.gaussian(10.0)), lambda: trial.uniforms(1)):
        with pytest.raises(ReceiptError, match=r"releases nothing here|is over here"):
            call()
    with pytest.raises(ReceiptError, match="is over here"):
        next(trials)


def test_copies_of_a_search_are_dead_or_refused() -> None:
    trials = SelectionTrials(charged())
    trial = next(trials)
    inner = trial.pay()
    again = pickle.loads(pickle.dumps(inner))
    assert not again.live
    with pytest.raises(ReceiptError, match="releases nothing here"):
        release(again)
    for thing in (trials, trial):
        for call in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="stays in the process"):
                call(thing)
    with pytest.raises(ReceiptError, match="releases nothing here"):
        SelectionTrials(pickle.loads(pickle.dumps(charged())))


def test_a_forked_child_has_no_trials() -> None:
    receipt, other = charged(search(mean=30.0), seed=next(_long())), charged()
    trials = SelectionTrials(receipt)
    trial = next(trials)
    inner = trial.pay()
    child = os.fork()
    if child == 0:
        refused = 0
        for call in (lambda: release(inner), trial.pay, lambda: next(trials), lambda: SelectionTrials(other)):
            try:
                call()
            except ReceiptError:
                refused += 1
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
    assert inner.live
    assert next(trials).pay().live


def test_threads_share_no_trial_and_no_payment() -> None:
    trials = SelectionTrials(charged(search(mean=30.0), seed=next(_long())))
    trial, paid, refused = next(trials), [], []

    def work() -> None:
        try:
            paid.append(trial.pay(events.gaussian(4.8)))  # four of them are the inner event
        except ReceiptError as error:
            refused.append(error)

    threads = [threading.Thread(target=work) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(paid), len(refused)) == (4, 6)
    assert len({part._key.secret() for part in paid if part._key}) == 4


def test_nothing_that_is_printed_tells_the_number() -> None:
    """Two searches of different numbers of trials print the same, but for the names of their receipts."""
    texts = set()
    for seed in range(6):
        receipt = charged(search(mean=30.0), seed=seed)
        trials = SelectionTrials(receipt)
        for trial in trials:
            inner = trial.pay()
            shown = [f(x) for f in (repr, str) for x in (trials, trial, receipt)] + [str(inner)]
            text = " | ".join(shown)
            for name, short in ((receipt.id, "R"), (receipt.id[:8], "R"), (inner.id[:8], "I"), (receipt.head, "H")):
                text = text.replace(name, short)
            texts.add(text)
            assert inner.id not in receipt.id
        assert not [name for name in dir(trials) if not name.startswith("_") and name not in ("receipt",)]
        assert not hasattr(trials, "__len__")
        assert not hasattr(trials, "__length_hint__")
    assert len(texts) == 1


# The winner


def test_the_largest_score_wins_and_what_is_not_finite_loses() -> None:
    scored = [(0.3, "a"), (math.nan, "b"), (math.inf, "c"), (0.9, "d"), (-math.inf, "e"), (0.9, "f"), (0.1, "g")]
    assert best(scored) == (0.9, "d")
    assert best(reversed(scored)) == (0.9, "f")  # the first of equals
    assert best([(torch.tensor(2.0, dtype=torch.float64), "t"), (np.float32(1.0), "n")]) == (2.0, "t")
    assert best([(math.nan, "a"), (math.inf, "b")]) is None
    assert best([]) is None


def test_ties_are_won_by_each_trial_alike() -> None:
    """Four alike trials with scores 0 or 1: whoever wins, each of two outcomes of one score is as likely (binomial)."""
    generator, runs = np.random.default_rng(3), 4000
    wins = [best(zip(generator.integers(0, 2, 4), generator.integers(0, 2, 4), strict=True)) for _ in range(runs)]
    heads = sum(int(win[1]) for win in wins if win)
    assert stats.binomtest(heads, runs, 0.5).pvalue > ALARM


# The ledger


@pytest.mark.parametrize("shape", SHAPES)
def test_a_renyi_subject_is_charged_the_divergence_of_the_search(shape: float, sqlite_url: str) -> None:
    """What is left is the cap less the search, as one Gaussian; the entry reads back, infinity and all."""
    event, order = search(shape=shape), 8.0
    with Ledger(sqlite_url) as ledger:
        ledger.subject("s", Budget(8.0, 1e-5), mode="renyi", order=order)
        receipt = ledger.charge("s", event, stage="tune")
        cap = 8.0 - math.log1p(-1 / order) + math.log(1e-5 * order) / (order - 1)
        left = cap - renyi(event, Neighbours.ADD_REMOVE, [order])[0]
        mu = ledger.remaining("s").mu
        assert mu is not None
        assert mu**2 * order / 2 == pytest.approx(left, rel=1e-9)
        assert ledger.receipt(receipt.id).event == event
        ledger.verify(receipt.head)


def test_a_plan_takes_a_search_beside_a_final_run() -> None:
    event, final = search(), events.gaussian(3.0, 9)
    ledger = Ledger("sqlite://")
    promised = guarantee(events.compose([event, final]), delta=1e-5).epsilon
    ledger.subject("s", Budget(promised, 1e-5), plan=[event, final])
    assert ledger.charge("s", event, stage="tune").live
    assert ledger.spent("s").epsilon == pytest.approx(guarantee(event, delta=1e-5).epsilon)
    assert ledger.remaining("s").planned == 1


def test_the_gaussian_and_the_pure_mode_say_what_to_do() -> None:
    ledger = Ledger("sqlite://")
    ledger.subject("g", Budget(8.0, 1e-5))
    ledger.subject("p", Budget(8.0, 0.0))
    for name, inner in (("g", INNER), ("p", events.laplace(5.0))):
        with pytest.raises(UnsupportedEvent, match="give the subject the renyi or the plan mode"):
            ledger.charge(name, search(inner), stage="tune")
    with pytest.raises(UnsupportedEvent, match="renyi or the plan mode"):
        guarantee(search(), delta=1e-5, accountant="gdp")


@pytest.mark.parametrize("started", [False, True])
def test_nothing_is_refunded_once_the_number_was_drawn(started: bool) -> None:
    ledger = Ledger("sqlite://")
    ledger.subject("s", Budget(8.0, 1e-5), mode="renyi")
    before = ledger.remaining("s")
    receipt = ledger.charge("s", search(shape=math.inf), stage="tune")
    during = ledger.remaining("s")
    assert during.epsilon < before.epsilon
    if started:
        SelectionTrials(receipt)
    ledger.settle(receipt)
    assert ledger.remaining("s") == (during if started else before)


def test_a_trials_receipt_is_no_charge_of_its_own() -> None:
    ledger = Ledger("sqlite://")
    ledger.subject("s", Budget(1e4, 1e-5), plan=[search()])
    inner = first_trial(ledger.charge("s", search(), stage="tune")).pay()
    entries = len(ledger.entries())
    for call in (
        lambda: ledger.settle(inner),
        lambda: leases.begin(ledger, inner),
        lambda: leases.extend(ledger, inner, 1),
        lambda: leases.check_holder(ledger, inner),
        lambda: replay.keep(ledger, inner),
    ):
        with pytest.raises((ReceiptError, LedgerError), match="pays for one trial of a search"):
            call()
    assert inner.live
    assert len(ledger.entries()) == entries


def test_the_price_of_other_events_has_not_moved() -> None:
    """Taking trees apart goes through one place for searches and all else."""
    event = events.compose([INNER, events.laplace(math.inf), events.laplace(3.0, 2)])
    terms = accounting.take_apart(event, Neighbours.REPLACE_ONE)
    assert terms.mu == pytest.approx(2 / 2.4)
    assert terms.others == {dp_event.LaplaceDpEvent(1.5): 2}


def test_a_trial_of_a_rehearsal_is_a_rehearsal() -> None:
    """Nothing was charged for it: what its receipts release is noise alone."""
    whole = rehearsal(search(), unit=Unit.SAMPLE, neighbours=Neighbours.ADD_REMOVE)
    trial = next(SelectionTrials(whole))  # shape 1: there is one at least
    many = grid_sum(torch.ones(100_000), low=0.0, high=1.0)
    assert abs(float(mechanisms.gaussian_query(many, trial.pay())[0])) < 1_000  # noise of 6
