"""Outputs for a study: the embedded model under each shift, computed once and kept, or files that are there already."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from studies.store import replacing
from tacit.calibrate import read_outputs
from tacit.data import Split, fashion_mnist, shifts
from tacit.models import embedded
from tacit.recipes import Progress, fingerprint

CLEAN = "clean"
FORMAT = 1  # of the kept outputs; raised when the same settings would give other numbers


@dataclass(frozen=True, kw_only=True)
class Shifted:
    """The embedded model's logits on the same images under every shift, each shift a data set of its own."""

    images: Split = "unseen"
    shifts: Literal["test", "extra"] = "test"
    severity: int = 3
    per_shift: int = 10_000
    seed: int = 0
    clean: bool = True  # also as they are
    format: int = FORMAT

    @property
    def names(self) -> list[str]:
        chosen = shifts.TEST if self.shifts == "test" else shifts.EXTRA
        return [*([CLEAN] if self.clean else []), *chosen]


@dataclass(frozen=True, kw_only=True)
class OutputsFile:
    """Outputs on disk, as `tacit calibrate` reads them."""

    name: str
    path: str
    form: Literal["logits", "probs"] = "probs"


@dataclass(frozen=True, kw_only=True, eq=False)
class DataSet:
    """Outputs and labels declared public; ``key`` names them in the folder of kept cells."""

    name: str
    key: str
    labels: np.ndarray[Any, Any]
    logits: np.ndarray[Any, Any] | None = None
    probs: np.ndarray[Any, Any] | None = None

    @property
    def arrays(self) -> dict[str, Any]:
        return {"logits": self.logits, "probs": self.probs, "labels": self.labels}


def shifted(config: Shifted, folder: Path, progress: Progress) -> list[DataSet]:
    """Every shift's outputs, computed where they are not kept."""
    key = fingerprint(config)
    path = folder / f"{key}.npz"
    if not path.exists():
        found = _compute(config, progress)
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial:
            np.savez(partial, allow_pickle=False, **found)
    with np.load(path, allow_pickle=False) as file:
        labels = file["labels"]
        return [DataSet(name=name, key=f"{key} {name}", logits=file[name], labels=labels) for name in config.names]


def from_file(config: OutputsFile) -> DataSet:
    outputs, labels = read_outputs(config.path, config.form)
    arrays: Mapping[str, Any] = {config.form: outputs}
    # the name and not the path: the same outputs may lie elsewhere tomorrow
    return DataSet(name=config.name, key=f"{config.form} {config.name} {outputs.shape}", labels=labels, **arrays)


def _compute(config: Shifted, progress: Progress) -> dict[str, np.ndarray[Any, Any]]:
    images, labels = fashion_mnist(config.images)
    if config.per_shift > len(images):
        raise ValueError(f"There are {len(images)} images in {config.images}, not {config.per_shift}.")
    images, labels = images[: config.per_shift], labels[: config.per_shift]
    model = embedded()
    found = {"labels": labels.numpy()}
    for place, name in enumerate(config.names):
        progress("outputs of the source model", place, len(config.names))
        seen = images if name == CLEAN else shifts.corrupt(images, name, config.severity, seed=config.seed)
        with torch.no_grad():
            parts = [model(part.float() / 255) for part in torch.split(seen, 500)]
        found[name] = torch.cat(parts).numpy()
    progress("outputs of the source model", len(config.names), len(config.names))
    return found
