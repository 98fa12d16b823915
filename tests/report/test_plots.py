"""Plots: what is drawn where, nothing invented, nothing left behind, and a figure that fits into a page."""

import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from itertools import pairwise

import matplotlib
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tacit.report import theme
from tacit.report._tables import Spread
from tacit.report.plots import Bin, Curve, bars_by_shift, curve, mean, reliability


def marked(axes: Axes, colour: str) -> list[tuple[float, float]]:
    """Where dots of a colour are."""
    lines = [line for line in axes.lines if line.get_color() == colour and line.get_marker() in theme.MARKS]
    return [(float(x), float(y)) for line in lines for x, y in zip(*line.get_data(), strict=True)]


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text)]


def test_a_mean_needs_every_shift() -> None:
    assert mean([1.0, Spread(3.0, 9.0), 5]) == 3.0
    assert mean([1.0, None]) is None
    assert mean([]) is None


def test_dots_by_shift() -> None:
    arms = {"source": [30.0, 40.0], "Tent": [Spread(50.0, 1.0), None]}
    figure = bars_by_shift(["gaussian_noise", "fog"], arms, reference="source")
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["gaussian noise", "fog", "mean"]
    heights = [float(tick) for tick in axes.get_yticks()]
    assert marked(axes, theme.MUTED) == [(30.0, heights[0]), (40.0, heights[1]), (35.0, heights[2])]
    assert marked(axes, theme.COLOURS[0]) == [(50.0, heights[0])]  # no dot where nothing was run, and no mean
    assert {"source  35.0", "Tent"} <= set(texts(figure))


def test_many_arms_are_panels() -> None:
    arms = {f"arm {n}": [float(n), 2.0 * n] for n in range(10)}
    figure = bars_by_shift(["fog", "snow"], arms, reference="arm 0")
    titles = [axes.get_title(loc="left") for axes in figure.axes if axes.axison]
    assert titles == [f"arm {n}  {1.5 * n:.1f}" for n in range(1, 10)]


def test_a_plot_by_shift_refuses_what_it_cannot_show() -> None:
    with pytest.raises(ValueError, match="'Tent' has 1 values for 2 shifts"):
        bars_by_shift(["a", "b"], {"Tent": [1.0]})
    with pytest.raises(ValueError, match="at least one arm"):
        bars_by_shift([], {})
    with pytest.raises(ValueError, match="no arm 'source'"):
        bars_by_shift(["a"], {"Tent": [1.0]}, reference="source")


def test_names_at_the_ends_keep_apart() -> None:
    lines = {f"method {n}": Curve([0.0, 1.0], [50.0, 50.0 + n / 100]) for n in range(6)}
    figure = curve(lines, x_label="step", y_label="accuracy (%)")
    (axes,) = figure.axes
    heights = sorted(t.get_position()[1] for t in axes.texts if t.get_text().startswith("method"))
    apart = [b - a for a, b in pairwise(heights)]
    assert min(apart) * figure.get_figheight() * 72 * 0.78 > 9.0  # more than the letters are high


def test_reliability_names_the_error() -> None:
    """By hand: (1 * 0.1 + 3 * 0.2) / 4 = 17.5%; an empty bin takes no part."""
    figure = reliability({"before": [Bin(0.5, 0.6, 1), Bin(0.9, 0.7, 3), Bin(0.1, math.nan, 0)], "after": []})
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert "before: ECE 17.5%" in titles
    assert "after" in titles
    with pytest.raises(ValueError, match="at least one panel"):
        reliability({})


def test_curve() -> None:
    line = Curve([1, 2, 3], [5.0, 6.0, 7.0], [4.0, 5.0, 6.0], [6.0, 7.0, 8.0])
    figure = curve(
        {"a": line, "empty": Curve([], [])}, x_label="step", y_label="loss", levels={"source": 5.5}, log_x=True
    )
    (axes,) = figure.axes
    assert (axes.get_xscale(), axes.get_xlabel(), len(axes.collections)) == ("log", "step", 1)
    assert {"a", "source"} <= set(texts(figure))


def test_an_svg_takes_its_colours_from_the_page() -> None:
    text, again = (
        theme.svg(
            curve({"A & $B$": Curve([1.0, 2.0], [2.0, 2.0])}, x_label="x", y_label="y", levels={"source": 1.0}),
            "figure7",
            alt='accuracy "here"',
        )
        for _ in range(2)
    )
    assert text == again
    root = ET.fromstring(text)  # well-formed, as a page needs it
    assert root.attrib["aria-label"] == 'accuracy "here"'
    assert "width" not in root.attrib
    assert f"var(--series-1, {theme.COLOURS[0]})" in text
    assert "A &amp; $B$" in text  # text stays text
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert ids
    assert all(name.startswith("figure7-") for name in ids)
    used = set(re.findall(r'(?:url\(#|href="#)([^")]+)', text))
    assert used <= set(ids)
    bare = re.sub(r"var\(--[\w-]+, #\w{6}\)", "", text)
    assert not re.findall(r"#[0-9a-f]{6}\b", bare), "a colour that would not change in the dark"
    assert "http" not in bare.replace("http://www.w3.org/", "")


def test_both_pages_have_every_colour() -> None:
    assert theme.ROLES.keys() == theme.DARK.keys()
    assert len(set(theme.ROLES.values())) == len(theme.ROLES)


def contrast(one: str, other: str) -> float:
    """The contrast of two colours (WCAG 2.1)."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted([luminance(one), luminance(other)])
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("colours", [theme.ROLES, theme.DARK], ids=["light", "dark"])
def test_figures_are_legible(colours: dict[str, str]) -> None:
    assert min(contrast(colours[role], colours["paper"]) for role in ("ink", "muted")) > 4.5
    assert min(contrast(colours[role], colours["paper"]) for role in colours if role.startswith("series")) > 2.0


def test_png() -> None:
    figure = curve({"a": Curve([1, 2], [1.0, 2.0])}, x_label="x", y_label="y")
    assert theme.png(figure, dpi=50).startswith(b"\x89PNG")


def test_matplotlib_is_left_as_it_was() -> None:
    code = """
import sys, matplotlib
matplotlib.rcParams["font.size"] = 7.5
look_at = lambda: {key: matplotlib.rcParams[key] for key in matplotlib.rcParams if key != "backend"}
before = look_at()
from tacit.report import theme
from tacit.report.plots import Curve, curve
figure = curve({"a": Curve([1, 2], [1.0, 2.0])}, x_label="x", y_label="y")
theme.svg(figure), theme.png(figure, dpi=30)
assert look_at() == before
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
