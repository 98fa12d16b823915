"""Plots of tuning: every point where it was measured, and the best one framed."""

import matplotlib
import pytest
from matplotlib.patches import Rectangle

from studies.linear_scaling.plots import Fit, gaps, heat_maps, lines
from tacit.report import theme


def test_a_heat_map_has_every_point_and_frames_the_best() -> None:
    grid = {(0.1, 1): 50.0, (0.1, 10): 60.0, (1.0, 1): 70.0}  # (1.0, 10) was not run
    figure = heat_maps({"ε = 1": grid, "ε = 2": {}})
    (axes,) = figure.axes
    numbers = {(t.get_position(), t.get_text()) for t in axes.texts}
    assert numbers == {((0.5, 0.5), "50"), ((1.5, 0.5), "60"), ((0.5, 1.5), "70")}
    (frame,) = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    assert frame.get_xy() == (0, 1)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0.1", "1"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "10"]
    assert theme.svg(figure).startswith("<svg")
    with pytest.raises(ValueError, match="at least one point"):
        heat_maps({"ε = 1": {}})


def test_lines_go_through_the_winners_to_the_final_run() -> None:
    figure = lines(
        {"task": [Fit([(0.1, 1.0), (0.2, 3.0)], [(0.1, 1.0), (0.9, 17.0)], (0.9, 17.0))]},
        {"task": [(1.0, 20.0), (0.5, 10.0)]},
    )
    (axes,) = figure.axes
    drawn = [[tuple(point) for point in line.get_xydata().tolist()] for line in axes.lines]
    assert drawn[0] == [(0.1, 1.0), (0.9, 17.0)]
    assert drawn[1] == [(0.1, 1.0), (0.2, 3.0)]
    assert drawn[2] == [(0.9, 17.0)]
    assert drawn[3] == [(0.5, 10.0), (1.0, 20.0)]


def test_gaps_are_drawn_by_epsilon() -> None:
    figure = gaps({"one": {"ε = 1": [(0.1, -5.0), (1.0, 0.0)]}, "two": {"ε = 1": [(1.0, 0.0)]}})
    first, second = figure.axes
    assert first.lines[0].get_xydata().tolist() == [[0.1, -5.0], [1.0, 0.0]]
    assert second.get_title(loc="left") == "two"
    assert "ε = 1" in [text.get_text() for text in figure.findobj(matplotlib.text.Text)]
