"""Shares of one noise: what their total is, by numeric convolution, and what too few of them are not."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from tacit.privacy import Budget, GridSum, Ledger, ReceiptError, events, mechanisms
from tacit.privacy.mechanisms._shares import _negative_binomial

Pmf = np.ndarray


def power(pmf: Pmf, times: int) -> Pmf:
    """The distribution of so many independent terms; the middle entry stays that of zero."""
    found = np.array([1.0])
    for _ in range(times):
        found = np.convolve(found, pmf)
    return found


def laplace_share(scale: float, parts: int, width: int = 400) -> Pmf:
    """A - B, both negative binomial, from scipy's own distribution."""
    one = stats.nbinom.pmf(np.arange(width + 1), 1 / parts, -math.expm1(-1 / scale))
    return np.convolve(one, one[::-1])


def gaussian_share(scale: float, parts: int, width: int = 200) -> Pmf:
    k = np.arange(-width, width + 1)
    weight = np.exp(-(k**2) / (2 * (scale**2 / parts + 9)))
    return weight / weight.sum()


def divergence(pmf: Pmf, shift: int, epsilon: float) -> float:
    """The delta of adding noise from ``pmf`` to numbers that differ by ``shift``."""
    one, other = np.append(pmf, np.zeros(shift)), np.append(np.zeros(shift), pmf)
    return float(np.clip(one - math.exp(epsilon) * other, 0, None).sum())


@pytest.mark.parametrize("parts", [1, 3, 20])
def test_shares_of_laplace_noise_add_up_to_pure_epsilon(parts: int) -> None:
    scale, shift = 6.0, 4
    whole = power(laplace_share(scale, parts), parts)
    k = np.arange(len(whole)) - len(whole) // 2
    near = np.abs(k) < 100
    expected = math.tanh(1 / (2 * scale)) * np.exp(-np.abs(k) / scale)  # discrete Laplace noise
    assert whole[near] == pytest.approx(expected[near], rel=1e-6)
    inside = np.flatnonzero(np.abs(k) < 60)
    ratio = np.log(whole[inside] / whole[inside + shift]).max()
    assert ratio == pytest.approx(shift / scale, rel=1e-6)
    if parts > 1:  # without one of them it is no longer what was charged
        fewer = power(laplace_share(scale, parts), parts - 1)
        assert divergence(fewer, shift, shift / scale) > 1e-3


