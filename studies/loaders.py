"""The data that recipes name: images and features from files, images of the package."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from tacit.data import fashion_mnist, read_images

Rows = tuple[Tensor, Tensor]


@lru_cache(maxsize=8)
def images(name: str) -> Rows:
    """Images (uint8, N x C x H x W) and labels: of a file .npz, or a split of Fashion-MNIST by its name."""
    return read_images(name) if name.endswith(".npz") else fashion_mnist(name)  # type: ignore[arg-type]


@lru_cache(maxsize=16)  # both parts of the files of a study
def features(file: str, part: Literal["train", "test"]) -> Rows:
    """Features (float32) and labels of a part of an .npz with train_features, train_labels and the same for test."""
    found = arrays(file, f"{part}_features", f"{part}_labels")
    return found[f"{part}_features"].float(), found[f"{part}_labels"]


def arrays(file: str, *names: str) -> dict[str, Tensor]:
    """Arrays of an .npz; all of them if none is named."""
    try:
        with np.load(file, allow_pickle=False) as found:
            return {name: torch.from_numpy(found[name]) for name in names or found.files}
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(
            f"{file} is no .npz file of features with their labels: make it with "
            "`python -m studies.prepare.imagenet_features` or `python -m studies.prepare.tune_features`."
        ) from None
