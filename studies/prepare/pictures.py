"""The images that feature scripts read (packed CIFAR and chest X-rays, as tensors by split), and their features."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from studies.prepare.unpack_cifar import unpacked

Arrays = dict[str, np.ndarray]
AT_ONCE = 16


def cifar(packed: Path, most: Mapping[str, int] | None = None) -> dict[str, tuple[Tensor, Tensor]]:
    """Images and labels by split; `most`: how many of each, the first ones."""
    found = {split: unpacked(str(packed), split, (most or {}).get(split)) for split in ("train", "test")}
    return {split: (torch.from_numpy(images), torch.from_numpy(labels)) for split, (images, labels) in found.items()}


def x_rays(path: Path) -> dict[str, tuple[Tensor, Tensor]]:
    with np.load(path, allow_pickle=False) as file:
        grey = {split: torch.from_numpy(file[f"{split}_images"]) for split in ("train", "val", "test")}
        labels = {split: torch.from_numpy(file[f"{split}_labels"].astype(np.int64)) for split in grey}
    return {split: (images.unsqueeze(1).expand(-1, 3, -1, -1), labels[split]) for split, images in grey.items()}


def features(net: nn.Module, images: Tensor) -> np.ndarray:
    with torch.inference_mode():
        return torch.cat([net(part) for part in torch.split(images, AT_ONCE)]).numpy()


def by_split(net: nn.Module, splits: Mapping[str, tuple[Tensor, Tensor]]) -> Arrays:
    arrays: Arrays = {}
    for split, (images, labels) in splits.items():
        arrays |= {f"{split}_features": features(net, images), f"{split}_labels": labels.numpy()}
    return arrays
