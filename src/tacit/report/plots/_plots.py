"""The plots of the reports. Each returns a figure of its own; nothing of matplotlib's global state changes.

Values that were not measured (None) leave a gap: nothing is drawn for them and no mean is taken over them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tacit.report import theme
from tacit.report._by_shift import bars_by_shift as bars_by_shift
from tacit.report._by_shift import mean as mean
from tacit.report.theme import WIDTH

if TYPE_CHECKING:
    from tacit.pretrain import Noisy


class Bin(NamedTuple):
    """Predictions of about the same confidence: their mean confidence, how many were right, and their share."""

    confidence: float
    accuracy: float
    weight: float


class Curve(NamedTuple):
    """A line, with the band between ``low`` and ``high`` around it if there are any."""

    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


# -- calibration ------------------------------------------------------------------------------------------------------


def reliability(panels: Mapping[str, Sequence[Bin]], *, title: str = "") -> Figure:
    """For each panel how often predictions of a confidence are right; on the diagonal they are as sure as they should.

    A dot's distance to the diagonal is the error of its bin, and the bars below say how many predictions are in it.
    The expected calibration error in the title is the mean distance.
    """
    if not panels:
        raise ValueError("A reliability diagram needs at least one panel.")
    across = min(len(panels), 4)
    down = math.ceil(len(panels) / across)
    with theme.styled():
        size = min(WIDTH / across, 3.8)
        figure = theme.figure(size * across, down * (size * 1.12 + 0.6))
        grid = figure.subplots(2 * down, across, squeeze=False, sharex=True, height_ratios=[5, 1] * down)
        for place in range(down * across):
            above, below = (grid[2 * (place // across) + part, place % across] for part in (0, 1))
            if place >= len(panels):
                above.set_axis_off()
                below.set_axis_off()
                continue
            name, bins = list(panels.items())[place]
            _reliability(above, below, name, [found for found in bins if found.weight > 0], theme.colour(place))
            if place % across == 0:
                above.set_ylabel("accuracy")
                below.set_ylabel("share")
        if title:
            figure.suptitle(title, x=0.01, ha="left", size=10.5, weight="bold")
    return figure


def _reliability(above: Axes, below: Axes, name: str, bins: Sequence[Bin], colour: str) -> None:
    whole = math.fsum(found.weight for found in bins)
    error = math.fsum(found.weight * abs(found.accuracy - found.confidence) for found in bins) / (whole or 1.0)
    above.plot([0, 1], [0, 1], color=theme.FAINT, lw=1.2, ls=(0, (4, 3)))
    for found in bins:
        above.plot([found.confidence] * 2, [found.confidence, found.accuracy], color=colour, lw=3.5, alpha=0.3)
        below.plot([found.confidence] * 2, [0, found.weight / whole], color=colour, lw=5, solid_capstyle="butt")
    x, y = [found.confidence for found in bins], [found.accuracy for found in bins]
    above.plot(x, y, color=colour, marker="o", ms=6.5, mec=theme.PAPER, mew=0.8, lw=1.2, zorder=3)
    above.set_title(f"{name}: ECE {100 * error:.1f}%" if bins else name)
    above.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), xticks=[0, 0.25, 0.5, 0.75, 1], yticks=[0, 0.25, 0.5, 0.75, 1])
    above.set_box_aspect(1)
    below.set_box_aspect(0.2)
    above.grid(True)
    below.set(xlabel="confidence", ylim=(0, None))
    below.locator_params(axis="y", nbins=2)


# -- anything else ----------------------------------------------------------------------------------------------------


def curve(
    lines: Mapping[str, Curve],
    *,
    x_label: str,
    y_label: str,
    levels: Mapping[str, float] | None = None,
    log_x: bool = False,
    title: str = "",
) -> Figure:
    """Lines with their spread as bands, each named at its end."""
    with theme.styled():
        figure = theme.figure(WIDTH, 4.0)
        axes = figure.add_subplot()
        if log_x:
            axes.set_xscale("log")
        named: list[tuple[float, str, str]] = []
        for name, level in (levels or {}).items():
            axes.axhline(level, color=theme.MUTED, lw=1.2, ls=(0, (4, 3)), zorder=1)
            named.append((level, name, theme.MUTED))
        for place, (name, line) in enumerate(lines.items()):
            colour = theme.colour(place)
            if line.low is not None and line.high is not None:
                axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.16, lw=0)
            axes.plot(line.x, line.y, color=colour)
            if len(line.y):
                named.append((line.y[-1], name, colour))
        axes.margins(x=0.01, y=0.1)
        axes.grid(axis="y")
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.set_title(title)
        theme.end_labels(axes, named)
    return figure


def accuracy_against_noise(series: Mapping[str, Sequence[Noisy]], clean: Mapping[str, float] | None = None) -> Figure:
    """Accuracy (%) over the noise's deviation; one line per model, from its accuracy without noise if that is given.

    The bands are one standard deviation over draws (of `pretrain.robustness`, or over all draws of all seeds).
    """
    lines = {}
    for name, noisy in series.items():
        points = sorted((one.std, 100 * one.mean, 100 * one.spread) for one in noisy)
        if clean is not None and name in clean:
            points.insert(0, (0.0, 100 * clean[name], 0.0))
        x, y, std = zip(*points, strict=True)
        low, high = ([a + sign * b for a, b in zip(y, std, strict=True)] for sign in (-1, 1))
        lines[name] = Curve(x, y, low, high)
    return curve(lines, x_label="deviation of the noise on the weights", y_label="accuracy (%)")
