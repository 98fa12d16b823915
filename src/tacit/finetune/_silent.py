"""Which models draw nothing themselves, so that their sums need no generators of their own."""

from __future__ import annotations

from typing import Any

from torch import nn

from tacit.finetune._tasks import SILENT_LOSSES
from tacit.gradients import untouched


def silent(model: nn.Module, loss: Any) -> bool:
    """Whether a model is made of plain layers alone, as torch has them, and its loss is one of the package's own.

    Formal guarantee: what such a model and loss compute draws from no generator, in any mode and for any rows. A module
    of another class, with a hook or a forward of its own, or compiled is taken to draw (`gradients.untouched`).

    Args:
        model: The model; it is looked at, not run.
        loss: The loss per row.

    Returns:
        False where it is not known.
    """
    return loss in SILENT_LOSSES and untouched(model)
