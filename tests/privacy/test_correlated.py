"""Correlated noise, checked against dense matrices, exact fractions, brute force and published numbers."""

import io
import time
from fractions import Fraction
from itertools import combinations, pairwise
from math import comb, sqrt

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.linalg import toeplitz
from scipy.stats import chi2
from torch import Tensor

from tacit.privacy import correlated
from tacit.privacy.correlated import Strategy, banded, buffered, by_name, independent, running_sum_rms, square_root

KINDS = ["independent", "full", "banded", "buffered", "toeplitz@0.9", "buffered@0.9"]


def make(kind: str, horizon: int) -> Strategy:
    return by_name(kind, horizon, bands=5, buffers=3)


def lower(column: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.tril(toeplitz(column))


def noise(seed: int, steps: int) -> list[dict[str, Tensor]]:
    rng = np.random.default_rng(seed)
    return [
        {"weight": torch.tensor(rng.standard_normal((2, 3))), "bias": torch.tensor(rng.standard_normal(4))}
        for _ in range(steps)
    ]


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# The matrices


def test_square_root_coefficients_are_central_binomials() -> None:
    c = square_root(500).coefficients()
    exact = [float(Fraction(comb(2 * k, k), 4**k)) for k in range(500)]
    np.testing.assert_allclose(c, exact, rtol=1e-12)


def test_square_root_squares_to_the_matrix_of_ones() -> None:
    c = lower(square_root(200).coefficients())
    np.testing.assert_allclose(c @ c, np.tril(np.ones((200, 200))), atol=1e-13)


@pytest.mark.parametrize("horizon", [2, 3, 100, 1000, 11_730])
def test_square_root_inverse_is_the_difference_of_coefficients(horizon: int) -> None:
    strategy = square_root(horizon)
    w = strategy.inverse()
    np.testing.assert_allclose(w, np.diff(strategy.coefficients(), prepend=0.0), atol=1e-14)


def test_buffered_coefficients_are_sums_of_geometric_series() -> None:
    strategy = buffered(50, 3)
    a, decay = strategy.weights, strategy.decays
    direct = [1.0] + [sum(a[i] * decay[i] ** (k - 1) for i in range(3)) for k in range(1, 50)]
    np.testing.assert_allclose(strategy.coefficients(), direct, rtol=1e-12)


def test_banded_coefficients_are_the_first_ones() -> None:
    c = banded(20, 4).coefficients()
    np.testing.assert_array_equal(c[:4], square_root(20).coefficients()[:4])
    assert not c[4:].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("horizon", [1, 2, 3, 7, 64, 100, 333])
def test_inverse_is_the_inverse(kind: str, horizon: int) -> None:
    strategy = make(kind, horizon)
    product = lower(strategy.coefficients()) @ lower(strategy.inverse())
    np.testing.assert_allclose(product, np.eye(horizon), atol=1e-13)


def test_buffers_are_what_is_kept() -> None:
    assert independent(10**9).buffers == 0
    assert square_root(100).buffers == 99
    assert banded(100, 8).buffers == 7
    assert buffered(100, 4).buffers == 4
    for kind in KINDS:
        mixer = make(kind, 12).mixer()
        for z in noise(0, 12):
            mixer.step(z)
        state = mixer.state()
        assert len(state["past"]) + len(state["sums"]) == make(kind, 12).buffers


@pytest.mark.parametrize(
    "fields",
    [
        {"taps": (0.2, 0.3)},
        {"taps": (0.5, -0.1)},
        {"taps": (1.1,)},
        {"taps": (float("nan"),)},
        {"weights": (0.6, 0.6), "decays": (0.5, 0.1)},
        {"weights": (-0.1,), "decays": (0.5,)},
        {"weights": (0.1,), "decays": (1.0,)},
        {"weights": (0.1,), "decays": (-0.5,)},
        {"weights": (0.1,)},
        {"taps": (0.5,) * 9},
    ],
)
def test_coefficients_without_a_known_sensitivity_are_refused(fields: dict[str, tuple[float, ...]]) -> None:
    with pytest.raises(ValueError, match=r"coefficients of C|decay per weight|do not fit"):
        Strategy(name="own", horizon=9, **fields)


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="horizon of 0 steps"):
        independent(0)
    with pytest.raises(ValueError, match="0 bands"):
        banded(10, 0)
    with pytest.raises(ValueError, match="0 buffers"):
        buffered(10, 0)
    with pytest.raises(ValueError, match="choose one of independent, full, banded, buffered, toeplitz"):
        by_name("pink", 10)
    with pytest.raises(ValueError, match="count from 1"):
        independent(10).sensitivity(0)


