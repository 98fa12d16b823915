"""The correction after a temperature: its belief by brute force, its map, and what it is worth."""

import math

import numpy as np
import pytest
import torch

from tacit.calibrate import (
    Calibrator,
    GapCells,
    GapCurve,
    Result,
    Setting,
    SignedGap,
    Simulation,
    Source,
    ece,
    reference,
)
from tacit.calibrate._curve import _LEAST, _LENGTH, _SIZES, corrected, corrections, middles
from tacit.calibrate._outputs import Outputs
from tacit.privacy import Budget

LOGITS, LABELS = reference(0.1)


def crooked() -> tuple[torch.Tensor, torch.Tensor]:
    """Two classes whose accuracy is 0.75 whatever the confidence says: no temperature mends it."""
    rng = np.random.default_rng(0)
    confidence = torch.from_numpy(rng.uniform(0.5, 1.0, 6000)).clamp(0.501, 0.999)
    right = torch.from_numpy(rng.random(6000) < 0.75)
    return torch.stack([confidence, 1 - confidence], dim=1).log(), (~right).long()


def test_the_counts_of_bins_follow_from_the_pairs() -> None:
    """In exact arithmetic, where all confidences of a bin are its middle."""
    middle = 0.7
    n = torch.tensor([[30.0, 12.0]], dtype=torch.float64)  # right and wrong
    gap = n[0, 0] * (1 - middle) - n[0, 1] * middle
    left = n[0, 0] * middle + n[0, 1] * (1 - middle)
    assert float((gap * (1 - 2 * middle) + left) / ((1 - middle) ** 2 + middle**2)) == pytest.approx(42.0)
    rows = Outputs.of(probs=torch.tensor([[0.7, 0.3]] * 42), labels=[0] * 30 + [1] * 12)
    found = GapCells(bins=5).sum(rows)
    assert torch.tensor(found.total)[[3, 8]] * found.grid == pytest.approx([float(gap), float(left)], abs=1e-4)


def test_the_belief_is_that_of_a_mixture_of_gaussian_processes() -> None:
    """Against importance sampling: draws of (sigma, delta) from the prior, weighted by the likelihood of the gaps."""
    bins, samples, noise, constant = 3, 600.0, 12.0, 0.02
    middle = middles(bins)
    counts = torch.tensor([100.0, 200.0, 300.0], dtype=torch.float64)
    truth = torch.tensor([-0.08, 0.0, 0.05], dtype=torch.float64)
    gap = counts * truth
    rest = counts * ((1 - middle) ** 2 + middle**2) - gap * (1 - 2 * middle)
    found = corrections(torch.cat([gap, rest])[None], samples=samples, noise=noise, constant=constant)[0]
    rng = np.random.default_rng(1)
    near = np.exp(-((middle[:, None] - middle) ** 2).numpy() / (2 * _LENGTH**2))
    draws, means = 400_000, []
    for size in _SIZES:
        cov = constant**2 + size**2 * near + 1e-12 * np.eye(bins)
        delta = rng.multivariate_normal(np.zeros(bins), cov, size=draws)
        var = noise**2 + counts.numpy() * ((middle * (1 - middle)).numpy() + _LEAST)
        weight = np.exp(-((gap.numpy() - delta * counts.numpy()) ** 2 / (2 * var)).sum(axis=1))
        means.append((weight.sum(), (weight[:, None] * delta * (size > 0)).sum(axis=0)))
    wanted = sum(m for _, m in means) / sum(w for w, _ in means)
    assert found.numpy() == pytest.approx(wanted, abs=1.5e-3)


def test_much_noise_corrects_nothing_and_none_is_histogram_binning() -> None:
    totals = torch.tensor([[-30.0, 0.0, 20.0, 150.0, 200.0, 300.0]], dtype=torch.float64)
    assert corrections(totals, samples=700, noise=1e6, constant=0.0).abs().max() < 1e-6
    exact = corrections(totals * 1e6, samples=7e8, noise=0.0, constant=0.0)[0]
    middle = middles(3)
    counts = (totals[0, :3] * (1 - 2 * middle) + totals[0, 3:]) / ((1 - middle) ** 2 + middle**2)
    assert exact == pytest.approx(totals[0, :3] / counts * float(counts.sum()) / 700, abs=1e-3)


def test_without_noise_bins_may_be_empty() -> None:
    simulation = Simulation(logits=LOGITS, labels=LABELS, sources=5, samples=40, trials=2)
    found = simulation.run(GapCurve(bins=15), budget=Budget(math.inf, 0.0), aggregate="sum").outcome.corrections
    assert found is not None
    assert torch.isfinite(found).all()
    assert found[:, 0].abs().max() < 0.05  # no sample is there: what is near says little


