"""What several shifts are made of: scales, blurs, warps and random textures."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional

from tacit.data.shifts._dice import Dice


def scale(images: Tensor) -> float:
    """Pixels of this image per pixel of a 32 x 32 one: all lengths of the table are given for the latter."""
    return min(images.shape[-2:]) / 32


def gaussian(images: Tensor, sigma: float) -> Tensor:
    """Gaussian blur of `sigma` pixels, mirrored at the rim."""
    radius = max(1, math.ceil(4 * sigma))
    places = torch.arange(-radius, radius + 1, dtype=images.dtype, device=images.device)
    weights = torch.exp(-0.5 * (places / sigma).square())
    weights = weights / weights.sum()
    return convolve(convolve(images, weights[:, None]), weights[None, :])


def convolve(images: Tensor, kernel: Tensor) -> Tensor:
    """Every channel with the same kernel of odd sides, mirrored at the rim."""
    tall, wide = (side // 2 for side in kernel.shape)
    channels = images.reshape(-1, 1, *images.shape[-2:])
    padded = functional.pad(channels, (wide, wide, tall, tall), mode="reflect")
    return functional.conv2d(padded, kernel[None, None]).reshape(images.shape)


def warp(images: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """Read each pixel from a place so many pixels further down and right; beyond the rim stands the rim.

    `down` and `right` are N x H x W or broadcast to it. Between pixels the value is bilinear.
    """
    count, _, height, width = images.shape
    y = torch.arange(height, dtype=images.dtype, device=images.device)[:, None] + down
    x = torch.arange(width, dtype=images.dtype, device=images.device)[None, :] + right
    places = ((2 * x + 1) / width - 1, (2 * y + 1) / height - 1)  # as grid_sample counts: the rims are -1 and 1
    grid = torch.stack([place.expand(count, height, width) for place in places], dim=-1)
    return functional.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)


def moved(images: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """Read each pixel from a place so many whole pixels further down and right, one distance per image; beyond the rim
    stands the rim."""
    height, width = images.shape[-2:]
    rows = (torch.arange(height, device=images.device) + down.to(images.device)[:, None]).clamp(0, height - 1)
    columns = (torch.arange(width, device=images.device) + right.to(images.device)[:, None]).clamp(0, width - 1)
    each = torch.arange(len(images), device=images.device)[:, None, None, None]
    channels = torch.arange(images.shape[1], device=images.device)[None, :, None, None]
    return images[each, channels, rows[:, None, :, None], columns[:, None, None, :]]


def streak(images: Tensor, length: float, angle: Tensor) -> Tensor:
    """The mean along a centred line of `length` pixels, at one angle per image."""
    steps = max(2, math.ceil(length) + 1)
    down, right = (part.view(-1, 1, 1) for part in (torch.sin(angle), torch.cos(angle)))
    along = torch.linspace(-length / 2, length / 2, steps).tolist()
    return mean(warp(images, step * down, step * right) for step in along)


def mean(copies: Iterable[Tensor]) -> Tensor:
    """The mean of copies that need not be in memory at once."""
    rest = iter(copies)
    total, count = next(rest).clone(), 1
    for copy in rest:
        total, count = total.add_(copy), count + 1
    return total / count


def fractal(dice: Dice, images: Tensor, decay: float) -> Tensor:
    """Cloudy noise in [0, 1], N x 1 x H x W: each octave is twice as fine and `decay` times as strong."""
    size = images.shape[-2:]
    total = images.new_zeros(len(images), 1, *size)
    cells, weight = 2, 1.0
    while cells < min(size):
        octave = dice.uniform(1, cells + 1, cells + 1)
        total = total + weight * functional.interpolate(octave, size=size, mode="bicubic", align_corners=True)
        cells, weight = 2 * cells, decay * weight
    low, high = total.amin((2, 3), keepdim=True), total.amax((2, 3), keepdim=True)
    return (total - low) / (high - low)


def grain(dice: Dice, images: Tensor, sigma: float) -> Tensor:
    """Normal noise, N x 1 x H x W, smoothed over `sigma` pixels of a 32 x 32 image and of unit strength again."""
    coarse = [max(1, round(side / scale(images))) for side in images.shape[-2:]]
    smooth = gaussian(dice.normal(1, *coarse), sigma)
    fine = functional.interpolate(smooth, size=images.shape[-2:], mode="bicubic", align_corners=False)
    return fine * (2 * sigma * math.sqrt(math.pi))  # the standard deviation that white noise keeps, inverted
