"""Data as people hand it over, and models as they come, made ready for training."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from tacit._curator import Curator
from tacit._refusals import Refusal, attempt
from tacit.data import (
    Records,
    TensorRecords,
    as_items,
    from_datasets,
    from_pandas,
    is_dataset,
    is_frame,
    samples_of,
)
from tacit.finetune._loader import check_loader
from tacit.gradients import refuse_live_statistics
from tacit.models import scratch, select, with_head
from tacit.privacy import Unit

UNREADABLE = "The data cannot be read. Nothing was charged. What went wrong may reveal rows: see curator=."


def read_records(data: Any, unit: Unit | None = None, *, curator: Curator | None = None, **how: Any) -> Records:
    """`as_records` of private data: what their own code raises or warns of goes to the curator alone."""
    return attempt(partial(as_records, data, unit, **how), sentence=UNREADABLE, curator=curator)


def as_records(
    data: Any,
    unit: Unit | None = None,
    *,
    unit_ids: Any = None,
    rows_each: int | None = None,
    augment: int | None = None,
    public: bool = False,
    model: Any = None,
) -> Records:
    """(inputs, labels), (inputs, labels, owners), a data set of (input, label) items, or records as they are.

    Also a DataLoader (its data set and collate function), a pandas DataFrame and a `datasets.Dataset`, of which
    `unit_ids` names a column; of a data set that lists its `samples`, it may be a function of a file. `model` says what
    size of images it takes, where images of a `datasets.Dataset` are asked for.

    The result says what its units are. A `unit` that the data do not have is refused, unless they are `public`: no
    unit is promised anything there. `unit_ids` (or owners) make all rows with the same id one unit, which `unit` names.
    """
    if isinstance(data, Records):
        if rows_each is not None or augment is not None:
            raise Refusal("rows_each and augment are for tensors and data sets: these decide it.")
        if unit_ids is not None:
            raise Refusal("unit_ids are for tensors and data sets: of records, say records.group_by(ids, unit=...).")
        if not public:
            agree(data, unit)
        return data
    if hasattr(data, "rows") and hasattr(data, "most_rows"):
        raise Refusal("These records do not say what their units are: give their class a `unit`, such as 'patient'.")
    parts = _parts(data, model, unit_ids if isinstance(unit_ids, str) else None)
    if callable(unit_ids):
        unit_ids = [unit_ids(file) for file in samples_of(parts[0])]
    elif isinstance(unit_ids, str):
        unit_ids = None
    owners = unit_ids if parts[2] is None else parts[2]
    if parts[2] is not None and unit_ids is not None:
        raise Refusal("Say whose each row is once: in the data, or as unit_ids=.")
    if public:
        return TensorRecords(parts[0], parts[1], owners, rows_each=rows_each, augment=augment)
    if owners is None and unit not in (None, Unit.SAMPLE):
        raise Refusal(
            f"unit={str(unit)!r} needs to know whose each row is: give unit_ids, one integer or string per row (all of "
            "them different, if everybody has one row)."
        )
    if owners is not None and unit in (None, Unit.SAMPLE):
        raise Refusal("Rows have owners, so a unit is more than a sample: say what with unit=, such as 'patient'.")
    return TensorRecords(parts[0], parts[1], owners, unit=unit, rows_each=rows_each, augment=augment)


def _parts(data: Any, model: Any, column: str | None) -> tuple[Any, Any, Any]:
    """Inputs, labels (None: the items have them) and owners (None: nothing is said)."""
    if is_frame(data) or is_dataset(data):
        table = (
            from_pandas(data, unit_ids=column) if is_frame(data) else from_datasets(data, unit_ids=column, shape=model)
        )
        return table.inputs, table.labels(), table.owners
    if column is not None:
        raise Refusal(f"unit_ids={column!r} names a column, and these data have none: give one id per row.")
    collate = default_collate
    if isinstance(data, DataLoader):
        check_loader(data)
        data, collate = data.dataset, data.collate_fn
    if isinstance(data, tuple | list) and len(data) in (2, 3):
        return (*data, None) if len(data) == 2 else tuple(data)
    if type(data) is TensorDataset and len(data.tensors) == 2 and collate is default_collate:
        return (*data.tensors, None)
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        return as_items(data, collate), None, getattr(data, "owners", None)
    raise Refusal(
        "Data is (inputs, labels), (inputs, labels, owners), a data set, a DataLoader, a DataFrame, or Records."
    )


def workers_of(data: Any) -> int:
    """How many processes read the rows, where the data say so."""
    return data.num_workers if isinstance(data, DataLoader) else 0


def agree(records: Records, unit: Unit | str | None) -> Unit:
    """The unit of the records; refused if somebody says that it is another one."""
    own = Unit(records.unit)
    if unit is not None and own != Unit(unit):
        raise Refusal(
            f"One unit of these data is a {own}, so that nothing would hold for a {unit}: give unit={str(own)!r}, or "
            f"put together what belongs to each {unit} first, with records.group_by(ids, unit={str(unit)!r})."
        )
    return own


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
        raise Refusal("head is 'new' or 'keep', and init is 'pretrained' or 'scratch'.")
    if init == "scratch":
        scratch(model, seed)
    if head == "new":
        model = with_head(model, outputs, bias=bias)
    select(model, scheme)
    model.eval()
    refuse_live_statistics(list(model.named_modules()))
    return model
