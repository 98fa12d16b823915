"""One total from many answers: the score against a density by quadrature, its efficiency, and liars."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate, optimize, stats

from tacit.calibrate import Answer, Calibrator, Gap, InProcess, Query, Refusal, SignedGap, Simulation, Source, reference
from tacit.calibrate._aggregate import Answers, _facts, _limits, _psi, deviation, shrunk, total, totals
from tacit.calibrate._search import Ask, drive, fit_gap
from tacit.privacy import Budget, Ledger

LOGITS, LABELS = reference(0.1)
RNG = np.random.default_rng(21)


def log_density(r: float, s: float, noise: str) -> float:
    """log of N(0, s^2) convolved with noise of scale 1, by quadrature."""
    pdf = stats.laplace.pdf if noise == "laplace" else stats.norm.pdf
    breaks = sorted({-12 * s, 12 * s, *([r] if abs(r) < 12 * s else [])})  # the Laplace density has a corner
    parts = [
        integrate.quad(lambda u: stats.norm.pdf(u, scale=s) * pdf(r - u), a, b, epsabs=0, epsrel=1e-11, limit=400)[0]
        for a, b in itertools.pairwise(breaks)
    ]
    return math.log(math.fsum(parts))


@pytest.mark.parametrize("noise", ["laplace", "gaussian"])
@pytest.mark.parametrize("s", [0.05, 0.7, 4.0])
def test_the_score_is_the_slope_of_the_log_density(noise: Any, s: float) -> None:
    for r in (-9.0, -1.3, 0.02, 0.5, 3.0, 20.0):
        h = 1e-4 * max(1.0, s)
        slope = -(log_density(r + h, s, noise) - log_density(r - h, s, noise)) / (2 * h)
        found = float(_psi(torch.tensor(r, dtype=torch.float64), torch.tensor(s, dtype=torch.float64), noise))
        assert found == pytest.approx(slope, rel=2e-4, abs=2e-5)


def test_the_expectations_of_the_score() -> None:
    cut, slope, square, *far = _facts(0.0001, "laplace")  # nearly Laplace: the score is a sign, of which nothing is cut
    assert (cut, slope, square) == pytest.approx((1.345, 1.0, 1.0), rel=0.02)
    assert far == pytest.approx((1.0, 1.0), rel=0.02)  # -log(f / f(0)) is exponential
    cut, slope, square, *far = _facts(3.0, "gaussian")  # Huber: E psi_cut' = P(|z| < c), E psi_cut^2 by its closed form
    assert far == pytest.approx((0.5, 0.5), rel=1e-3)  # half of a chi-square
    c, var = 1.345, 10.0
    inside = 2 * stats.norm.cdf(c) - 1
    assert cut == pytest.approx(c / math.sqrt(var), rel=1e-3)
    assert slope == pytest.approx(inside / var, rel=1e-3)
    closed = inside - 2 * c * stats.norm.pdf(c) + 2 * c**2 * stats.norm.sf(c)
    assert square == pytest.approx(closed / var, rel=1e-3)
    assert slope**2 / square * var == pytest.approx(0.95, abs=0.005)  # Huber's 95 %


@pytest.mark.parametrize("noise", ["laplace", "gaussian"])
@pytest.mark.parametrize("scale", [0.5, 4.0, 30.0])
@pytest.mark.parametrize("sizes", [[20] * 60, [5, 10, 40, 200] * 15])
def test_the_total_is_unbiased_with_the_deviation_that_is_stated(noise: Any, scale: float, sizes: list[int]) -> None:
    counted = torch.tensor(sizes, dtype=torch.float64)
    draw = RNG.laplace if noise == "laplace" else RNG.normal
    shape = (1500, len(sizes))
    x = 0.07 * counted.numpy() + np.sqrt(0.2 * counted.numpy()) * RNG.normal(size=shape) + draw(scale=scale, size=shape)
    found = total(torch.from_numpy(x)[:, :, None], counted, Gap(), noise=noise, scale=scale).value[:, 0].numpy()
    stated = deviation(counted, 0.2, noise=noise, scale=scale)
    assert abs(found.mean() - 0.07 * sum(sizes)) < 6 * stated / math.sqrt(len(found))
    assert found.std() == pytest.approx(stated, rel=0.12)  # 6 standard deviations of an estimated deviation
    if noise == "laplace" and scale == 30.0:  # the median of Laplace noise has half the variance of its mean
        assert found.std() < 0.85 * x.sum(axis=1).std()


def test_the_root_is_the_likelihoods_maximum() -> None:
    """Against a search over mu of the density itself, with sizes that differ."""
    sizes = np.array([4.0, 9.0, 25.0, 16.0])
    x = np.array([3.0, -5.0, 6.0, 2.5])

    def loss(mu: float) -> float:
        return -sum(
            log_density((a - n * mu) / 3.0, math.sqrt(0.2 * n) / 3.0, "laplace") for a, n in zip(x, sizes, strict=True)
        )

    best = optimize.minimize_scalar(loss, bounds=(-2, 2), method="bounded", options={"xatol": 1e-7}).x
    found = total(torch.from_numpy(x)[None, :, None], torch.from_numpy(sizes), Gap(), noise="laplace", scale=3.0)
    assert float(found.value[0, 0]) == pytest.approx(best * sizes.sum(), rel=1e-3)


def test_without_noise_or_sizes_it_is_the_sum() -> None:
    x = torch.tensor([[[1.0], [5.0], [100.0]]], dtype=torch.float64)
    assert total(x, torch.ones(3), Gap(), noise="laplace", scale=0.0).value.item() == 106
    assert total(x, torch.zeros(3), Gap(), noise="laplace", scale=2.0).value.item() == 106


def two_questions(
    noise: Any, offset: float = 0.0, liars: int = 0, trials: int = 400, spread: float = 0.0
) -> list[Answers]:
    """The gap and a second value, asked twice of 60 sources of 20 samples with a mean of 0.07; ``liars`` add to all."""
    scale, size = 4.0, 20
    asked = []
    own = RNG.normal(size=(1, 60, 1)) * spread * size  # how a source differs from the others, always
    for _ in range(2):
        draw = RNG.laplace if noise == "laplace" else RNG.normal
        x = (
            0.07 * size
            + own
            + math.sqrt(0.2 * size) * RNG.normal(size=(trials, 60, 1))
            + draw(scale=scale, size=(trials, 60, 1))
        )
        x[:, :liars] += offset * scale
        sizes = torch.full((60,), size)
        asked.append(
            Answers(values=torch.from_numpy(x), sizes=sizes, statistic=Gap(), noise=noise, scale=scale, spread=[0.2])
        )
    return asked


@pytest.mark.parametrize("noise", ["laplace", "gaussian"])
def test_all_answers_of_a_source_are_judged_together(noise: Any) -> None:
    """Three of 60 sources are off by some scales in both answers. Chance: five deviations of a mean of 400."""
    honest = two_questions(noise)
    limit, _ = _limits(honest)
    truth = torch.full((400, 1), 0.07, dtype=torch.float64)
    trimmed = sum(one.distance(truth) for one in honest) > limit
    assert float(trimmed.double().mean()) == pytest.approx(0.05, abs=0.01)  # 24,000 sources: seven deviations
    bias, left = {}, {}
    for offset in (1.5, 3.0, 6.0, 20.0):
        asked = two_questions(noise, offset, liars=3)
        found = [float(one.value.mean()) / 1200 - 0.07 for one in totals(asked)]
        alone = [float(one.alone[0].mean()) - 0.07 for one in asked]
        bias[offset], left[offset] = sum(found) / sum(alone), sum(found) / 2 * 20 / 4.0
    assert bias[1.5] < 1.1
    assert bias[3.0] < 0.75
    assert abs(left[6.0]) < 0.04  # scales of the noise: the deviation of one estimate is 0.15, that of 800 below 0.007
    assert abs(left[20.0]) < 0.04


def test_a_later_answer_changes_what_an_earlier_one_counts() -> None:
    first, second = two_questions("laplace", 2.5, liars=3)
    alone, again = totals([first])[0].value, totals([first, second])[0].value
    assert float(again.mean()) < float(alone.mean())  # the lies were upwards


def test_sources_that_are_unlike_each_other_are_not_taken_for_liars() -> None:
    """Honest sources differ by 30 points, beyond the noise: the limits grow, so that most of them count as before."""
    asked = two_questions("laplace", spread=0.3, trials=200)
    for one, found in zip(asked, totals(asked), strict=True):
        middle = float(one.values.mean())  # of 60 sources with a deviation of 6 each: known to 0.8
        assert float(found.value.mean()) / 60 == pytest.approx(middle, abs=2.5)
    limit, middle_distance = _limits(asked)
    distance = sum(one.distance(one.alone[0]) for one in asked)
    unlike = (distance / middle_distance).median(dim=1, keepdim=True).values
    assert float(unlike.median()) > 1.5
    assert float((distance > limit * unlike).double().mean()) < 0.12


def test_sources_that_did_not_answer_have_no_say() -> None:
    first, second = two_questions("laplace", trials=5)
    sizes = second.sizes.clone()
    sizes[:7] = 0
    values = second.values.clone()
    values[:, :7] = 0.0
    silent = replace(second, values=values, sizes=sizes)
    without = replace(second, values=second.values[:, 7:], sizes=second.sizes[7:])
    found = totals([silent])[0].value
    assert torch.allclose(found, totals([without])[0].value, rtol=1e-6)
    assert len(totals([first, silent])) == 2


def test_noisy_counts_are_drawn_together_as_far_as_noise_explains_them() -> None:
    same = shrunk(torch.from_numpy(30 + RNG.laplace(scale=8, size=400)), noise="laplace", scale=8.0)
    assert float(same.std()) < 6  # of the noise of 11.3
    unlike = torch.tensor([10.0, 100.0] * 50, dtype=torch.float64)
    assert torch.allclose(shrunk(unlike, noise="laplace", scale=0.1), unlike, atol=0.1)
    assert float(shrunk(torch.tensor([9.0, 10.0, 11.0, 1e9]), noise="laplace", scale=0.1).max()) <= 100


# Liars

Lie = Callable[[torch.Tensor, Ask, float], torch.Tensor]


def lies(share: float, kind: str, size: int, sign: float = 1.0) -> Lie:
    """What the first ``share`` of the sources make of their answers."""

    def tamper(answers: torch.Tensor, asked: Ask, scale: float) -> torch.Tensor:
        liars, changed = round(share * answers.shape[1]), answers.clone()
        part = changed[:, :liars]
        most = 2 * max(abs(asked.statistic.low), asked.statistic.high) * (size + 1) + 27 * scale
        if kind == "extreme":
            part[:] = sign * most
        elif kind == "flipped":
            part.neg_()
        elif kind == "hidden":  # just not taken for a lie by one answer alone
            part.add_(sign * (most / 10 + 20 * scale))
        else:  # together, and each of them within its noise
            part.add_(sign * {"colluding": 2, "small": 1}[kind] * math.sqrt(2) * scale)
        return changed

    return tamper


@pytest.mark.parametrize("budget", [Budget(1.0, 0.0), Budget(4.0, 1e-6)])
@pytest.mark.parametrize("kind", ["extreme", "hidden", "flipped", "colluding", "small"])
def test_liars_decide_little(kind: str, budget: Budget) -> None:
    """The seeds are fixed: these are the same numbers each time. A plain sum is at the mercy of one source."""
    simulation = Simulation(logits=LOGITS, labels=LABELS, sources=100, samples=20, trials=60)
    honest = float(simulation.run(SignedGap(), budget=budget).ece_after.median())
    most = {0.01: 1.1, 0.05: 1.1, 0.2: 1.6 if kind in ("colluding", "small") else 1.1}
    for share, factor in most.items():
        for sign in (1.0, -1.0):
            tamper = lies(share, kind, 20, sign)
            found = float(simulation.run(SignedGap(), budget=budget, tamper=tamper).ece_after.median())
            assert found < factor * honest, (share, sign, found, honest)
    if kind == "extreme":
        plain = simulation.run(SignedGap(), budget=budget, tamper=lies(0.01, kind, 20, 1.0), aggregate="sum")
        assert float(plain.ece_after.median()) > 2 * honest


class Lying(InProcess):
    """The first source says that nearly all of its samples are wrong, and sure of it."""

    def ask(self, query: Query) -> list[Answer | Refusal]:
        replies = super().ask(query)
        first = replies[0]
        assert isinstance(first, Answer)
        return [replace(first, values=tuple(-380.0 for _ in first.values)), *replies[1:]]


def test_a_lie_that_is_possible_is_named_and_counts_for_little() -> None:
    def sources() -> list[Source]:
        places = [slice(i * 400, (i + 1) * 400) for i in range(10)]
        return [
            Source(f"s{i}", logits=LOGITS[r], labels=LABELS[r], budget=Budget(2.0, 0.0), ledger=Ledger("sqlite://"),
                   size=400, seed=i)
            for i, r in enumerate(places)
        ]  # fmt: skip

    calibrator = Calibrator(budget=Budget(2.0, 0.0))
    honest, lied = calibrator.run(sources()), calibrator.run(Lying(sources()))
    assert "s0 is far from what the others say" in str(lied)
    assert "far from" not in str(honest)
    assert abs(math.log(lied.temperature / honest.temperature)) < 0.1
    summed = replace(calibrator, aggregate="sum").run(Lying(sources()))
    assert math.log(summed.temperature / honest.temperature) > 0.3


# The gate


def gap_curve(gap: float) -> Callable[[Ask], list[torch.Tensor]]:
    """Exact totals of 1000 units whose gap at T = 1 is known, with a slope of 0.2 in log T."""
    sums: list[torch.Tensor] = []

    def answer(asked: Ask) -> list[torch.Tensor]:
        t = asked.temperatures.log()
        sums.append(torch.stack([1000 * (gap + 0.2 * t), torch.full_like(t, 200.0)], dim=1))
        return sums

    return answer


def test_the_gate_keeps_exactly_one_without_evidence() -> None:
    def found(gap: float, noise: float) -> Any:
        search = fit_gap(low=0.5, high=3.0, steps=2, samples=1000, stds=(noise, noise), trials=1, z=1.96)
        return drive(search, gap_curve(gap))

    near = found(-0.01, 20.0)  # one point off, known to two points
    assert float(near.temperature[0]) == 1.0
    assert bool(near.kept[0])
    assert float(near.low[0]) <= 1.0 <= float(near.high[0])
    far = found(-0.1, 20.0)
    assert not bool(far.kept[0])
    assert float(far.temperature[0]) == pytest.approx(math.exp(0.5), rel=0.1)
    sharp = found(-0.01, 1.0)
    assert not bool(sharp.kept[0])
    search = fit_gap(low=1.2, high=3.0, steps=1, samples=1000, stds=(20.0, 20.0), trials=1, z=1.96)
    assert not bool(drive(search, gap_curve(-0.01)).kept[0])  # T = 1 is not in this range


def test_the_gate_is_the_probability_of_harm() -> None:
    """By simulation: a gap g ~ N(m, s) that is moved by -m becomes larger with probability 1 - Phi(|m| / 2 s)."""
    for m, s in ((0.05, 0.02), (0.02, 0.03), (-0.04, 0.01)):
        g = RNG.normal(m, s, 200_000)
        harm = (np.abs(g - m) > np.abs(g)).mean()
        assert harm == pytest.approx(1 - stats.norm.cdf(abs(m) / (2 * s)), abs=0.006)
