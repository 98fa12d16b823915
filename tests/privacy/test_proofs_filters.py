"""Filters, plans and odometers, checked against docs/proofs.md by enumerating every transcript of small mechanisms."""

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
from scipy.special import ndtr

from tacit.privacy import Budget, Ledger, Neighbours, accounting, delta_of, epsilon_of, events
from tacit.privacy._budget import mu_of_pure

ALPHAS = np.exp(np.linspace(-4, 4, 81))
Row = tuple[float, float]  # the probability of a transcript in the two worlds


def hockey(rows: list[Row], alpha: float) -> float:
    return sum(max(p - alpha * q, 0.0) for p, q in rows)


def divergence(rows: list[Row], order: float) -> float:
    return math.log(sum(p**order * q ** (1 - order) for p, q in rows if p > 0)) / (order - 1)


# Gaussian: every step shows one bit of a Gaussian release, or a pure one; what comes next depends on the bits.


def transcripts(cap: float, random: np.random.Generator) -> Iterator[Row]:
    """All transcripts of one adaptive run of at most five steps whose mu^2 add up to the cap on no path beyond it."""

    def go(left: float, steps: int, p: float, q: float) -> Iterator[Row]:
        if steps == 5 or left < 1e-4 or (steps and random.uniform() < 0.1):  # some stop early
            yield p, q
            return
        mu = math.sqrt(left * (random.uniform(0.05, 1.0) if steps < 4 else 1.0))
        if random.uniform() < 0.3:  # a pure release of the epsilon that this mu dominates
            low, high = 0.0, 60.0
            for _ in range(100):
                low, high = ((low + high) / 2, high) if mu_of_pure((low + high) / 2) < mu else (low, (low + high) / 2)
            often = 1 / (1 + math.exp(-low))
            bits = [(often, 1 - often), (1 - often, often)]
        else:
            cut, side = random.normal() + mu / 2, random.choice([-1, 1])
            one, zero = ndtr(side * (mu - cut)), ndtr(-side * cut)
            bits = [(one, zero), (1 - one, 1 - zero)]
        for a, b in bits:
            yield from go(left - mu**2, steps + 1, p * a, q * b)

    yield from go(cap, 0, 1.0, 1.0)


@pytest.mark.parametrize("seed", range(40))
def test_no_adaptive_run_within_a_sum_of_mu_squared_passes_one_gaussian(seed: int) -> None:
    random = np.random.default_rng(seed)
    mu = random.uniform(0.3, 3.0)
    rows = list(transcripts(mu**2, random))
    assert sum(p for p, _ in rows) == pytest.approx(1) == pytest.approx(sum(q for _, q in rows))
    for alpha in ALPHAS:
        exact = delta_of(math.log(alpha), mu) if alpha >= 1 else 1 - alpha + alpha * delta_of(-math.log(alpha), mu)
        assert hockey(rows, alpha) <= exact + 1e-12
        assert hockey([(q, p) for p, q in rows], alpha) <= exact + 1e-12


# Renyi: the sum of divergences at one order, held to on every path.


@pytest.mark.parametrize("order", [1.3, 2.0, 8.0])
@pytest.mark.parametrize("seed", range(10))
def test_no_adaptive_run_within_a_sum_of_divergences_passes_it(order: float, seed: int) -> None:
    random = np.random.default_rng(1000 + seed)

    def go(left: float, steps: int, p: float, q: float) -> Iterator[Row]:
        for _ in range(20):
            one, zero = random.dirichlet([1, 1, 1]) * 0.9 + 1 / 30, random.dirichlet([1, 1, 1]) * 0.9 + 1 / 30
            cost = divergence(list(zip(one, zero, strict=True)), order)
            if cost <= left and steps < 5:
                for a, b in zip(one, zero, strict=True):
                    yield from go(left - cost, steps + 1, p * a, q * b)
                return
        yield p, q

    cap = random.uniform(0.5, 3.0)
    rows = list(go(cap, 0, 1.0, 1.0))
    assert divergence(rows, order) <= cap + 1e-9


