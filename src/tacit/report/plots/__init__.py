"""The plots of the reports. Each returns a figure of its own; nothing of matplotlib's global state changes."""

from tacit._deprecation import renamed_attributes
from tacit.report.plots._plots import (
    Bin,
    Curve,
    accuracy_against_noise,
    bars_by_shift,
    curve,
    mean,
    reliability,
)

__all__ = [
    "Bin",
    "Curve",
    "accuracy_against_noise",
    "bars_by_shift",
    "curve",
    "mean",
    "reliability",
]

__getattr__ = renamed_attributes(__name__, {"Line": "Curve"})
