"""Accuracy under each shift, for several arms at once: dots in rows, or a panel per arm."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tacit.report import theme
from tacit.report._tables import Cell, Spread, number
from tacit.report.theme import WIDTH


def bars_by_shift(
    shifts: Sequence[str],
    arms: Mapping[str, Sequence[Cell]],
    *,
    reference: str | None = None,
    label: str = "accuracy (%)",
    title: str = "",
) -> Figure:
    """One row per shift and one for the mean: a dot per arm, or a panel per arm where there are many.

    ``reference`` names the arm that the others are compared with, such as the source model: it is grey.
    """
    for name, values in arms.items():
        if len(values) != len(shifts):
            raise ValueError(f"The arm {name!r} has {len(values)} values for {len(shifts)} shifts.")
    if not arms or not shifts:
        raise ValueError("A plot by shift needs at least one arm and one shift.")
    if reference is not None and reference not in arms:
        raise ValueError(f"There is no arm {reference!r} to compare with; the arms are {', '.join(arms)}.")
    cells = {name: [*values, mean(values)] for name, values in arms.items()}
    with theme.styled():
        many = len(arms) - (reference is not None) > len(theme.COLOURS)
        return (_panels if many else _dots)(shifts, cells, reference, label, title)


def _dots(
    shifts: Sequence[str], arms: Mapping[str, Sequence[Cell]], reference: str | None, label: str, title: str
) -> Figure:
    figure = theme.figure(WIDTH, 1.35 + 0.27 * (len(shifts) + 1.6))
    axes = figure.add_subplot()
    heights = _rows(axes, shifts)
    for height, column in zip(heights, zip(*arms.values(), strict=True), strict=True):
        found = [value for value in map(number, column) if value is not None]
        if len(found) > 1:
            axes.plot([min(found), max(found)], [height, height], color=theme.GRID, lw=4, zorder=1)
    names = [name for name in arms if name != reference]
    for name, cells in arms.items():
        place = names.index(name) if name in names else None
        tint, mark = (theme.MUTED, "o") if place is None else (theme.colour(place), theme.mark(place))
        _draw_dots(axes, heights, cells, tint, mark, _with_mean(name, cells))
    axes.set_xlabel(label)
    lines = math.ceil(sum(len(name) + 9 for name in arms) / 105)  # what fits beside each other
    across = math.ceil(len(arms) / lines)
    figure.legend(loc="outside upper left", ncols=across, handletextpad=0.2, columnspacing=1.4, title=title or None)
    return figure


def _panels(
    shifts: Sequence[str], arms: Mapping[str, Sequence[Cell]], reference: str | None, label: str, title: str
) -> Figure:
    names = [name for name in arms if name != reference]
    across = 5 if len(names) % 5 == 0 or len(names) > 12 else 4
    down = math.ceil(len(names) / across)
    figure = theme.figure(WIDTH, down * (0.7 + 0.19 * (len(shifts) + 1.6)))
    panels: list[Axes] = list(figure.subplots(down, across, sharex=True, sharey=True, squeeze=False).flat)
    for place, (axes, name) in enumerate(zip(panels, names, strict=False)):
        heights = _rows(axes, shifts, size=8)
        if reference is None:
            for other in names:
                _draw_dots(axes, heights, arms[other], theme.FAINT, "o", "", size=3)
        else:
            _compare(axes, heights, arms[name], arms[reference])
        _draw_dots(axes, heights, arms[name], theme.COLOURS[0], "o", "", size=5.5)
        axes.set_title(textwrap.fill(_with_mean(name, arms[name]), 90 // across), size=9)
        if place >= len(names) - across:
            axes.set_xlabel(label, size=8)
            axes.tick_params(axis="x", labelbottom=True, labelsize=8)
    for axes in panels[len(names) :]:
        axes.set_axis_off()
    if title:
        figure.suptitle(title, x=0.01, ha="left", size=10.5, weight="bold")
    return figure


def _compare(axes: Axes, heights: Sequence[float], cells: Sequence[Cell], reference: Sequence[Cell]) -> None:
    """From the reference to the arm: blue where it gains, the second colour where it loses."""
    for height, cell, other in zip(heights, cells, reference, strict=True):
        here, there = number(cell), number(other)
        if here is not None and there is not None:
            tint = theme.COLOURS[0] if here >= there else theme.COLOURS[1]
            axes.plot([there, here], [height, height], color=tint, lw=2.5, alpha=0.35, zorder=2)
    _draw_dots(axes, heights, reference, theme.MUTED, "|", "", size=6)


def _with_mean(name: str, cells: Sequence[Cell]) -> str:
    found = number(cells[-1])
    return name if found is None else f"{name}  {found:.1f}"


def _rows(axes: Axes, shifts: Sequence[str], size: float = 9.5) -> list[float]:
    """A row per shift from the top, and that of the mean a little apart."""
    heights = [-float(place) for place in range(len(shifts))] + [-len(shifts) - 0.6]
    axes.set_yticks(heights, [*(shift.replace("_", " ") for shift in shifts), "mean"], size=size)
    for text in axes.get_yticklabels()[-1:]:  # none where another panel shows them
        text.set_fontweight("bold")
    axes.set_ylim(heights[-1] - 0.7, 0.7)
    axes.axhline(-len(shifts) + 0.2, color=theme.FAINT, lw=0.8)
    axes.grid(axis="x")
    axes.spines["left"].set_visible(False)
    return heights


def _draw_dots(
    axes: Axes, heights: Sequence[float], cells: Sequence[Cell], colour: str, mark: str, label: str, size: float = 6.5
) -> None:
    places = [(number(cell), height) for cell, height in zip(cells, heights, strict=True)]
    seen = [(value, height) for value, height in places if value is not None]
    x, y = [value for value, _ in seen], [height for _, height in seen]
    edge = colour if mark == "|" else theme.PAPER
    axes.plot(x, y, mark, color=colour, ms=size, mec=edge, mew=0.7, label=label, zorder=3)
    for cell, height in zip(cells, heights, strict=True):
        if isinstance(cell, Spread) and cell.std > 0:
            axes.plot([cell.mean - cell.std, cell.mean + cell.std], [height] * 2, color=colour, lw=1.2, zorder=2)


def mean(values: Sequence[Cell]) -> float | None:
    """The mean over all shifts; None if any is missing, for then it would be a mean of something else."""
    found = [number(value) for value in values]
    kept = [value for value in found if value is not None]
    return math.fsum(kept) / len(kept) if kept and len(kept) == len(found) else None
