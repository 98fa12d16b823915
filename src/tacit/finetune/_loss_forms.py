"""The loss of a training loop in the forms that people have it, as one loss per row of a loader's batch."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tacit._refusals import Refusal
from tacit.finetune._tasks import Classes, Task, outputs_of

PerRow = Callable[[nn.Module, Any], Tensor]  # (model, batch) -> one loss per row

_LABELS = ("labels", "label", "targets", "target")
_MEAN = "Give reduction='mean' (the default) or 'none': tacit divides by the public batch size itself."
_FORMS = (
    "loss is a criterion of outputs and targets, such as nn.CrossEntropyLoss() or torch.nn.functional.cross_entropy, "
    "a task such as finetune.Classes(10), or a function loss(model, batch) that returns one loss per row"
)


def per_row(loss: Any, autocast: torch.dtype | None = None) -> PerRow:
    """The loss as a function of model and batch that returns one number per row.

    Args:
        loss: A criterion with a `reduction` (module or function), a `Task`, or a function of (model, batch).
        autocast: Run forward and loss in mixed precision of this type.
    """
    found = _per_row(loss)
    return found if autocast is None else partial(_autocast, found, autocast)


def check_classes(loss: Any, outputs: Tensor, labels: Tensor) -> None:
    """Refuse class labels that a cross entropy cannot take: each of their rows would contribute zero, in silence.

    Args:
        loss: As for `per_row`.
        outputs: Of the model, for some rows.
        labels: Every label that is known.
    """
    plain = loss.func if isinstance(loss, partial) else loss
    kinds = (nn.CrossEntropyLoss, nn.NLLLoss)
    if not (isinstance(plain, kinds) or plain in (functional.cross_entropy, functional.nll_loss)):
        return
    if labels.is_floating_point() or labels.dtype == torch.bool or outputs.dim() < 2:
        return
    ignored = getattr(plain, "ignore_index", -100)
    known = labels[labels != ignored].flatten()
    Classes(outputs.shape[1]).check(known)


def name_of(loss: Any) -> str:
    """A name for a loss that is the same in the next process: where it is defined, its settings and its code."""
    if isinstance(loss, partial):
        return f"{name_of(loss.func)} {loss.args!r} {loss.keywords!r}"
    code = getattr(loss, "__code__", None)
    if code is None:
        return f"{type(loss).__module__}.{type(loss).__qualname__} {loss!r}"
    constants = [value for value in code.co_consts if value is None or isinstance(value, int | float | str)]
    return f"{loss.__module__}.{loss.__qualname__} {code.co_code.hex()} {code.co_names!r} {constants!r}"


def _per_row(loss: Any) -> PerRow:
    if isinstance(loss, type) or not (callable(loss) or isinstance(loss, Task)):
        raise TypeError(f"{_FORMS}; got {'the class ' if isinstance(loss, type) else ''}{_name(loss)}.")
    if isinstance(loss, nn.Module) and hasattr(loss, "reduction"):
        criterion: Any = copy.copy(loss)  # its weights are shared, its reduction is not
        within = _within_a_row(str(loss.reduction))
        criterion.reduction = "none"
        return partial(_criterion, criterion, within)
    if isinstance(loss, Task):
        return partial(_criterion, loss.loss, "mean")
    if not isinstance(loss, nn.Module) and "reduction" in (parameters := _parameters(loss)):
        default = parameters["reduction"].default
        within = _within_a_row("mean" if default is inspect.Parameter.empty else str(default))
        return partial(_criterion, partial(loss, reduction="none"), within)
    return partial(_function, loss)


def _within_a_row(reduction: str) -> str:
    """How the entries of one row are put together where rows are averaged so."""
    if reduction in ("mean", "none"):
        return "mean"
    if reduction == "batchmean":  # of nn.KLDivLoss: a sum over a row's entries
        return "sum"
    raise Refusal(f"A loss with reduction={reduction!r} cannot be honoured. {_MEAN}")


def _parameters(loss: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(loss).parameters
    except (TypeError, ValueError):
        return {}


def _name(loss: Any) -> str:
    return loss.__name__ if isinstance(loss, type) else type(loss).__name__


def _criterion(criterion: Any, within: str, model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = parted(batch)
    found: Tensor = criterion(outputs_of(model, inputs), targets)
    if found.dim() < 2:
        return found
    each = found.flatten(1)
    if within == "sum":
        return each.sum(1)
    ignored: int | None = getattr(criterion, "ignore_index", None)
    if ignored is not None and targets.shape == found.shape:  # a mean over the positions that count, as in torch
        return each.sum(1) / (targets != ignored).flatten(1).sum(1).clamp_min(1)
    return each.mean(1)


def _function(loss: Any, model: nn.Module, batch: Any) -> Tensor:
    found: Tensor = loss(model, batch)
    return found


def _autocast(loss: PerRow, dtype: torch.dtype, model: nn.Module, batch: Any) -> Tensor:
    device = next(model.parameters()).device.type
    with torch.autocast(device, dtype=dtype, cache_enabled=False):
        return loss(model, batch).float()


def parted(batch: Any) -> tuple[Any, Tensor]:
    """Inputs and targets of a batch: a pair, or a mapping with labels."""
    if isinstance(batch, Mapping):
        key = next((name for name in _LABELS if name in batch), None)
        if key is not None:
            return {name: value for name, value in batch.items() if name != key}, batch[key]
    elif isinstance(batch, list | tuple) and len(batch) == 2 and isinstance(batch[1], Tensor):
        return batch[0], batch[1]
    raise Refusal(
        "A criterion needs batches of (inputs, targets), or mappings with 'labels': for others give a function "
        "loss(model, batch) that returns one loss per row. Nothing was charged."
    )
