"""The line, its decisions, and its file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tacit.privacy import mu_of
from tacit.tune import Line, Space, fit_line

BOX = Space(lr=(0.001, 10.0), steps=(1, 100))


def line(points: list[tuple[float, float]], **more: object) -> Line:
    return fit_line(points, space=BOX, delta=1e-5, **more)  # type: ignore[arg-type]


@given(st.floats(0.1, 100), st.floats(0.0, 50))
def test_two_points_are_met_exactly(slope: float, offset: float) -> None:
    made = line([(0.1, slope * 0.1 + offset), (0.2, slope * 0.2 + offset)])
    assert made.r(0.88) == pytest.approx(BOX.clamp(slope * 0.88 + offset), rel=1e-6)
    assert made.decision in ("", "The sweeps have the same winner: r stays as it is.")


def test_least_squares_and_degree_two_against_numpy() -> None:
    points = [(0.1, 2.0), (0.2, 3.5), (0.3, 4.2), (0.4, 9.0)]
    epsilons, rs = zip(*points, strict=True)
    for degree in (1, 2, 3):
        expected = np.linalg.lstsq(np.vander(epsilons, degree + 1), np.array(rs), rcond=None)[0]
        assert line(points, degree=degree).r(0.6) == pytest.approx(float(np.polyval(expected, 0.6)), rel=1e-6)


def test_against_mu() -> None:
    places = [mu_of(0.1, 1e-5), mu_of(0.2, 1e-5), mu_of(0.9, 1e-5)]
    made = line([(0.1, 7 * places[0] + 1), (0.2, 7 * places[1] + 1)], axis="mu")
    assert made.r(0.9) == pytest.approx(7 * places[2] + 1, rel=1e-9)


def test_a_falling_line_is_in_proportion_to_epsilon() -> None:
    made = line([(0.1, 9.0), (0.2, 3.0)])
    assert made.r(0.8) == pytest.approx(12.0)
    assert "r fell from 9 to 3" in made.decision
    assert line([(0.1, 9.0), (0.2, 3.0)], best=(0.1, 9.0)).r(0.4) == pytest.approx(36.0)


def test_equal_winners_stay() -> None:
    made = line([(0.1, 3.0), (0.2, 3.0)])
    assert made.r(0.1) == made.r(0.9) == 3.0
    assert "same winner" in made.decision


def test_one_winner_and_none() -> None:
    assert line([(0.2, 2.0)]).r(0.8) == pytest.approx(8.0)
    none = line([])
    assert none.r(0.1) == none.r(5.0) == pytest.approx(1.0)  # the middle of 0.001 to 1000
    assert "No trial gave a score" in none.decision


def test_fewer_winners_than_the_degree_needs() -> None:
    made = line([(0.1, 1.0), (0.2, 2.0)], degree=2)
    assert made.r(0.4) == pytest.approx(4.0)
    assert "degree 1" in made.decision


def test_a_line_that_leaves_the_box_is_clamped_and_says_so() -> None:
    steep = line([(0.1, 1.0), (0.2, 400.0)])
    assert steep.r(2.0) == 1000.0
    assert "above the box" in steep.said(2.0)[-1]
    assert steep.at(2.0).r == pytest.approx(1000)
    assert steep.r(0.01) == 0.001  # the line is negative there: nothing rounds to zero steps
    assert steep.at(0.01).steps == 1
    assert "below the box" in steep.said(0.01)[-1]
    assert steep.said(0.15) == []


def test_a_saved_line_reads_the_same(tmp_path: Path) -> None:
    box = Space(lr=(0.001, 10.0), steps=(1, 100), batch_size=(16, 64))
    made = fit_line([(0.1, 9.0), (0.2, 3.0)], space=box, delta=1e-6, axis="mu", way="balanced")
    made.save(tmp_path / "line.json")
    again = Line.load(tmp_path / "line.json")
    assert again == made
    assert again.at(0.7) == made.at(0.7)
    assert [path.name for path in tmp_path.iterdir()] == ["line.json"]


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"format": 99}', '{"format": 1, "space": {"lr": [1, 2]}}'])
def test_what_is_no_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "line.json").write_text(text)
    with pytest.raises(ValueError, match="holds no line"):
        Line.load(tmp_path / "line.json")
