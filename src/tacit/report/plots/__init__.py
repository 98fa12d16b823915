"""The plots of the reports. Each returns a figure of its own; nothing of matplotlib's global state changes."""

from tacit.report.plots._plots import (
    Bin,
    Line,
    Point,
    accuracy_against_noise,
    bars_by_shift,
    curve,
    mean,
    reliability,
    tradeoff,
)

__all__ = [
    "Bin",
    "Line",
    "Point",
    "accuracy_against_noise",
    "bars_by_shift",
    "curve",
    "mean",
    "reliability",
    "tradeoff",
]