# Plans: entries fixed in advance, taken in any order, some never.


def product_of(pairs: list[list[Row]]) -> list[Row]:
    return [
        (math.prod(p for p, _ in outcome), math.prod(q for _, q in outcome)) for outcome in itertools.product(*pairs)
    ]


def random_pair(random: np.random.Generator) -> list[Row]:
    size = random.integers(2, 4)
    return list(zip(random.dirichlet(np.ones(size)), random.dirichlet(np.ones(size)), strict=True))


def run_plan(pairs: list[list[Row]], random: np.random.Generator, *, again: bool = False) -> list[Row]:
    """All transcripts of one adaptive run: the next entry, how it is garbled and when to stop all go by the past."""

    def go(left: tuple[int, ...], steps: int, p: float, q: float) -> Iterator[Row]:
        if not left or (steps and random.uniform() < 0.15):
            yield p, q
            return
        chosen = int(random.choice(left))
        kept = left if again and steps < 2 else tuple(place for place in left if place != chosen)
        kernel = random.dirichlet(np.full(3, 0.3), size=len(pairs[chosen]))  # an outcome becomes one of three
        for shown in range(3):
            a = sum(one * row[shown] for (one, _), row in zip(pairs[chosen], kernel, strict=True))
            b = sum(zero * row[shown] for (_, zero), row in zip(pairs[chosen], kernel, strict=True))
            yield from go(kept, steps + 1, p * a, q * b)

    return list(go(tuple(range(len(pairs))), 0, 1.0, 1.0))


@pytest.mark.parametrize("seed", range(40))
def test_entries_of_a_plan_in_any_order_and_some_skipped_cost_no_more_than_all(seed: int) -> None:
    random = np.random.default_rng(seed)
    pairs = [random_pair(random) for _ in range(4)]
    whole, rows = product_of(pairs), run_plan(pairs, random)
    for alpha in ALPHAS:
        assert hockey(rows, alpha) <= hockey(whole, alpha) + 1e-12


def test_an_entry_that_is_taken_twice_would_cost_more() -> None:
    """The check above sees a broken ledger."""
    pair = [(0.9, 0.1), (0.1, 0.9)]
    assert hockey(product_of([pair, pair]), 5.0) > hockey(product_of([pair]), 5.0) + 0.01
    found = []
    for seed in range(40):
        random = np.random.default_rng(seed)
        pairs = [random_pair(random) for _ in range(2)]
        whole, rows = product_of(pairs), run_plan(pairs, random, again=True)
        found.append(max(hockey(rows, alpha) - hockey(whole, alpha) for alpha in ALPHAS))
    assert max(found) > 0.01


# Odometers: what was spent when a run stopped by what it saw is no bound.


def stopped(mu: float, steps: int, delta: float) -> tuple[float, float]:
    """A run that stops as soon as its loss passes the epsilon spent so far.

    Returns the sum over t of P(stopped at t) - e^eps P'(stopped at t), with eps what was spent at t, and with eps the
    cap. The density of the loss of those still running is carried along on a grid: steps of N(mu^2/2, mu^2) in one
    world; in the other the same times e^-loss.
    """
    width = 8 * mu * math.sqrt(steps) + steps * mu**2
    grid = np.linspace(-width, width, 8001)
    h = grid[1] - grid[0]

    def bell(loss: np.ndarray) -> np.ndarray:
        return np.exp(-((loss - mu**2 / 2) ** 2) / (2 * mu**2)) / (mu * math.sqrt(2 * math.pi)) * h

    reach = math.ceil(9 * mu / h)
    step, alive = bell(np.arange(-reach, reach + 1) * h), bell(grid)
    cap, over, within = epsilon_of(mu * math.sqrt(steps), delta), 0.0, 0.0
    for t in range(1, steps + 1):
        alive = np.convolve(alive, step)[reach : reach + len(grid)] if t > 1 else alive
        spent = epsilon_of(mu * math.sqrt(t), delta)
        out = grid > spent
        over += float(alive[out] @ -np.expm1(spent - grid[out]))
        within += float(alive[out] @ np.maximum(-np.expm1(cap - grid[out]), 0))
        alive[out] = 0.0
    within += float(alive @ np.maximum(-np.expm1(cap - grid), 0))
    return over, within


