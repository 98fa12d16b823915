"""The data of a recipe as the stages take it: records with their unit, and plain rows for streams and sources."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from tacit import data as sets
from tacit._refusals import ENDING, Refusal
from tacit.calibrate import read_outputs, read_unit_ids
from tacit.data import Records, TensorRecords
from tacit.pipeline._models import Built
from tacit.pipeline._schema import Pipeline
from tacit.pipeline._schema_data import Data, Embedded, Images, Outputs, Texts, Video


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """Rows in the order of their table: inputs, labels, whose each is, and its source."""

    records: Records
    inputs: Any  # indexed by row: a tensor, or a data set of (input, label)
    labels: Tensor
    blank: Any  # one row of zeros
    owners: list[str] | None = None
    sources: list[str] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, places: Sequence[int]) -> Any:
        """The inputs of some rows, as a model takes them; a row that cannot be read is NaN, in its place."""
        try:
            return self.inputs(torch.as_tensor(list(places)))
        except ENDING:
            raise
        except BaseException:  # what it says may reveal rows; for want of memory, too: one by one they ask for less
            if not isinstance(self.blank, Tensor):
                raise
        return torch.cat([self._row(place) for place in places])

    def _row(self, place: int) -> Tensor:
        try:
            found: Tensor = self.inputs(torch.tensor([place]))
            return found
        except ENDING:
            raise
        except BaseException:  # how much memory a file asks for is its own doing
            pass
        return torch.full_like(self.blank, math.nan)

    def batches(self, size: int) -> Iterator[tuple[Any, list[str] | None]]:
        """All rows in their order, with whose they are."""
        for start in range(0, len(self), size):
            places = range(start, min(start + size, len(self)))
            yield self.batch(places), None if self.owners is None else [self.owners[i] for i in places]


@dataclass(frozen=True, kw_only=True)
class Shown:
    """How the rows of a unit are shown in training: at most so many at a time, each in so many views."""

    rows_each: int | None = None
    augment: int | None = None


def load(
    recipe: Pipeline,
    data: Data,
    built: Built,
    *,
    labelled: bool = True,
    public: bool = False,
    shown: Shown = Shown(),  # noqa: B008
) -> Loaded:
    """Everything that a stage needs of its data; nothing is charged, and no message reveals a row."""
    unit = None if public else recipe.budget.unit
    if isinstance(data, Embedded):
        return _embedded(data, unit, shown)
    if unit not in (None, "sample") and data.unit_ids is None and not (isinstance(data, Video) and unit == "video"):
        raise Refusal(f"The budget protects a {unit}, and nothing says whose each row is: name the column unit_ids.")
    if data.unit_ids is not None and unit == "sample":
        raise Refusal('Rows have owners, so a unit is more than a sample: say budget.unit, such as "patient".')
    if isinstance(data, Images):
        return _images(recipe, data, built, unit, labelled=labelled, shown=shown)
    if isinstance(data, Texts):
        return _texts(recipe, data, built, unit, labelled=labelled, shown=shown)
    return _video(recipe, data, unit, labelled=labelled, shown=shown)


def load_outputs(recipe: Pipeline, data: Outputs, source: str) -> tuple[Any, Any, Any]:
    """Outputs, labels and unit ids of one source."""
    folder = recipe.path(data.folder)
    found = [folder / f"{source}{ending}" for ending in (".npz", ".safetensors", ".csv")]
    path = next((file for file in found if file.is_file()), None)
    if path is None:
        raise Refusal(f"The source {source!r} has no file of outputs: {found[0]} (or .safetensors, .csv) is not there.")
    outputs, labels = read_outputs(path, data.form, unit_ids=data.unit_ids)
    ids = None if data.unit_ids is None else [str(each) for each in read_unit_ids(path, data.unit_ids).tolist()]
    return outputs, labels, ids


def _columns(recipe: Pipeline, data: Images | Texts | Video, first: str, *, labelled: bool) -> dict[str, list[str]]:
    names = [first, *([data.label] if labelled else []), *(each for each in (data.unit_ids, data.source) if each)]
    if data.table is None:
        raise Refusal("There is no table to read.")
    columns = sets.read_columns(recipe.path(data.table), names)
    if data.unit_ids is not None and not all(owner.strip() for owner in columns[data.unit_ids]):
        raise Refusal(f"{data.table}: some rows have nothing in the column {data.unit_ids!r}: say whose each row is.")
    files = columns[first]
    if labelled and not isinstance(data, Texts) and len(set(files)) < len(files):
        raise Refusal(f"{data.table}: some files are named in several lines: each has one line, label and owner.")
    return columns


def _labels(data: Images | Texts | Video, columns: dict[str, list[str]], rows: int) -> list[int]:
    if data.label not in columns:
        return [0] * rows
    return sets.read_labels(columns[data.label], data.classes, data.table or "the table")


def _images(recipe: Pipeline, data: Images, built: Built, unit: str | None, *, labelled: bool, shown: Shown) -> Loaded:
    if built.shape is None:
        raise Refusal("This model does not say what images it takes: say data.size.")
    folder = recipe.path(data.folder)
    if not folder.is_dir():
        raise Refusal(f"There is no folder {folder}.")
    columns = _columns(recipe, data, data.file, labelled=labelled)
    names = columns[data.file]
    files = sets.ImageFiles([folder / name for name in names], _labels(data, columns, len(names)), shape=built.shape)
    owners = columns.get(data.unit_ids or "") if unit else None
    table = TensorRecords(
        files,
        files.labels,
        owners,
        unit=unit if owners else None,
        rows_each=shown.rows_each,
        augment=shown.augment,
    )
    return Loaded(
        records=table,
        inputs=table.read,
        labels=files.labels,
        blank=torch.zeros(1, built.shape.channels, built.shape.height, built.shape.width),
        owners=columns.get(data.unit_ids or ""),
        sources=columns.get(data.source or ""),
    )


def _texts(recipe: Pipeline, data: Texts, built: Built, unit: str | None, *, labelled: bool, shown: Shown) -> Loaded:
    if shown.augment is not None:
        raise Refusal("finetune.augment flips and shifts images: leave it out for texts.")
    if built.tokenizer is None:
        raise Refusal("Texts need a model with a tokenizer: transformers:NAME_OR_FOLDER.")
    words: Any = getattr(built.model, "get_input_embeddings", lambda: None)()
    known = getattr(words, "num_embeddings", None)
    if not labelled and known is not None and known < len(built.tokenizer):  # a word would stop the stream
        raise Refusal(f"The tokenizer has {len(built.tokenizer)} tokens, and the model knows {known}: take its own.")
    columns = _columns(recipe, data, data.text, labelled=labelled)
    texts = columns[data.text]
    owners = columns.get(data.unit_ids or "") if unit else None
    records = sets.Texts(
        built.tokenizer,
        texts,
        _labels(data, columns, len(texts)),
        owners,
        unit=unit if owners else None,
        max_length=data.max_length,
        rows_each=shown.rows_each,
        bucket=16 if labelled else data.max_length,  # in a stream a text's length changes the shape of no other
    )
    return Loaded(
        records=records,
        inputs=records.read,
        labels=records.labels(),
        blank=records.synthetic().inputs,
        owners=columns.get(data.unit_ids or ""),
        sources=columns.get(data.source or ""),
    )


def _video(recipe: Pipeline, data: Video, unit: str | None, *, labelled: bool, shown: Shown) -> Loaded:
    if shown.augment is not None:
        raise Refusal("finetune.augment is for images: of a video, data.clips are shown.")
    folder, clips = recipe.path(data.folder), sets.VideoClips
    how: dict[str, Any] = {
        "clips": data.clips,
        "frames": data.frames,
        "stride": data.stride,
        "size": data.size,
        "colour": data.colour,
        "fps": data.fps,
        "mean": data.mean,
        "std": data.std,
        "layout": data.axes,
        "index": None if data.index is None else recipe.path(data.index),
        "strict": True,
    }
    columns: dict[str, list[str]] = {}
    if data.layout == "folder":
        found = clips.folder(folder, **how)
    elif data.layout == "ucf101":
        found = clips.ucf101(folder, recipe.path(data.split or folder), unit="video", **how)
    elif data.layout == "hmdb51":
        found = clips.hmdb51(folder, recipe.path(data.split or folder), **how)
    else:
        columns = _columns(recipe, data, data.file, labelled=labelled)
        names = columns[data.file]
        found = clips([folder / name for name in names], _labels(data, columns, len(names)), **how)
    owners = columns.get(data.unit_ids or "") if unit else None
    records: Records = (
        found if owners is None else found.group_by(owners, unit=unit or "video", at_most=shown.rows_each)
    )
    return Loaded(
        records=records,
        inputs=lambda places: found.rows(places, None).inputs,
        labels=found.labels(),
        blank=None,
        owners=columns.get(data.unit_ids or ""),
        sources=columns.get(data.source or ""),
    )


def _embedded(data: Embedded, unit: str | None, shown: Shown) -> Loaded:
    if unit not in (None, "sample"):
        raise Refusal('Every embedded image is a person of its own: say budget.unit = "sample".')
    images, labels = sets.fashion_mnist(data.split)
    images, labels = images[data.start : data.stop], labels[data.start : data.stop]
    if data.relabel is not None:
        if len(data.relabel) != 10:
            raise Refusal("relabel has one number for each of the ten classes.")
        labels = torch.tensor(data.relabel)[labels]
        images, labels = images[labels >= 0], labels[labels >= 0]
    if data.shift is not None:
        images = sets.shifts.corrupt(images, data.shift, data.severity, seed=0)
    pixels = images.float() / 255
    table = TensorRecords(pixels, labels, augment=shown.augment)
    sources = [f"ward-{place % data.sources + 1}" for place in range(len(labels))]
    return Loaded(records=table, inputs=table.read, labels=labels, blank=torch.zeros(1, 1, 28, 28), sources=sources)


class OneTensor(nn.Module):
    """A classifier whose rows are one tensor each, also where it takes several by name (ids and mask of a text)."""

    def __init__(self, model: nn.Module, rows: Loaded) -> None:
        super().__init__()
        self.model = model
        self._names = list(rows.blank) if isinstance(rows.blank, Mapping) else None

    def forward(self, rows: Tensor) -> Tensor:
        """The logits."""
        rows = rows.to(next(self.model.parameters()).device)
        if self._names is None:
            said = self.model(rows)
        else:
            said = self.model(**{name: rows[:, place] for place, name in enumerate(self._names)})
        found: Tensor = getattr(said, "logits", said)
        return found


def in_batches(rows: Loaded, places: Sequence[int], size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Some rows as (inputs, labels), each row one tensor; for `OneTensor`."""
    for start in range(0, len(places), size):
        part = places[start : start + size]
        inputs = rows.batch(part)
        if isinstance(inputs, Mapping):  # to one length, that of the longest there may be
            longest = rows.blank["input_ids"].shape[1]
            inputs = torch.stack([pad(value, (0, longest - value.shape[1])) for value in inputs.values()], 1)
        yield inputs, rows.labels[list(part)]
