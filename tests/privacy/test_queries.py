"""Grid sums: brute force over neighbours, with the worst values that a row can hold."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tacit.privacy._budget import Neighbours
from tacit.privacy._queries import BoundedSum, GridSum, Norm, grid_sum

NORMS: tuple[Norm, ...] = ("l1", "l2", "linf")
SLACK = 1 + 1e-12  # what float64 adds to a bound

values = st.one_of(
    st.floats(-3, 3),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324, 0.0, -0.0, 1.0, -1.0]),
)


@st.composite
def settings_and_rows(draw: st.DrawFn) -> tuple[dict[str, float], list[list[float]], list[float]]:
    low = draw(st.floats(-4, 3))
    options = {"low": low, "high": low + draw(st.floats(0.5, 4))}
    if draw(st.booleans()):
        options["grid"] = draw(st.sampled_from([2.0**-30, 0.01, 0.1, 0.2, 1 / 7]))
    if options["low"] <= 0 <= options["high"]:
        for limit in ("l1", "l2"):
            if draw(st.booleans()):
                options[limit] = draw(st.floats(0.05, 6))
    size = draw(st.integers(1, 6))
    edges = st.sampled_from([options["low"], options["high"], options["low"] - 1, options["high"] + 1])
    row = st.lists(values | edges, min_size=size, max_size=size)
    return options, draw(st.lists(row, min_size=1, max_size=4)), draw(row)


def size_of(change: list[int], grid: float, norm: Norm) -> float:
    exact = [abs(step) * Fraction(grid) for step in change]
    if norm == "l2":
        return math.sqrt(sum(x * x for x in exact))
    return float(sum(exact) if norm == "l1" else max(exact))


def check(one: GridSum, other: GridSum, neighbours: Neighbours) -> None:
    change = [a - b for a, b in zip(one.total, other.total, strict=True)]
    for norm in NORMS:
        assert size_of(change, one.grid, norm) <= neighbours.factor * one.bound(norm, neighbours) * SLACK


@settings(deadline=None, max_examples=250)
@given(settings_and_rows())
def test_no_row_moves_the_sum_further_than_its_bound(
    case: tuple[dict[str, float], list[list[float]], list[float]],
) -> None:
    options, rows, other = case
    whole = grid_sum(torch.tensor(rows, dtype=torch.float64), **options)
    for i in range(len(rows)):
        rest = rows[:i] + rows[i + 1 :]
        without = grid_sum(torch.tensor(rest, dtype=torch.float64).reshape(len(rest), len(other)), **options)
        replaced = grid_sum(torch.tensor([*rest, other], dtype=torch.float64), **options)
        check(whole, without, Neighbours.ADD_REMOVE)
        check(whole, without, Neighbours.ZERO_OUT)
        check(whole, replaced, Neighbours.REPLACE_ONE)


@settings(deadline=None, max_examples=100)
@given(settings_and_rows())
def test_every_contribution_keeps_every_bound(case: tuple[dict[str, float], list[list[float]], list[float]]) -> None:
    options, rows, _ = case
    for row in rows:
        query = grid_sum(torch.tensor([row], dtype=torch.float64), **options)
        steps = [Fraction(query.low) / Fraction(query.grid), Fraction(query.high) / Fraction(query.grid)]
        assert all(steps[0] - Fraction(1, 10**6) <= x <= steps[1] + Fraction(1, 10**6) for x in query.total)
        assert size_of(list(query.total), query.grid, "l1") <= query.l1 * SLACK
        assert size_of(list(query.total), query.grid, "l2") <= query.l2 * SLACK
        assert options["low"] - 1e-9 <= query.low <= query.high <= options["high"] + 1e-9


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_with_a_bad_value_counts_as_zero_or_the_nearest_bound(bad: float) -> None:
    assert grid_sum(torch.tensor([[0.5, bad], [0.25, 0.5]]), low=-1, high=1, grid=0.25).total == (1, 2)
    assert grid_sum(torch.tensor([bad]), low=1, high=2, grid=0.25).total == (4,)
    assert grid_sum(torch.tensor([bad]), low=-2, high=-1, grid=0.25).total == (-4,)


# FACTS: L1 sensitivities, add-remove / replace-one


@pytest.mark.parametrize(
    ("low", "high", "size", "l1", "removed", "replaced"),
    [
        pytest.param(-1.0, 1.0, 1, math.inf, 1.0, 2.0, id="Acc-T"),
        pytest.param(-1.0, 1.0, 15, 1.0, 1.0, 2.0, id="ECE-T"),
        pytest.param(0.0, 1.0, 30, 2.0, 2.0, 4.0, id="histogram"),
        pytest.param(0.0, 10.0, 1, math.inf, 10.0, 10.0, id="NLL-T"),
    ],
)
def test_sensitivities(low: float, high: float, size: int, l1: float, removed: float, replaced: float) -> None:
    query = grid_sum(torch.zeros(3, size), low=low, high=high, l1=l1)
    for neighbours, expected in [("add-remove", removed), ("zero-out", removed), ("replace-one", replaced)]:
        relation = Neighbours(neighbours)
        assert relation.factor * query.bound("l1", relation) == pytest.approx(expected, rel=1e-15)


# Exactness


def test_the_sum_does_not_depend_on_the_order_and_is_exact() -> None:
    rows = torch.linspace(-1, 1, 10_001, dtype=torch.float64)
    query = grid_sum(rows, low=-1, high=1)
    assert query.grid == 2.0**-20
    assert query.total == grid_sum(rows.flip(0), low=-1, high=1).total
    assert query.total == (sum(round(Fraction(x) / Fraction(2.0**-20)) for x in rows.tolist()),)


@pytest.mark.parametrize("kind", [np.float16, np.float32])
def test_limits_in_few_bits_are_not_rounded_again(kind: type) -> None:
    """Steps of the grid are counted in them, and 2^20 steps are beyond 16 bits."""
    rows = torch.full((1, 2), 5.0)
    found = grid_sum(rows, low=kind(-0.7), high=kind(0.7), l1=kind(0.9), grid=kind(2.0**-10))
    assert found == grid_sum(rows, low=float(kind(-0.7)), high=float(kind(0.7)), l1=float(kind(0.9)), grid=2.0**-10)
    assert type(found.bound("l1", Neighbours.ADD_REMOVE)) is float
    assert sum(found.total) * found.grid <= float(kind(0.9))


def test_the_finest_grid_does_not_overflow() -> None:
    query = grid_sum(torch.ones(5000), low=0, high=1, grid=2.0**-53)
    assert query.total == (5000 * 2**53,)  # beyond 64 bits
    assert grid_sum(-torch.ones(5000), low=-1, high=1, grid=2.0**-53).total == (-5000 * 2**53,)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.bool])
def test_any_dtype_with_or_without_gradients(dtype: torch.dtype) -> None:
    assert grid_sum(torch.tensor([1, 0, 1], dtype=dtype), low=0, high=1, grid=0.5).total == (4,)
    assert grid_sum(torch.ones(2, requires_grad=True), low=0, high=1, grid=0.5).total == (4,)


def test_bounds_that_are_grid_points_up_to_rounding_are_reached() -> None:
    assert grid_sum(torch.tensor([9.0]), low=0, high=0.3, grid=0.1).total == (3,)
    assert grid_sum(torch.tensor([9.0]), low=0, high=0.35, grid=0.1).total == (3,)
    assert grid_sum(torch.tensor([9.0]), low=0, high=0.35, grid=0.1).high == pytest.approx(0.3)


def test_an_empty_data_set_sums_to_zero() -> None:
    assert grid_sum(torch.zeros(0, 3), low=0, high=1).total == (0, 0, 0)


def test_shortening_never_leaves_the_interval() -> None:
    with pytest.raises(ValueError, match="zero must lie"):  # (2, 1, ..., 1) and (1, 2, ..., 2) would end 1.25 apart
        grid_sum(torch.ones(1, 100), low=1, high=2, l1=150)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"low": 1, "high": 1}, "low < high"),
        ({"low": 0, "high": math.inf}, "finite"),
        ({"low": math.nan, "high": 1}, "finite"),
        ({"low": 0, "high": 1, "grid": 0}, "above 0"),
        ({"low": 0, "high": 1, "grid": math.nan}, "above 0"),
        ({"low": 0, "high": 1, "l1": 0}, "above 0"),
        ({"low": 0, "high": 1, "l2": -1}, "above 0"),
        ({"low": 0, "high": 1, "grid": 1e-17}, "too fine"),
        ({"low": 0, "high": 1e308, "grid": 1e-17}, "too fine"),
        ({"low": -1.4, "high": -1.3, "grid": 1}, "too coarse"),
        ({"low": 0, "high": 0.5, "grid": 1}, "too coarse"),
    ],
)
def test_settings_that_make_no_sense(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grid_sum(torch.ones(3), **options)


def test_shapes_and_secrecy() -> None:
    with pytest.raises(ValueError, match=r"one row per unit.*\(2, 2, 2\)"):
        grid_sum(torch.zeros(2, 2, 2), low=0, high=1)
    query = grid_sum(torch.tensor([0.734]), low=0, high=1)
    assert str(query.total[0]) not in repr(query)  # the total is private
    assert not isinstance(query, BoundedSum)
