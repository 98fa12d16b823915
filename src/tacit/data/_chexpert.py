"""CheXpert: chest X-rays by patient, from its CSV layout (Irvin et al., 2019). Nothing is downloaded.

The labels come from radiology reports: 1.0 is present, 0.0 absent, -1.0 uncertain, and blank means that the report does
not mention it, which counts as absent here, as in the competition.
"""

from __future__ import annotations

import csv as tables
import re
from collections.abc import Sequence
from difflib import get_close_matches
from io import BytesIO
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tacit.data._cache import Cache, Pixels, digest, fingerprint
from tacit.data._file_state import check_state, state_of
from tacit.data._image_files import ImageShape
from tacit.data._tensor_records import TensorRecords

COMPETITION = ("Atelectasis", "Cardiomegaly", "Consolidation", "Edema", "Pleural Effusion")
UNCERTAIN = {"ones": 1.0, "zeros": 0.0, "ignore": float("nan")}
VIEW = "Frontal/Lateral"


class Films:
    """Image files as float32, channels x height x width: in [0, 1], or normalized.

    A file whose bytes are no image is NaN, as it will be at any time: its patient contributes nothing. One that is
    gone, or not what it was, raises.
    """

    draws = False

    def __init__(self, files: Sequence[Path], shape: ImageShape, memory: int) -> None:
        self.files, self.shape = list(files), shape
        self._mean, self._std = (torch.tensor(part).view(-1, 1, 1) for part in (shape.mean, shape.std))
        self._cache = Cache(memory)
        self._states = [state_of(file) for file in self.files]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        pixels = self._pixels(number)
        if not len(pixels):
            return torch.full((self.shape.channels, self.shape.height, self.shape.width), torch.nan), number
        grey = torch.from_numpy(pixels.astype(np.float32) / 255)
        return (grey.expand(self.shape.channels, -1, -1) - self._mean) / self._std, number

    def _pixels(self, number: int) -> Pixels:
        if (kept := self._cache.get(number)) is not None:
            return kept
        file = self.files[number]
        check_state(file, self._states[number])
        content = file.read_bytes()
        check_state(file, self._states[number])
        try:
            with Image.open(BytesIO(content)) as opened:
                grey = opened.convert("L").resize((self.shape.width, self.shape.height), Image.Resampling.BILINEAR)
            pixels: Pixels = np.array(grey)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):  # whatever Pillow says of bytes
            pixels = np.empty((0, 0), np.uint8)
        self._cache.put(number, pixels)
        return pixels


class Patients(TensorRecords):
    """The images of each patient are the rows of one unit. `skipped` lists the files that were not there."""

    def __init__(
        self,
        films: Films,
        labels: Tensor,
        names: Sequence[str],
        *,
        rows: int,
        skipped: list[Path],
        diseases: Sequence[str],
    ) -> None:
        self._owners = list(names)
        super().__init__(films, labels, self._owners, unit="patient", rows_each=rows)
        self.skipped = skipped
        self.classes = tuple(diseases)

    def fingerprint(self) -> str:
        """Over the files as they are, which is faster than to decode them."""
        contents = [digest(file) for file in self.inputs.files]
        return fingerprint([self.inputs.shape, self.most_rows, self._owners, contents, self.labels().tolist()])


