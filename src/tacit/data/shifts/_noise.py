"""Noise of the sensor: each pixel for itself."""

from __future__ import annotations

import torch
from torch import Tensor

from tacit.data.shifts._dice import Dice


def gaussian_noise(images: Tensor, dice: Dice, deviation: float) -> Tensor:
    """Add normal noise, as in poor light."""
    return images + deviation * dice.normal(*images.shape[1:])


def shot_noise(images: Tensor, dice: Dice, photons: float) -> Tensor:
    """Count light: a white pixel receives `photons` of them on average."""
    counts = dice.poisson(images.nan_to_num() * photons)
    return torch.where(images.isnan(), images, counts / photons)


def impulse_noise(images: Tensor, dice: Dice, share: float) -> Tensor:
    """Dead and hot pixels: this share of the values turns black or white, half each."""
    luck = dice.uniform(*images.shape[1:])
    return images.masked_fill(luck < share / 2, 0.0).masked_fill(luck >= 1 - share / 2, 1.0)


def speckle_noise(images: Tensor, dice: Dice, deviation: float) -> Tensor:
    """Normal noise in proportion to the light."""
    return images * (1 + deviation * dice.normal(*images.shape[1:]))
