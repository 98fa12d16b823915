"""Samples of a fixed size, without replacement: who is drawn, and what it costs."""

import math

import numpy as np
import pytest
import torch
from dp_accounting import dp_event
from scipy.integrate import quad
from scipy.special import comb, logsumexp
from scipy.stats import chi2, norm

from tacit.privacy import Budget, Ledger, Neighbours, accounting, events, guarantee, mechanisms, sampling
from tacit.privacy._queries import grid_sum
from tacit.privacy._receipts import Receipt, ReceiptError

FALSE_ALARM = 1e-7  # of each statistical test


def charged(sample: int, size: int, steps: int = 1, *, seed: int | None = 1) -> Receipt:
    event = events.without_replacement(sample, size, events.gaussian(5.0), steps)
    ledger = Ledger("sqlite://")
    ledger.subject("s", Budget(1e4, 1e-5), neighbours=Neighbours.REPLACE_ONE, plan=[event])
    return ledger.charge("s", event, stage="test", seed=seed)


def release(receipt: Receipt) -> None:
    mechanisms.gaussian_query(grid_sum(torch.zeros(1), low=0.0, high=1.0, grid=1.0), receipt)


def test_every_set_is_as_likely() -> None:
    """A chi-square test over all ten pairs of five units, and over the pairs of consecutive draws."""
    draws = 4000
    receipt = charged(2, 5, draws)
    seen = np.zeros((10, 10))
    place = {pair: i for i, pair in enumerate((a, b) for a in range(5) for b in range(a + 1, 5))}
    found = []
    for _ in range(draws):
        first, second = sampling.draw(receipt, 5).tolist()
        found.append(place[first, second])
        release(receipt)
    for one, other in zip(found[::2], found[1::2], strict=True):
        seen[one, other] += 1
    for counts in (seen.sum(0), seen.sum(1), seen):
        expected = draws / 2 / counts.size
        statistic = float(((counts - expected) ** 2 / expected).sum())
        assert statistic < chi2.ppf(1 - FALSE_ALARM, counts.size - 1)


def test_the_size_is_that_of_the_charge() -> None:
    receipt = charged(30, 1000, 3, seed=None)
    ahead = [sampling.draw(receipt, 1000, ahead=later) for later in range(3)]
    for expected in ahead:
        drawn = sampling.draw(receipt, 1000)
        assert torch.equal(drawn, expected)
        assert torch.equal(drawn, drawn.unique())
        assert len(drawn) == 30
        release(receipt)
    assert torch.equal(sampling.draw(charged(7, 7), 7), torch.arange(7))  # all of them: no sampling


@pytest.mark.parametrize("people", [0, 99, 101])
def test_another_number_of_units_is_refused_and_binds_nothing(people: int) -> None:
    receipt = charged(10, 100)
    with pytest.raises(ReceiptError, match="true number of units"):
        sampling.draw(receipt, people)
    with pytest.raises(ReceiptError, match="draw them"):
        release(receipt)
    sampling.draw(receipt, 100)
    release(receipt)


@pytest.mark.parametrize("neighbours", [Neighbours.ADD_REMOVE, Neighbours.ZERO_OUT])
def test_other_relations_have_no_bound(neighbours: Neighbours) -> None:
    with pytest.raises(accounting.UnsupportedEvent, match="replace-one only"):
        guarantee(events.without_replacement(1, 10, events.gaussian(2.0)), delta=1e-5, neighbours=neighbours)


def profile(ratio: float, rate: float, mu: float) -> float:
    """The worst divergence of one step (docs/proofs.md, lemma 13a), for unit normals that are at most mu apart."""
    x = crossing(ratio, rate, mu)
    if ratio >= 1:
        return float((1 - rate) * norm.sf(x) + rate * norm.sf(x - mu) - ratio * norm.sf(x))
    return float(norm.cdf(x) - ratio * ((1 - rate) * norm.cdf(x) + rate * norm.cdf(x - mu)))


def crossing(ratio: float, rate: float, mu: float) -> float:
    """Where (1 - q) + q e^(mu x - mu^2 / 2) is the ratio, or its inverse if that is above 1."""
    above = (max(ratio, 1 / ratio) - 1) / rate + 1
    return (math.log(above) + mu**2 / 2) / mu


