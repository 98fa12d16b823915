"""Images of a folder, by class or listed in a CSV file: decoded, resized, cropped and normalized for a model."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
from PIL import Image
from torch import Tensor

from tacit._refusals import Refusal
from tacit.data._cache import Pixels, digest, fingerprint
from tacit.data._csv_files import read_columns, read_labels
from tacit.data._file_state import Broken, check_state, state_of

_RESAMPLING = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
_SUFFIXES = frozenset([".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"])


@dataclass(frozen=True, kw_only=True)
class ImageShape:
    """What a model takes: channels x height x width, normalized with mean and std (of values in [0, 1]).

    `crop`: the share of the resized image that is kept, around its middle; below 1, the shorter side is resized to
    size / crop first.

    Args:
        channels: Input channels.
        height: Of the input.
        width: Of the input.
        mean: Per channel, of values in [0, 1].
        std: Per channel.
        crop: The share of the resized image that is kept.
        resampling: The filter.
    """

    channels: int = 3
    height: int = 224
    width: int = 224
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    crop: float = 1.0
    resampling: str = "bicubic"

    def __post_init__(self) -> None:
        if self.channels not in (1, 3):
            raise ValueError(f"Images have 1 or 3 channels; got {self.channels}.")
        if min(self.height, self.width) < 1 or not 0 < self.crop <= 1:
            raise ValueError("An image has at least one pixel a side, and the crop is a share above 0.")
        if any(len(part) not in (1, self.channels) for part in (self.mean, self.std)) or min(self.std) <= 0:
            raise ValueError("mean and std have one number for each channel, and no std is 0 or below.")
        if self.resampling not in _RESAMPLING:
            raise ValueError(f"resampling is one of {', '.join(_RESAMPLING)}; got {self.resampling!r}.")

    @classmethod
    def of(cls, model: Any) -> ImageShape:
        """What a model was trained on: size, mean, std, crop and filter, as timm or transformers report it.

        Args:
            model: A model of timm (`pretrained_cfg`), an image processor of transformers, or a model of transformers
                that was loaded from a folder or the local cache, where its image processor is.

        Returns:
            The shape.

        Raises:
            Refusal: The model does not say.
        """
        config = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
        if isinstance(config, Mapping) and "input_size" in config:
            return cls(**_of_timm(config))
        if hasattr(model, "image_mean"):
            return cls(**_of_processor(model))
        name = getattr(getattr(model, "config", None), "_name_or_path", None)
        if name:
            try:
                processors = importlib.import_module("transformers").AutoImageProcessor
                return cls(**_of_processor(processors.from_pretrained(name, local_files_only=True)))
            except (ImportError, OSError, ValueError, KeyError):
                pass
        raise Refusal("This model does not say what pictures it takes: give an ImageShape with size, mean and std.")

    def __str__(self) -> str:
        mean, std = (", ".join(f"{value:g}" for value in part) for part in (self.mean, self.std))
        return (
            f"{self.channels} x {self.height} x {self.width}, crop {self.crop:g}, {self.resampling}, "
            f"mean {mean}, std {std}"
        )


class ImageFiles:
    """A data set of (image, label) items from files; for `finetune.fit`, `TensorRecords` and torch's loaders alike.

    `ImageFiles.folder` reads a folder per class, `ImageFiles.table` a CSV file beside a folder. The files' content is
    in the data's fingerprint; one that is gone or was written to since it was first looked at raises.

    Args:
        files: One file per item; they are looked for here, and decoded when they are read.
        labels: One class number per item.
        shape: What the model takes: an `ImageShape`, or a model or image processor that says it (see `ImageShape.of`;
            then what it says is printed).
        memory: Decoded pixels stay in so many bytes, in each process that reads; the rest is decoded anew each time.
        owners: One integer or string per item: whose it is.
        classes: Names of the classes.

    Raises:
        Refusal: Some files are not there (the message has their number, and no name).
    """

    draws = False

    def __init__(
        self,
        files: Sequence[str | Path],
        labels: Sequence[int],
        *,
        shape: ImageShape | Any,
        memory: int = 1_000_000_000,
        owners: Sequence[int] | Sequence[str] | None = None,
        classes: Sequence[str] | None = None,
    ) -> None:
        self.files = [Path(file) for file in files]
        if len(self.files) != len(labels) or (owners is not None and len(self.files) != len(owners)):
            raise Refusal("The numbers of files, labels and owners differ: each file needs one label, and one owner.")
        if not all(file.is_file() for file in self.files):
            raise Refusal("Some image files that the table names are not there: check the folder and the file column.")
        self.labels = torch.tensor(list(labels), dtype=torch.long)
        self.owners, self.classes = owners, None if classes is None else tuple(classes)
        self.shape = shape_for(shape)
        self._states = [state_of(file) for file in self.files]
        self._left = memory
        self._kept: dict[int, Pixels] = {}

    @classmethod
    def folder(
        cls,
        root: str | Path,
        *,
        shape: ImageShape | Any,
        owners: Callable[[Path], int | str] | None = None,
        classes: Sequence[str] | None = None,
        memory: int = 1_000_000_000,
    ) -> ImageFiles:
        """A folder per class: `root/CLASS/FILE`, and folders below, as torchvision's ImageFolder has them.

        Args:
            root: The folder.
            shape: As for the class.
            owners: Says of a file whose it is: `lambda file: file.stem.split("_")[0]`.
            classes: Their names (default: the folders, in the order of their names).
            memory: As for the class.

        Returns:
            The images.

        Raises:
            Refusal: There is no such folder, or no image in it.
        """
        home = Path(root)
        if not home.is_dir():
            raise Refusal(f"There is no folder {home}.")
        there = sorted(each.name for each in home.iterdir() if each.is_dir() and not each.name.startswith("."))
        names = list(there if classes is None else classes)
        for name in names:
            if name not in there:
                near = get_close_matches(name, there, n=1)
                raise Refusal(f"{home} has no folder {name!r}" + (f"; did you mean {near[0]!r}?" if near else "."))
        found = [
            (file, label)
            for label, name in enumerate(names)
            for file in sorted((home / name).rglob("*"))
            if file.suffix.lower() in _SUFFIXES and not file.name.startswith(".")
        ]
        if not found:
            raise Refusal(f"{home} holds no image: a folder per class with image files in it is expected.")
        files, labels = [file for file, _ in found], [label for _, label in found]
        whose: Any = None if owners is None else [owners(file) for file in files]
        return cls(files, labels, shape=shape, memory=memory, owners=whose, classes=names)

    @classmethod
    def table(
        cls,
        csv: str | Path,
        root: str | Path,
        *,
        shape: ImageShape | Any,
        classes: int | Sequence[str],
        file: str = "file",
        label: str = "label",
        unit_ids: str | None = None,
        memory: int = 1_000_000_000,
    ) -> ImageFiles:
        """The images that a CSV file names, with their labels and owners.

        Args:
            csv: UTF-8; its first line names the columns.
            root: The folder that files are in.
            shape: As for the class.
            classes: The number of classes, or their names where labels are names.
            file: The column of file names.
            label: The column of labels.
            unit_ids: The column that says whose each image is.
            memory: As for the class.

        Returns:
            The images.

        Raises:
            Refusal: A file, folder or column is not there, or a label is none of the classes.
        """
        columns = read_columns(csv, [file, label, *([unit_ids] if unit_ids else [])])
        labels = read_labels(columns[label], classes, csv)
        names = None if isinstance(classes, int) else classes
        files = [Path(root) / name for name in columns[file]]
        owners = columns[unit_ids] if unit_ids else None
        return cls(files, labels, shape=shape, memory=memory, owners=owners, classes=names)

    @property
    def samples(self) -> list[tuple[str, int]]:
        """File and class of each item, as torchvision's ImageFolder lists them."""
        return [(str(file), label) for file, label in zip(self.files, self.labels.tolist(), strict=True)]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        return normalized(self._pixels(int(place)), self.shape), self.labels[place]

    def fingerprint(self) -> str:
        """Over the files as they are, which is faster than to decode them."""
        return fingerprint([self.shape, PIL.__version__, *(digest(file) for file in self.files)])

    def _pixels(self, place: int) -> Pixels:
        found = self._kept.get(place)
        if found is None:
            file, state = self.files[place], self._states[place]
            check_state(file, state)
            try:
                found = decode(file, self.shape)
            finally:
                check_state(file, state)
            if found.nbytes <= self._left:
                self._left -= found.nbytes
                self._kept[place] = found
        return found


