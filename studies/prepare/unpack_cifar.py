"""Unpack CIFAR from one file of lossless WebP blobs into the arrays that recipes read.

    python -m studies.prepare.unpack_cifar cifar10_lossless_webp_train20k_test10k.npz OUT

writes OUT/train.npz and OUT/test.npz with `images` (uint8, N x 3 x 32 x 32) and `labels`.
"""

from __future__ import annotations

import io
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
from PIL import Image


def unpacked(packed: str, split: str, most: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The first `most` images of a split (all of them by default) and their labels."""
    with np.load(packed, allow_pickle=False) as file:
        blob, ends = file[f"{split}_blob"].tobytes(), file[f"{split}_offsets"]
        found = list(pairwise(ends))[:most]
        pictures = [np.asarray(Image.open(io.BytesIO(blob[a:b])).convert("RGB")) for a, b in found]
        return np.stack(pictures).transpose(0, 3, 1, 2), file[f"{split}_y"].astype(np.int64)[:most]


def unpack(packed: str, out: str) -> None:
    Path(out).mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        images, labels = unpacked(packed, split)
        np.savez(Path(out) / f"{split}.npz", images=images, labels=labels)


if __name__ == "__main__":
    unpack(*sys.argv[1:3])
