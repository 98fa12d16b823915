"""What software does to a picture: tone, shape and resolution."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from tacit.data.shifts._dice import Dice
from tacit.data.shifts._tools import grain, scale, warp
from tacit.data.shifts._weather import grey


def contrast(images: Tensor, dice: Dice, factor: float) -> Tensor:  # noqa: ARG001
    """Pull every channel towards its mean over the picture."""
    mean = images.mean((2, 3), keepdim=True)
    return mean + factor * (images - mean)


def saturate(images: Tensor, dice: Dice, factor: float) -> Tensor:  # noqa: ARG001
    """Push every pixel away from its own grey: colours grow garish.

    A grey picture has no colour. There the same factor pushes away from the picture's mean tone, so that light and
    dark run into their ends as overdriven colours do.
    """
    middle = grey(images) if images.shape[1] == 3 else images.mean((2, 3), keepdim=True)
    return middle + factor * (images - middle)


def elastic_transform(images: Tensor, dice: Dice, stretch: float, width: float) -> Tensor:
    """Rubber: every place moves by about `stretch` pixels, together with its neighbours up to `width` away."""
    down, right = (stretch * scale(images) * grain(dice, images, width)[:, 0] for _ in range(2))
    return warp(images, down, right)


def pixelate(images: Tensor, dice: Dice, block: float) -> Tensor:  # noqa: ARG001
    """Squares of about `block` pixels, each of its mean colour."""
    size = images.shape[-2:]
    coarse = [max(1, round(side / (block * scale(images)))) for side in size]
    small = functional.interpolate(images, size=coarse, mode="area")
    return functional.interpolate(small, size=size, mode="nearest-exact")
