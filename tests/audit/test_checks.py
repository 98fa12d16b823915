"""Deterministic checks: they hold, and each finds the mistake that it is for."""

import math

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor

from tacit.audit import checks
from tacit.audit._exact import erfc, sampled_delta, sampled_epsilon
from tacit.privacy import sampling

TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_low_bits_tell_nothing(dtype: torch.dtype) -> None:
    assert checks.low_bits(dtype).holds


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_low_bits_of_noise_that_is_simply_added_tell(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)

    def plain(sums: Tensor) -> Tensor:
        return sums + 20.0 * torch.randn(len(sums), generator=generator, dtype=dtype)

    assert not checks.low_bits(dtype, plain).holds


def test_events_cost_something_or_are_refused() -> None:
    assert checks.event_fuzzer(60).holds


def test_prices_against_extended_precision() -> None:
    assert checks.prices((1e-2, 1e-9, 1e-12)).holds


def test_extended_precision_against_fifty_digits() -> None:
    """Beyond float64: relative errors below 1e-17, in the far tail as well."""
    with mpmath.workdps(50):
        for x in (-1.0, 0.1, 1.9, 2.4999, 2.5, 4.0, 9.0):
            value = erfc(x)
            exact = mpmath.erfc(mpmath.mpf(x))
            high = float(value)
            error = mpmath.mpf(high) + mpmath.mpf(float(value - np.longdouble(high))) - exact
            assert abs(error / exact) < 1e-17
        rate, noise, epsilon = mpmath.mpf("0.1"), mpmath.mpf("0.7"), mpmath.mpf(2)

        def density(y: mpmath.mpf) -> mpmath.mpf:
            def normal(mean: int) -> mpmath.mpf:
                return mpmath.npdf(y, mean, noise)

            gain = (1 - rate) * normal(0) + rate * normal(1) - mpmath.exp(epsilon) * normal(0)
            return max(gain, mpmath.mpf(0))

        edge = noise**2 * mpmath.log((mpmath.exp(epsilon) - 1 + rate) / rate) + mpmath.mpf(1) / 2
        exact = mpmath.quad(density, [edge, edge + 2, edge + 8])
        assert sampled_delta(0.1, 0.7, 2.0) == pytest.approx(float(exact), rel=1e-12)
    assert sampled_delta(0.1, 0.7, sampled_epsilon(0.1, 0.7, 1e-9)) == pytest.approx(1e-9, rel=1e-6)


def test_draws_are_fair_and_independent() -> None:
    assert checks.draws().holds


def test_unfair_draws_are_found() -> None:
    """Twice the rate, the draw of the step before, each unit in turn, neighbours together, some more often."""
    chance = np.random.default_rng(0)
    fair = (chance.random((400, 1000)) < 0.1).astype(float)
    assert checks.judge_draws(fair, 0.1).holds
    assert not checks.judge_draws((chance.random((400, 1000)) < 0.11).astype(float), 0.1).holds
    again = fair.copy()
    again[1::2] = again[::2]
    assert not checks.judge_draws(again, 0.1).holds
    order = np.stack([chance.permutation(1000) for _ in range(400)])
    assert not checks.judge_draws((order < 100).astype(float), 0.1).holds  # batches of a fixed size
    pairs = fair.copy()
    pairs[:, 1::2] = pairs[:, ::2]
    assert not checks.judge_draws(pairs, 0.1).holds
    unequal = (chance.random((400, 1000)) < np.where(np.arange(1000) % 2, 0.05, 0.15)).astype(float)
    assert not checks.judge_draws(unequal, 0.1).holds


def test_a_draw_that_is_made_twice_is_found() -> None:
    kept: list[Tensor] = []

    def stuck(receipt: object, people: int) -> Tensor:
        kept.append(sampling.draw(receipt, people))  # type: ignore[arg-type]
        return kept[0]

    assert not checks.draws(steps=100, draw=stuck).holds


def test_coordinates_are_independent() -> None:
    assert checks.coordinates(100_000).holds


def test_no_odd_row_moves_the_sum_of_a_loop_beyond_its_bound() -> None:
    for check in checks.loops(("DPSGD", "AdpClip", "GEP", "DPZO")):
        assert check.holds, check


def test_prices_against_dp_accounting() -> None:
    assert checks.prices_of_mixtures(6).holds


def test_stability() -> None:
    rows = {"huge": 1e30, "plain": 0.5, "nan": math.nan}

    def clipped(row: object) -> dict[str, Tensor]:
        value = 0.0 if row is None or math.isnan(row) else max(-1.0, min(1.0, float(row)))  # type: ignore[arg-type]
        return {"w": torch.tensor([3.0 + value])}

    assert checks.stability(clipped, rows, 1.0).holds
    assert not checks.stability(lambda row: {"w": torch.tensor([float(row or 0.0)])}, rows, 1.0).holds  # type: ignore[arg-type]
