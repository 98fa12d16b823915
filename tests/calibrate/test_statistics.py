"""What one unit can change, by brute force over neighbouring data; and the values themselves."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tacit.calibrate import (
    BinGaps,
    Cells,
    Count,
    Gap,
    GapCells,
    GapSlope,
    Histogram,
    LogitCells,
    Loss,
    Price,
    Query,
    Statistic,
)
from tacit.calibrate._outputs import Outputs
from tacit.privacy import Neighbours

CLASSES = 3
STATISTICS: list[Statistic] = [
    Gap(),
    GapSlope(),
    BinGaps(),
    BinGaps(bins=4),
    GapCells(),
    GapCells(bins=2),
    LogitCells(),
    Cells(),
    Cells(bins=3),
    Histogram(),
    Loss(),
    Loss(bound=0.7),
    Count(),
]
SLACK = 1 + 1e-12
numbers = st.one_of(
    st.floats(-20, 20),
    st.sampled_from([0.0, 1e-3, 30.0, 1e308, -1e308, math.nan, math.inf, -math.inf]),
)
row = st.tuples(st.lists(numbers, min_size=CLASSES, max_size=CLASSES), st.integers(0, CLASSES - 1))


def outputs(rows: list[tuple[list[float], int]]) -> Outputs:
    logits = torch.tensor([scores for scores, _ in rows], dtype=torch.float64).reshape(-1, CLASSES) + 0.0
    return Outputs.of(logits=logits * 1.0, labels=torch.tensor([label for _, label in rows], dtype=torch.int64))


def total(statistic: Statistic, rows: list[tuple[list[float], int]], units: list[int] | None = None) -> torch.Tensor:
    found = statistic.sum(outputs(rows), None if units is None else torch.tensor(units))
    return torch.tensor(found.total, dtype=torch.float64) * found.grid


def check(statistic: Statistic, one: torch.Tensor, other: torch.Tensor, neighbours: Neighbours) -> None:
    change = one - other
    assert float(change.abs().sum()) <= statistic.sensitivity("laplace", neighbours) * SLACK
    assert float(change.square().sum().sqrt()) <= statistic.sensitivity("gaussian", neighbours) * SLACK


@settings(deadline=None, max_examples=120)
@given(st.lists(row, min_size=1, max_size=4), row, st.sampled_from(STATISTICS), st.floats(0.1, 5))
def test_no_sample_moves_an_answer_beyond_its_sensitivity(
    rows: list[tuple[list[float], int]], other: tuple[list[float], int], kind: Statistic, temperature: float
) -> None:
    try:
        outputs(rows), outputs([*rows, other])
    except ValueError:  # rows that happen to sum to 1 are refused before anything
        return
    statistic = kind.at(temperature)
    whole = total(statistic, rows)
    for i in range(len(rows)):
        rest = rows[:i] + rows[i + 1 :]
        check(statistic, whole, total(statistic, rest), Neighbours.ADD_REMOVE)
        check(statistic, whole, total(statistic, rest), Neighbours.ZERO_OUT)
        check(statistic, whole, total(statistic, [*rest, other]), Neighbours.REPLACE_ONE)


@settings(deadline=None, max_examples=60)
@given(st.lists(row, min_size=4, max_size=4), st.lists(row, min_size=3, max_size=3), st.sampled_from(STATISTICS))
def test_no_unit_of_several_rows_moves_it_further(
    rows: list[tuple[list[float], int]], others: list[tuple[list[float], int]], statistic: Statistic
) -> None:
    try:
        outputs(rows), outputs(others)
    except ValueError:
        return
    units = [7, 7, 7, 3]
    whole = total(statistic, rows, units)
    check(statistic, whole, total(statistic, rows[3:], [3]), Neighbours.ADD_REMOVE)
    check(statistic, whole, total(statistic, [*others, rows[3]], units), Neighbours.REPLACE_ONE)


@pytest.mark.parametrize("bins", [2, 5])
def test_the_l2_sensitivity_of_a_histogram_is_reached_and_not_above_it(bins: int) -> None:
    """All pairs of contributions: none, or one bin's total with or without its correct; and means of several rows."""
    corners = [torch.zeros(2 * bins)]
    for place in range(bins):
        wrong = torch.zeros(2 * bins).index_fill_(0, torch.tensor([place + bins]), 1.0)
        corners += [wrong, wrong.index_fill(0, torch.tensor([place]), 1.0)]
    means = [(a + b) / 2 for a in corners for b in corners]
    apart = max(float((a - b).norm()) for a in means for b in means)
    assert apart == pytest.approx(2.0)
    assert Histogram(bins=bins).sensitivity("gaussian", Neighbours.REPLACE_ONE) == pytest.approx(apart)
    assert Histogram(bins=bins).sensitivity("gaussian", Neighbours.ADD_REMOVE) == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize(
    ("statistic", "removed", "replaced"),
    [
        (Gap(), 1, 2),
        (GapSlope(), 1, 2),
        (BinGaps(), 1, 2),
        (GapCells(), 1, 2),
        (LogitCells(), 1, 2),
        (Cells(), 1, 2),
        (Histogram(), 2, 4),
        (Loss(), 10, 10),
        (Count(), 1, 1),
    ],
)
def test_l1_sensitivities_are_those_of_the_proofs_and_are_reached(
    statistic: Statistic, removed: float, replaced: float
) -> None:
    assert statistic.sensitivity("laplace", Neighbours.ADD_REMOVE) == pytest.approx(removed)
    assert statistic.sensitivity("laplace", Neighbours.REPLACE_ONE) == pytest.approx(replaced)
    sure, flat, bad = torch.zeros(2000), torch.zeros(2000), torch.full((2000,), math.nan)
    sure[0], flat[0] = 100.0, 1e-9  # with many classes a right answer can have a confidence near 0
    cases = [(sure, 1), (sure, 0), (flat, 0), (bad, 0)]
    alone = []
    for logits, label in cases:
        found = statistic.sum(Outputs.of(logits=logits[None], labels=[label]))
        alone.append(torch.tensor(found.total, dtype=torch.float64) * found.grid)
    assert max(float(one.abs().sum()) for one in alone) == pytest.approx(removed, rel=1e-3)
    assert max(float((a - b).abs().sum()) for a in alone for b in alone) == pytest.approx(replaced, rel=1e-3)


