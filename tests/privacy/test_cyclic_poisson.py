"""Banded noise with cyclic Poisson sampling: its price derived again, jax-privacy's numbers, what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant

from tacit.privacy import Budget, Ledger, ReceiptError, accounting, correlated, events, mechanisms, sampling
from tacit.privacy.accounting import UnsupportedEvent


class Sum:
    """One coordinate per unit, each moved by at most 1."""

    def __init__(self, values: torch.Tensor) -> None:
        self.sum, self.bounds, self.blocks = {"w": values}, {"w": 1.0}, {"w": ("w",)}


def cyclic(noise: float, steps: int, bands: int, rate: float, strategy: str = "toeplitz") -> events.DpEvent:
    return events.cyclic_poisson(noise, steps, strategy=strategy, bands=bands, sample_rate=rate)


@pytest.mark.parametrize(("steps", "bands", "rate"), [(40, 4, 0.2), (41, 4, 0.2), (30, 1, 0.05), (12, 12, 0.3)])
@pytest.mark.parametrize("neighbours", ["add-remove", "zero-out"])
def test_the_price_is_that_of_one_group(steps: int, bands: int, rate: float, neighbours: str) -> None:
    """dp-accounting, asked for what the unit luckiest in its group can meet: ceil(steps / bands) sampled Gaussians."""
    plain = PLDAccountant(value_discretization_interval=1e-4)
    plain.compose(dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(0.9)), math.ceil(steps / bands))
    found = accounting.guarantee(cyclic(0.9, steps, bands, rate), delta=1e-5, neighbours=neighbours)
    assert found.epsilon == pytest.approx(plain.get_epsilon(1e-5), rel=2e-3)


@pytest.mark.parametrize(
    ("noise", "size", "batch", "steps", "bands", "expected"),
    [
        (1.0, 10_000, 100, 200, 4, 2.1710963),
        (0.8, 10_000, 100, 200, 1, 1.8018419),
        (0.7, 10_000, 100, 403, 8, 8.9675447),
        (2.0, 1_000, 100, 100, 10, 7.5112759),
    ],
)
def test_jax_privacy_says_the_same(
    noise: float, size: int, batch: int, steps: int, bands: int, expected: float
) -> None:
    """jax-privacy 2.0.0: DpsgdTrainingAccountant with cycle_length, PLD at 1e-4, delta 1e-5."""
    found = accounting.guarantee(cyclic(noise, steps, bands, batch * bands / size), delta=1e-5)
    assert found.epsilon == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("strategy", ["banded", "toeplitz"])
def test_columns_of_one_group_have_no_row_in_common(strategy: str) -> None:
    """What the price rests on, from the matrix itself; and no column is longer than the sensitivity."""
    made = correlated.by_name(strategy, 23, bands=5)
    column = made.coefficients()
    matrix = np.array([[column[t - k] if t >= k else 0.0 for k in range(23)] for t in range(23)])
    for group in range(5):
        met = matrix[:, group::5] != 0
        assert met.sum(1).max() <= 1
    assert made.sensitivity() == pytest.approx(np.linalg.norm(matrix, axis=0).max())


@pytest.mark.parametrize(("steps", "bands", "squared"), [(200, 4, 28.471481), (500, 16, 22.106314)])
def test_optimised_bands_are_as_good_as_jax_privacys(steps: int, bands: int, squared: float) -> None:
    """Its optimize_banded_toeplitz: sensitivity squared times the mean squared error of the running sum."""
    made = correlated.toeplitz(steps, bands)
    assert correlated.running_sum_rms(made) ** 2 == pytest.approx(squared, rel=2e-3)
    assert correlated.running_sum_rms(made) < correlated.running_sum_rms(correlated.banded(steps, bands))


def test_few_passes_at_moderate_epsilon_have_less_noise_than_dp_sgd() -> None:
    """Noise of the running sum at epsilon 8 over two passes of 64 batches: the regime of the papers."""
    budget, size, batch, steps = Budget(8.0, 1e-5), 6400, 100, 128
    one = accounting.noise_multiplier(budget, lambda z: events.poisson(batch / size, events.gaussian(z), steps))
    plain = one * correlated.running_sum_rms(correlated.independent(steps))
    bands = 8
    many = accounting.noise_multiplier(budget, lambda z: cyclic(z, steps, bands, batch * bands / size))
    assert many * correlated.running_sum_rms(correlated.toeplitz(steps, bands)) < 0.9 * plain


def test_a_stream_needs_its_draws_and_is_released_step_by_step() -> None:
    ledger, event = Ledger("sqlite://"), cyclic(1.0, 6, 2, 0.5)
    ledger.subject("people", Budget(50.0, 1e-5), plan=[event])
    receipt = ledger.charge("people", event, stage="test", seed=1)
    stream = mechanisms.GaussianStream(receipt)
    with pytest.raises(ReceiptError, match=r"drawn with probability 0\.5"):
        stream.release(Sum(torch.zeros(3, dtype=torch.float64)))
    counts = []
    for _ in range(6):
        counts.append(len(sampling.draw(receipt, 10_000)))
        stream.release(Sum(torch.zeros(3, dtype=torch.float64)))
    # six binomials of 10,000 and 1/2: none is off by 5.5 deviations with a chance above 1e-6
    assert all(abs(count - 5000) < 5.5 * 50 for count in counts)
    with pytest.raises(ReceiptError):
        stream.release(Sum(torch.zeros(3, dtype=torch.float64)))


def test_what_is_refused() -> None:
    event = cyclic(1.0, 8, 4, 0.5)
    with pytest.raises(UnsupportedEvent, match="replace-one"):
        accounting.guarantee(event, delta=1e-5, neighbours="replace-one")
    ledger = Ledger("sqlite://")
    ledger.subject("gaussian", Budget(8.0, 1e-5))
    with pytest.raises(UnsupportedEvent, match="renyi or the plan mode"):
        ledger.charge("gaussian", event, stage="test")
    assert events.from_json(events.to_json(event)) == event
    for bad in ({"separation": 3}, {"contributions": 2}, {"strategy": "buffered:4"}, {"sample_rate": 0.0}):
        with pytest.raises(ValueError, match=r"as many groups|probability"):
            events.from_json(events.to_json(event) | bad)