@pytest.mark.parametrize("parts", [1, 4, 25])
@pytest.mark.parametrize("shift", [1, 8, 30])
def test_shares_of_gaussian_noise_are_dominated_by_the_gaussian(parts: int, shift: int) -> None:
    scale = 20.0
    whole = power(gaussian_share(scale, parts), parts)
    mu = shift / scale
    for epsilon in (0.0, 0.3 * mu, mu, 2 * mu):
        exact = stats.norm.cdf(-epsilon / mu + mu / 2) - math.exp(epsilon) * stats.norm.cdf(-epsilon / mu - mu / 2)
        assert divergence(whole, shift, epsilon) <= exact * (1 + 1e-9) + 1e-15
    if parts > 1:
        half = power(gaussian_share(scale, parts), parts // 2)
        narrow = stats.norm.cdf(mu / 2) - stats.norm.cdf(-mu / 2)
        assert divergence(half, shift, 0.0) > narrow * 1.02


@pytest.mark.parametrize(("scale", "parts"), [(3.0, 1), (3.0, 4), (40.0, 10)])
def test_the_sampler_draws_negative_binomials(scale: float, parts: int) -> None:
    found = np.array(_negative_binomial(scale, parts, 4000))
    dist = stats.nbinom(1 / parts, -math.expm1(-1 / scale))
    edges = np.unique(dist.ppf([0.1, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98])).astype(int)
    bins = np.concatenate([[-1], edges, [10**9]])
    seen = np.histogram(found, bins + 0.5)[0]
    expected = np.diff(dist.cdf(bins)) * len(found)
    kept = expected > 5
    assert stats.chisquare(seen[kept], expected[kept] * seen[kept].sum() / expected[kept].sum()).pvalue > 1e-6
    assert seen[~kept].sum() < 60


def query(value: int, count: int = 1) -> GridSum:
    return GridSum(total=(value,) * count, grid=1.0, low=0.0, high=8.0, l1=8.0, l2=8.0)


@pytest.mark.parametrize("kind", ["laplace", "gaussian"])
def test_the_total_of_all_shares_has_the_noise_that_was_charged(kind: str) -> None:
    parts, noise, count = 4, 2.0, 500
    totals = np.zeros(count)
    for _ in range(parts):
        ledger = Ledger("sqlite://")
        ledger.subject("s", Budget(math.inf, 1e-6))
        receipt = ledger.charge("s", events.shared_noise(kind, noise, parts), stage="test")
        totals += np.array(mechanisms.share(query(5, count), receipt), dtype=float)
    scale = noise * 8.0
    wanted = stats.laplace(20, scale) if kind == "laplace" else stats.norm(20, math.hypot(scale, 3 * 2))
    assert stats.kstest(totals + np.random.default_rng(0).uniform(-0.5, 0.5, count), wanted.cdf).pvalue > 1e-6


def test_it_costs_what_the_whole_noise_costs() -> None:
    for relation in ("add-remove", "replace-one"):
        factor = 2 if relation == "replace-one" else 1
        ledger = Ledger("sqlite://")
        ledger.subject("pure", Budget(4.0, 0.0), neighbours=relation)
        ledger.charge("pure", events.shared_noise("laplace", 2.0, 7), stage="test")
        assert ledger.spent("pure").epsilon == pytest.approx(factor / 2)
        ledger.subject("gauss", Budget(8.0, 1e-6), neighbours=relation)
        ledger.charge("gauss", events.shared_noise("gaussian", 3.0, 7), stage="test")
        assert Budget(ledger.spent("gauss").epsilon, 1e-6).mu == pytest.approx(factor / 3, rel=1e-6)


def test_receipts_for_shares_pay_for_shares_alone() -> None:
    ledger = Ledger("sqlite://")
    ledger.subject("s", Budget(math.inf, 1e-6))
    shared = ledger.charge("s", events.shared_noise("laplace", 2.0, 3), stage="test")
    for release in (mechanisms.laplace, mechanisms.gaussian_query):
        with pytest.raises(ReceiptError, match="paid for SharedNoiseDpEvent"):
            release(query(1), shared)
    for event in (events.laplace(2.0), events.gaussian(2.0)):
        with pytest.raises(ReceiptError, match="No SharedNoiseDpEvent"):
            mechanisms.share(query(1), ledger.charge("s", event, stage="test"))
    mechanisms.share(query(1), shared)
    with pytest.raises(ReceiptError, match="left"):
        mechanisms.share(query(1), shared)
    wide = ledger.charge("s", events.shared_noise("laplace", 1e9, 3), stage="test")
    with pytest.raises(ReceiptError, match="coarser grid"):
        mechanisms.share(query(1), wide)
    for bad in (("luck", 1.0, 2), ("laplace", -1.0, 2), ("laplace", 1.0, 0), ("laplace", math.nan, 2)):
        with pytest.raises(ValueError, match=r"[a-z]"):
            events.shared_noise(*bad)


@pytest.mark.parametrize("kind", ["laplace", "gaussian"])
def test_seeded_shares_are_the_same_again(kind: str) -> None:
    def draw() -> tuple[int, ...]:
        ledger = Ledger("sqlite://")
        ledger.subject("s", Budget(math.inf, 1e-6))
        return mechanisms.share(query(5, 4), ledger.charge("s", events.shared_noise(kind, 50.0, 3), stage="t", seed=4))

    assert draw() == draw()
