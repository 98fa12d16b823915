"""Tables of columns as people have them: a pandas DataFrame, or a `datasets.Dataset`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tacit._refusals import Refusal
from tacit.data._csv_files import check_column, read_labels
from tacit.data._image_files import ImageFiles, ImageShape, normalized, shape_for, squeezed
from tacit.data._tensor_records import TensorRecords
from tacit.data._texts import Texts

LABEL_NAMES = ("label", "labels", "target")


def from_pandas(
    frame: Any,
    *,
    inputs: str | Sequence[str] | None = None,
    label: str | None = None,
    classes: int | Sequence[str] | None = None,
    unit_ids: str | None = None,
    unit: str | None = None,
    folder: str | Path | None = None,
    shape: ImageShape | Any = None,
    tokenizer: Any = None,
    rows_each: int | None = None,
) -> TensorRecords:
    """The rows of a pandas DataFrame as records.

    Args:
        frame: One row per example. Its index is ignored.
        inputs: Columns of numbers (default: all that are neither label nor ids), which become one vector per row; or
            one column of texts, with `tokenizer`; or one column of image files, with `folder`.
        label: The column of labels (default: "label").
        classes: Names of the classes, in their order, where labels are names.
        unit_ids: The column that says whose each row is; without it each row is a "sample".
        unit: What an owner is ("patient").
        folder: Where image files are.
        shape: Of the images; a model of timm or an image processor of transformers says it.
        tokenizer: Of texts.
        rows_each: The most rows of a unit shown in one step.

    Returns:
        Records for `finetune.fit`, `tune.Finetuning` and `finetune.Evaluation`.

    Raises:
        Refusal: A column is not there, or is not what it should be; the message contains no value of a row.

    Examples:
        >>> import pandas as pd
        >>> from tacit.data import from_pandas
        >>> frame = pd.DataFrame({"age": [61, 48, 61], "dose": [1.0, 2.5, 0.5], "label": [0, 1, 0], "who": list("aba")})
        >>> visits = from_pandas(frame, unit_ids="who", unit="patient")
        >>> len(visits), visits.unit, visits.unit_ids
        (2, 'patient', ['a', 'b'])
    """
    return _records(
        [str(name) for name in frame.columns],
        lambda name: frame[name].to_numpy(),
        inputs=inputs,
        label=label,
        classes=classes,
        unit_ids=unit_ids,
        unit=unit,
        folder=folder,
        shape=shape,
        tokenizer=tokenizer,
        rows_each=rows_each,
    )


def from_datasets(
    dataset: Any,
    *,
    inputs: str | Sequence[str] | None = None,
    label: str | None = None,
    classes: int | Sequence[str] | None = None,
    unit_ids: str | None = None,
    unit: str | None = None,
    shape: ImageShape | Any = None,
    tokenizer: Any = None,
    rows_each: int | None = None,
) -> TensorRecords:
    """The rows of a `datasets.Dataset` as records.

    Args:
        dataset: A split with `__len__`; not a stream.
        inputs: A column of images, of texts (with `tokenizer`), or columns of numbers; default: all that are neither
            label nor ids. Several columns of numbers that are sequences, such as input_ids and attention_mask, are
            given to the model by their names.
        label: The column of labels (default: "label", or "labels").
        classes: Names of the classes, where labels are texts.
        unit_ids: The column that says whose each row is; without it each row is a "sample".
        unit: What an owner is ("patient").
        shape: Of the images; a model of timm or an image processor of transformers says it.
        tokenizer: Of texts.
        rows_each: The most rows of a unit shown in one step.

    Returns:
        Records for `finetune.fit`, `tune.Finetuning` and `finetune.Evaluation`.

    Raises:
        Refusal: A column is not there, or is not what it should be; the message contains no value of a row.
    """
    if not isinstance(getattr(dataset, "column_names", None), list) or not hasattr(dataset, "__len__"):
        raise Refusal("Give one split of a data set, such as dataset['train'], loaded without streaming=True.")
    kinds = {name: type(kind).__name__ for name, kind in dataset.features.items()}
    pictures = [name for name, kind in kinds.items() if kind == "Image"]
    if inputs is None and len(pictures) == 1:
        inputs = pictures[0]
    if isinstance(inputs, str) and kinds.get(inputs) == "Image":
        numbers, owners = _told(list(kinds), dataset.with_format(None).__getitem__, label, classes, unit_ids)
        images = Pictures(dataset, inputs, numbers, shape_for(shape))
        return TensorRecords(images, images.targets, owners, unit=unit, rows_each=rows_each)
    return _records(
        list(kinds),
        lambda name: dataset.with_format(None)[name][:],
        inputs=inputs,
        label=label,
        classes=classes,
        unit_ids=unit_ids,
        unit=unit,
        folder=None,
        shape=shape,
        tokenizer=tokenizer,
        rows_each=rows_each,
    )


def is_frame(data: Any) -> bool:
    """Whether this is a pandas DataFrame; pandas need not be there."""
    return _is(data, "pandas", "DataFrame")


def is_dataset(data: Any) -> bool:
    """Whether this is a `datasets.Dataset`; datasets need not be there."""
    return _is(data, "datasets", "Dataset") or _is(data, "datasets", "DatasetDict")


class Pictures:
    """The images of a column, as a model takes them."""

    draws = False

    def __init__(self, dataset: Any, column: str, labels: Tensor, shape: ImageShape) -> None:
        self._dataset, self._column, self.targets, self.shape = dataset.with_format(None), column, labels, shape

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        image = self._dataset[int(place)][self._column]
        return normalized(squeezed(image, self.shape), self.shape), self.targets[place]


def _records(
    columns: list[str],
    values: Callable[[str], Any],
    *,
    inputs: str | Sequence[str] | None,
    label: str | None,
    classes: int | Sequence[str] | None,
    unit_ids: str | None,
    unit: str | None,
    folder: str | Path | None,
    shape: Any,
    tokenizer: Any,
    rows_each: int | None,
) -> TensorRecords:
    labels, owners = _told(columns, values, label, classes, unit_ids)
    rest = [name for name in columns if name not in (_label_name(columns, label), unit_ids)]
    chosen = rest if inputs is None else [inputs] if isinstance(inputs, str) else list(inputs)
    for name in chosen:
        _check(name, columns)
    if not chosen:
        raise Refusal("No column is left for the inputs: name them with inputs=.")
    more: dict[str, Any] = {"unit": unit, "rows_each": rows_each}
    if tokenizer is not None or folder is not None:
        if len(chosen) != 1:
            raise Refusal(f"One column has the texts or files; name it with inputs=, of {', '.join(chosen)}.")
        given = [str(value) for value in values(chosen[0])]
        if tokenizer is not None:
            return Texts(tokenizer, given, labels, owners=owners, **more)
        home = Path(folder or "")
        files = ImageFiles([home / name for name in given], labels.tolist(), shape=shape_for(shape))
        return TensorRecords(files, files.labels, owners, **more)
    rows = [_numbers(values(name), name) for name in chosen]
    if all(part.dim() == 1 for part in rows):
        table: Any = torch.stack([part.float() for part in rows], 1)
    else:
        table = rows[0] if len(rows) == 1 else dict(zip(chosen, rows, strict=True))
    return TensorRecords(table, labels, owners, **more)


def _told(
    columns: list[str],
    values: Callable[[str], Any],
    label: str | None,
    classes: int | Sequence[str] | None,
    unit_ids: str | None,
) -> tuple[Tensor, Any]:
    """The labels, and whose each row is."""
    if unit_ids is not None:
        _check(unit_ids, columns)
    found = np.asarray(values(_label_name(columns, label)))
    if found.dtype.kind in "OUTS" or (classes is not None and not isinstance(classes, int)):
        if classes is None or isinstance(classes, int):
            raise Refusal("Labels are texts: give classes=, the names of the classes in their order.")
        labels = torch.tensor(read_labels([str(value) for value in found.tolist()], classes, "the column of labels"))
    else:
        labels = _numbers(found, "label")
    return labels, None if unit_ids is None else np.asarray(values(unit_ids)).tolist()


def _label_name(columns: list[str], label: str | None) -> str:
    name = label or next((each for each in LABEL_NAMES if each in columns), None)
    if name is None:
        raise Refusal(f"Give label=, the column of labels, of {', '.join(columns)}.")
    _check(name, columns)
    return name


def _check(name: str, columns: list[str]) -> None:
    check_column(name, columns, "The table")


def _numbers(column: Any, name: str) -> Tensor:
    try:
        values = np.asarray(column)
        if values.dtype.kind == "O":  # a column of lists, as pandas has it
            values = np.stack([np.asarray(value) for value in values])
    except ValueError:
        raise Refusal(f"The rows of the column {name!r} differ in length: make them one length first.") from None
    if values.dtype.kind not in "iufb":
        raise Refusal(f"The column {name!r} has no numbers: name the columns of the inputs with inputs=.")
    found = torch.from_numpy(np.array(values))  # a copy: what pandas hands over is read-only
    return found.float() if found.dtype is torch.float64 else found


def _is(data: Any, package: str, name: str) -> bool:
    return any(each.__module__.split(".")[0] == package and each.__name__ == name for each in type(data).__mro__)
