"""Balls-in-bins sampling: what it costs, and who is thrown where."""

import json
import math
from collections.abc import Callable
from functools import partial
from itertools import chain, pairwise, product

import numpy as np
import pytest
import torch
from scipy.integrate import dblquad, quad
from scipy.optimize import brentq
from scipy.special import ndtri
from scipy.stats import chi2, norm

from tacit.audit import _releases as releases
from tacit.audit import mechanism
from tacit.audit._findings import Claim
from tacit.audit._ledger import ledger as audit_ledger
from tacit.privacy import (
    Budget,
    BudgetExceeded,
    Ledger,
    Neighbours,
    accounting,
    events,
    guarantee,
    leases,
    mechanisms,
    noise_multiplier,
    replay,
    sampling,
)
from tacit.privacy import _balls_in_bins as bins_pld
from tacit.privacy import _tilted as tilted
from tacit.privacy._budget import epsilon_of
from tacit.privacy._pld_numerics import Losses
from tacit.privacy._queries import grid_sum
from tacit.privacy._receipts import Receipt, ReceiptError

FALSE_ALARM = 1e-8  # of each statistical test
GRID = 5e-4


def losses(noise: float, bins: int, steps: int, delta: float = 1e-5, fine: float = 1.0) -> tuple[Losses, Losses]:
    """Of the unit removed, and added."""
    return bins_pld.balls_in_bins(noise, bins, steps, GRID, -float(ndtri(1e-4 * delta / 2)), fine=fine)


def epsilons(noise: float, bins: int, steps: int, delta: float = 1e-5, fine: float = 1.0) -> tuple[float, float]:
    removed, added = (
        tilted.epsilon(tilted.compose([(side, 1)], delta), GRID, delta)
        for side in losses(noise, bins, steps, delta, fine)
    )
    return removed, added


def delta_at(side: Losses, epsilon: float) -> float:
    loss = GRID * (side.first + np.arange(len(side.probabilities)))
    return side.infinite + float(side.probabilities @ np.maximum(-np.expm1(epsilon - loss), 0.0))


# By integration: the hockey-stick divergence of N(0, s^2) in b dimensions from the even mixture of unit shifts


def above(mu: float, threshold: float) -> float:
    """E (X - t)+ of X = exp(mu z - mu^2 / 2)."""
    if threshold <= 0:
        return 1 - threshold
    if mu == 0:
        return max(1 - threshold, 0.0)
    x = math.log(threshold) / mu
    return float(norm.sf(x - mu / 2) - threshold * norm.sf(x + mu / 2))


def below(mu: float, threshold: float) -> float:
    """E (t - X)+, without cancellation."""
    if threshold <= 0 or mu == 0:
        return max(threshold - 1, 0.0)
    x = math.log(threshold) / mu
    return float(threshold * norm.cdf(x + mu / 2) - norm.cdf(x - mu / 2))


def factor(mu: float, z: float) -> float:
    return math.exp(mu * z - mu * mu / 2)


def divergence(mus: list[float], epsilon: float, removed: bool) -> float:
    """Of two or three bins, the last one integrated in closed form."""
    *others, last = mus
    sign, bins = (1, len(mus)) if removed else (-1, len(mus))
    level = bins * math.exp(sign * epsilon)
    partial_mean, scale = (above, 1 / bins) if removed else (below, math.exp(epsilon) / bins)

    def inner(*z: float) -> float:
        rest = level - sum(factor(mu, each) for mu, each in zip(others, z, strict=True))
        return math.prod(map(norm._pdf, z)) * partial_mean(last, rest)

    if len(others) == 1:
        edges = np.linspace(-9, 12, 43)
        return scale * sum(quad(inner, *part, epsabs=1e-15, epsrel=1e-10)[0] for part in pairwise(edges))
    edges = np.linspace(-8, 11, 5)
    cells = product(pairwise(edges), repeat=2)
    return scale * sum(dblquad(inner, *one, *other, epsabs=1e-10, epsrel=1e-4)[0] for one, other in cells)


@pytest.mark.parametrize("removed", [True, False])
@pytest.mark.parametrize(
    ("noise", "steps", "mus"),
    [
        (1.0, 2, [1.0, 1.0]),
        (3.0, 8, [2 / 3, 2 / 3]),
        (1.5, 3, [math.sqrt(2) / 1.5, 1 / 1.5]),
        (0.7, 1, [0.0, 1 / 0.7]),
    ],
)
@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-8])
def test_two_bins_by_integration(noise: float, steps: int, mus: list[float], removed: bool, delta: float) -> None:
    """Whole epochs and epochs that are cut short, in both directions."""
    claimed = epsilons(noise, 2, steps, delta)[0 if removed else 1]
    true = float(brentq(lambda epsilon: divergence(mus, epsilon, removed) - delta, 0.0, 30.0, xtol=1e-6))
    assert true * (1 - 1e-5) <= claimed <= true * 1.004 + 1e-3


