"""The published corruption and rendition sets, as they come: CIFAR-10-C, CIFAR-100-C, ImageNet-C, ImageNet-R.

Nothing is downloaded: the folders are the caller's. Images are uint8, C x H x W; divide by 255 before a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Dataset

SEVERITIES = 5
SUFFIXES = (".jpeg", ".jpg", ".png")


def cifar_c(folder: str | Path, name: str, severity: int) -> tuple[Tensor, Tensor]:
    """Images (uint8, N x 3 x H x W) and labels (int64) of one corruption of CIFAR-10-C or CIFAR-100-C.

    `NAME.npy` holds the test images five times, severity after severity, and `labels.npy` a label for each row. Only
    the rows asked for are read.

    Args:
        folder: Where the .npy files are.
        name: The corruption.
        severity: 1 to 5.

    Returns:
        Images and labels.
    """
    _check_severity(severity)
    images, labels = _array(Path(folder), name), _array(Path(folder), "labels")
    if images.ndim != 4 or images.shape[3] != 3 or images.dtype != np.uint8:
        raise ValueError(
            f"{name}.npy holds {images.dtype} of shape {images.shape}, not uint8 rows x height x width x 3."
        )
    if not len(images) or len(images) % SEVERITIES:
        raise ValueError(f"{name}.npy has {len(images)} rows: five severities of equally many are expected.")
    if labels.shape != (len(images),):
        raise ValueError(f"labels.npy has shape {labels.shape}, but {name}.npy has {len(images)} rows.")
    count = len(images) // SEVERITIES
    rows = slice((severity - 1) * count, severity * count)
    chosen = torch.from_numpy(np.array(images[rows])).permute(0, 3, 1, 2).contiguous()
    return chosen, torch.from_numpy(np.array(labels[rows]).astype(np.int64))


def imagenet_c(
    folder: str | Path,
    name: str,
    severity: int,
    *,
    size: int = 224,
    resize: int | None = None,
    wnids: Sequence[str] | str | Path | None = None,
) -> Pictures:
    """One corruption of ImageNet-C at one severity: the files `NAME/SEVERITY/WNID/*.JPEG`, read when asked for.

    The published files are 224 pixels square already; others are brought to `resize` (by default `size`) on their
    shorter side and cut to `size` around their middle. A label is the place of its WordNet id in `wnids` (a list, or a
    file with one per line), by default in the sorted list of the folders found.

    Args:
        folder: The folder of the corruptions.
        name: The corruption.
        severity: 1 to 5.
        size: The side of the result.
        resize: The shorter side before cropping (default: `size`).
        wnids: The classes in the model's order: a list, or a file with one per line.

    Returns:
        Pictures that are read when asked for.
    """
    _check_severity(severity)
    home = _folder(Path(folder))
    if not (home / name).is_dir():
        raise ValueError(f"{home} has no corruption {name!r}{_near(name, _folders(home))}")
    home = _folder(home / name / str(severity))
    return _pictures(home, _wnids(wnids) if wnids is not None else _folders(home), size, resize or size)


def imagenet_r(
    folder: str | Path, *, wnids: Sequence[str] | str | Path, size: int = 224, resize: int | None = None
) -> Pictures:
    """ImageNet-R: the files `WNID/*.jpg` of 200 of the 1,000 classes, with labels among all 1,000.

    `wnids` lists all classes of the model in its order (or is a file with one per line); it is not shipped here.
    `.mask` says which classes occur: compare only these, `logits.masked_fill(~mask, -inf)`. Pictures come in all sizes:
    the shorter side becomes `resize` (by default 256 for 224, and so in proportion), then the middle is cut out.

    Args:
        folder: The folder of the classes.
        wnids: All classes of the model in its order: a list, or a file with one per line.
        size: The side of the result.
        resize: The shorter side before cropping (default: in proportion of 256 to 224).

    Returns:
        Pictures, with `.mask` over the classes that occur.
    """
    return _pictures(_folder(Path(folder)), _wnids(wnids), size, resize or round(size * 256 / 224))


@dataclass(frozen=True, kw_only=True)
class Pictures(Dataset[tuple[Tensor, int]]):
    """Image files and their classes; a file is read when its item is asked for."""

    files: tuple[Path, ...]
    labels: Tensor
    classes: tuple[str, ...]
    size: int
    resize: int

    @property
    def mask(self) -> Tensor:
        """Which of all classes occur here: one bool per class."""
        mask = torch.zeros(len(self.classes), dtype=torch.bool)
        mask[self.labels] = True
        return mask

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """The image (uint8, 3 x size x size) and its label."""
        return _read(self.files[index], self.size, self.resize), int(self.labels[index])


def _pictures(home: Path, classes: tuple[str, ...], size: int, resize: int) -> Pictures:
    if not 0 < size <= resize:
        raise ValueError(f"The cut of {size} pixels does not fit into a shorter side of {resize}.")
    index = {wnid: place for place, wnid in enumerate(classes)}
    found = _folders(home)
    if unknown := [wnid for wnid in found if wnid not in index]:
        raise ValueError(f"{home} has folders that are not in the list of classes: {', '.join(unknown[:5])}.")
    files = [(file, index[wnid]) for wnid in found for file in _image_files(home / wnid)]
    if not files:
        raise ValueError(f"{home} holds no image: folders named by WordNet id with image files are expected.")
    labels = torch.tensor([label for _, label in files])
    paths = tuple(file for file, _ in files)
    return Pictures(files=paths, labels=labels, classes=classes, size=size, resize=resize)


def _read(file: Path, size: int, resize: int) -> Tensor:
    try:
        with Image.open(file) as opened:
            image = opened.convert("RGB")
    except (OSError, UnidentifiedImageError, SyntaxError) as error:
        raise ValueError(f"The image {file} cannot be read: it is damaged or no image.") from error
    width, height = image.size
    short = min(width, height)
    if short != resize:
        wanted = (max(resize, round(width * resize / short)), max(resize, round(height * resize / short)))
        image = image.resize(wanted, Image.Resampling.BILINEAR)
    left, top = (image.width - size) // 2, (image.height - size) // 2
    cut = image.crop((left, top, left + size, top + size))
    return torch.from_numpy(np.array(cut)).permute(2, 0, 1).contiguous()


def _check_severity(severity: int) -> None:
    if isinstance(severity, bool) or severity not in range(1, SEVERITIES + 1):
        raise ValueError(f"The severity is {severity!r}, but severities are whole numbers from 1 to 5.")


def _array(folder: Path, name: str) -> NDArray[Any]:
    file = _folder(folder) / f"{name}.npy"
    if not file.is_file():
        known = tuple(sorted(other.stem for other in folder.glob("*.npy")))
        raise ValueError(f"{folder} has no {name}.npy{_near(name, known)}")
    try:
        array: NDArray[Any] = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(
            f"{file} cannot be read as a NumPy array: it is damaged, cut short or no such file."
        ) from error
    return array


def _folder(path: Path) -> Path:
    if not path.is_dir():
        raise ValueError(f"There is no folder {path}.")
    return path


def _folders(path: Path) -> tuple[str, ...]:
    return tuple(sorted(inner.name for inner in path.iterdir() if inner.is_dir() and not inner.name.startswith(".")))


def _image_files(folder: Path) -> list[Path]:
    return sorted(
        file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES and not file.name.startswith(".")
    )


def _near(name: str, known: Sequence[str]) -> str:
    near = get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f": it has {', '.join(known) or 'nothing of the kind'}."


def _wnids(given: Sequence[str] | str | Path) -> tuple[str, ...]:
    if isinstance(given, str | Path):
        if not Path(given).is_file():
            raise ValueError(f"There is no file {given} with the list of classes, one WordNet id per line.")
        lines = Path(given).read_text("utf-8").splitlines()
        given = [line.split()[0] for line in lines if line.strip()]  # some lists have the class's name behind the id
    if len(set(given)) != len(given):
        raise ValueError("The list of classes names one WordNet id twice: each has one place in it.")
    return tuple(given)
