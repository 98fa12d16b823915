"""Images from a file of arrays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor


def read_images(path: str | Path) -> tuple[Tensor, Tensor]:
    """`images` (uint8, N x C x H x W or N x H x W x C) and `labels` of an .npz, as tensors.

    Args:
        path: The .npz file.

    Returns:
        Images and labels.

    Raises:
        ValueError: The file has no such arrays.
    """
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
