"""One clipped gradient sum per privacy unit, fast."""

from tacit.gradients._clipping import (
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
from tacit.gradients._engine import Engine
from tacit.gradients._isolation import RowsMixed
from tacit.gradients._parameter_swap import refuse_live_statistics
from tacit.gradients._remembered import clipped_sum
from tacit.gradients._result import ClippedSum

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
