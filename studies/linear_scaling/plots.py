"""The plots of a tuning study: heat maps over learning rate and steps, r against epsilon, the gap against r."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from tacit.report import theme

Grid = Mapping[tuple[float, int], float]  # accuracy by (learning rate, steps)
_DARK, _LIGHT = "#15181d", "#ffffff"  # of numbers in a heat map, whatever the page's colours are


def _plainly(value: float, _: float) -> str:
    """A tick as a number: powers of ten would be set as mathematics."""
    return f"{value:g}"


class Fit(NamedTuple):
    """One search by linear scaling: (epsilon, r) of its sweeps' winners, along its line, and of its final run."""

    winners: Sequence[tuple[float, float]]
    line: Sequence[tuple[float, float]]
    final: tuple[float, float]


def heat_maps(panels: Mapping[str, Grid], *, label: str = "accuracy (%)") -> Figure:
    """Accuracy over learning rate and steps, a panel per epsilon, each coloured from its worst to its best point."""
    panels = {name: grid for name, grid in panels.items() if grid}
    if not panels:
        raise ValueError("A heat map needs at least one point.")
    rates = len({lr for grid in panels.values() for lr, _ in grid})
    with theme.styled():
        figure = theme.figure(theme.WIDTH, 0.34 * rates + 1.1)
        for place, (name, grid) in enumerate(panels.items()):
            axes = figure.add_subplot(1, len(panels), place + 1)
            _heat(axes, grid)
            axes.set_title(name, weight="normal")
            axes.set_xlabel("steps")
            if place == 0:
                axes.set_ylabel("learning rate")
        figure.suptitle(label, x=0.01, ha="left", size=10.5, weight="bold")
    return figure


def _heat(axes: Axes, grid: Grid) -> None:
    rates, steps = sorted({lr for lr, _ in grid}), sorted({count for _, count in grid})
    values = np.array([[grid.get((lr, count), math.nan) for count in steps] for lr in rates])
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    colours = colormaps["Blues"]
    axes.pcolormesh(values, cmap=colours, vmin=low - 0.05 * (high - low), vmax=high + 0.25 * (high - low))
    for row, column in np.ndindex(values.shape):
        value = values[row, column]
        if math.isfinite(value):
            shade = (value - low) / (high - low) if high > low else 0.0
            tint = _LIGHT if shade > 0.72 else _DARK
            axes.text(column + 0.5, row + 0.5, f"{value:.0f}", ha="center", va="center", size=7.5, color=tint)
    top = np.unravel_index(int(np.nanargmax(values)), values.shape)
    axes.add_patch(
        Rectangle((float(top[1]), float(top[0])), 1, 1, fill=False, ec=theme.COLOURS[1], lw=1.8, clip_on=False)
    )
    axes.set_xticks(np.arange(len(steps)) + 0.5, [f"{count}" for count in steps])
    axes.set_yticks(np.arange(len(rates)) + 0.5, [f"{lr:.2g}" for lr in rates])
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)


def lines(
    panels: Mapping[str, Sequence[Fit]], oracle: Mapping[str, Sequence[tuple[float, float]]] | None = None
) -> Figure:
    """r against epsilon: the winners of the sweeps, the line through them, the final run, and where the oracle was."""
    across = min(len(panels), 2)
    down = math.ceil(len(panels) / across)
    with theme.styled():
        figure = theme.figure(theme.WIDTH, 3.1 * down)
        for place, (name, fits) in enumerate(panels.items()):
            axes = figure.add_subplot(down, across, place + 1)
            for number, fit in enumerate(fits):
                colour = theme.colour(number)
                axes.plot(*zip(*fit.line, strict=True), color=colour, lw=1.2, alpha=0.8)
                for points, mark, size in ((fit.winners, "o", 5.0), ([fit.final], "D", 6.5)):
                    x, y = zip(*points, strict=True) if points else ((), ())
                    axes.plot(x, y, color=colour, ls="none", marker=mark, ms=size, mec=theme.PAPER, mew=0.8, zorder=3)
            best = sorted((oracle or {}).get(name, ()))
            if best:
                axes.plot(*zip(*best, strict=True), color=theme.INK, ls=(0, (4, 3)), lw=1.2, marker="x", ms=6, mew=1.6)
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(_plainly)
            axes.set_title(name)
            axes.grid(axis="y")
            axes.minorticks_off()
            if place // across == down - 1:
                axes.set_xlabel("epsilon of one run")
            if place % across == 0:
                axes.set_ylabel("r = learning rate × steps")
    return figure


def along(panels: Mapping[str, Mapping[str, Sequence[tuple[float, float, float]]]]) -> Figure:
    """(epsilon, accuracy, deviation) of each way to choose hyperparameters; a panel per task."""
    across = min(len(panels), 3)
    down = math.ceil(len(panels) / across)
    with theme.styled():
        figure = theme.figure(theme.WIDTH, 2.9 * down + 0.3)
        for place, (name, series) in enumerate(panels.items()):
            axes = figure.add_subplot(down, across, place + 1)
            axes.set_xscale("log")
            for number, (way, points) in enumerate(series.items()):
                x, y, spread = zip(*points, strict=True)
                colour = theme.colour(number)
                axes.errorbar(x, y, spread, color=colour, elinewidth=1.0, capsize=2, ls="none", alpha=0.6)
                axes.plot(
                    x, y, color=colour, marker=theme.mark(number), mec=theme.PAPER, mew=0.6, ms=5.5, lw=1.2, label=way
                )
            axes.set_xticks(x, [_plainly(value, 0) for value in x])
            axes.set_title(name)
            axes.grid(axis="y")
            axes.minorticks_off()
            if place // across == down - 1:
                axes.set_xlabel("epsilon in all")
            if place % across == 0:
                axes.set_ylabel("accuracy (%)")
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="lower right", frameon=False)
    return figure


def gaps(panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]) -> Figure:
    """How far each point of a grid is below the best, against its r; a panel per task, a colour per epsilon."""
    across = min(len(panels), 2)
    down = math.ceil(len(panels) / across)
    with theme.styled():
        figure = theme.figure(theme.WIDTH, 2.9 * down + 0.3)
        for place, (name, series) in enumerate(panels.items()):
            axes = figure.add_subplot(down, across, place + 1)
            for number, (epsilon, points) in enumerate(series.items()):
                x, y = zip(*points, strict=True)
                axes.plot(
                    x,
                    y,
                    ls="none",
                    marker=theme.mark(number),
                    ms=5,
                    color=theme.colour(number),
                    mec=theme.PAPER,
                    mew=0.6,
                    alpha=0.85,
                    label=epsilon,
                )
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(_plainly)
            axes.set_title(name)
            axes.grid(axis="y")
            axes.minorticks_off()
            if place == 0:
                axes.legend(loc="lower center", ncols=len(series), handletextpad=0.2, columnspacing=1.0)
            if place // across == down - 1:
                axes.set_xlabel("r = learning rate × steps")
            if place % across == 0:
                axes.set_ylabel("gap to the best (points)")
    return figure
