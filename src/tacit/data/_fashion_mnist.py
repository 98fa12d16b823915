"""Fashion-MNIST: real photographs of clothes, shipped with the package (Xiao et al., 2017; MIT licence).

The file holds the first 23,000 training images and all 10,000 test images of the published set, bit for bit, in
11.8 MB: one LZMA stream of the columns of each image, then the labels. `benchmarks/` and the studies use the same file,
so nothing is ever downloaded. Copyright 2017 Zalando SE; the licence stands beside the file.
"""

from __future__ import annotations

import lzma
from functools import cache
from importlib.resources import files
from typing import Literal

import numpy as np
import torch
from torch import Tensor

CLASSES = (
    "t-shirt",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "boot",
)
TRAIN, TEST = 23_000, 10_000
SEEN = 18_000  # the embedded source model was trained on the first 18,000 training images

Split = Literal["train", "test", "seen", "unseen"]


def fashion_mnist(split: Split = "train") -> tuple[Tensor, Tensor]:
    """Images (uint8, N x 1 x 28 x 28) and labels (int64) of a split; the tensors are the caller's own.

    `train` and `test` are the published ones (the first 23,000 and all 10,000). `seen` is the part of `train` on which
    the embedded source model was trained, `unseen` is all the rest: the 10,000 test images and the last 5,000 of
    `train`, for streams that need many images that the model has never met.

    Args:
        split: "train", "test", "seen" or "unseen".

    Returns:
        Images and labels.

    Examples:
        >>> from tacit.data import fashion_mnist
        >>> images, labels = fashion_mnist("test")
        >>> tuple(images.shape), images.dtype
        ((10000, 1, 28, 28), torch.uint8)
    """
    parts = {
        "train": slice(0, TRAIN),
        "test": slice(TRAIN, TRAIN + TEST),
        "seen": slice(0, SEEN),
        "unseen": slice(SEEN, TRAIN + TEST),
    }
    if split not in parts:
        raise ValueError(f"Fashion-MNIST has no split {split!r}: choose one of {', '.join(parts)}.")
    images, labels = _all()
    return images[parts[split]].clone(), labels[parts[split]].clone()


@cache
def _all() -> tuple[Tensor, Tensor]:
    packed = files("tacit.data").joinpath("files/fashion_mnist.xz").read_bytes()
    flat = np.frombuffer(lzma.decompress(packed), np.uint8)
    count = TRAIN + TEST
    columns = flat[: count * 784].reshape(count, 1, 28, 28)
    images = torch.from_numpy(columns.copy()).transpose(2, 3).contiguous()
    return images, torch.from_numpy(flat[count * 784 :].astype(np.int64))
