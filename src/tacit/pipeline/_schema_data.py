"""What a pipeline recipe may say of data: the kinds of [data], and their classes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Classes = int | tuple[str, ...]


def check_positive(**numbers: float | None) -> None:
    for name, value in numbers.items():
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be above 0; got {value:g}.")


@dataclass(frozen=True, kw_only=True)
class Images:
    """A folder of images and a CSV file that names them."""

    kind: Literal["images"]
    folder: Path
    table: Path
    file: str = "file"  # columns of the table
    label: str = "label"
    unit_ids: str | None = None
    source: str | None = None
    classes: Classes = 2
    size: tuple[int, int] | int | None = None  # by default what the model's configuration says, as the next four
    channels: Literal[1, 3] | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    crop: float | None = None

    def __post_init__(self) -> None:
        check_classes(self.classes)


@dataclass(frozen=True, kw_only=True)
class Video:
    """Video files: a folder per class, the split files of UCF-101 or HMDB-51, or a CSV file that names them."""

    kind: Literal["video"]
    folder: Path
    layout: Literal["folder", "ucf101", "hmdb51", "table"] = "folder"
    split: Path | None = None  # a split file (ucf101), a folder of them (hmdb51)
    table: Path | None = None
    file: str = "file"  # columns of the table
    label: str = "label"
    unit_ids: str | None = None
    source: str | None = None
    classes: Classes = 2
    clips: int = 8
    frames: int = 8
    stride: int = 2
    size: int | None = None
    colour: bool = True
    fps: float | None = None  # frames a second that every video is brought to
    mean: tuple[float, ...] = (0.0,)  # of values in [0, 1], per channel
    std: tuple[float, ...] = (1.0,)
    axes: Literal["TC", "CT"] = "TC"  # frames before channels, or channels before frames
    index: Path | None = None  # keeps what is known of the files; private

    def __post_init__(self) -> None:
        check_classes(self.classes)
        needed = "table, a CSV file" if self.layout == "table" else "split, its split file or the folder of these"
        if self.layout != "folder" and (self.table if self.layout == "table" else self.split) is None:
            raise ValueError(f"the layout {self.layout} needs {needed}.")


@dataclass(frozen=True, kw_only=True)
class Texts:
    """A CSV file of texts."""

    kind: Literal["text"]
    table: Path
    text: str = "text"  # columns of the table
    label: str = "label"
    unit_ids: str | None = None
    source: str | None = None
    classes: Classes = 2
    max_length: int = 128

    def __post_init__(self) -> None:
        check_classes(self.classes)


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """A classifier's outputs on disk (.npz, .npy, .safetensors, .csv), one file per source; for [calibrate] alone."""

    kind: Literal["outputs"]
    folder: Path  # holds SOURCE.npz (or .npy, .safetensors, .csv)
    form: Literal["logits", "probs"] = "logits"
    unit_ids: str | None = None  # the array or column that says whose each row is


@dataclass(frozen=True, kw_only=True)
class Embedded:
    """The Fashion-MNIST images that come with the package; for demonstrations and tests."""

    kind: Literal["embedded"]
    split: Literal["train", "test", "seen", "unseen"] = "unseen"
    start: int = 0
    stop: int | None = None
    shift: str | None = None  # of tacit.data.shifts
    severity: int = 3
    sources: int = 1  # assigned to so many sources in turn
    relabel: tuple[int, ...] | None = None  # the new label of each of the ten classes; -1: left out

    @property
    def unit_ids(self) -> None:
        """Every image is somebody else's."""

    @property
    def classes(self) -> int:
        return 10 if self.relabel is None else max(self.relabel) + 1


Data = Images | Video | Texts | Embedded


def check_classes(classes: Any) -> None:
    count = classes if isinstance(classes, int) else len(set(classes))
    if count < 2 or (not isinstance(classes, int) and count < len(classes)):
        raise ValueError("classes is a number, at least 2, or a list of different names.")


def count_of(classes: Classes) -> int:
    return classes if isinstance(classes, int) else len(classes)
