"""Blur: of the lens, of the glass before it, of the hand that holds it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tacit.data.shifts._dice import Dice
from tacit.data.shifts._tools import convolve, gaussian, mean, scale, streak, warp


def gaussian_blur(images: Tensor, dice: Dice, sigma: float) -> Tensor:  # noqa: ARG001
    """Blur with a Gaussian of this standard deviation."""
    return gaussian(images, sigma * scale(images))


def defocus_blur(images: Tensor, dice: Dice, radius: float) -> Tensor:  # noqa: ARG001
    """Every point becomes a disc, as out of focus."""
    return convolve(images, disc(radius * scale(images)).to(images))


def disc(radius: float) -> Tensor:
    """A disc of weight one; a pixel at the edge counts by how much of it lies inside."""
    reach = math.ceil(radius)
    places = torch.arange(-reach, reach + 1, dtype=torch.float32)
    kernel = (radius + 0.5 - torch.hypot(places[:, None], places[None, :])).clamp(0, 1)
    return kernel / kernel.sum()


def glass_blur(images: Tensor, dice: Dice, sigma: float, reach: float, chance: float) -> Tensor:
    """Frosted glass: blur, let neighbours trade places, blur again."""
    sigma, pixels = sigma * scale(images), max(1, round(reach * scale(images)))
    return gaussian(trade(gaussian(images, sigma), dice, pixels, chance), sigma)


def trade(images: Tensor, dice: Dice, reach: int, chance: float) -> Tensor:
    """Swap pixels at most `reach` apart, direction by direction; `chance` is that of a swap among nearest neighbours.

    For a direction, the image falls into pairs (a pixel, the one a step further) that do not overlap, in two ways; all
    pairs of one way are swapped at once. All channels of a pixel move together and no value is lost.
    """
    directions = [(y, x) for y in range(reach + 1) for x in range(-reach, reach + 1) if (y, x) > (0, 0)]
    chance = 4 * chance / len(directions)  # a pixel moves as often as with the 4 directions of reach 1, only further
    for y, x in directions:
        for way in (0, 1):
            front = _fronts(images, y, x, way) & (dice.uniform(1, *images.shape[-2:]) < chance)
            ahead, behind = images.roll((-y, -x), (2, 3)), images.roll((y, x), (2, 3))
            images = torch.where(front, ahead, torch.where(front.roll((y, x), (2, 3)), behind, images))
    return images


def _fronts(images: Tensor, y: int, x: int, way: int) -> Tensor:
    """The pixels that have their partner y down and x right inside the image: every other block of that step."""
    height, width = images.shape[-2:]
    rows = torch.arange(height, device=images.device)[:, None]
    columns = torch.arange(width, device=images.device)[None, :]
    block = rows // y if y else columns // x
    return ((block + way) % 2 == 0) & (rows + y < height) & (columns + x >= 0) & (columns + x < width)


def motion_blur(images: Tensor, dice: Dice, length: float) -> Tensor:
    """The camera moves along a straight line, within 45 degrees of the horizontal."""
    angle = (dice.uniform() - 0.5) * math.pi / 2
    return streak(images, length * scale(images), angle)


def zoom_blur(images: Tensor, dice: Dice, factor: float) -> Tensor:  # noqa: ARG001
    """The camera moves towards the middle while it looks: the mean of magnifications from 1 to `factor`."""
    height, width = images.shape[-2:]
    down = torch.arange(height, dtype=images.dtype, device=images.device)[:, None] - (height - 1) / 2
    right = torch.arange(width, dtype=images.dtype, device=images.device)[None, :] - (width - 1) / 2
    steps = max(2, math.ceil((factor - 1) * max(height, width) / 2) + 1)  # no two neighbours more than a pixel apart
    shrink = [1 / zoom - 1 for zoom in torch.linspace(1, factor, steps).tolist()]
    return mean(warp(images, by * down, by * right) for by in shrink)
