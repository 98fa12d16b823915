"""Data as people hand it over, and models as they come, made ready for training."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from tacit.data.records import Records
from tacit.data.tabled import Table
from tacit.gradients import refuse_live_statistics
from tacit.models import scratch, select, with_head
from tacit.privacy import Unit


def as_records(
    data: Any, unit: Unit | None = None, *, rows_each: int | None = None, augment: int | None = None
) -> Records:
    """(inputs, labels), (inputs, labels, owners), a data set of (input, label) items, or records as they are.

    With a `unit` the data must say whose each row is, unless a unit is a sample; without one (evaluation) it may.
    """
    if isinstance(data, Records):
        if rows_each is not None or augment is not None:
            raise ValueError("rows_each and augment are for tensors and data sets: these decide it.")
        if isinstance(data, Table) and unit is not None:
            _agree(unit, grouped=data.grouped)
        return data
    if isinstance(data, tuple | list) and len(data) in (2, 3):
        parts = tuple(data)
    elif hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        parts = (data, None)
    else:
        raise ValueError("Data is (inputs, labels), (inputs, labels, owners), a data set, or Records; got neither.")
    owners = parts[2] if len(parts) == 3 else None
    if unit is not None:
        _agree(unit, grouped=owners is not None)
    return Table(parts[0], parts[1], owners, rows_each=rows_each, augment=augment)


def _agree(unit: Unit, *, grouped: bool) -> None:
    if unit == Unit.SAMPLE and grouped:
        raise ValueError("Rows have owners, so a unit is more than a sample: say what with units=, such as 'patient'.")
    if unit != Unit.SAMPLE and not grouped:
        raise ValueError(f"units={str(unit)!r} needs to know whose each row is: give owners, one integer per row.")


def prepared(
    model: nn.Module,
    outputs: int,
    *,
    scheme: str,
    head: Literal["new", "keep"],
    bias: bool,
    init: Literal["pretrained", "scratch"],
    seed: int,
) -> nn.Module:
    """The model with its head and its trainable parameters as asked, in evaluation mode."""
    if head not in ("new", "keep") or init not in ("pretrained", "scratch"):
        raise ValueError("head is 'new' or 'keep', and init is 'pretrained' or 'scratch'.")
    if init == "scratch":
        scratch(model, seed)
    if head == "new":
        model = with_head(model, outputs, bias=bias)
    select(model, scheme)
    model.eval()
    refuse_live_statistics(list(model.named_modules()))
    return model