@pytest.mark.parametrize("ratio", [0.3, 0.9, 0.999, 1.0, 1.001, 1.2, 3.0])
def test_no_three_rows_are_worse_than_the_lemmas(ratio: float) -> None:
    """Any row beside, any row gone and any row come, within the clip; by integration on the line."""
    rate, noise = 0.2, 1.3
    worst = profile(ratio, rate, 2 / noise)
    chance = np.random.default_rng(0)
    x = np.linspace(-12, 12, 48_001)

    def divergence(beside: float, gone: float, come: float) -> float:
        one, other = (
            (1 - rate) * norm.pdf(x - beside / noise) + rate * norm.pdf(x - row / noise) for row in (gone, come)
        )
        return float(np.maximum(one - ratio * other, 0).sum() * (x[1] - x[0]))

    for rows in chance.uniform(-1, 1, (60, 3)):
        assert divergence(*rows) <= worst + 1e-6
    ends = [divergence(*rows) for rows in [(-1, 1, -1), (1, -1, 1), (1, 1, -1), (-1, -1, 1), (-1, 1, 1)]]
    assert max(ends) == pytest.approx(worst, abs=1e-6)


@pytest.mark.parametrize(("sample", "size", "noise"), [(20, 100, 2.0), (1, 50, 1.0)])
def test_two_steps_by_integration(sample: int, size: int, noise: float) -> None:
    """delta(e) of two steps is the mean of one step's profile at e less the first step's loss."""
    rate, mu, delta = sample / size, 2 / noise, 1e-5
    event = events.without_replacement(sample, size, events.gaussian(noise), 2)
    claimed = guarantee(event, delta=delta, neighbours=Neighbours.REPLACE_ONE)
    assert claimed.accountant == "PLD, pessimistic"

    def loss(x: float) -> float:
        return math.log1p(rate * math.expm1(mu * x - mu**2 / 2))

    def true(epsilon: float) -> float:
        def gone(x: float) -> float:
            weight = (1 - rate) * norm.pdf(x) + rate * norm.pdf(x - mu)
            return float(weight) * profile(math.exp(epsilon - loss(x)), rate, mu)

        def come(x: float) -> float:
            return float(norm.pdf(x)) * profile(math.exp(epsilon + loss(x)), rate, mu)

        zero = (1 - rate) * (1 - 2 * norm.cdf(-mu / 2))
        parts = [quad(part, mu / 2, mu / 2 + 12, limit=400, epsabs=1e-13)[0] for part in (gone, come)]
        return float(sum(parts) + zero * profile(math.exp(epsilon), rate, mu))

    assert true(claimed.epsilon) <= delta * (1 + 1e-6)
    assert true(claimed.epsilon * 0.995) > delta


@pytest.mark.parametrize(("sample", "size", "noise", "steps"), [(10, 1000, 2.0, 50), (50, 500, 8.0, 100)])
def test_epsilon_lies_between_two_bounds_that_are_derived_here(
    sample: int, size: int, noise: float, steps: int
) -> None:
    """At most theorem 9 of Wang et al. (2019) by hand; at least what one step of a known pair of data sets has."""
    delta, rate, mu = 1e-5, sample / size, 2 / noise
    event = events.without_replacement(sample, size, events.gaussian(noise), steps)
    claimed = guarantee(event, delta=delta, neighbours=Neighbours.REPLACE_ONE)
    by_rdp = guarantee(event, delta=delta, neighbours=Neighbours.REPLACE_ONE, accountant="rdp")
    assert claimed.epsilon < by_rdp.epsilon

    def by_hand(order: int) -> float:
        parts = [0.0, math.log(rate**2 * comb(order, 2) * min(4 * math.expm1(mu**2), 2 * math.exp(mu**2)))]
        parts += [
            j * math.log(rate) + math.log(2 * comb(order, j)) + (j - 1) * j * mu**2 / 2 for j in range(3, order + 1)
        ]
        divergence = steps * logsumexp(parts) / (order - 1)
        return float(divergence + math.log1p(-1 / order) - math.log(delta * order) / (order - 1))

    assert by_rdp.epsilon <= min(by_hand(order) for order in range(2, 200)) * (1 + 1e-9)

    def hockey_stick(epsilon: float) -> float:
        def positive(x: float) -> float:
            with_it = (1 - rate) * norm.pdf(x) + rate * norm.pdf(x - mu / 2)
            other = (1 - rate) * norm.pdf(x) + rate * norm.pdf(x + mu / 2)
            return max(0.0, with_it - math.exp(epsilon) * other)

        return float(quad(positive, -10, 40, limit=500)[0])

    one = guarantee(
        events.without_replacement(sample, size, events.gaussian(noise)), delta=delta, neighbours=Neighbours.REPLACE_ONE
    )
    assert hockey_stick(one.epsilon) <= delta
    assert one.epsilon <= claimed.epsilon


@pytest.mark.parametrize("noise", [0.2, 0.5, 2.0])
def test_a_sample_of_all_units_is_no_sampling(noise: float) -> None:
    everybody = dp_event.SampledWithoutReplacementDpEvent(5, 5, dp_event.GaussianDpEvent(noise))
    plain = guarantee(events.gaussian(noise), delta=1e-5, neighbours=Neighbours.REPLACE_ONE)
    assert guarantee(everybody, delta=1e-5, neighbours=Neighbours.REPLACE_ONE) == plain
