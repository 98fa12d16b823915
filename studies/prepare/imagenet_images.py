"""Images of ImageNet's validation set from a zip of CLASS/NAME.jpg into the arrays that recipes read.

    python -m studies.prepare.imagenet_images imagenet_val_224_3_per_class.zip OUT.npz

writes `images` (uint8, N x 3 x 224 x 224) and `labels`, in the order of the names: with three images a class, every
third one is a set with one image of each class.
"""

from __future__ import annotations

import io
import sys
from zipfile import ZipFile

import numpy as np
from PIL import Image


def unpack(packed: str, out: str) -> None:
    with ZipFile(packed) as file:
        names = sorted(name for name in file.namelist() if name.lower().endswith((".jpg", ".jpeg")))
        pictures = [np.asarray(Image.open(io.BytesIO(file.read(name))).convert("RGB")) for name in names]
    labels = np.array([int(name.split("/")[-2]) for name in names], dtype=np.int64)
    np.savez(out, images=np.stack(pictures).transpose(0, 3, 1, 2), labels=labels)


if __name__ == "__main__":
    unpack(*sys.argv[1:3])