def test_the_map_is_linear_between_the_middles_and_keeps_the_class() -> None:
    correction = torch.tensor([0.1, -0.1, 0.2, -0.3, 0.08], dtype=torch.float64)
    c = torch.tensor([0.05, 0.3, 0.4, 0.6, 0.9, 0.95, 1.0], dtype=torch.float64)
    delta = torch.tensor([0.1, -0.1, 0.05, -0.05, 0.08, 0.04, 0.0], dtype=torch.float64)
    assert corrected(c, correction, 1000) == pytest.approx(c + delta)
    assert float(corrected(torch.tensor([0.7], dtype=torch.float64), correction, 2)) == 0.5  # not below chance
    result = Result(method="gap-curve", temperature=1.3, corrections=tuple(correction.tolist()))
    probs = torch.softmax(result.apply(LOGITS[:500]), dim=1)
    before = torch.softmax(LOGITS[:500] / 1.3, dim=1)
    assert (probs.argmax(1) == before.argmax(1)).all()
    assert probs.amax(1) == pytest.approx(corrected(before.amax(1), correction, 10).clamp_min(1.00001 / 10), abs=1e-6)
    assert Result.from_json(result.to_json()) == result
    module = result.wrap(torch.nn.Identity())
    assert module(LOGITS[:500]) == pytest.approx(result.apply(LOGITS[:500]))
    with pytest.raises(ValueError, match="cannot go into a model's weights"):
        module.save("nowhere")


def test_it_mends_what_no_temperature_can_and_leaves_the_rest() -> None:
    logits, labels = crooked()
    simulation = Simulation(logits=logits, labels=labels, sources=50, samples=40, trials=40)
    budget = Budget(2.0, 0.0)
    one, curve = (simulation.run(m, budget=budget, aggregate="secure").ece_after for m in (SignedGap(), GapCurve()))
    assert float(one.mean()) > 0.1
    assert float(curve.mean()) < 0.4 * float(one.mean())
    simulation = Simulation(logits=LOGITS, labels=LABELS, sources=50, samples=40, trials=40)
    one, curve = (simulation.run(m, budget=budget, aggregate="secure").ece_after for m in (SignedGap(), GapCurve()))
    assert float(curve.mean()) < 1.1 * float(one.mean())  # a temperature is right there: little is lost


@pytest.mark.parametrize(("epsilon", "bends"), [(0.2, False), (1.0, False), (4.0, True), (8.0, True)])
def test_whether_there_is_a_curve_is_decided_by_public_quantities(epsilon: float, bends: bool) -> None:
    """Plain sums of 50 sources: the noise of a bin is sqrt(100) / epsilon per question; 0.65 % of the units is 9.75."""
    simulation = Simulation(logits=LOGITS, labels=LABELS, sources=50, samples=30, trials=3)
    found = {
        method: simulation.run(method, budget=Budget(epsilon, 0.0), aggregate="sum")
        for method in (GapCurve(), SignedGap())
    }
    curve, one = found[GapCurve()], found[SignedGap()]
    noise = math.sqrt(100) * curve.queries / epsilon
    assert (noise <= 9.75) == bends
    assert (curve.outcome.corrections is not None) == bends
    assert curve.queries == one.queries
    if not bends:
        assert curve.temperature.tolist() == one.temperature.tolist()


def test_real_sources_pay_for_it_as_for_the_signed_gap() -> None:
    logits, labels = crooked()
    budget = Budget(4.0, 0.0)
    sources = [
        Source(f"s{k}", logits=logits[k:2000:20], labels=labels[k:2000:20], budget=budget, size=100, seed=k)
        for k in range(20)
    ]
    setting = Setting(sources=20, samples=2000, budget=budget, noise="laplace")
    result = Calibrator(budget=budget, method=GapCurve()).run(sources)
    assert result.queries == SignedGap().queries(setting) == GapCurve().queries(setting)
    assert [source.spent.epsilon for source in sources] == pytest.approx([4.0] * 20)
    assert result.corrections is not None
    assert len(result.corrections) == 5
    assert "and a correction of the confidence" in str(result)
    left = ece(logits=result.apply(logits[2000:]), labels=labels[2000:])
    assert left < 0.6 * ece(logits=logits[2000:] / result.temperature, labels=labels[2000:])
    with pytest.raises(ValueError, match="a temperature alone"):
        Calibrator(budget=budget, method=GapCurve(), check=True)
