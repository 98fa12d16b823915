"""Engines that are made on first use and kept on their model."""

from __future__ import annotations

from typing import Any

from torch import nn

from tacit._deprecation import renamed_argument
from tacit.gradients._clipping import Policy, as_policy
from tacit.gradients._engine import Engine
from tacit.gradients._isolation import Loss
from tacit.gradients._losses import same_loss
from tacit.gradients._result import ClippedSum


class _Remembered(dict[Any, Engine]):
    """The engines of a model, kept on the model so that they go when it goes; copies and files do not see them.

    A weak map by model does not serve: an engine refers to its model, so the map's values would keep its keys alive
    (Python has no ephemerons). On the model the two are a cycle, which the garbage collector frees.
    """

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
    unit_ids: Any = None,
    microbatch: int | None = None,
    mute: Any = None,
    units: Any = None,
) -> ClippedSum:
    """The sum over privacy units of their clipped per-example gradients, with its L2 bound.

    The gradient of a unit is the mean over its rows, clipped as one. No per-example gradient is built where that can be
    avoided. The engine behind it (see `Engine`, which states the **formal guarantee**) is kept and used again by the
    next call with the same model and loss.

    Args:
        model: Its trainable parameters are summed over.
        per_sample_loss: `per_sample_loss(model, batch)` returns one loss per row, or a pair of these and a tensor with
            one entry per row (the logits, say), which is found in `total.private.outputs`.
        batch: A tensor, or any nest of tuples, lists and dicts of tensors, rows first.
        clip: The L2 bound of a unit's gradient, or a clip policy.
        unit_ids: One integer or string per row; rows with the same id are one unit. By default each row is a unit.
        microbatch: The most rows in memory at a time; the result does not depend on it.
        mute: One boolean per row; a unit with a muted row contributes zero.

    Returns:
        The sum with its bounds, for `privacy.mechanisms.gaussian`.

    Raises:
        RowsMixed: A layer or the loss mixes rows, so that no per-unit bound holds; the message names the layer.
        ValueError: An invalid clip, batch or model; before any private value is used.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from tacit.gradients import clipped_sum
        >>> loss = lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
        >>> batch = torch.randn(6, 4), torch.tensor([0, 1, 0, 1, 0, 1])
        >>> total = clipped_sum(nn.Linear(4, 2), loss, batch, clip=1.0, unit_ids=torch.tensor([7, 7, 7, 8, 8, 9]))
        >>> total.bounds
        {'gradient': 1.0}
    """
    unit_ids = renamed_argument("units", units, "unit_ids", unit_ids, where="clipped_sum")
    clip = as_policy(clip)
    key = (*same_loss(per_sample_loss), microbatch)
    engines: _Remembered = model.__dict__.setdefault("_tacit_engines", _Remembered())
    engine = engines.get(key)
    if engine is None or engine.outdated():
        engine = engines[key] = Engine(model, per_sample_loss, clip=clip, microbatch=microbatch)
    engine.per_sample_loss = per_sample_loss
    return engine(batch, clip=clip, unit_ids=unit_ids, mute=mute)