@pytest.mark.parametrize("removed", [True, False])
def test_three_bins_by_integration(removed: bool) -> None:
    side = losses(1.0, 3, 3)[0 if removed else 1]
    for epsilon in (0.5, 1.5):
        true = divergence([1.0, 1.0, 1.0], epsilon, removed)
        assert true * (1 - 1e-3) <= delta_at(side, epsilon) <= true * 1.01


def test_an_adaptive_run_is_no_worse_than_the_pair() -> None:
    """Two bins, three steps on the line, contributions that follow what was released; on a grid, at many ratios."""
    z, y = 1.2, np.linspace(-7.5, 8.5, 161)
    first, second, third = np.meshgrid(y, y, y, indexing="ij", sparse=True)
    none = norm.pdf(first) * norm.pdf(second) * norm.pdf(third) * (y[1] - y[0]) ** 3

    def ratio(moved: np.ndarray, at: np.ndarray) -> np.ndarray:
        return np.exp(at * moved / z - (moved / z) ** 2 / 2)

    ways: list[tuple[Callable[[np.ndarray], np.ndarray], Callable[[np.ndarray, np.ndarray], np.ndarray]]] = [
        (np.ones_like, lambda a, b: np.ones_like(a + b)),  # the worst: it attains the bound
        (lambda a: np.sign(a - 0.5), lambda a, b: np.sign(a + b)),
        (lambda a: np.where(a > 1, -1.0, 1.0), lambda a, b: np.clip(a - b, -1, 1)),
        (lambda a: (a < 0) * 1.0, lambda a, b: np.where(b > a, 1.0, 0.2)),
    ]
    for place, (bend, turn) in enumerate(ways):
        whole = ratio(np.ones_like(first), first) * ratio(turn(first, second), third) / 2  # bin 0: steps 0 and 2
        whole = whole + ratio(bend(first), second) / 2
        for epsilon in (-1.0, 0.0, 0.4, 1.2, 2.5):
            worst = divergence([math.sqrt(2) / z, 1 / z], epsilon, True)
            found = float((none * np.maximum(whole - math.exp(epsilon), 0)).sum())
            assert found <= worst + 2e-4
            assert place > 0 or found == pytest.approx(worst, abs=2e-4)


# By simulation


def mean_of(draw: Callable[[np.random.Generator, int], np.ndarray], most: float) -> tuple[float, float]:
    """A mean of values in [0, most] and its deviation, at FALSE_ALARM (Maurer & Pontil 2009, theorem 4)."""
    chance, log = np.random.default_rng(3), math.log(4 / FALSE_ALARM)
    values = np.concatenate([np.minimum(draw(chance, 50_000), most) for _ in range(20)])
    count = len(values)
    return float(values.mean()), math.sqrt(2 * values.var(ddof=1) * log / count) + 7 * most * log / 3 / (count - 1)


@pytest.mark.parametrize(("noise", "bins", "epochs", "epsilon"), [(2.0, 20, 5, 1.6), (1.0, 60, 1, 0.7)])
def test_removed_by_simulation(noise: float, bins: int, epochs: int, epsilon: float) -> None:
    """E (S / b - e^eps)+, one of the normals drawn where the ratio passes e^eps; what is cut off makes it less."""
    mu, level = math.sqrt(epochs) / noise, bins * math.exp(epsilon)
    centre = (math.log(level - bins + 1) + mu * mu / 2) / mu

    def draw(chance: np.random.Generator, count: int) -> np.ndarray:
        z = chance.normal(size=(count, bins))
        z[:, 0] += centre
        total = np.exp(mu * z - mu * mu / 2).sum(axis=1)
        return np.maximum(total - level, 0) / np.exp(centre * z - centre**2 / 2).sum(axis=1)

    claimed = delta_at(losses(noise, bins, bins * epochs)[0], epsilon)
    mean, off = mean_of(draw, 50 * claimed)
    assert off < 0.03 * mean
    assert mean - off <= claimed <= 1.02 * mean + off


