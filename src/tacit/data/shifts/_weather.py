"""Weather: snow, frost, fog, light, and drops on the lens. All textures are drawn, none is read from a file."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tacit.data.shifts._dice import Dice
from tacit.data.shifts._tools import fractal, grain, scale, streak

ICE = (0.82, 0.93, 1.0)  # a little blue
WATER = (0.69, 0.93, 0.93)


def snow(images: Tensor, dice: Dice, flakes: float, veil: float) -> Tensor:
    """Flakes on this share of the picture, drawn out as they fall, and a white veil of this strength."""
    fall = grain(dice, images, 0.6) - quantile(1 - flakes)
    angle = (0.25 + 0.5 * dice.uniform()) * math.pi  # steeply downwards
    layer = streak(fall.clamp(0, 1), 3.0 * scale(images), angle)
    pale = torch.maximum(images, 0.5 + 0.5 * grey(images))
    return images + veil * (pale - images) + 1.5 * layer


def frost(images: Tensor, dice: Dice, keep: float, ice: float) -> Tensor:
    """Ice on the lens: `keep` of the picture and this much ice, which grows in ridges from the rim."""
    crystals = (1 - (2 * fractal(dice, images, 0.6) - 1).abs()).pow(3)
    cover = fractal(dice, images, 0.5)
    texture = (0.3 * cover + 0.8 * crystals * (0.4 + 0.6 * cover) + 0.3 * rim(images)).clamp(0, 1)
    return keep * images + ice * texture * tint(images, ICE)


def fog(images: Tensor, dice: Dice, strength: float, decay: float) -> Tensor:
    """Light from drifting clouds is added and the whole is darkened to the range that it had."""
    brightest = images.amax((1, 2, 3), keepdim=True)
    return (images + strength * fractal(dice, images, decay)) * brightest / (brightest + strength)


def brightness(images: Tensor, dice: Dice, lift: float) -> Tensor:  # noqa: ARG001
    """Lift the value (the largest channel) by this much; hue and saturation stay."""
    value = images.amax(1, keepdim=True)
    lifted = (value + lift).clamp(max=1)
    return torch.where(value > 0, images * lifted / value.clamp(min=1e-6), lifted.expand_as(images))


def spatter(images: Tensor, dice: Dice, drops: float, opacity: float) -> Tensor:
    """Drops of pale water that cover about this share of the picture."""
    wet = (grain(dice, images, 1.2) - quantile(1 - drops)) * 4 + 0.5  # soft at the edge of a drop
    cover = opacity * wet.clamp(0, 1)
    return images + cover * (tint(images, WATER) - images)


def quantile(share: float) -> float:
    """The value below which this share of standard normal draws lies."""
    return math.sqrt(2) * torch.erfinv(torch.tensor(2 * share - 1)).item()


def grey(images: Tensor) -> Tensor:
    """The light that the eye sees (ITU-R BT.601), N x 1 x H x W."""
    if images.shape[1] == 1:
        return images
    return (images * images.new_tensor((0.299, 0.587, 0.114)).view(1, 3, 1, 1)).sum(1, keepdim=True)


def tint(images: Tensor, colour: tuple[float, float, float]) -> Tensor:
    """A colour that fits the channels of the images: on grey ones its light."""
    wanted = images.new_tensor(colour).view(1, 3, 1, 1)
    return wanted if images.shape[1] == 3 else grey(wanted)


def rim(images: Tensor) -> Tensor:
    """0 in the middle of the picture, 1 at its corners."""
    down, right = (torch.linspace(-1, 1, side, dtype=images.dtype, device=images.device) for side in images.shape[-2:])
    return (down[:, None].square() + right[None, :].square()) / 2
