"""One clipped gradient sum per privacy unit, fast."""

from tacit.gradients.clipping import (
    AdaptiveQuantile,
    Automatic,
    BatchClip,
    FilterByBoth,
    FilterByLoss,
    FilterByNorm,
    Flat,
    PerLayer,
    Policy,
)
from tacit.gradients.engine import Engine
from tacit.gradients.isolation import RowsMixed
from tacit.gradients.remembered import clipped_sum
from tacit.gradients.result import ClippedSum
from tacit.gradients.watch import refuse_live_statistics

__all__ = [
    "AdaptiveQuantile",
    "Automatic",
    "BatchClip",
    "ClippedSum",
    "Engine",
    "FilterByBoth",
    "FilterByLoss",
    "FilterByNorm",
    "Flat",
    "PerLayer",
    "Policy",
    "RowsMixed",
    "clipped_sum",
    "refuse_live_statistics",
]
