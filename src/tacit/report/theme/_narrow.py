"""The same figure for a phone: as narrow as its screen, with panels below each other and text of the usual size."""

from __future__ import annotations

import math
import pickle
import textwrap
from typing import Any

from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from matplotlib.legend import Legend

from tacit.report.theme._theme import styled

NARROW = 4.0  # inches: 400 pixels in a page
_PLACES = {code: name for name, code in Legend.codes.items()}
_LETTERS = 46  # of the usual size that fit in a line of a legend


def narrow(figure: Figure) -> Figure:
    """A copy of a figure for a narrow screen; the figure itself stays as it is."""
    made: Figure = pickle.loads(pickle.dumps(figure))
    width, height = made.get_size_inches()
    if width <= NARROW:
        return made
    taller = _stack(made)
    with styled():
        legends = [legend for legend in (*made.legends, *(axes.get_legend() for axes in made.axes)) if legend]
        more = math.fsum(map(_fold, legends))
    made.set_size_inches(NARROW, height * taller + more)
    title = getattr(made, "_suptitle", None)
    for text in (title, *(axes.title for axes in made.axes), *(axes._left_title for axes in made.axes)):  # type: ignore[attr-defined]
        if text is not None:
            text.set_wrap(True)
    return made


def _stack(figure: Figure) -> float:
    """Put a grid of panels two beside each other; returns how much taller it gets.

    Panels of one height follow each other row by row; where rows differ in height (a plot and its bars below), the
    columns move as they are.
    """
    grids = {spec.get_gridspec() for axes in figure.axes if (spec := axes.get_subplotspec()) is not None}
    grid: Any = grids.pop() if len(grids) == 1 else None
    if grid is None or grid.ncols <= 2:
        return 1.0
    down, across, ratios = grid.nrows, grid.ncols, list(grid.get_height_ratios())
    alike = len(set(ratios)) == 1
    shown = sum(axes.axison for axes in figure.axes)
    rows = math.ceil(shown / 2) if alike else down * math.ceil(across / 2)
    new = GridSpec(rows, 2, figure=figure, height_ratios=None if alike else ratios * math.ceil(across / 2))
    for axes in figure.axes:
        spec = axes.get_subplotspec()
        if spec is None:
            continue
        row, column = spec.rowspan.start, spec.colspan.start
        place = divmod(row * across + column, 2) if alike else (column // 2 * down + row, column % 2)
        if place[0] >= rows:
            axes.remove()  # an empty place at the end of the grid
            continue
        axes.set_subplotspec(new[place])
        if place[1] == 0:
            axes.tick_params(axis="y", labelleft=True)
        for title in (axes.title, axes._left_title):  # type: ignore[attr-defined]
            title.set_text(textwrap.fill(title.get_text(), 16))
    return float(rows / down)


def _fold(legend: Any) -> float:
    """Fewer columns where the names do not fit beside each other; returns the inches of the new lines."""
    names = [text.get_text() for text in legend.get_texts()]
    before: int = legend._ncols
    fits = max(1, _LETTERS // (max(map(len, names), default=1) + 4))
    if fits >= before:
        return 0.0
    where = f"outside {_PLACES[legend._loc]}" if legend._outside_loc else legend._loc
    title = legend.get_title().get_text() or None
    legend.parent.legend(legend.legend_handles, names, loc=where, ncols=fits, title=title, handletextpad=0.2)
    if isinstance(legend.parent, Figure):
        legend.remove()  # axes replace theirs by themselves
    return 0.22 * (math.ceil(len(names) / fits) - math.ceil(len(names) / before))