def test_stopping_by_the_loss_realises_more_delta_than_is_claimed_and_the_cap_holds() -> None:
    over, within = stopped(0.1, 400, 1e-3)
    assert 4.9e-3 < over < 5e-3  # five times the claim, at the epsilon that was spent when it stopped
    assert within <= 1e-3


def test_what_a_ledger_promises_after_a_stop_is_its_cap() -> None:
    ledger = Ledger("sqlite://")
    ledger.subject("s", Budget(1.0, 1e-5))
    receipt = ledger.charge("s", events.gaussian(40.0, steps=100), stage="test")
    receipt.skip(25)
    ledger.settle(receipt)
    assert ledger.total().epsilon < 0.6
    assert ledger.total(promised=True).epsilon == pytest.approx(1.0)
    assert ledger.spent("s", promised=True).epsilon == pytest.approx(1.0)
    assert "spent so far" in str(ledger.total())
    assert "the cap" in str(ledger.total(promised=True))
    assert "spent so far" not in str(ledger.spent("s", promised=True))
    assert ledger.stopped("s")


def test_a_part_of_a_plan_says_that_the_budget_holds_if_it_was_chosen() -> None:
    ledger = Ledger("sqlite://")
    one, other = events.poisson(0.1, events.gaussian(3.0), 10), events.poisson(0.1, events.gaussian(4.0), 10)
    ledger.subject("s", Budget(2.0, 1e-5), plan=[one, other])
    ledger.charge("s", one, stage="test")
    assert "fixed in advance" not in str(ledger.spent("s"))
    assert "chosen by earlier releases, the budget (2, 1e-05) holds" in str(ledger.spent("s"))
    assert "fixed in advance" in str(ledger.spent("s", promised=True))
    ledger.charge("s", other, stage="test")
    assert "fixed in advance" in str(ledger.spent("s"))
    assert not ledger.stopped("s")


# Dominating pairs.


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
def test_two_points_dominate_everything_that_is_pure(epsilon: float) -> None:
    random = np.random.default_rng(3)
    often = 1 / (1 + math.exp(-epsilon))
    two = [(often, 1 - often), (1 - often, often)]
    for _ in range(50):
        q, ratios = random.dirichlet(np.ones(5)), np.exp(random.uniform(-epsilon, epsilon, 5))
        end = math.exp(-epsilon if q @ ratios > 1 else epsilon)  # towards it the ratios go until the masses agree
        ratios = end + (ratios - end) * (1 - end) / (q @ ratios - end)
        rows = list(zip(q * ratios, q, strict=True))
        for alpha in ALPHAS:
            assert hockey(rows, alpha) <= hockey(two, alpha) + 1e-12


def test_many_small_pure_releases_are_worth_no_more_mu_than_one_of_their_sum() -> None:
    """mu_of_pure(eps)^2 / eps never falls, so the squares are superadditive."""
    grid = np.geomspace(1e-4, 600, 4000)
    ratio = np.array([mu_of_pure(float(epsilon)) ** 2 / epsilon for epsilon in grid])
    assert (np.diff(ratio) > 0).all()


@pytest.mark.parametrize("order", [1.5, 4.0, 32.0])
def test_noisy_max_costs_the_divergence_of_two_points_in_every_mode(order: float) -> None:
    often = 1 / (1 + math.exp(-1.0))
    two = divergence([(often, 1 - often), (1 - often, often)], order)
    found = accounting.renyi(events.noisy_max(2.0), Neighbours.ADD_REMOVE, [order])[0]
    assert found == pytest.approx(two, rel=1e-9)
