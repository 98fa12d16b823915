"""Public rows as people hand them over, and whether a model can learn from them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tacit.data import TensorRecords

_ROWS = 4096  # looked at, or tried, at a time


def as_table(data: Any) -> TensorRecords:
    """(inputs, labels), a data set of (input, label) items, or a table as it is."""
    if isinstance(data, TensorRecords):
        return data
    if isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(part, Tensor) for part in data):
        return TensorRecords(*data)
    if hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, Tensor | tuple | list):
        return TensorRecords(data)
    raise ValueError("Data is (inputs, labels), two tensors, or a data set of (input, label) items.")


def checked(rows: TensorRecords, model: nn.Module) -> TensorRecords:
    """The same rows, if the model takes them, they are finite and their labels are among its outputs."""
    labels = rows.labels()
    if labels.dim() != 1 or labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"Labels are one whole number per row; got {labels.dtype} of shape {tuple(labels.shape)}.")
    if isinstance(rows.inputs, Tensor) and rows.inputs.is_floating_point():
        for start in range(0, len(rows.inputs), _ROWS):
            if not bool(torch.isfinite(rows.inputs[start : start + _ROWS]).all()):
                raise ValueError("Some inputs are not finite (NaN or infinite): take these rows out.")
    outputs = said(model, rows, torch.zeros(1, dtype=torch.long)).shape[-1]
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= outputs:
        raise ValueError(f"Labels go from {low} to {high}, and the model has {outputs} outputs: 0 to {outputs - 1}.")
    return rows


@torch.no_grad()
def said(model: nn.Module, rows: TensorRecords, index: Tensor) -> Tensor:
    """What the model says of some rows, in evaluation mode; its own mode is left as it was."""
    modes = [(module, module.training) for module in model.modules()]
    inputs = rows.read(index)
    try:
        inputs = inputs.to(next(model.parameters()).device)
        found = model.eval()(inputs)
    except (RuntimeError, TypeError, IndexError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"The model does not take these rows ({type(error).__name__}: {reason}).") from None
    finally:
        for module, mode in modes:
            module.training = mode
    if not isinstance(found, Tensor) or found.dim() != 2:
        raise ValueError("The model should return logits, one line per row.")
    return found
