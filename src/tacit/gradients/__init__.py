"""One clipped gradient sum per privacy unit, fast."""

from tacit.gradients._batches import change as change
from tacit.gradients._batches import count_rows as count_rows
from tacit.gradients._batches import in_own_places as in_own_places
from tacit.gradients._batches import leaves as leaves
from tacit.gradients._batches import row_shapes as row_shapes
from tacit.gradients._batches import rows_of as rows_of
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
from tacit.gradients._clipping import as_policy as as_policy
from tacit.gradients._clipping import shrink as shrink
from tacit.gradients._closed_form import untouched as untouched
from tacit.gradients._engine import Engine
from tacit.gradients._grad_factors import PerUnit as PerUnit
from tacit.gradients._isolation import Probe as Probe
from tacit.gradients._isolation import RowsMixed
from tacit.gradients._isolation import check_many_apart as check_many_apart
from tacit.gradients._isolation import check_rows_apart as check_rows_apart
from tacit.gradients._isolation import moved as moved
from tacit.gradients._isolation import seed_all as seed_all
from tacit.gradients._isolation import undisturbed as undisturbed
from tacit.gradients._isolation import wrong_shape as wrong_shape
from tacit.gradients._kernels import channel_moments as channel_moments
from tacit.gradients._kernels import kernels_version as kernels_version
from tacit.gradients._norms import square_norms as square_norms
from tacit.gradients._numbers import plain_numbers as plain_numbers
from tacit.gradients._parameter_swap import refuse_live_statistics
from tacit.gradients._remembered import clipped_sum
from tacit.gradients._result import ClippedSum
from tacit.gradients._result import Private as Private
from tacit.gradients._rounding import rounds_alike as rounds_alike
from tacit.gradients._spot import MIXED as MIXED
from tacit.gradients._spot import copied as copied
from tacit.gradients._spot import due as due
from tacit.gradients._synthetic import varies as varies
from tacit.gradients._units import Units as Units
from tacit.gradients._validation import check_private_apart as check_private_apart

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