@pytest.mark.parametrize("statistic", STATISTICS)
def test_rows_that_are_no_numbers_and_empty_sources_add_zero(statistic: Statistic) -> None:
    bad = [([math.nan, 0.0, 1.0], 0), ([math.inf, 0.0, 1.0], 0), ([-math.inf, 0.0, 1.0], 2)]
    good = [([3.0, 0.0, 1.0], 0)]
    assert torch.equal(total(statistic, bad + good), total(statistic, good))
    assert total(statistic, []).tolist() == [0.0] * statistic.size


def test_values_by_hand() -> None:
    rows = [([2.0, 0.0, 0.0], 0), ([0.0, 1.0, 0.0], 2)]
    p, q = 1 / (1 + 2 * math.exp(-1.0)), 1 / (1 + 2 * math.exp(-0.5))  # at T = 2
    at = {"temperature": 2.0}
    assert total(Gap(**at), rows).tolist() == pytest.approx([(1 - p) - q], abs=2e-6)
    losses = -math.log(p) - math.log(math.exp(-0.5) * q)
    assert total(Loss(**at), rows).tolist() == pytest.approx([losses], abs=4e-5)
    assert total(Loss(bound=0.1, **at), rows).tolist() == pytest.approx([0.2], abs=1e-6)
    assert total(Count(), rows).tolist() == [2.0]
    bins = [0.0] * 15
    bins[math.ceil(p * 15) - 1] += 1 - p
    bins[math.ceil(q * 15) - 1] -= q
    assert total(BinGaps(**at), rows).tolist() == pytest.approx(bins, abs=2e-6)
    counts = total(Histogram(**at), rows).tolist()
    assert sum(counts[:15]) == 1
    assert sum(counts[15:]) == 2
    assert counts[math.ceil(p * 15) - 1] == counts[15 + math.ceil(q * 15) - 1] == 1


def test_the_slope_is_the_derivative_where_it_was_not_cut() -> None:
    rows = [([2.0, 0.5, -1.0], 0), ([0.3, 1.0, 0.0], 1)]
    step = 1e-3
    for temperature in (0.8, 1.0, 2.5):
        up, down = (total(Gap(temperature=temperature * math.exp(s)), rows) for s in (step, -step))
        slope = total(GapSlope(temperature=temperature), rows)[1]
        assert float(slope) == pytest.approx(float((up - down)[0]) / (2 * step), abs=2e-3)


@given(st.floats(0.05, 50), st.floats(0.05, 50))
@settings(deadline=None, max_examples=50)
def test_the_gap_rises_with_the_temperature(one: float, other: float) -> None:
    rows = [([2.0, 0.0, 0.0], 0), ([0.0, 1.0, 0.4], 2), ([0.0, 9.0, 0.4], 1)]
    low, high = sorted((one, other))
    assert float(total(Gap(temperature=low), rows)) <= float(total(Gap(temperature=high), rows)) + 1e-5


@pytest.mark.parametrize("statistic", STATISTICS)
def test_queries_travel_as_plain_data(statistic: Statistic) -> None:
    for price in (Price(noise="laplace", amount=0.25), Price(noise="gaussian", amount=math.inf)):
        query = Query(id="run/3", statistic=statistic.at(1.7), price=price)
        assert Query.from_json(query.to_json()) == query
        assert query.text == Query.from_json(query.to_json()).text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "everything"}, "no statistic called 'everything'"),
        ({"kind": "gap", "temperature": 0.0}, "temperature lies"),
        ({"kind": "gap", "temperature": math.nan}, "temperature lies"),
        ({"kind": "gap", "temperature": "hot"}, "This is no Gap"),
        ({"kind": "gap", "sensitivity": 0.001}, "no field 'sensitivity'"),
        ({"kind": "loss", "bound": math.inf}, "bound of a loss"),
        ({"kind": "bin-gaps", "bins": 10**9}, "number of bins"),
        ({"kind": "histogram", "bins": 2.5}, "number of bins"),
        ({}, "no statistic called None"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_sentence(change: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Statistic.from_json(change)


def test_prices() -> None:
    with pytest.raises(ValueError, match="at least"):
        Price(noise="laplace", amount=0.0)
    with pytest.raises(ValueError, match="one of laplace, gaussian"):
        Price(noise="uniform", amount=1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="This is no Price"):
        Price.from_json({"noise": "laplace", "amount": "much"})
    assert replace(Price(noise="laplace", amount=0.5), amount=0.25).scale(Gap(), Neighbours.REPLACE_ONE) == 8.0
