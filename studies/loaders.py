"""The data that recipes name: images and features from files, images of the package."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from tacit.data import fashion_mnist

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


def read_images(path: str | Path) -> tuple[Tensor, Tensor]:
    """`images` (uint8, N x C x H x W or N x H x W x C) and `labels` of an .npz, as tensors."""
    try:
        with np.load(path, allow_pickle=False) as file:
            images, labels = torch.from_numpy(file["images"]), torch.from_numpy(file["labels"].astype(np.int64))
    except FileNotFoundError:
        raise ValueError(f"There is no file {path}.") from None
    except (KeyError, ValueError, OSError):
        raise ValueError(f"{path} is no .npz with the arrays images and labels.") from None
    if images.dim() == 4 and images.shape[1] not in (1, 3) and images.shape[3] in (1, 3):
        images = images.permute(0, 3, 1, 2).contiguous()
    if images.dtype != torch.uint8 or images.dim() != 4 or labels.shape != (len(images),):
        raise ValueError(f"{path}: images must be uint8, N x C x H x W, with one label each.")
    return images, labels
