"""One question with the whole budget: its posterior by brute force, when it is asked, its cost and its worth."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_curve import LABELS, LOGITS, crooked

from tacit.calibrate import (
    Calibrator,
    GapCells,
    GapCurve,
    GapSlope,
    Query,
    Setting,
    SignedGap,
    Simulation,
    Source,
    ece,
    reference,
)
from tacit.calibrate import _accuracy_curve as module
from tacit.calibrate._outputs import Outputs
from tacit.privacy import Budget, mechanisms

SECURE: Any = "secure-aggregation"
ONCE = GapCurve(steps=1)


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


def test_the_posterior_is_that_of_the_stated_prior() -> None:
    """Against importance sampling: draws of (T, sigma, delta) from the prior, weighted by the likelihood."""
    rng, noise, bins = np.random.default_rng(3), 10.0, 5
    middle, fine = (np.arange(bins) + 0.5) / bins, (np.arange(module.NODES) + 0.5) / module.NODES
    counts = np.array([0.0, 150.0, 350.0, 400.0, 600.0])
    gap = counts * np.array([0.0, -0.02, -0.06, -0.1, -0.05])
    rest = counts * ((1 - middle) ** 2 + middle**2) - gap * (1 - 2 * middle)
    totals = torch.from_numpy(np.concatenate([gap, rest]))[None]
    probability, accuracy = module.accuracy_curve(totals, samples=1500.0, noise=noise)

    def confidence(c: Any, log_t: Any) -> Any:
        """At another temperature, with three rivals of equal probability: softmax of (z, 0, 0, 0)."""
        c = np.clip(c, 0.2501, 1 - 1e-9)
        z = math.exp(0.4) * np.log(3 * c / (1 - c)) / np.exp(log_t)
        return np.exp(z) / (np.exp(z) + 3)

    draws, both = 40_000, np.concatenate([middle, fine])
    levels = np.arange(-6, 28) / 16
    likely = np.exp(-(((levels - 0.2) / 0.5) ** 2) / 2)
    log_t = rng.choice(levels, size=(4 * draws, 1), p=likely / likely.sum())
    near = np.exp(-((both[:, None] - both) ** 2) / (2 * 0.2**2)) + 1e-9 * np.eye(len(both))
    sizes = np.repeat([0.0, 0.03, 0.06, 0.12], draws)[:, None]
    delta = sizes * rng.multivariate_normal(np.zeros(len(both)), near, size=4 * draws)
    claimed = confidence(middle, log_t)
    variance = noise**2 + counts * (claimed * (1 - claimed) + 0.01) + 1e-6
    at = claimed + delta[:, :bins]
    weight = np.exp(-((gap - counts * (at - middle)) ** 2 / variance + np.log(variance)).sum(axis=1) / 2)
    wanted = (weight[:, None] * (confidence(fine, log_t) + delta[:, bins:])).sum(axis=0) / weight.sum()
    own = confidence(middle, 0.0)
    variance = noise**2 + counts * (own * (1 - own) + 0.01) + (0.03 * counts) ** 2 + 1e-6
    null = np.exp(-((gap - counts * (own - middle)) ** 2 / variance + np.log(variance)).sum() / 2)
    odds = 0.7 / 0.3 * null / weight.mean()
    assert float(probability) == pytest.approx(odds / (1 + odds), rel=0.1)
    wanted = wanted + float(probability) * (confidence(fine, 0.0) - wanted)
    assert accuracy[0].numpy() == pytest.approx(np.maximum.accumulate(wanted), abs=4e-3)


def test_noise_alone_is_no_evidence() -> None:
    totals = torch.tensor([[-30.0, 0.0, 20.0, 150.0, 200.0, 300.0]], dtype=torch.float64)
    probability, _ = module.accuracy_curve(totals, samples=700, noise=1e7)
    assert float(probability) == pytest.approx(0.7, abs=1e-3)
    assert (module.accuracy_curve(totals * 1e3, samples=7e5, noise=0.0)[1].diff() >= 0).all()


@pytest.mark.parametrize(("epsilon", "at_once"), [(0.1, False), (0.13, False), (0.14, True), (0.2, True), (2.0, True)])
def test_when_it_is_asked_is_decided_by_public_quantities(epsilon: float, at_once: bool) -> None:
    """2 / epsilon is at most 1 % of 1,500 units from 0.1334 on."""
    assert (2 / epsilon <= 15) == at_once
    simulation = Simulation(logits=LOGITS, labels=LABELS, sources=50, samples=30, trials=3)
    budget = Budget(epsilon, 0.0)
    local = Setting(sources=50, samples=1500, budget=budget, noise="laplace", aggregate="sum")
    for public, curve in ((setting(epsilon), at_once), (local, False)):
        found = simulation.run_in(public, GapCurve(steps=1))
        (asked, _), *more = found.outcome.asked
        assert (found.queries, more) == (1, [])
        assert isinstance(asked.statistic, GapCells if curve else GapSlope)
        assert GapCurve().queries(public) == SignedGap().queries(public)
    unknown = replace(setting(epsilon), samples=None)
    assert GapCurve(steps=1).queries(unknown) == SignedGap(steps=1).queries(unknown) == 2


def test_it_mends_what_no_temperature_can_and_leaves_the_rest() -> None:
    """Seeds are fixed. Crooked outputs have an error of 0.13 at every temperature."""
    logits, labels = crooked()
    simulation = Simulation(logits=logits, labels=labels, sources=50, samples=30, trials=40)
    one, curve = (simulation.run_in(setting(0.2), method) for method in (SignedGap(), ONCE))
    assert (one.queries, curve.queries) == (2, 1)
    assert float(one.ece_after.mean()) > 0.1
    assert float(curve.ece_after.mean()) < 0.4 * float(one.ece_after.mean())
    logits, labels = reference(0.002, 10_000)
    simulation = Simulation(logits=logits, labels=labels, sources=50, samples=30, trials=100)
    found = simulation.run_in(setting(0.2), ONCE)
    assert float((found.ece_after - found.ece_before > 0.01).double().mean()) <= 0.03
    assert found.outcome.kept is not None
    kept = found.outcome.kept
    assert (found.temperature[kept] == 1.0).all()
    assert found.ece_after[kept].tolist() == pytest.approx(found.ece_before[kept].tolist())


def test_one_share_of_each_source_costs_the_whole_epsilon_and_not_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Epsilon from the noise itself: discrete Laplace noise moved by d steps changes by exp(d / scale) at most.

    d by brute force: every source with one row more, of any confidence, right or wrong.
    """
    logits, labels = crooked()
    asked, scales, share = list[Query](), list[float](), Source.share
    draw = mechanisms.share

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
    result = Calibrator(budget=budget, method=ONCE, trust=SECURE).run(sources)
    assert (len(asked), len(scales), result.queries, result.honest) == (20, 20, 1, 10)
    assert [source.spent.epsilon for source in sources] == pytest.approx([0.2] * 20)
    statistic, shares = asked[0].statistic, asked[0].shares
    assert statistic == GapCells(bins=5, temperature=module.TEMPERATURE)
    assert shares is not None
    assert len({query.text for query in asked}) == 1
    grid = torch.linspace(0.5, 1.0, 2001, dtype=torch.float64).clamp(1e-6, 1 - 1e-6)
    rows = torch.stack([grid, 1 - grid], dim=1).log()
    furthest = 0
    for label in (0, 1):
        for start in range(0, len(rows), 7):
            moved = statistic.sum(Outputs.of(logits=rows[start : start + 1], labels=[label]), None, shares.steps).total
            furthest = max(furthest, sum(abs(value) for value in moved))
    assert furthest <= shares.steps
    assert 0.98 * 0.2 < furthest / max(scales) <= furthest / min(scales) <= 0.2 * (1 + 1e-12)
    assert result.corrections is not None
    assert len(result.corrections) == module.NODES
    assert (
        ece(logits=result.apply(logits[3000:]), labels=labels[3000:])
        < 0.06
        < ece(logits=logits[3000:], labels=labels[3000:])
    )


def test_a_classifier_that_is_fine_keeps_its_temperature() -> None:
    calibrated, labels = reference(0.002)
    budget = Budget(0.2, 0.0)
    sources = [
        Source(
            f"s{k}",
            logits=calibrated[k:3000:20],
            labels=labels[k:3000:20],
            budget=budget,
            size=150,
            seed=k,
            trust=SECURE,
        )
        for k in range(20)
    ]
    result = Calibrator(budget=budget, method=ONCE, trust=SECURE, cautious=False).run(sources)
    assert (result.temperature, result.corrections, result.only_temperature) == (1.0, None, True)
    assert "T stays 1" in str(result)


def test_the_reference_is_mended_as_well() -> None:
    """Seeds are fixed. A temperature is right for it, which costs nothing to know beforehand."""
    simulation = Simulation(logits=LOGITS, labels=LABELS, sources=50, samples=30, trials=60)
    found = simulation.run_in(setting(0.2), ONCE)
    assert float(found.ece_after.mean()) < 0.6 * float(found.ece_before.mean())
