"""Shifts of pictures: the 15 test corruptions of ImageNet-C and CIFAR-C and the 4 extra ones, made here and now.

They follow the published families (Hendrycks and Dietterich, 2019) but not their code or their exact strengths: those
here are graded for small pictures. For the published files themselves see `tacit.data.published`.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

import torch
from torch import Tensor

from tacit.data.shifts import _blur as blur
from tacit.data.shifts import _digital as digital
from tacit.data.shifts import _jpeg as jpeg
from tacit.data.shifts import _noise as noise
from tacit.data.shifts import _weather as weather
from tacit.data.shifts._dice import Dice
from tacit.data.shifts._strengths import STRENGTHS

__all__ = ["EXTRA", "SMALLEST", "TEST", "check", "check_images", "corrupt"]

_MAKERS: dict[str, Callable[..., Tensor]] = {
    "gaussian_noise": noise.gaussian_noise,
    "shot_noise": noise.shot_noise,
    "impulse_noise": noise.impulse_noise,
    "defocus_blur": blur.defocus_blur,
    "glass_blur": blur.glass_blur,
    "motion_blur": blur.motion_blur,
    "zoom_blur": blur.zoom_blur,
    "snow": weather.snow,
    "frost": weather.frost,
    "fog": weather.fog,
    "brightness": weather.brightness,
    "contrast": digital.contrast,
    "elastic_transform": digital.elastic_transform,
    "pixelate": digital.pixelate,
    "jpeg_compression": jpeg.jpeg_compression,
    "speckle_noise": noise.speckle_noise,
    "gaussian_blur": blur.gaussian_blur,
    "spatter": weather.spatter,
    "saturate": digital.saturate,
}

TEST = tuple(_MAKERS)[:15]
"""The 15 corruptions to report on, in the order of the published tables."""

EXTRA = tuple(_MAKERS)[15:]
"""The 4 corruptions to tune on: none of them is reported on."""

SMALLEST = 28


def corrupt(images: Tensor, name: str, severity: int, *, seed: int) -> Tensor:
    """A shifted copy of pictures, of the same shape and dtype.

    `images` is N x C x H x W with one or three channels: uint8, or floats in [0, 1]. Each picture has a generator of
    its own, made from the seed, the name and its position, so its copy does not depend on the pictures beside it, and
    the global generator is not touched. A picture with NaN leaves the others alone.
    """
    check(name, severity)
    check_images(images)
    if not len(images):
        return images.clone()
    values = images.float() / 255 if images.dtype == torch.uint8 else images.float()
    shifted = _MAKERS[name](values, Dice(seed, name, images), *STRENGTHS[name][severity - 1]).clamp(0, 1)
    return (shifted * 255).round().to(torch.uint8) if images.dtype == torch.uint8 else shifted.to(images.dtype)


def check(name: str, severity: int) -> None:
    """Refuse a shift that does not exist, naming the nearest one, and a severity other than 1 to 5."""
    if name not in _MAKERS:
        near = get_close_matches(str(name), _MAKERS, n=1, cutoff=0.0)[0]
        raise ValueError(f"There is no shift {name!r}; did you mean {near!r}? All of them: {', '.join(_MAKERS)}.")
    if isinstance(severity, bool) or not isinstance(severity, int) or not 1 <= severity <= 5:
        raise ValueError(f"The severity is {severity!r}, but severities are whole numbers from 1 to 5.")


def check_images(images: Tensor) -> None:
    """Refuse what `corrupt` cannot take."""
    if not isinstance(images, Tensor):
        raise ValueError(f"Images are a torch tensor, not {type(images).__name__}.")
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        raise ValueError(f"Images are N x C x H x W with 1 or 3 channels, not of shape {tuple(images.shape)}.")
    if min(images.shape[-2:]) < SMALLEST:
        size = " x ".join(map(str, images.shape[-2:]))
        raise ValueError(f"Images of {size} pixels are too small: the shifts need {SMALLEST} x {SMALLEST}.")
    if images.dtype == torch.uint8:
        return
    if not images.is_floating_point():
        raise ValueError(f"Images are uint8 or floats in [0, 1], not {images.dtype}.")
    if ((images < -1e-4) | (images > 1 + 1e-4)).any():
        raise ValueError("Float images lie in [0, 1], these do not: divide by 255, or give uint8.")
