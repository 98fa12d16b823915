"""A classifier's outputs and labels from a file: .npz, .npy, .safetensors or .csv.

Which array holds what is found by its name, or said. Whether the outputs are logits or probabilities is always said.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal
from zipfile import BadZipFile

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

Form = Literal["logits", "probs"]
LABELS = ("labels", "ground_truth", "label")
_OUTPUTS: dict[str, tuple[str, ...]] = {
    "logits": ("logits", "predictions", "outputs", "probs"),
    "probs": ("probs", "predictions", "probabilities", "outputs", "logits"),
}
_IDS = ("id", "ids", "index", "idx", "row", "row_id", "sample", "sample_id", "key", "uuid", "unnamed: 0", "")
_TRUTH = {"false": "0", "true": "1", "0": "0", "1": "1"}
_ONLY = "only"  # the array of a file that holds one without a name


def read_outputs(
    path: Path | str,
    form: Form,
    *,
    key: str | None = None,
    labels: Path | str | None = None,
    labels_key: str | None = None,
    unit_ids: str | None = None,
    source: str | None = None,
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Outputs (one row per sample) and labels, as arrays; they are checked where they are used.

    ``labels`` is another file, for a format that holds one array only. The first array found under a name of ``form``
    or of labels is taken, unless ``key`` and ``labels_key`` name them. ``unit_ids`` and ``source`` name what says whose
    each row is and where (see ``read_unit_ids``): no outputs. In a .csv without a header, columns have numbers: the
    first is 1.

    Args:
        path: .npz, .npy, .csv or .pt.
        form: "logits" or "probs".
        key: The name of the outputs in the file.
        labels: Another file, for a format that holds one array only.
        labels_key: The name of the labels in the file.
        unit_ids: The name of the unit ids in the file.
        source: The name of what says at which source each row is.

    Returns:
        Outputs and labels.

    Raises:
        ValueError: The file has no such arrays.
    """
    others = tuple(name for name in (unit_ids, source) if name is not None)
    arrays = {
        name: array
        for name, array in _arrays(Path(path), labels_key if labels is None else None, others).items()
        if name not in others
    }
    outputs = _pick(arrays, key, _OUTPUTS[form], path, "outputs", "--key")
    beside = arrays if labels is None else _arrays(Path(labels), labels_key)
    if labels is None and list(arrays) == [_ONLY]:
        raise ValueError(
            f"{path} holds outputs and no labels: give the labels in a file of their own (--labels), or in a .csv a "
            "column with a name (its first line names the columns, and the label's is label or labels). If its first "
            "line is a sample already, give the number of the column: --labels-key 1 is the first."
        )
    classes = _pick(beside, labels_key, LABELS, labels or path, "labels", "--labels-key")
    if outputs.dtype.kind not in "fiu":
        raise ValueError(f"{path}: outputs are numbers, and these are of the type {outputs.dtype}.")
    if classes.dtype.kind == "b":
        classes = classes.astype(np.int64)
    if classes.dtype.kind not in "fiu":
        raise ValueError(
            f"{labels or path}: the labels of an array of outputs are whole numbers, 0 for its first column; these are "
            "none. In a .csv whose columns have names, labels may be those names."
        )
    if classes.ndim == 2 and classes.shape[1] == 1:
        classes = classes[:, 0]
    if classes.dtype.kind == "f" and np.isfinite(classes).all() and (classes == np.round(classes)).all():
        classes = classes.astype(np.int64)
    return outputs, classes.astype(np.int64) if classes.dtype.kind in "iu" else classes


def read_unit_ids(path: Path | str, key: str) -> np.ndarray[Any, Any]:
    """Whose each row is, or at which source: the array or column ``key`` of a file of outputs, integers or strings.

    Args:
        path: The file.
        key: The name of the unit ids in it.

    Returns:
        One id per row.
    """
    arrays = _arrays(Path(path), None, (key,), only=True)
    if key not in arrays:
        raise ValueError(f"{path} has no array or column {key!r} that says whose each row is.")
    ids = arrays[key]
    if ids.dtype.kind not in "iuU" or ids.ndim != 1:
        raise ValueError(f"{path}: {key} is one integer or string per row.")
    return ids