# The golden numbers


def test_golden_numbers_of_a_stream_of_11730_steps() -> None:
    n = 15 * 782
    full, plain = square_root(n), independent(n)
    assert full.sensitivity() == pytest.approx(2.012, abs=5e-4)
    assert running_sum_rms(plain) == pytest.approx(sqrt((n + 1) / 2), rel=1e-9)
    assert running_sum_rms(plain) == pytest.approx(76.6, abs=0.05)
    assert running_sum_rms(full) == pytest.approx(3.9, abs=0.05)
    assert running_sum_rms(plain) / running_sum_rms(full) == pytest.approx(20, abs=0.5)
    assert full.sensitivity(4) / full.sensitivity() == pytest.approx(3.71, abs=5e-3)
    assert plain.sensitivity(4) == pytest.approx(2.0)


def test_running_sum_is_that_of_the_dense_matrices() -> None:
    for kind in KINDS:
        strategy = make(kind, 60)
        rows = np.tril(np.ones((60, 60))) @ np.linalg.inv(lower(strategy.coefficients()))
        dense = strategy.sensitivity(3, 7) * np.linalg.norm(rows) / sqrt(60)
        assert running_sum_rms(strategy, 3, 7) == pytest.approx(dense, rel=1e-10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_noise_in_the_weights_is_that_of_torchs_sgd(kind: str, momentum: float) -> None:
    """One weight for each z: what SGD makes of the rows of C^-1 are the rows whose norms are averaged."""
    horizon = 25
    strategy = make(kind, horizon)
    weights = torch.nn.Parameter(torch.zeros(horizon, dtype=torch.float64))
    sgd, squares = torch.optim.SGD([weights], lr=1.0, momentum=momentum), []
    for row in np.linalg.inv(lower(strategy.coefficients())):
        weights.grad = torch.tensor(row)
        sgd.step()
        squares.append(float(weights.detach() @ weights.detach()))
    expected = strategy.sensitivity(3, 7) * sqrt(np.mean(squares))
    assert running_sum_rms(strategy, 3, 7, momentum=momentum) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize(
    ("horizon", "bands", "plain", "fit"),
    [(60, 4, 23.4297, 22.6543), (60, 8, 18.1412, 16.8756), (200, 8, 35.3964, 33.9496)],
)
def test_bands_for_momentum_have_less_noise_than_jax_privacys_for_sums(
    horizon: int, bands: int, plain: float, fit: float
) -> None:
    """jax-privacy 2.0.0's `per_query_error`, momentum 0.9 as its workload_coef: of its optimised bands and of ours."""
    strategy = correlated.toeplitz(horizon, bands, momentum=0.9)
    assert running_sum_rms(correlated.toeplitz(horizon, bands), momentum=0.9) == pytest.approx(plain, rel=1e-4)
    assert running_sum_rms(strategy, momentum=0.9) == pytest.approx(fit, rel=1e-4)


@pytest.mark.parametrize(
    ("horizon", "passes", "momentum", "ours", "dense"),
    [
        (60, 1, 0.9, 11.5759, 11.2137),
        (60, 4, 0.0, 4.8762, 5.1462),
        (60, 4, 0.9, 29.2284, 30.9602),
        (200, 4, 0.0, 5.6332, 5.9984),
        (200, 4, 0.9, 37.2318, 39.7801),
    ],
)
def test_buffers_for_momentum_and_passes_beside_jax_privacys_dense_optimum(
    horizon: int, passes: int, momentum: float, ours: float, dense: float
) -> None:
    """jax-privacy 2.0.0: its evaluation of our coefficients, and its `dense.optimize` (n x n, orthogonal columns)."""
    often = {"contributions": passes, "separation": horizon // passes}
    found = running_sum_rms(buffered(horizon, momentum=momentum, **often), passes, horizon // passes, momentum=momentum)
    plain = running_sum_rms(buffered(horizon), passes, horizon // passes, momentum=momentum)
    assert found == pytest.approx(ours, rel=1e-3)
    assert found < min(1.04 * dense, 0.98 * plain)


def test_names_say_what_a_strategy_is_for() -> None:
    assert by_name("buffered", 40) == buffered(40)  # the meaning that it always had, whatever the contributions
    assert by_name("buffered", 40, contributions=4, separation=10) == buffered(40)
    fit = by_name("buffered:3@0.9", 40, contributions=4, separation=10)
    assert fit == buffered(40, 3, momentum=0.9, contributions=4, separation=10)
    assert by_name("buffered@0", 40, contributions=4, separation=10) == buffered(40, contributions=4, separation=10)
    assert by_name("toeplitz:4@0.5", 40) == correlated.toeplitz(40, 4, momentum=0.5)
    for name in (
        "full@0.9",
        "banded:4@0.9",
        "buffered@1",
        "buffered@",
        "buffered:0",
        "buffered@-0.5",
        "toeplitz:4@1e-3",
    ):
        with pytest.raises(ValueError, match="There is no noise called"):
            by_name(name, 40)


@pytest.mark.parametrize("horizon", [100, 1000, 11_730, 100_000])
def test_four_buffers_are_as_good_as_all(horizon: int) -> None:
    buffered.cache_clear()
    start = time.process_time()
    strategy = buffered(horizon)
    assert time.process_time() - start < 5  # a quarter of a second on an idle core
    assert strategy.buffers == 4
    assert running_sum_rms(strategy) <= running_sum_rms(square_root(horizon))
    assert buffered(horizon) is strategy


@pytest.mark.parametrize("horizon", [2, 3, 5, 17, 400, 50_000])
@pytest.mark.parametrize("buffers", [1, 2, 6])
def test_buffered_recursion_is_stable(horizon: int, buffers: int) -> None:
    strategy = buffered(horizon, buffers)
    assert 0 < sum(strategy.weights) <= 1
    assert all(0 <= decay < 1 for decay in strategy.decays)
    poles = np.linalg.eigvals(np.diag(strategy.decays) - np.outer(np.ones(strategy.buffers), strategy.weights))
    assert np.abs(poles).max() < 1
    assert running_sum_rms(strategy) <= running_sum_rms(independent(horizon))


# What it costs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("horizon", [1, 4, 9])
def test_sensitivity_is_the_worst_of_all_patterns(kind: str, horizon: int) -> None:
    strategy = make(kind, horizon)
    matrix = lower(strategy.coefficients())
    for contributions in range(1, 6):
        for separation in range(1, horizon + 2):
            patterns = [
                steps
                for size in range(1, contributions + 1)
                for steps in combinations(range(horizon), size)
                if all(later - earlier >= separation for earlier, later in pairwise(steps))
            ]
            worst = max(np.linalg.norm(matrix[:, list(steps)].sum(axis=1)) for steps in patterns)
            assert strategy.sensitivity(contributions, separation) == pytest.approx(worst, rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_contributions_that_point_the_same_way_are_the_worst(kind: str) -> None:
    strategy = make(kind, 12)
    matrix = lower(strategy.coefficients())
    rng = np.random.default_rng(3)
    for _ in range(200):
        directions = rng.standard_normal((3, 4))
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        steps = 4 * rng.permutation(3)
        assert np.linalg.norm(matrix[:, steps] @ directions) <= strategy.sensitivity(3, 4) + 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_within_the_horizon_cost_nothing(kind: str) -> None:
    """Every way to cut eight steps into blocks, and every pattern of a unit, against the charge for eight steps."""
    horizon, contributions, separation = 8, 3, 2
    whole = make(kind, horizon)
    charged = whole.sensitivity(contributions, separation)
    for cuts in (c for size in range(3) for c in combinations(range(1, horizon), size)):
        matrix = lower(whole.coefficients())
        for cut in cuts:
            matrix[cut:, :cut] = 0
        for steps in combinations(range(horizon), contributions):
            if all(later - earlier >= separation for earlier, later in pairwise(steps)):
                assert np.linalg.norm(matrix[:, list(steps)].sum(axis=1)) <= charged + 1e-12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("separation", [1, 3, 6])
def test_a_unit_in_several_full_blocks_is_charged_for_the_worst_split(kind: str, separation: int) -> None:
    horizon, blocks = 6, 3
    strategy = make(kind, horizon)
    matrix = np.kron(np.eye(blocks), lower(strategy.coefficients()))
    worst = 0.0
    for contributions in range(1, 5):
        for steps in combinations(range(blocks * horizon), contributions):
            close = (b - a < separation for a, b in pairwise(steps) if a // horizon == b // horizon)
            if not any(close):
                worst = max(worst, float(np.linalg.norm(matrix[:, list(steps)].sum(axis=1))))
        assert strategy.sensitivity(contributions, separation, blocks=blocks) == pytest.approx(worst, rel=1e-12)


def test_two_blocks_can_cost_more_than_one() -> None:
    strategy = square_root(50)
    assert strategy.sensitivity(2, 50) == strategy.sensitivity(1)  # only one step fits
    assert strategy.sensitivity(2, 50, blocks=2) == pytest.approx(sqrt(2) * strategy.sensitivity(1))
    assert strategy.sensitivity(1, blocks=9) == pytest.approx(strategy.sensitivity(1), rel=1e-15)


@given(
    kind=st.sampled_from(KINDS),
    horizon=st.integers(2, 60),
    contributions=st.integers(1, 10),
    separation=st.integers(1, 70),
)
@settings(deadline=None, max_examples=60)
def test_more_never_costs_less(kind: str, horizon: int, contributions: int, separation: int) -> None:
    strategy = make(kind, horizon)
    cost = strategy.sensitivity(contributions, separation) * (1 + 1e-12)
    assert strategy.sensitivity(contributions, separation + 1) <= cost
    assert strategy.sensitivity(max(contributions - 1, 1), separation) <= cost
    fields = (strategy.taps[: horizon - 2], strategy.weights, strategy.decays)
    shorter = Strategy(name="shorter", horizon=horizon - 1, taps=fields[0], weights=fields[1], decays=fields[2])
    assert shorter.sensitivity(contributions, separation) <= cost


def test_bands_further_apart_than_their_number_cost_the_square_root() -> None:
    strategy = banded(1000, 8)
    assert strategy.sensitivity(9, 8) == pytest.approx(3 * strategy.sensitivity(), rel=1e-12)


def test_sensitivity_is_quick_and_exact_for_a_long_stream() -> None:
    strategy = square_root(100_000)
    c = strategy.coefficients()
    total = sum(np.pad(c, (700 * j, 0))[:100_000] for j in range(20))
    start = time.process_time()
    assert strategy.sensitivity(20, 700) == pytest.approx(float(np.linalg.norm(total)), rel=1e-12)
    assert strategy.sensitivity(100_000) == pytest.approx(float(np.linalg.norm(np.cumsum(c))), rel=1e-9)
    assert time.process_time() - start < 2
    assert independent(10**12).sensitivity(9, 1) == pytest.approx(3.0)


# The stream


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("horizon", [1, 2, 5, 6, 40])
def test_mixer_is_the_dense_product(kind: str, horizon: int) -> None:
    strategy = make(kind, horizon)
    inverse = np.linalg.inv(lower(strategy.coefficients()))
    stream = noise(1, horizon)
    mixer = strategy.mixer()
    for t, z in enumerate(stream):
        mixed = mixer.step(z)
        for name, tensor in mixed.items():
            expected = sum(inverse[t, j] * stream[j][name] for j in range(t + 1))
            assert tensor.dtype == torch.float64
            torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-12)


def test_a_long_stream_keeps_its_precision() -> None:
    strategy = buffered(5_000)
    z = np.random.default_rng(2).standard_normal(5_000)
    mixer = strategy.mixer()
    mixed = np.array([mixer.step({"x": torch.tensor([value])})["x"].item() for value in z])
    expected = np.convolve(strategy.inverse(), z)[:5_000]
    np.testing.assert_allclose(mixed, expected, atol=1e-10)


@given(kind=st.sampled_from(KINDS), horizon=st.integers(1, 20), data=st.data())
@settings(deadline=None, max_examples=60)
def test_a_saved_block_goes_on_bit_for_bit(kind: str, horizon: int, data: st.DataObject) -> None:
    strategy = make(kind, horizon)
    stop = data.draw(st.integers(0, horizon))
    stream = noise(7, horizon)
    whole = strategy.mixer()
    expected = [whole.step(z) for z in stream]

    first = strategy.mixer()
    for z in stream[:stop]:
        first.step(z)
    file = io.BytesIO()
    torch.save(first.state(), file)
    file.seek(0)
    resumed = strategy.mixer(torch.load(file, weights_only=True))
    assert all(same(resumed.step(z), e) for z, e in zip(stream[stop:], expected[stop:], strict=True))


def test_a_state_is_a_copy() -> None:
    strategy = banded(10, 3)
    mixer = strategy.mixer()
    stream = noise(5, 10)
    for z in stream[:4]:
        mixer.step(z)
    state = mixer.state()
    expected = mixer.step(stream[4])
    resumed = strategy.mixer(state)
    assert same(resumed.step(stream[4]), expected)
    assert same(strategy.mixer(state).step(stream[4]), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_callers_may_change_what_they_gave_and_got(kind: str) -> None:
    strategy = make(kind, 6)
    careful, careless = strategy.mixer(), strategy.mixer()
    for t in range(6):
        expected = careful.step(noise(t, 1)[0])
        z = noise(t, 1)[0]
        mixed = careless.step(z)
        assert same(z, noise(t, 1)[0])
        assert same(mixed, expected)
        for tensor in (*mixed.values(), *z.values()):
            tensor.fill_(1e9)


def test_the_order_of_parameters_does_not_matter() -> None:
    strategy = buffered(4, 2)
    straight, turned = strategy.mixer(), strategy.mixer()
    for t, z in enumerate(noise(0, 4)):
        other = dict(reversed(z.items())) if t else z
        assert same(straight.step(z), turned.step(other))


@pytest.mark.parametrize("kind", KINDS)
def test_noise_in_one_line_is_mixed_in_place_to_the_same_bits(kind: str) -> None:
    strategy = make(kind, 5)
    apart, in_line = strategy.mixer(), strategy.mixer()
    for t, z in enumerate(noise(0, 5)):
        order = list(reversed(z)) if t % 2 else list(z)
        line = torch.cat([z[name].reshape(-1).double() for name in order])
        mixed = in_line.mix(line, {name: tuple(z[name].shape) for name in order})
        assert mixed.data_ptr() == line.data_ptr()
        pieces = torch.split(line, [z[name].numel() for name in order])
        assert same(apart.step(z), {name: piece.view(z[name].shape) for name, piece in zip(order, pieces, strict=True)})


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_ends_at_its_horizon(kind: str) -> None:
    mixer = make(kind, 3).mixer()
    for z in noise(0, 3):
        mixer.step(z)
    with pytest.raises(RuntimeError, match="Start a new block"):
        mixer.step(noise(0, 1)[0])
    with pytest.raises(RuntimeError, match="Start a new block"):
        make(kind, 3).mixer(mixer.state()).step(noise(0, 1)[0])


def test_other_parameters_within_a_block_are_refused_and_change_nothing() -> None:
    strategy = buffered(4, 2)
    mixer, twin = strategy.mixer(), strategy.mixer()
    stream = noise(0, 2)
    mixer.step(stream[0])
    twin.step(stream[0])
    with pytest.raises(ValueError, match="bias was added, removed or reshaped"):
        mixer.step({"weight": stream[1]["weight"]})
    assert same(mixer.step(stream[1]), twin.step(stream[1]))


def test_a_state_of_another_strategy_is_refused() -> None:
    with pytest.raises(ValueError, match="another strategy"):
        banded(10, 3).mixer(banded(10, 4).mixer().state())


def covariance_fits(mixed: NDArray[np.float64], strategy: Strategy) -> bool:
    """Whether the columns of `mixed` look like draws from N(0, V), V = C^-1 C^-T. False alarm below 1e-7.

    If they are, |u^T Y|^2 / (u^T V u) is chi-squared with m degrees of freedom for m columns and any fixed u, and
    trace(V^-1 Y Y^T) with n m. Tested are each step (u = e_t), each pair of neighbours (u = e_t + e_{t+1}), each
    running sum, and the trace: 36 tests for 12 steps, each at 1e-9 on either side.
    """
    steps, samples = mixed.shape
    inverse = np.linalg.inv(lower(strategy.coefficients()))
    covariance = inverse @ inverse.T
    directions = [*np.eye(steps), *(np.eye(steps) + np.eye(steps, k=1))[:-1], *np.tril(np.ones((steps, steps)))]
    tests = [(np.sum((u @ mixed) ** 2) / (u @ covariance @ u), samples) for u in directions]
    tests.append((np.sum(mixed * np.linalg.solve(covariance, mixed)), steps * samples))
    return all(chi2.ppf(1e-9, freedom) < value < chi2.isf(1e-9, freedom) for value, freedom in tests)


def mix(strategy: Strategy, samples: int) -> NDArray[np.float64]:
    rng = np.random.default_rng(11)
    mixer = strategy.mixer()
    return np.stack(
        [mixer.step({"x": torch.tensor(rng.standard_normal(samples))})["x"].numpy() for _ in range(strategy.horizon)]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_covariance_is_the_closed_form(kind: str) -> None:
    strategy = make(kind, 12)
    assert covariance_fits(mix(strategy, 20_000), strategy)


def test_covariance_check_finds_a_missing_band() -> None:
    assert not covariance_fits(mix(banded(12, 4), 20_000), banded(12, 5))