@pytest.mark.parametrize(("noise", "bins", "epochs", "epsilon"), [(2.0, 20, 5, 0.8), (1.0, 20, 1, 0.75)])
def test_added_by_simulation(noise: float, bins: int, epochs: int, epsilon: float) -> None:
    """E (1 - e^eps S / b)+, all normals shifted down."""
    mu = math.sqrt(epochs) / noise
    shift = 0.7 * epsilon / mu

    def draw(chance: np.random.Generator, count: int) -> np.ndarray:
        z = chance.normal(size=(count, bins)) - shift
        mean = np.exp(mu * z - mu * mu / 2).mean(axis=1)
        return np.exp(shift * z.sum(axis=1) + bins * shift**2 / 2) * np.maximum(1 - math.exp(epsilon) * mean, 0)

    claimed = delta_at(losses(noise, bins, bins * epochs)[1], epsilon)
    mean, off = mean_of(draw, 100 * claimed)
    assert off < 0.03 * mean
    assert mean - off <= claimed <= 1.02 * mean + off


# What must hold whatever the numbers


@pytest.mark.parametrize("steps", [1, 4])
def test_one_bin_is_no_sampling(steps: int) -> None:
    plain = epsilon_of(math.sqrt(steps) / 1.5, 1e-5)
    assert events.balls_in_bins(1.5, bins=1, steps=steps) == events.gaussian(1.5, steps)
    assert guarantee(events.BallsInBinsDpEvent(1.5, steps, 1), delta=1e-5).epsilon == pytest.approx(plain, rel=1e-12)
    assert max(epsilons(1.5, 1, steps)) == pytest.approx(plain, rel=1e-3)


