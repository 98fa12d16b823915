"""Accuracy against epsilon."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.figure import Figure

from tacit.report import theme


class Point(NamedTuple):
    """What was reached at an epsilon (inf: without noise), with the standard deviation over runs."""

    epsilon: float
    value: float
    std: float = 0.0


def tradeoff(
    series: Mapping[str, Sequence[Point]],
    levels: Mapping[str, float] | None = None,
    *,
    label: str = "accuracy (%)",
    title: str = "",
) -> Figure:
    """Accuracy against epsilon, with error bars where there were several runs.

    ``levels`` are lines across, such as the source and no privacy.
    """
    points = [point for line in series.values() for point in line]
    finite = sorted({point.epsilon for point in points if math.isfinite(point.epsilon)})
    if not finite:
        raise ValueError("A trade-off needs at least one point at a finite epsilon.")
    beyond = finite[-1] * max(2.0, (finite[-1] / finite[0]) ** 0.2)  # where infinity is drawn
    with theme.styled():
        figure = theme.figure(theme.WIDTH, 4.4)
        axes = figure.add_subplot()
        axes.set_xscale("log")
        named: list[tuple[float, str, str]] = []
        for name, level in (levels or {}).items():
            axes.axhline(level, color=theme.MUTED, lw=1.2, ls=(0, (4, 3)), zorder=1)
            named.append((level, name, theme.MUTED))
        for place, (name, line) in enumerate(series.items()):
            ordered = sorted(line)
            x = [point.epsilon if math.isfinite(point.epsilon) else beyond for point in ordered]
            y = [point.value for point in ordered]
            colour = theme.colour(place)
            if any(point.std > 0 for point in ordered):  # one run has no spread
                axes.errorbar(x, y, [p.std for p in ordered], color=colour, elinewidth=1.2, capsize=2.5, ls="none")
            axes.plot(x, y, marker=theme.mark(place), color=colour, mec=theme.PAPER, mew=0.8, ms=6.5, zorder=3)
            if ordered:
                named.append((y[-1], name, colour))
        ticks = [(epsilon, f"{epsilon:g}") for epsilon in finite]
        if any(math.isinf(point.epsilon) for point in points):
            ticks.append((beyond, "∞\nnot private"))
        axes.set_xticks([at for at, _ in ticks], [text for _, text in ticks])
        axes.minorticks_off()
        axes.margins(x=0.04, y=0.12)
        axes.grid(axis="y")
        axes.set_xlabel("epsilon (smaller is more private)")
        axes.set_ylabel(label)
        axes.set_title(title)
        theme.end_labels(axes, named)
    return figure
