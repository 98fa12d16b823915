"""Blur as published: lengths are pixels of the picture itself, kernels and edges those of the reference code."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tacit.data.shifts._dice import Dice
from tacit.data.shifts._tools import convolve, mean, moved


def gaussian(images: Tensor, sigma: float, *, truncate: float = 4.0, edge: str = "replicate") -> Tensor:
    """Gaussian blur of `sigma` pixels, cut off at `truncate` of them; beyond the rim the rim, or its mirror image."""
    radius = int(truncate * sigma + 0.5)
    if radius < 1:
        return images
    places = torch.arange(-radius, radius + 1, dtype=images.dtype, device=images.device)
    weights = torch.exp(-0.5 * (places / sigma).square())
    weights = weights / weights.sum()
    planes = images.reshape(-1, 1, *images.shape[-2:])
    for axis, kernel in ((2, weights.view(1, 1, -1, 1)), (3, weights.view(1, 1, 1, -1))):
        side = planes.shape[axis]
        around = torch.arange(-radius, side + radius, device=images.device)
        if edge == "replicate":
            around = around.clamp(0, side - 1)
        else:  # d c b a | a b c d | d c b a
            around = around % (2 * side)
            around = torch.minimum(around, 2 * side - 1 - around)
        planes = functional.conv2d(planes.index_select(axis, around), kernel)
    return planes.reshape(images.shape)


def gaussian_blur(images: Tensor, dice: Dice, sigma: float) -> Tensor:  # noqa: ARG001
    """Blur with a Gaussian of this standard deviation."""
    return gaussian(images, sigma)


def defocus_blur(images: Tensor, dice: Dice, radius: float, edge: float) -> Tensor:  # noqa: ARG001
    """Every point becomes a disc, whose edge is blurred a little."""
    return convolve(images, disc(radius, edge).to(images))


def disc(radius: float, edge: float) -> Tensor:
    """The pixels within the radius, of weight one together, under a small Gaussian blur."""
    reach, size = (8.0, 3) if radius <= 8 else (radius, 5)
    places = torch.arange(-reach, reach + 1, dtype=torch.float64)
    inside = (places[:, None].square() + places[None, :].square() <= radius**2).double()
    offsets = torch.arange(size, dtype=torch.float64) - size // 2
    bell = torch.exp(-0.5 * (offsets / edge).square())
    bell = bell / bell.sum()
    return convolve((inside / inside.sum())[None, None], bell[:, None] * bell[None, :])[0, 0]


def glass_blur(images: Tensor, dice: Dice, sigma: float, reach: float, rounds: float) -> Tensor:
    """Frosted glass: blur, let each pixel take the colour of one nearby, blur again.

    The reference means to swap two pixels, but for pictures with colours its assignment copies one to the other: from
    the last row to the first, a pixel takes what then stands at most `reach` away.
    """
    return gaussian(scattered(gaussian(images, sigma), dice, int(reach), int(rounds)), sigma)


def scattered(images: Tensor, dice: Dice, reach: int, rounds: int) -> Tensor:
    """The copies of `glass_blur`, for all pictures at once: what is moved is an index of the pixel it came from."""
    count, _, height, width = images.shape
    origin = np.tile(np.arange(height * width, dtype=np.int64)[:, None], (1, count))
    pictures = np.arange(count)
    for _ in range(rounds):
        draws = (dice.uniform(2, height, width) * 2 * reach).floor().long().cpu() - reach  # -reach ... reach - 1
        step = (draws[:, 0] * width + draws[:, 1]).reshape(count, -1).T.contiguous().numpy()
        for row in range(height - reach, reach, -1):
            for place in range(row * width + width - reach, row * width + reach, -1):
                origin[place] = origin[place + step[place], pictures]
    index = torch.from_numpy(origin.T.copy()).to(images.device)[:, None].expand(-1, images.shape[1], -1)
    return images.flatten(2).gather(2, index).reshape(images.shape)


def motion_blur(images: Tensor, dice: Dice, radius: float, sigma: float) -> Tensor:
    """The camera moves along a straight line within 45 degrees of the horizontal, and looks less and less."""
    return trail(images, int(radius), sigma, (dice.uniform() - 0.5) * 90)


def trail(images: Tensor, radius: int, sigma: float, degrees: Tensor) -> Tensor:
    """The sum of copies moved along a line, weighted by half a bell; one angle per picture."""
    length = 2 * radius + 1
    weights = torch.exp(-0.5 * (torch.arange(length, dtype=torch.float64) / sigma).square())
    angle = torch.deg2rad(degrees.double())
    total = torch.zeros_like(images)
    for i, weight in enumerate((weights / weights.sum()).tolist()):
        down, right = (-torch.ceil(i * part - 0.5).long() for part in (torch.sin(angle), torch.cos(angle)))
        total += weight * moved(images, -down, -right)
    return total


def zoom_blur(images: Tensor, dice: Dice, end: float, step: float) -> Tensor:  # noqa: ARG001
    """The camera moves towards the middle while it looks: the mean of the picture and of its magnifications."""
    factors = np.arange(1, end, step).tolist()
    copies = (zoomed(images, factor)[..., : images.shape[2], : images.shape[3]] for factor in factors)
    return (images + len(factors) * mean(copies)) / (len(factors) + 1)


def zoomed(images: Tensor, factor: float) -> Tensor:
    """The middle of the pictures magnified; a pixel larger than they were where rounding says so."""
    sides = [math.ceil(side / factor) for side in images.shape[-2:]]
    top, left = ((side - part) // 2 for side, part in zip(images.shape[-2:], sides, strict=True))
    middle = images[..., top : top + sides[0], left : left + sides[1]]
    size = [round(part * factor) for part in sides]
    return functional.interpolate(middle, size=size, mode="bilinear", align_corners=True)