@pytest.mark.parametrize("noise", [1e-99, 0.01, 0.3, 1.0, 4.0, 1e3, 1e9, 1e200])
@pytest.mark.parametrize(("bins", "steps"), [(2, 2), (2, 3), (50, 50), (50, 120), (3000, 3000), (10**7, 5)])
def test_it_never_costs_more_than_no_sampling(noise: float, bins: int, steps: int) -> None:
    claimed = guarantee(events.balls_in_bins(noise, bins=bins, steps=steps), delta=1e-6).epsilon
    assert 0 <= claimed <= epsilon_of(math.sqrt(-(-steps // bins)) / noise, 1e-6) * (1 + 1e-3) + 1e-6


def test_more_noise_more_bins_and_fewer_steps_never_cost_more() -> None:
    def cost(noise: float, bins: int, steps: int) -> float:
        return guarantee(events.balls_in_bins(noise, bins=bins, steps=steps), delta=1e-5).epsilon

    for costs in (
        [cost(noise, 20, 60) for noise in (0.6, 1.0, 1.2, 2.0, 5.0, 20.0)],
        [cost(1.0, bins, bins) for bins in (1, 2, 3, 10, 100, 1000)],
        [cost(1.5, 10, steps) for steps in (31, 30, 25, 20, 11, 10, 5, 1)],
    ):
        assert costs == sorted(costs, reverse=True)
        assert costs[-1] < 0.7 * costs[0]


@pytest.mark.parametrize(("noise", "bins", "steps"), [(1.0, 2, 2), (2.0, 20, 100), (0.8, 100, 150)])
def test_a_finer_lattice_only_lowers_the_claim(noise: float, bins: int, steps: int) -> None:
    found = np.array([epsilons(noise, bins, steps, fine=fine) for fine in (8, 4, 2, 1, 0.5)])
    assert (np.diff(found, axis=0) <= 1e-5).all()
    assert (found[-2] - found[-1] <= 1e-3 * found[-1]).all()


def test_what_the_transforms_may_hide_covers_what_they_do() -> None:
    """Against direct convolution in long floats."""
    for removed in (True, False):
        one = bins_pld._lattice(0.9, 0.01, 0.05, 400, removed)
        size = 8 * 400 + 1
        found, lost, hidden = bins_pld._sum([(8, one)], 8, size, removed)
        exact = np.array([1.0], dtype=np.longdouble)
        for place in range(8):
            exact = np.convolve(exact, (one.biased if removed and not place else one.masses).astype(np.longdouble))
        off = float(np.abs(found - exact).sum())
        assert 0 < off < hidden < 1e-9
        outside = norm.cdf(math.log(0.01) / 0.9 + 0.45), norm.sf(math.log(20.01) / 0.9 - 0.45)
        assert lost == pytest.approx(outside[1] if removed else 8 * outside[0], rel=0.01)


def test_a_lattice_keeps_the_mean_and_what_was_cut_is_stated() -> None:
    up, down = (bins_pld._lattice(0.9, 0.0 + 1e-4, 0.03, 3000, up) for up in (True, False))
    for one in (up, down):
        assert one.masses.min() >= 0
        assert one.masses.sum() == pytest.approx(1.0, abs=1e-12 + (norm.cdf(math.log(1e-4) / 0.9 + 0.45)))
    true = 1 - above(0.9, float(up.points[-1]))
    assert down.biased.sum() <= true <= up.biased.sum()
    assert up.biased.sum() - down.biased.sum() < 1e-10
    assert above(0.9, float(up.points[-1])) <= up.beyond


# Events, ledgers


def test_with_other_releases_by_integration() -> None:
    """Together with a Gaussian, delta(eps) is the mean over its loss of what two bins have at the rest."""
    mu, delta = 0.5, 1e-5
    event = events.compose([events.balls_in_bins(1.0, bins=2, steps=2), events.gaussian(1 / mu)])
    claimed = guarantee(event, delta=delta)
    assert claimed.accountant == "PLD, pessimistic"

    def true(epsilon: float, removed: bool) -> float:
        x = np.linspace(-6, 6, 49)
        rest = [divergence([1.0, 1.0], epsilon - mu * each - mu * mu / 2, removed) for each in x]
        return float(norm.pdf(x) @ rest * (x[1] - x[0]))

    assert max(true(claimed.epsilon, removed) for removed in (True, False)) <= delta * (1 + 1e-4)
    assert true(claimed.epsilon * 0.99, True) > delta


def test_epochs_that_are_thrown_anew_compose() -> None:
    """Five epochs thrown anew cost less than five of the same bins, and more than one."""

    def cost(event: events.DpEvent) -> float:
        return guarantee(event, delta=1e-5).epsilon

    epoch = events.balls_in_bins(1.3, bins=20, steps=20)
    assert cost(epoch) < cost(events.repeat(epoch, 5)) < cost(events.balls_in_bins(1.3, bins=20, steps=100))
    assert events.releases(events.repeat(epoch, 5)) == 100


def test_noise_is_found_in_seconds_and_meets_the_budget() -> None:
    event = partial(events.balls_in_bins, bins=20, steps=100)
    noise = noise_multiplier(Budget(2.0, 1e-5), event)
    assert 1.999 < guarantee(event(noise), delta=1e-5).epsilon <= 2.0


def test_an_event_survives_json_and_a_ledger_takes_it_in_a_plan_alone() -> None:
    event = events.balls_in_bins(2.0, bins=20, steps=100)
    assert events.from_json(json.loads(json.dumps(events.to_json(event)))) == event
    ledger = Ledger("sqlite://")
    budget = Budget(2.2, 1e-5)
    ledger.subject("plan", budget, plan=[event])
    ledger.subject("gaussian", budget)
    ledger.subject("renyi", budget, mode="renyi", order=8.0)
    for name, sentence in (("gaussian", "renyi or the plan mode"), ("renyi", "by PLD only")):
        with pytest.raises(accounting.UnsupportedEvent, match=sentence):
            ledger.charge(name, event, stage="test")
    receipt = ledger.charge("plan", event, stage="test")
    assert receipt.releases == 100
    assert ledger.spent("plan").epsilon == pytest.approx(2.116, abs=2e-3)
    with pytest.raises(BudgetExceeded):
        ledger.charge("plan", event, stage="test")
    with pytest.raises(BudgetExceeded):
        ledger.subject("too much", Budget(2.0, 1e-5), plan=[event])


def test_replace_one_has_no_bound() -> None:
    with pytest.raises(accounting.UnsupportedEvent, match="no bound here under replace-one"):
        guarantee(events.balls_in_bins(2.0, bins=4, steps=4), delta=1e-5, neighbours=Neighbours.REPLACE_ONE)
    zero_out = guarantee(events.balls_in_bins(2.0, bins=4, steps=4), delta=1e-5, neighbours="zero-out")  # type: ignore
    assert zero_out.epsilon == guarantee(events.balls_in_bins(2.0, bins=4, steps=4), delta=1e-5).epsilon


# Who is thrown where


def charged(event: events.DpEvent, *, seed: int | None = None) -> tuple[Ledger, Receipt]:
    ledger = Ledger("sqlite://")
    ledger.subject("s", Budget(1e4, 1e-5), plan=[event])
    return ledger, ledger.charge("s", event, stage="test", seed=seed)


def release(receipt: Receipt) -> None:
    mechanisms.gaussian_query(grid_sum(torch.zeros(1), low=0.0, high=1.0, grid=1.0), receipt)


def drawn(receipt: Receipt, people: int, steps: int) -> list[list[int]]:
    found = []
    for _ in range(steps):
        found.append(sampling.draw(receipt, people).tolist())
        release(receipt)
    return found


def test_everybody_is_in_one_bin_and_in_the_same_one_in_every_epoch() -> None:
    for event, anew in (
        (events.balls_in_bins(5.0, bins=7, steps=21), False),
        (events.repeat(events.balls_in_bins(5.0, bins=7, steps=7), 3), True),
    ):
        _, receipt = charged(event)
        ahead = [sampling.draw(receipt, 100, ahead=later).tolist() for later in range(21)]
        found = drawn(receipt, 100, 21)
        assert found == ahead
        epochs = [found[start : start + 7] for start in (0, 7, 14)]
        assert all(sorted(chain(*epoch)) == list(range(100)) for epoch in epochs)
        assert (epochs[0] != epochs[1]) == anew
        assert (epochs[1] != epochs[2]) == anew


def test_who_is_there_moves_nobody_and_a_bin_may_be_empty() -> None:
    few, many = (drawn(charged(events.balls_in_bins(5.0, bins=9, steps=9), seed=4)[1], people, 9) for people in (3, 30))
    assert [[unit for unit in step if unit < 3] for step in many] == few
    assert [] in few


def test_bins_are_equally_likely_and_independent() -> None:
    """Chi-square tests over the bins of 60,000 units, and over those of neighbours and of two epochs thrown anew."""
    people, bins = 60_000, 6
    _, receipt = charged(events.repeat(events.balls_in_bins(5.0, bins=bins, steps=bins), 2))
    places = np.zeros((2, people), dtype=int)
    for step, units in enumerate(drawn(receipt, people, 2 * bins)):
        places[step // bins, units] = step % bins
    first, second = places
    pairs = bins * first[::2] + first[1::2], bins * first + second
    for values, cells in ((first, bins), (second, bins), (pairs[0], bins**2), (pairs[1], bins**2)):
        expected = len(values) / cells
        statistic = float(((np.bincount(values, minlength=cells) - expected) ** 2 / expected).sum())
        assert statistic < chi2.ppf(1 - FALSE_ALARM, cells - 1)


def test_a_receipt_that_is_resumed_has_the_same_bins() -> None:
    event = events.balls_in_bins(5.0, bins=4, steps=10)
    ledger, receipt = charged(event)
    secret = replay.keep(ledger, receipt)
    expected = [sampling.draw(receipt, 50, ahead=later).tolist() for later in range(10)]
    again, _ = replay.resume(ledger, receipt.id, secret, 3)
    assert [sampling.draw(again, 50, ahead=later).tolist() for later in range(7)] == expected[3:]


def test_a_fresh_key_for_the_rest_is_refused() -> None:
    ledger, receipt = charged(events.balls_in_bins(5.0, bins=4, steps=10))
    leases.begin(ledger, receipt)
    with pytest.raises(ReceiptError, match="throw them again"):
        leases.resume_after_lease(ledger, receipt.id)


def test_nothing_is_released_without_a_draw() -> None:
    _, receipt = charged(events.balls_in_bins(5.0, bins=4, steps=4))
    with pytest.raises(ReceiptError, match="draw them"):
        release(receipt)


def test_a_part_that_was_released_counts_in_full() -> None:
    event = events.balls_in_bins(5.0, bins=4, steps=8)
    _, receipt = charged(events.repeat(event, 3))
    drawn(receipt, 10, 9)
    assert receipt.close() == events.compose([events.repeat(event, 2)])


@pytest.mark.parametrize(("noise", "steps"), [(0.5, 3), (1.0, 8)])
def test_the_audit_finds_half_the_noise(noise: float, steps: int) -> None:
    """As many trials as find nothing in the right run; false alarms once in 1e9."""
    claim = Claim.of(events.BallsInBinsDpEvent(noise, steps, 3), delta=1e-2)
    for share in (1.0, 0.5):
        release = releases.balls_in_bins(events.BallsInBinsDpEvent(share * noise, steps, 3))
        found = mechanism(release, claim, name="bins", trials=100_000, strict=False)
        assert found.holds == (share == 1)


def test_a_ledgers_own_audit_attacks_the_charge() -> None:
    ledger, _ = charged(events.repeat(events.balls_in_bins(1.0, bins=3, steps=3), 2))
    (found,) = audit_ledger(ledger, trials=5_000)
    assert not isinstance(found, str)
    assert found.holds
    assert "BallsInBins" in found.name
