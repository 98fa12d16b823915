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
from tacit.gradients.engine import Engine, clipped_sum
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
    "clipped_sum",
    "refuse_live_statistics",
]