def chexpert(
    csv: str | Path,
    root: str | Path,
    *,
    diseases: Sequence[str] = COMPETITION,
    uncertain: Literal["ones", "zeros", "ignore"] = "ones",
    views: Literal["frontal", "all"] = "frontal",
    size: int = 224,
    colour: bool = False,
    mean: Sequence[float] = (0.0,),
    std: Sequence[float] = (1.0,),
    shape: ImageShape | None = None,
    rows: int = 4,
    memory: int = 1_000_000_000,
) -> Patients:
    """The patients of a CSV file such as `train.csv`, with the paths in it below `root` (or below the folder above it).

    A patient is shown by at most `rows` images at a time, drawn without replacement, and by all of them in an
    evaluation. A row has one target per disease: 0 or 1, or NaN where it is uncertain and `uncertain="ignore"`; a loss
    leaves those out. Images are squeezed to `size` x `size`, and grey, in one channel or, with `colour`, in three that
    are alike, as nets pretrained on photographs take them; decoded ones stay in `memory` bytes. A file that is missing
    is left out and listed in `skipped`; one that is no image is a row of NaN, so that its patient contributes nothing
    to a clipped sum in which it is shown. One that is missing when it is read, or has changed, raises: training
    then leaves its patient out of the step, or, where steps may be replayed, stops.

    Args:
        csv: A file such as `train.csv`.
        root: The folder that its paths are below.
        diseases: The targets.
        uncertain: What an uncertain target counts as.
        views: Which images.
        size: The side that images are resized to.
        colour: Three channels, all alike, instead of one.
        mean: Per channel, of values in [0, 1]: taken from them.
        std: Per channel: what they are then divided by.
        shape: What a model takes, instead of size, colour, mean and std: `ImageShape.of(model)`.
        rows: The most images of a patient in one step.
        memory: Bytes of decoded images that are kept.

    Returns:
        Records whose unit is the patient.
    """
    for value, known, what in ((uncertain, tuple(UNCERTAIN), "uncertain"), (views, ("frontal", "all"), "views")):
        if value not in known:
            raise ValueError(f"{what} is {value!r}: choose one of {', '.join(known)}.")
    if not Path(root).is_dir():
        raise ValueError(f"There is no folder {root}.")
    if not diseases:
        raise ValueError("Name at least one disease.")
    shape = shape or ImageShape(
        channels=3 if colour else 1, height=size, width=size, mean=tuple(mean), std=tuple(std), resampling="bilinear"
    )
    files: list[Path] = []
    names: list[str] = []
    labels: list[list[float]] = []
    skipped: list[Path] = []
    for line, row in enumerate(_read(Path(csv), ("Path", VIEW, *diseases)), 2):
        match = re.search(r"(?:^|/)(patient\d+)/", row["Path"])
        if not match:
            raise ValueError(
                f"{csv}, line {line}: the path {row['Path']!r} names no patient, as in train/patient00001/."
            )
        targets = [
            _target(row[disease], UNCERTAIN[uncertain], f"{csv}, line {line}, {disease}") for disease in diseases
        ]
        if views == "frontal" and row[VIEW] != "Frontal":
            continue
        file = _find(Path(root), row["Path"])
        if file is None:
            skipped.append(Path(root) / row["Path"])
            continue
        files.append(file)
        names.append(match.group(1))
        labels.append(targets)
    if not files:
        missing = (
            f"none of its {len(skipped)} files is below {root}, such as {skipped[0]}" if skipped else f"no {views} view"
        )
        raise ValueError(f"{csv} gives no image: {missing}.")
    films = Films(files, shape, memory)
    return Patients(films, torch.tensor(labels), names, rows=rows, skipped=skipped, diseases=diseases)


def _read(csv: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    if not csv.is_file():
        raise ValueError(f"There is no file {csv}.")
    with csv.open(encoding="utf-8", newline="") as opened:
        reader = tables.DictReader(opened, restval="")
        known = reader.fieldnames or []
        rows = list(reader)
    if not rows:
        raise ValueError(f"{csv} is empty: a header and a row for each image are expected.")
    for name in columns:
        if name not in known:
            near = get_close_matches(name, known, n=1, cutoff=0.5)
            raise ValueError(f"{csv} has no column {name!r}" + (f"; did you mean {near[0]!r}?" if near else "."))
    return rows


def _target(value: str, uncertain: float, where: str) -> float:
    if not value.strip():
        return 0.0
    try:
        return {1.0: 1.0, 0.0: 0.0, -1.0: uncertain}[float(value)]
    except (ValueError, KeyError):
        raise ValueError(f"{where}: {value!r} is none of 1.0, 0.0, -1.0 and blank.") from None


def _find(root: Path, path: str) -> Path | None:
    """Below root, or, as the paths begin with the name of the data set's own folder, below that folder as root."""
    for file in (root / path, root / Path(*Path(path).parts[1:])):
        if file.is_file():
            return file
    return None
