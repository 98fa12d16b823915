"""Accuracy against epsilon: every point where it belongs, the infinite epsilon last."""

import math

import matplotlib
import pytest

from studies.tradeoff import Point, tradeoff
from tacit.report import theme


def test_tradeoff() -> None:
    points = [Point(10.0, 62.0, 0.4), Point(1.0, 57.0, 0.8), Point(math.inf, 63.0)]
    figure = tradeoff({"DP-Tent": points, "DP-SAR": [Point(1.0, 58.0)]}, {"source": 51.0})
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "10", "∞\nnot private"]
    (x, y) = next(
        line.get_data() for line in axes.lines if line.get_color() == theme.COLOURS[0] and len(line.get_xdata()) == 3
    )
    assert list(y) == [57.0, 62.0, 63.0]  # in the order of epsilon, the infinite one last
    assert list(x[:2]) == [1.0, 10.0]
    assert 10.0 < x[2] < math.inf
    assert {"DP-Tent", "DP-SAR", "source"} <= {text.get_text() for text in figure.findobj(matplotlib.text.Text)}
    with pytest.raises(ValueError, match="finite epsilon"):
        tradeoff({"Tent": [Point(math.inf, 1.0)]})
