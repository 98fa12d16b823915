"""Engines that are made on first use and kept on their model."""

from __future__ import annotations

from typing import Any

from torch import nn

from tacit.gradients._clipping import Policy, as_policy
from tacit.gradients._engine import Engine
from tacit.gradients._isolation import Loss
from tacit.gradients._losses import same_loss
from tacit.gradients._result import ClippedSum


class _Remembered(dict[Any, Engine]):
    """The engines of a model, kept on the model so that they go when it goes; copies and files do not see them."""

    def __deepcopy__(self, memo: Any) -> _Remembered:
        del memo
        return _Remembered()

    def __reduce__(self) -> tuple[type[dict[Any, Any]], tuple[()]]:
        return dict, ()


def clipped_sum(
    model: nn.Module,
    per_sample_loss: Loss,
    batch: Any,
    *,
    clip: float | Policy,
    units: Any = None,
    microbatch: int | None = None,
    mute: Any = None,
) -> ClippedSum:
    """The sum over privacy units of their clipped gradients; see `Engine`, which this makes and remembers."""
    clip = as_policy(clip)
    key = (*same_loss(per_sample_loss), microbatch)
    engines: _Remembered = model.__dict__.setdefault("_tacit_engines", _Remembered())
    engine = engines.get(key)
    if engine is None or engine.outdated():
        engine = engines[key] = Engine(model, per_sample_loss, clip=clip, microbatch=microbatch)
    engine.per_sample_loss = per_sample_loss
    return engine(batch, clip=clip, units=units, mute=mute)
