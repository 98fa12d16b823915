"""The plots of the reports. Each returns a figure of its own; nothing of matplotlib's global state changes."""

from tacit._deprecation import renamed_attributes
from tacit.report.plots._plots import (
    Bin,
    Curve,
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
    "Curve",
    "Point",
    "accuracy_against_noise",
    "bars_by_shift",
    "curve",
    "mean",
    "reliability",
    "tradeoff",
]

__getattr__ = renamed_attributes(__name__, {"Line": "Curve"})
