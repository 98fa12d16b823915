"""Platt scaling from one question: its posterior by brute force, when it is asked, its cost, its worth and its harm."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_curve import LABELS, LOGITS, crooked

from tacit.calibrate import (
    Calibrator,
    GapSlope,
    LogitCells,
    Platt,
    Query,
    Result,
    Setting,
    SignedGap,
    Simulation,
    Source,
    ece,
    reference,
)
from tacit.calibrate import _platt as module
from tacit.calibrate._outputs import Outputs
from tacit.privacy import Budget, mechanisms

SECURE: Any = "secure-aggregation"


def setting(epsilon: float, *, samples: int = 1500, honest: int = 25) -> Setting:
    """Fifty sources, so that a number of a single question has the noise 2 / epsilon where half may collude."""
    return Setting(
        sources=50,
        samples=samples,
        budget=Budget(epsilon, 0.0),
        noise="laplace",
        aggregate="secure",
        honest=honest,
    )


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def answer(intercept: float, slope: float, counts: Any) -> Any:
    """The totals of so many samples in each narrow bin, without noise, one sample after the other."""
    wide, totals = len(module.WIDE) + 1, np.zeros(LogitCells().size)
    for place, (x, count) in enumerate(zip(module._MIDDLES, counts, strict=True)):
        c, accuracy = sigmoid(x), sigmoid(intercept + slope * x)
        totals[np.searchsorted(module.WIDE, x)] += count * (accuracy * (1 - c) - (1 - accuracy) * c)
        totals[wide + place] += count * (accuracy * c + (1 - accuracy) * (1 - c))
    return torch.from_numpy(totals)[None]


def test_the_posterior_is_that_of_the_stated_prior() -> None:
    """Against importance sampling: draws of (a, log b) from the prior, weighted by the likelihood."""
    rng, noise = np.random.default_rng(5), 10.0
    counts = np.array([20, 60, 40, 50, 120, 150, 160, 80, 150, 200, 180, 150, 80, 40, 20])
    totals = answer(-0.3, 0.7, counts)
    weight, mean, _ = module.posterior(totals, noise=noise)

    draws, wide = 60_000, np.searchsorted(module.WIDE, module._MIDDLES)
    shares = [0.8, 0.2]
    parts = []
    for share, (mean_a, mean_b), (std_a, std_b), r in zip(
        shares, [(-0.1, -0.25), (0.0, 0.0)], [(0.6, 0.45), (1.5, 0.7)], [0.3, 0.5], strict=True
    ):
        covariance = [[std_a**2, r * std_a * std_b], [r * std_a * std_b, std_b**2]]
        parts.append(rng.multivariate_normal([mean_a, mean_b], covariance, size=int(share * draws)))
    lines = np.concatenate([*parts, [[0.0, 0.0]]])
    x = np.array(module._MIDDLES)
    c, accuracy = sigmoid(x), sigmoid(lines[:, :1] + np.exp(lines[:, 1:]) * x)
    gaps, rest = totals[0, :3].numpy(), totals[0, 3:].numpy()
    score = np.append(np.full(draws, math.log(0.9 / draws)), math.log(0.1))
    for place in range(3):
        here = wide == place
        h = accuracy[:, here] * c[here] + (1 - accuracy[:, here]) * (1 - c[here])
        r = (accuracy[:, here] - c[here]) / h
        n = rest[here] / h
        flip = 1 - r * (2 * c[here] - 1)  # a right sample in place of a wrong one moves the gap less r times the rest
        variance = noise**2 * (1 + (r**2).sum(1)) + (n * accuracy[:, here] * (1 - accuracy[:, here]) * flip**2).sum(1)
        variance += (0.01 * n.sum(1)) ** 2 + 1
        score -= ((gaps[place] - (r * rest[here]).sum(1)) ** 2 / variance + np.log(variance)) / 2
    wanted = np.exp(score - score.max())
    wanted /= wanted.sum()
    assert float(weight[0, -1]) == pytest.approx(wanted[-1], rel=0.1, abs=1e-4)
    assert mean[0].numpy() == pytest.approx(wanted @ lines, abs=0.02)


@pytest.mark.parametrize(("intercept", "slope"), [(-0.4, 0.6), (0.3, 0.8), (0.5, 1.6)])
def test_without_noise_it_finds_the_line(intercept: float, slope: float) -> None:
    totals = answer(intercept, slope, np.full(15, 10_000.0))
    line, gone = module.fit_platt(totals, noise=0.0)
    assert line[0].tolist() == pytest.approx([intercept, slope], abs=0.08)
    assert float(gone) == 1.0


def test_it_goes_as_far_as_harm_is_improbable() -> None:
    """Harm of every part of the way, from the posterior, one place of the grid after the other."""
    counts = np.array([20, 60, 40, 50, 120, 150, 160, 80, 150, 200, 180, 150, 80, 40, 20])
    x = np.array(module._MIDDLES)
    found = []
    for slope in (0.95, 0.9, 0.85, 0.6):
        totals = answer(0.0, slope, counts)
        line, gone = module.fit_platt(totals, noise=10.0)
        weight, mean, accuracy = (value.numpy() for value in module.posterior(totals, noise=10.0))
        share = totals[0, 3:].numpy() / totals[0, 3:].sum().item()
        before = np.abs(accuracy - sigmoid(x)) @ share
        allowed = [0.0]
        for part in np.arange(1, 11) / 10:
            claimed = sigmoid(part * mean[0, 0] + np.exp(part * mean[0, 1]) * x)
            if weight[0] @ (np.abs(accuracy - claimed) @ share > before + 0.01) <= 0.03:
                allowed.append(part)
        assert float(gone) == pytest.approx(max(allowed))
        assert line[0].tolist() == pytest.approx([max(allowed) * mean[0, 0], math.exp(max(allowed) * mean[0, 1])])
        found.append(max(allowed))
    assert min(found) < 1.0 == found[-1]
    many, far = module.fit_platt(answer(0.0, 0.8, counts).expand(120, -1), noise=5.0)  # more than at once
    assert many.shape == (120, 2)
    assert len(set(far.tolist())) == 1


def test_the_map_keeps_the_order_and_the_class() -> None:
    c = torch.linspace(0.1, 1.0, 200, dtype=torch.float64)
    assert module.platt(c, 0.0, 1.0, 10).tolist() == pytest.approx(c.tolist(), abs=1e-9)
    assert (module.platt(c, -0.3, 0.4, 10).diff() >= 0).all()
    assert float(module.platt(c, -9.0, 1.0, 10).min()) == 0.1
    result = Result(method="platt", platt=(-0.3, 0.7))
    assert Result.from_json(result.to_json()) == result
    assert not result.only_temperature
    calibrated = torch.softmax(result.apply(LOGITS), dim=1)
    before = torch.softmax(LOGITS, dim=1)
    assert (calibrated.argmax(1) == before.argmax(1)).all()
    wanted = module.platt(before.amax(1).double(), -0.3, 0.7, LOGITS.shape[1])
    assert torch.allclose(calibrated.amax(1).double(), wanted, atol=1e-4)
    wrapped = result.wrap(torch.nn.Identity())
    assert torch.allclose(torch.softmax(wrapped(LOGITS), dim=1), calibrated, atol=1e-6)
    with pytest.raises(ValueError, match="merge=False"):
        wrapped.save("nowhere")
    assert "times 0.700" in str(result)


@pytest.mark.parametrize(("epsilon", "at_once"), [(0.1, False), (0.13, False), (0.14, True), (0.2, True), (2.0, True)])
def test_when_it_is_asked_is_decided_by_public_quantities(epsilon: float, at_once: bool) -> None:
    """2 / epsilon is at most 1 % of 1,500 units from 0.1334 on."""
    simulation = Simulation(logits=LOGITS, labels=LABELS, sources=50, samples=30, trials=3)
    robust = Setting(sources=50, samples=1500, budget=Budget(epsilon, 0.0), noise="laplace")
    for public, one in ((setting(epsilon), at_once), (robust, False)):
        found = simulation.run_in(public, Platt())
        asked = [ask.statistic for ask, _ in found.outcome.asked]
        assert found.queries == len(asked) == (1 if one else SignedGap().queries(public))
        assert all(isinstance(statistic, LogitCells if one else GapSlope) for statistic in asked)
    unknown = replace(setting(epsilon), samples=None)
    assert Platt().queries(unknown) == SignedGap().queries(unknown)


def test_it_mends_what_no_temperature_can_and_leaves_the_rest() -> None:
    """Seeds are fixed. Crooked outputs have an error of 0.13 at every temperature."""
    logits, labels = crooked()
    simulation = Simulation(logits=logits, labels=labels, sources=50, samples=30, trials=40)
    one, two = (simulation.run_in(setting(0.2), method) for method in (SignedGap(), Platt()))
    assert (one.queries, two.queries) == (2, 1)
    assert float(two.ece_after.mean()) < float(one.ece_after.mean())
    simulation = Simulation(logits=LOGITS, labels=LABELS, sources=50, samples=30, trials=60)
    found = simulation.run_in(setting(0.2), Platt())
    assert float(found.ece_after.mean()) < 0.5 * float(found.ece_before.mean())
    logits, labels = reference(0.002, 10_000)
    simulation = Simulation(logits=logits, labels=labels, sources=50, samples=30, trials=100)
    found = simulation.run_in(setting(0.2), Platt())
    assert float((found.ece_after - found.ece_before > 0.01).double().mean()) <= 0.05
    kept = found.outcome.kept
    assert kept is not None
    assert found.ece_after[kept].tolist() == pytest.approx(found.ece_before[kept].tolist())


def test_one_share_of_each_source_costs_the_whole_epsilon_and_not_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Epsilon from the noise itself: discrete Laplace noise moved by d steps changes by exp(d / scale) at most.

    d by brute force: every source with one row more, of any confidence, right or wrong.
    """
    logits, labels = reference(0.15, 4000)
    asked, scales, share, draw = list[Query](), list[float](), Source.share, mechanisms.share

    def noted(source: Source, query: Query) -> tuple[int, ...]:
        asked.append(query)
        return share(source, query)

    def drawn(total: Any, receipt: Any) -> tuple[int, ...]:
        scales.append(receipt.event.noise_multiplier * 1.0 / total.grid)  # in steps, for a bound of 1
        return draw(total, receipt)

    monkeypatch.setattr(Source, "share", noted)
    monkeypatch.setattr(mechanisms, "share", drawn)
    budget = Budget(0.2, 0.0)
    sources = [
        Source(
            f"s{k}", logits=logits[k:3000:20], labels=labels[k:3000:20], budget=budget, size=150, seed=k, trust=SECURE
        )
        for k in range(20)
    ]
    result = Calibrator(budget=budget, method=Platt(), trust=SECURE).run(sources)
    assert (len(asked), len(scales), result.queries, result.honest) == (20, 20, 1, 10)
    assert [source.spent.epsilon for source in sources] == pytest.approx([0.2] * 20)
    statistic, shares = asked[0].statistic, asked[0].shares
    assert statistic == LogitCells()
    assert shares is not None
    grid = torch.linspace(0.5, 1.0, 2001, dtype=torch.float64).clamp(1e-6, 1 - 1e-6)
    rows = torch.stack([grid, 1 - grid], dim=1).log()
    furthest = 0
    for label in (0, 1):
        for start in range(0, len(rows), 7):
            moved = statistic.sum(Outputs.of(logits=rows[start : start + 1], labels=[label]), None, shares.steps).total
            assert sum(value != 0 for value in moved) <= 2
            furthest = max(furthest, sum(abs(value) for value in moved))
    assert furthest <= shares.steps
    assert 0.98 * 0.2 < furthest / max(scales) <= furthest / min(scales) <= 0.2 * (1 + 1e-12)
    assert result.platt is not None
    assert result.temperature == 1.0
    before, after = (ece(logits=one[3000:], labels=labels[3000:]) for one in (logits, result.apply(logits)))
    assert after < 0.5 * before


def test_a_check_of_a_temperature_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="platt has more or none"):
        Calibrator(budget=Budget(1.0, 0.0), method=Platt(), check=True)


@pytest.mark.parametrize("value", [0.0, -1e4, math.nan, math.inf])
@pytest.mark.parametrize("noise", [0.0, 1.0, 1e6])
def test_totals_without_any_samples_change_nothing(value: float, noise: float) -> None:
    """So many samples cannot have given them: liars did, or there are none. Before, it went all the way to -4."""
    line, gone = module.fit_platt(torch.full((2, LogitCells().size), value, dtype=torch.float64), noise=noise)
    assert line.tolist() == [[0.0, 1.0]] * 2
    assert gone.tolist() == [0.0, 0.0]