def _pick(
    arrays: Mapping[str, np.ndarray[Any, Any]],
    key: str | None,
    names: tuple[str, ...],
    path: Path | str,
    what: str,
    option: str,
) -> np.ndarray[Any, Any]:
    if list(arrays) == [_ONLY]:
        return arrays[_ONLY]
    found = next((name for name in ((key,) if key else names) if name in arrays), None)
    if found is None:
        wanted = f"no array {key!r}" if key else f"no {what} under a name that tacit looks for ({', '.join(names)})"
        has = f"it has {', '.join(sorted(arrays))}" if arrays else "it is empty"
        raise ValueError(f"{path} has {wanted}; {has}. Name the array with {option}.")
    return arrays[found]


def _arrays(
    path: Path, labels_key: str | None, others: tuple[str, ...] = (), *, only: bool = False
) -> dict[str, np.ndarray[Any, Any]]:
    """Every array of a file by its name, or ``only`` the ``others``; a file without names has one, the only one."""
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise ValueError(f"{path} is none of the kinds that tacit reads: {', '.join(_READERS)}.")
    if not path.is_file():
        raise ValueError(f"There is no file {path}.")
    try:
        return (
            _columns(path, _table(path, others), others)
            if only and reader is _csv
            else reader(path, labels_key, others)
        )
    except (BadZipFile, SafetensorError, EOFError, OSError, UnicodeDecodeError, csv.Error):
        raise ValueError(f"{path} cannot be read as {path.suffix.lower()}: it is damaged or of another kind.") from None


def _npz(path: Path, *_: object) -> dict[str, np.ndarray[Any, Any]]:
    try:
        with np.load(path, allow_pickle=False) as file:
            if not isinstance(file, np.lib.npyio.NpzFile):
                return {_ONLY: file}
            return {name: file[name] for name in file.files}
    except ValueError:  # an array of Python objects, or no array at all
        raise ValueError(f"{path} holds something other than plain arrays of numbers.") from None


def _npy(path: Path, *_: object) -> dict[str, np.ndarray[Any, Any]]:
    try:
        return {_ONLY: np.load(path, allow_pickle=False)}
    except ValueError:
        raise ValueError(f"{path} holds something other than a plain array of numbers.") from None


def _safetensors(path: Path, *_: object) -> dict[str, np.ndarray[Any, Any]]:
    return dict(load_file(path))


def _csv(path: Path, labels_key: str | None, others: tuple[str, ...]) -> dict[str, np.ndarray[Any, Any]]:
    """One row per sample. Labels, unit ids and sources are known by their names; all other columns are outputs."""
    table = header, rows = _table(path, (*LABELS, labels_key or "", *others))
    named = _columns(path, table, others)
    gone = sorted((_place(header, name) for name in named), key=lambda at: -(at or 0))
    place = _label_column(header, labels_key)
    for at in gone:
        if at is not None:
            header = header and header[:at] + header[at + 1 :]
            rows = [row[:at] + row[at + 1 :] for row in rows]
            place = place - 1 if place is not None and place > at else place
    if header is not None:
        odd = [name for at, name in enumerate(header) if at != place and _is_id(name)]
        if odd:
            raise ValueError(
                f"{path} has a column {odd[0]!r} that looks like an id and not like a class: leave it out, or name it "
                "with --unit-ids if it says whose each row is, or --source-column if it says where."
            )
        beside = _beside_numbered([name for at, name in enumerate(header) if at != place])
        if beside:
            raise ValueError(
                f"{path} has a column {beside!r} beside numbered columns of outputs: leave it out, or name it with "
                "--labels-key, --unit-ids or --source-column if it is one of those, or as the others if it is a class."
            )
        words = [name for at, name in enumerate(header) if at != place and _words(rows, at)]
        if words:
            raise ValueError(
                f"{path} has a column {words[0]!r} without a number in it, which is no class: leave it out, or name it "
                "with --labels-key if it holds the labels, --unit-ids if it says whose each row is, or --source-column "
                "if it says where."
            )
    if place is not None:
        rows = _class_numbers(path, header or [], rows, place)
    width = len(rows[0]) if rows else len(header or [])
    if not all(
        len(row) == width and all(map(_number, row)) for row in rows
    ):  # the number of a line would say whose it is
        raise ValueError(f"{path}: every line has the same number of columns, all of them numbers; some have not.")
    values = np.array(rows, dtype=np.float64).reshape(len(rows), width)
    if labels_key and (place is None or place >= width):
        has = f"it has {', '.join(header)}" if header else f"its first line is a sample, and it has {width} columns"
        raise ValueError(f"{path} has no column {labels_key!r}; {has}.")
    if place is None:
        return {_ONLY: values[:, 0] if width == 1 and header is None else values} | named
    outputs = np.delete(values, place, axis=1)
    return {"outputs": outputs, labels_key or (header or LABELS)[place]: values[:, place]} | named