def shape_for(shape: ImageShape | Any) -> ImageShape:
    """A shape as it is given, or as a model says it: then it is printed, for nothing else shows what was taken."""
    if isinstance(shape, ImageShape):
        return shape
    if shape is None:
        raise Refusal("Give shape=, what the model takes: a data.ImageShape, or the model itself if it says so.")
    found = ImageShape.of(shape)
    print(f"Images as the model says: {found}", file=sys.stderr)
    return found


def decode(file: Path, shape: ImageShape) -> Pixels:
    """The pixels of a file, height x width x channels: the shorter side resized, then cut around the middle."""
    try:
        with Image.open(file) as image:
            return squeezed(image, shape)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # whatever Pillow says of bytes
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the machine (too many open files, a disk that fails): when it is read again it may be there
        raise Broken(f"{file} is no image that can be decoded.") from None


def squeezed(image: Image.Image, shape: ImageShape) -> Pixels:
    """The pixels of an image, height x width x channels: the shorter side resized, then cut around the middle."""
    if image.mode.startswith("I;16"):  # which Pillow's convert would cut off at 255
        image = Image.fromarray((np.asarray(image, dtype=np.uint32) // 257).astype(np.uint8))
    plain = image.convert("L" if shape.channels == 1 else "RGB")
    high, wide = (round(side / shape.crop) for side in (shape.height, shape.width))
    scale = max(high / plain.height, wide / plain.width)
    size = max(round(plain.width * scale), wide), max(round(plain.height * scale), high)
    if size != plain.size:
        plain = plain.resize(size, _RESAMPLING[shape.resampling])
    left, top = (plain.width - shape.width) // 2, (plain.height - shape.height) // 2
    plain = plain.crop((left, top, left + shape.width, top + shape.height))
    return np.array(plain, dtype=np.uint8).reshape(shape.height, shape.width, shape.channels)


def normalized(pixels: Pixels, shape: ImageShape) -> Tensor:
    """Pixels as a model takes them: channels first, less the mean, over the standard deviation."""
    mean, std = (torch.tensor(part).expand(shape.channels).view(-1, 1, 1) for part in (shape.mean, shape.std))
    return (torch.from_numpy(pixels).permute(2, 0, 1).float() / 255 - mean) / std


def _of_timm(config: Mapping[str, Any]) -> dict[str, Any]:
    channels, height, width = config["input_size"]
    filtered = config.get("interpolation", "bicubic")
    return {
        "channels": channels,
        "height": height,
        "width": width,
        "mean": tuple(config.get("mean", (0.0,))),
        "std": tuple(config.get("std", (1.0,))),
        "crop": float(config.get("crop_pct", 1.0)),
        "resampling": filtered if filtered in _RESAMPLING else "bicubic",
    }


def _of_processor(processor: Any) -> dict[str, Any]:
    config = processor.to_dict()
    size = config.get("crop_size") or config.get("size") or {}
    side = size.get("height") or size.get("shortest_edge")
    if side is None:
        raise Refusal("This image processor does not say its size: give an ImageShape.")
    mean = tuple(config.get("image_mean") or (0.5,)) if config.get("do_normalize", True) else (0.0,)
    std = tuple(config.get("image_std") or (0.5,)) if config.get("do_normalize", True) else (1.0,)
    resized = (config.get("size") or {}).get("shortest_edge")
    crop = side / resized if config.get("do_center_crop") and resized and resized > side else 1.0
    filtered = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}.get(config.get("resample", 3), "bicubic")
    return {
        "channels": 1 if len(mean) == 1 and config.get("image_mean") else 3,
        "height": side,
        "width": size.get("width") or side,
        "mean": mean,
        "std": std,
        "crop": crop,
        "resampling": filtered,
    }
