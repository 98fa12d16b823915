"""Images of a folder, listed in a CSV file: decoded, resized, cropped and normalized as a model expects them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from tacit._refusals import Refusal

_RESAMPLING = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


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

    def __str__(self) -> str:
        mean, std = (", ".join(f"{value:g}" for value in part) for part in (self.mean, self.std))
        return (
            f"{self.channels} x {self.height} x {self.width}, crop {self.crop:g}, {self.resampling}, "
            f"mean {mean}, std {std}"
        )


class ImageFiles:
    """A data set of (image, label) items from files; for `finetune.fit`, `TensorRecords` and torch's loaders alike.

    Args:
        files: One file per item; they are looked for here, and decoded when they are asked for.
        labels: One class number per item.
        shape: What the model takes.
        memory: Decoded pixels stay in so many bytes; the rest is decoded anew each time.

    Raises:
        Refusal: Some files are not there (their number is told, and no name).
    """

    def __init__(
        self, files: Sequence[str | Path], labels: Sequence[int], *, shape: ImageShape, memory: int = 1_000_000_000
    ) -> None:
        self.files = [Path(file) for file in files]
        if len(self.files) != len(labels):
            raise Refusal("The numbers of files and of labels differ: each file needs one label.")
        if not all(file.is_file() for file in self.files):
            raise Refusal("Some image files that the table names are not there: check the folder and the file column.")
        self.labels = torch.tensor(list(labels), dtype=torch.long)
        self.shape = shape
        self._left = memory
        self._kept: dict[int, np.ndarray[tuple[int, ...], np.dtype[np.uint8]]] = {}
        channels = shape.channels
        mean, std = (torch.tensor(part).expand(channels).view(-1, 1, 1) for part in (shape.mean, shape.std))
        self._mean, self._std = mean, std

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        pixels = torch.from_numpy(self._pixels(int(place))).permute(2, 0, 1).float() / 255
        return (pixels - self._mean) / self._std, self.labels[place]

    def _pixels(self, place: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        found = self._kept.get(place)
        if found is None:
            found = decode(self.files[place], self.shape)
            if found.nbytes <= self._left:
                self._left -= found.nbytes
                self._kept[place] = found
        return found


def decode(file: Path, shape: ImageShape) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """The pixels of a file, height x width x channels: the shorter side resized, then cut around the middle."""
    try:
        with Image.open(file) as image:
            plain = image.convert("L" if shape.channels == 1 else "RGB")
    except (OSError, UnidentifiedImageError, ValueError, Image.DecompressionBombError):
        raise ValueError(f"{file} is no image that can be decoded.") from None
    high, wide = (round(side / shape.crop) for side in (shape.height, shape.width))
    scale = max(high / plain.height, wide / plain.width)
    size = max(round(plain.width * scale), wide), max(round(plain.height * scale), high)
    if size != plain.size:
        plain = plain.resize(size, _RESAMPLING[shape.resampling])
    left, top = (plain.width - shape.width) // 2, (plain.height - shape.height) // 2
    plain = plain.crop((left, top, left + shape.width, top + shape.height))
    return np.array(plain, dtype=np.uint8).reshape(shape.height, shape.width, shape.channels)
