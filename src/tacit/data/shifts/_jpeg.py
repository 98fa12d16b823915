"""JPEG: what quantising the cosine waves of 8 x 8 squares leaves of a picture (ITU-T T.81), without the file."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from tacit.data.shifts._dice import Dice

# The example tables of the standard, annex K.1: light and colour, by rows.
LIGHT = (
    (16, 11, 10, 16, 24, 40, 51, 61),
    (12, 12, 14, 19, 26, 58, 60, 55),
    (14, 13, 16, 24, 40, 57, 69, 56),
    (14, 17, 22, 29, 51, 87, 80, 62),
    (18, 22, 37, 56, 68, 109, 103, 77),
    (24, 35, 55, 64, 81, 104, 113, 92),
    (49, 64, 78, 87, 103, 121, 120, 101),
    (72, 92, 95, 98, 112, 100, 103, 99),
)
COLOUR = ((17, 18, 24, 47), (18, 21, 26, 66), (24, 26, 56, 99), (47, 66, 99, 99))  # 99 everywhere else

# JFIF: light, blue against yellow, red against green.
MIX = ((0.299, 0.587, 0.114), (-0.168736, -0.331264, 0.5), (0.5, -0.418688, -0.081312))


def jpeg_compression(images: Tensor, dice: Dice, quality: float) -> Tensor:  # noqa: ARG001
    """Store as JPEG of this quality (1 to 100, as libjpeg counts) and read again; colour at half resolution."""
    levels = (255 * images).round()
    light, colour = (table.to(images) for table in tables(quality))
    if images.shape[1] == 1:
        return _squares(levels, light) / 255
    mix = images.new_tensor(MIX)
    middle = images.new_tensor((0, 128, 128)).view(1, 3, 1, 1)
    planes = (torch.einsum("pc,nchw->nphw", mix, levels) + middle).round()
    bright, half = _squares(planes[:, :1], light), _squares(_halved(planes[:, 1:]), colour)
    full = functional.interpolate(half, scale_factor=2.0, mode="bilinear", align_corners=False)
    planes = torch.cat([bright, full[..., : images.shape[2], : images.shape[3]]], 1)
    return torch.einsum("cp,nphw->nchw", torch.linalg.inv(mix), planes - middle).round() / 255


def _halved(planes: Tensor) -> Tensor:
    height, width = planes.shape[-2:]
    even = functional.pad(planes, (0, width % 2, 0, height % 2), mode="replicate")
    return functional.avg_pool2d(even, 2).round()


def tables(quality: float) -> tuple[Tensor, Tensor]:
    """The steps of light and colour at a quality, scaled as libjpeg does."""
    percent = 5000 / quality if quality < 50 else 200 - 2 * quality
    colour = torch.full((8, 8), 99.0)
    colour[:4, :4] = torch.tensor(COLOUR)
    light = torch.tensor(LIGHT, dtype=torch.float32)
    scaled = [((table * percent + 50) / 100).floor().clamp(1, 255) for table in (light, colour)]
    return scaled[0], scaled[1]


def _squares(plane: Tensor, steps: Tensor) -> Tensor:
    """Round the waves of each 8 x 8 square to multiples of the steps; the rim is repeated up to full squares."""
    height, width = plane.shape[-2:]
    full = functional.pad(plane - 128, (0, -width % 8, 0, -height % 8), mode="replicate")
    squares = full.unfold(2, 8, 8).unfold(3, 8, 8)
    waves = _waves().to(plane)
    rounded = (waves @ squares @ waves.T / steps).round() * steps
    squares = waves.T @ rounded @ waves
    rows = squares.transpose(3, 4).reshape(full.shape)[..., :height, :width]
    return (rows + 128).round().clamp(0, 255)


def _waves() -> Tensor:
    """The orthonormal cosine transform of eight values, a wave per row."""
    wave, place = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    cosines = torch.cos((2 * place + 1) * wave * math.pi / 16) / 2
    cosines[0] /= math.sqrt(2)
    return cosines