_Table = tuple[list[str] | None, list[list[str]]]


def _table(path: Path, names: tuple[str, ...]) -> _Table:
    """The header, if there is one, and the lines below it. A line that has one of the ``names`` is a header."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        first = file.readline()
        file.seek(0)
        mark = max(",;\t", key=first.count)  # the first of them, if there is none
        rows = [row for row in csv.reader(file, delimiter=mark) if row]
    if mark != ",":  # where numbers may have a comma in them
        rows = [[cell.replace(",", ".") if _number(cell.replace(",", ".")) else cell for cell in row] for row in rows]
    if not rows:
        raise ValueError(f"{path} is empty.")
    start = [cell.strip() for cell in rows[0]]
    words = [not _number(cell) for cell in start]
    if not any(words):
        return None, rows
    below = [not _number(cell) for cell in rows[1]] if len(rows) > 1 else []
    like_a_sample = words == below and not any(name and name in start for name in names)
    return (None, rows) if like_a_sample else (start, rows[1:])


def _columns(path: Path, table: _Table, names: tuple[str, ...]) -> dict[str, np.ndarray[Any, Any]]:
    """Columns of a table as strings, by their names or numbers, as far as they are there."""
    header, rows = table
    found = {name: at for name in names if (at := _place(header, name)) is not None}
    if any(at >= len(row) for at in found.values() for row in rows):
        raise ValueError(f"{path}: every line has the same number of columns; some have not.")
    return {name: np.array([row[at].strip() for row in rows], dtype=np.str_) for name, at in found.items()}


def _place(header: list[str] | None, name: str) -> int | None:
    """Where a column is: by its name, or by its number (the first is 1) where columns have no names."""
    if header is not None:
        return header.index(name) if name in header else None
    return int(name) - 1 if name.isdecimal() and int(name) > 0 else None


def _label_column(header: list[str] | None, labels_key: str | None) -> int | None:
    if labels_key or header is None:
        return _place(header, labels_key or "")
    return next((header.index(name) for name in LABELS if name in header), None)


def _is_id(name: str) -> bool:
    return name.lower() in _IDS or name.lower().endswith(("_id", "_ids", " id")) or name.endswith(("ID", "Id"))


def _beside_numbered(names: list[str]) -> str | None:
    """The first name without the form of all the others, where those are one word with consecutive numbers."""
    parts = [re.fullmatch(r"(.*?)(\d+)", name) for name in names]
    words = Counter(part[1] for part in parts if part)
    word, count = words.most_common(1)[0] if words else ("", 0)
    numbers = sorted(int(part[2]) for part in parts if part and part[1] == word)
    if (
        count < 2
        or count == len(names)
        or 2 * count <= len(names)
        or numbers != list(range(numbers[0], numbers[0] + count))
    ):
        return None
    return next(name for name, part in zip(names, parts, strict=True) if part is None or part[1] != word)


def _class_numbers(path: Path, header: list[str], rows: list[list[str]], place: int) -> list[list[str]]:
    """Rows whose labels, if they are names of classes, are the places of their columns; of one column, true is 1."""
    if all(place >= len(row) or _number(row[place]) for row in rows):
        return rows
    classes = {name: str(at) for at, name in enumerate(name for i, name in enumerate(header) if i != place)}
    if len(rows[0]) == 2 and all(len(row) == 2 and row[place].strip().lower() in _TRUTH for row in rows):
        return [[*row[:place], _TRUTH[row[place].strip().lower()], *row[place + 1 :]] for row in rows]
    if not all(len(row) == len(header) and row[place].strip() in classes for row in rows):
        if len(classes) == 1:
            raise ValueError(
                f"{path}: with one column of outputs labels are 0 and 1, where 1 is the class whose probability the "
                "column holds; some are neither."
            )
        raise ValueError(
            f"{path}: labels are whole numbers, 0 for the first class, or names of the columns of outputs; some are "
            "neither."
        )
    return [[*row[:place], classes[row[place].strip()], *row[place + 1 :]] for row in rows]


def _words(rows: list[list[str]], at: int) -> bool:
    """Whether no line has a number in this column, and some have something else."""
    cells = [row[at].strip() for row in rows if at < len(row)]
    return any(cells) and not any(map(_number, cells))


def _number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


_READERS: dict[str, Callable[[Path, str | None, tuple[str, ...]], dict[str, np.ndarray[Any, Any]]]] = {
    ".npz": _npz,
    ".npy": _npy,
    ".safetensors": _safetensors,
    ".csv": _csv,
}
