"""Weather as published. The ice of `frost` is drawn: the reference cuts it from photographs, which are not shipped."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import ndimage
from torch import Tensor

from tacit.data.shifts._dice import Dice
from tacit.data.shifts._published_blur import gaussian, trail, zoomed
from tacit.data.shifts._tools import fractal
from tacit.data.shifts._weather import grey, tint

WATER = (175 / 255, 238 / 255, 238 / 255)
MUD = (63 / 255, 42 / 255, 20 / 255)
ICE = (  # mean colour and deviation of the light, of the five photographs that the reference takes crops from
    (0.305, 0.582, 0.646, 0.059),
    (0.775, 0.792, 0.829, 0.076),
    (0.776, 0.793, 0.829, 0.076),
    (0.566, 0.624, 0.675, 0.102),
    (0.391, 0.436, 0.483, 0.135),
)


def snow(
    images: Tensor,
    dice: Dice,
    level: float,
    deviation: float,
    zoom: float,
    threshold: float,
    radius: float,
    fall: float,
    keep: float,
) -> Tensor:
    """Flakes, drawn out as they fall, on a whitened picture; once more turned by half a circle."""
    height, width = images.shape[-2:]
    flakes = zoomed(level + deviation * dice.normal(1, height, width), zoom)
    flakes = torch.where(flakes < threshold, 0.0, flakes).clamp(0, 1)
    layer = trail(flakes.to(images), int(radius), fall, -135 + 90 * dice.uniform())
    layer = ((layer * 255).round() / 255)[..., :height, :width]
    pale = torch.maximum(images, 1.5 * grey(images) + 0.5)
    return keep * images + (1 - keep) * pale + layer + layer.flip(2, 3)


def frost(images: Tensor, dice: Dice, keep: float, ice: float) -> Tensor:
    """`keep` of the picture and so much ice."""
    return keep * images + ice * icy(images, dice)


def icy(images: Tensor, dice: Dice) -> Tensor:
    """Ice on glass: ridges and crystals of every size, with colour, deviation and grain of one of the photographs."""
    which = (len(ICE) * dice.uniform(1)).long().squeeze(1)
    table = images.new_tensor(ICE)[which]
    colour = table[:, :3] + 0.03 * dice.normal(1).to(images)
    place = colour[:, :, None, None] if images.shape[1] == 3 else grey(colour[:, :, None, None])
    light = fractal(dice, images, 0.95) + 0.5 * (1 - (2 * fractal(dice, images, 0.8) - 1).abs())
    light = (light - light.mean((2, 3), keepdim=True)) / light.std((2, 3), keepdim=True).clamp(min=1e-6)
    return (place + table[:, 3, None, None, None] * light).clamp(0, 1)


def fog(images: Tensor, dice: Dice, strength: float, decay: float) -> Tensor:
    """Light from drifting clouds is added and the whole is darkened to the range that it had."""
    brightest = images.amax((1, 2, 3), keepdim=True)
    side = 1 << (max(images.shape[-2:]) - 1).bit_length()
    clouds = plasma(dice, side, decay)[:, None, : images.shape[2], : images.shape[3]].to(images)
    return (images + strength * clouds) * brightest / (brightest + strength)


def plasma(dice: Dice, side: int, decay: float) -> Tensor:
    """The diamond-square fractal in [0, 1], periodic, N x side x side; the side is a power of two."""
    corner = dice.uniform(1, 1)[:, :1, :1] * 0  # zeros, one picture each
    total = corner.repeat(1, side, side)
    step, wobble = side, 100.0
    while step >= 2:
        half = step // 2

        def around(sums: Tensor, wobble: float = wobble) -> Tensor:
            return sums / 4 + wobble * wobble * (2 * dice.uniform(*sums.shape[1:]) - 1)

        corners = total[:, ::step, ::step]
        squares = corners + corners.roll(-1, 1)
        total[:, half::step, half::step] = around(squares + squares.roll(-1, 2))
        middles = total[:, half::step, half::step]
        down = middles + middles.roll(1, 1)
        right = corners + corners.roll(-1, 2)
        total[:, ::step, half::step] = around(down + right)
        across = middles + middles.roll(1, 2)
        upright = corners + corners.roll(-1, 1)
        total[:, half::step, ::step] = around(across + upright)
        step, wobble = half, wobble / decay
    total = total - total.amin((1, 2), keepdim=True)
    return total / total.amax((1, 2), keepdim=True)


def spatter(
    images: Tensor, dice: Dice, level: float, deviation: float, width: float, threshold: float, by: float, mud: float
) -> Tensor:
    """Drops on the lens: of pale water that catches the light at its rim, or of brown mud."""
    liquid = gaussian(level + deviation * dice.normal(1, *images.shape[-2:]), width)
    if mud:
        cover = gaussian((liquid > threshold).float(), by)
        cover = torch.where(cover < 0.8, 0.0, cover).to(images)
        return images * (1 - cover) + cover * tint(images, MUD)
    levels = (torch.where(liquid < threshold, 0.0, liquid) * 255).floor()
    shine = torch.stack([torch.from_numpy(_shine(each[0].cpu().numpy())) for each in levels])[:, None].to(images)
    drops = levels.to(images) * shine
    drops = by * drops / drops.amax((2, 3), keepdim=True).clamp(min=1e-6)
    return images + drops * tint(images, WATER)


def _shine(levels: NDArray[np.float32]) -> NDArray[np.float32]:
    """How bright water is: by the distance from the rim of a drop, spread over all levels, as in relief."""
    wet = levels > 0
    rim = wet & ~ndimage.binary_erosion(wet, border_value=1)
    if not rim.any():
        return np.zeros_like(levels)
    distance = np.minimum(ndimage.distance_transform_edt(~rim), 20.0)
    shades = _box(distance).astype(np.uint8)
    counts = np.bincount(shades.ravel(), minlength=256)
    first = counts[counts > 0][0]
    table = np.round((counts.cumsum() - first) * 255.0 / max(1, shades.size - first)).clip(0, 255)
    relief = ndimage.correlate(table[shades], np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]]), mode="mirror")
    found: NDArray[np.float32] = _box(relief.clip(0, 255)).round().astype(np.float32)
    return found


def _box(values: NDArray[np.floating]) -> NDArray[np.floating]:
    """The mean of 3 x 3 pixels."""
    found: NDArray[np.floating] = ndimage.uniform_filter(values.astype(np.float64), 3, mode="mirror")
    return found
