"""CheXpert: chest X-rays by patient, from its CSV layout (Irvin et al., 2019). Nothing is downloaded.

The labels come from radiology reports: 1.0 is present, 0.0 absent, -1.0 uncertain, and blank means that the report does
not mention it, which counts as absent here, as in the competition.
"""

from __future__ import annotations

import csv as tables
import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tacit.data._cache import Cache, Pixels, digest, fingerprint
from tacit.data._tensor_records import Table

COMPETITION = ("Atelectasis", "Cardiomegaly", "Consolidation", "Edema", "Pleural Effusion")
UNCERTAIN = {"ones": 1.0, "zeros": 0.0, "ignore": float("nan")}
VIEW = "Frontal/Lateral"


class Films:
    """Image files as float32 in [0, 1], 1 x size x size; what cannot be read is NaN and counted."""

    def __init__(self, files: Sequence[Path], size: int, memory: int) -> None:
        if size < 1:
            raise ValueError(f"The size is {size}, but at least 1 pixel is needed.")
        self.files, self.size = list(files), size
        self._cache = Cache(memory)
        self._broken: set[Path] = set()

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        file = self.files[number]
        try:
            pixels = self._pixels(file)
        except Exception:  # after a charge nothing about one image may be told by an error, whatever it is
            self._broken.add(file)
            return torch.full((1, self.size, self.size), torch.nan), number
        return torch.from_numpy(pixels[None].astype(np.float32) / 255), number

    def _pixels(self, file: Path) -> Pixels:
        if (kept := self._cache.get(file)) is not None:
            return kept
        with Image.open(file) as opened:
            grey = opened.convert("L").resize((self.size, self.size), Image.Resampling.BILINEAR)
        pixels: Pixels = np.array(grey)
        self._cache.put(file, pixels)
        return pixels


class Patients(Table):
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
        return fingerprint([self.inputs.size, self.most_rows, self._owners, contents, self.labels().tolist()])


def chexpert(
    csv: str | Path,
    root: str | Path,
    *,
    diseases: Sequence[str] = COMPETITION,
    uncertain: Literal["ones", "zeros", "ignore"] = "ones",
    views: Literal["frontal", "all"] = "frontal",
    size: int = 224,
    rows: int = 4,
    memory: int = 1_000_000_000,
) -> Patients:
    """The patients of a CSV file such as `train.csv`, with the paths in it below `root` (or below the folder above it).

    A patient is shown by at most `rows` images at a time, drawn without replacement, and by all of them in an
    evaluation. A row has one target per disease: 0 or 1, or NaN where it is uncertain and `uncertain="ignore"`; a loss
    leaves those out. Images are grey and squeezed to `size` x `size`; decoded ones stay in `memory` bytes. A file that
    is missing is left out and listed in `skipped`; one that cannot be read is a row of NaN, so that its patient
    contributes nothing to a clipped sum in which it is shown.

    Args:
        csv: A file such as `train.csv`.
        root: The folder that its paths are below.
        diseases: The targets.
        uncertain: What an uncertain target counts as.
        views: Which images.
        size: The side that images are resized to.
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
    films = Films(files, size, memory)
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
