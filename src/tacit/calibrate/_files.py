"""A classifier's outputs and labels from a file: .npz, .npy, .safetensors or .csv.

Which array holds what is found by its name, or said. Whether the outputs are logits or probabilities is always said.
"""

from __future__ import annotations

import csv
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
_ONLY = "only"  # the array of a file that holds one without a name


def read_outputs(
    path: Path | str,
    form: Form,
    *,
    key: str | None = None,
    labels: Path | str | None = None,
    labels_key: str | None = None,
    unit_ids: str | None = None,
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Outputs (one row per sample) and labels, as arrays; they are checked where they are used.

    ``labels`` is another file, for a format that holds one array only. The first array found under a name of ``form``
    or of labels is taken, unless ``key`` and ``labels_key`` name them. ``unit_ids`` is the name of what says whose each
    row is (see ``read_unit_ids``): no output.

    Args:
        path: .npz, .npy, .csv or .pt.
        form: "logits" or "probs".
        key: The name of the outputs in the file.
        labels: Another file, for a format that holds one array only.
        labels_key: The name of the labels in the file.
        unit_ids: The name of the unit ids in the file.

    Returns:
        Outputs and labels.

    Raises:
        ValueError: The file has no such arrays.
    """
    arrays = _arrays(Path(path), labels_key, unit_ids)
    arrays.pop(unit_ids or "", None)
    outputs = _pick(arrays, key, _OUTPUTS[form], path, "outputs", "--key")
    beside = arrays if labels is None else _arrays(Path(labels), labels_key)
    if labels is None and list(arrays) == [_ONLY]:
        raise ValueError(f"{path} holds outputs and no labels: give the labels in a file of their own (--labels).")
    classes = _pick(beside, labels_key, LABELS, labels or path, "labels", "--labels-key")
    if outputs.dtype.kind not in "fiu" or classes.dtype.kind not in "fiu":
        raise ValueError(f"{path}: outputs and labels are numbers.")
    if classes.ndim == 2 and classes.shape[1] == 1:
        classes = classes[:, 0]
    if classes.dtype.kind == "f" and np.isfinite(classes).all() and (classes == np.round(classes)).all():
        classes = classes.astype(np.int64)
    return outputs, classes.astype(np.int64) if classes.dtype.kind in "iu" else classes


def read_unit_ids(path: Path | str, key: str) -> np.ndarray[Any, Any]:
    """Whose each row is: the array or column ``key`` of a file of outputs, integers or strings.

    Args:
        path: The file.
        key: The name of the unit ids in it.

    Returns:
        One id per row.
    """
    arrays = _arrays(Path(path), None, key)
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


def _arrays(path: Path, labels_key: str | None, unit_ids: str | None = None) -> dict[str, np.ndarray[Any, Any]]:
    """Every array of a file by its name; a file without names has one, the only one."""
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise ValueError(f"{path} is none of the kinds that tacit reads: {', '.join(_READERS)}.")
    if not path.is_file():
        raise ValueError(f"There is no file {path}.")
    try:
        return reader(path, labels_key, unit_ids)
    except (BadZipFile, SafetensorError, EOFError, OSError, UnicodeDecodeError, csv.Error):
        raise ValueError(f"{path} cannot be read as {path.suffix.lower()}: it is damaged or of another kind.") from None


def _npz(path: Path, *_: str | None) -> dict[str, np.ndarray[Any, Any]]:
    try:
        with np.load(path, allow_pickle=False) as file:
            if not isinstance(file, np.lib.npyio.NpzFile):
                return {_ONLY: file}
            return {name: file[name] for name in file.files}
    except ValueError:  # an array of Python objects, or no array at all
        raise ValueError(f"{path} holds something other than plain arrays of numbers.") from None


def _npy(path: Path, *_: str | None) -> dict[str, np.ndarray[Any, Any]]:
    try:
        return {_ONLY: np.load(path, allow_pickle=False)}
    except ValueError:
        raise ValueError(f"{path} holds something other than a plain array of numbers.") from None


def _safetensors(path: Path, *_: str | None) -> dict[str, np.ndarray[Any, Any]]:
    return dict(load_file(path))


def _csv(path: Path, labels_key: str | None, unit_ids: str | None) -> dict[str, np.ndarray[Any, Any]]:
    """One row per sample. With a header, labels and unit ids are known by their names and all others are outputs."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = [row for row in csv.reader(file) if row]
    if not rows:
        raise ValueError(f"{path} is empty.")
    header = None if all(map(_number, rows[0])) else [name.strip() for name in rows.pop(0)]
    whose = {}
    if unit_ids is not None and header is not None and unit_ids in header:
        column = header.index(unit_ids)
        whose = {unit_ids: np.array([row[column] if column < len(row) else "" for row in rows])}
        header, rows = [n for n in header if n != unit_ids], [row[:column] + row[column + 1 :] for row in rows]
    width = len(rows[0]) if rows else len(header or [])
    if not all(len(row) == width and all(map(_number, row)) for row in rows):  # which line it is would tell whose
        raise ValueError(f"{path}: every line has the same number of columns, all of them numbers; some have not.")
    values = np.array(rows, dtype=np.float64).reshape(len(rows), width)
    if header is None:
        return {_ONLY: values[:, 0] if width == 1 else values}
    place = next((header.index(name) for name in ((labels_key,) if labels_key else LABELS) if name in header), None)
    if place is None:
        if labels_key:
            raise ValueError(f"{path} has no column {labels_key!r}; it has {', '.join(header)}.")
        return {_ONLY: values} | whose
    outputs = np.delete(values, place, axis=1)
    return {"outputs": outputs, labels_key or header[place]: values[:, place]} | whose


def _number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


_READERS: dict[str, Callable[[Path, str | None, str | None], dict[str, np.ndarray[Any, Any]]]] = {
    ".npz": _npz,
    ".npy": _npy,
    ".safetensors": _safetensors,
    ".csv": _csv,
}
