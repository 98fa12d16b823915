"""What the reports of all studies share: a mean over seeds in a table, in its note, and as a line with a band."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from tacit.report import Cell, Spread, plots


def spread(values: Sequence[float]) -> Spread | None:
    """Mean and standard deviation over runs (0 of a single one); None if there are none."""
    if not values:
        return None
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0)


def cell(values: Sequence[float]) -> Cell:
    """The same for a table: a single run has no spread, and what was not run is empty."""
    found = spread(values)
    return found if found is None or len(values) > 1 else found.mean


def seeds(used: Sequence[int]) -> str:
    """The note below a table."""
    count = len(used)
    return f"Mean and standard deviation over {count} seeds." if count > 1 else "One seed."


def band(points: Iterable[tuple[float, float, float]]) -> plots.Curve:
    """A line through (x, mean, standard deviation), in the order of x, with a band of one standard deviation."""
    ordered = sorted(points)
    x, y = [point[0] for point in ordered], [point[1] for point in ordered]
    return plots.Curve(x, y, [mean - std for _, mean, std in ordered], [mean + std for _, mean, std in ordered])
