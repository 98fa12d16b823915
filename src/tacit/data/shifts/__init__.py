"""Shifts of pictures: the 15 test corruptions of ImageNet-C and CIFAR-C and the 4 extra ones, made here and now.

They follow the published families (Hendrycks and Dietterich, 2019) in forms and strengths: those of ImageNet-C, those
of CIFAR-C, or others that are graded for small pictures of clothes. For the published files themselves see
`tacit.data.published`.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import Literal, get_args

import torch
from torch import Tensor

from tacit.data.shifts import _blur as blur
from tacit.data.shifts import _digital as digital
from tacit.data.shifts import _jpeg as jpeg
from tacit.data.shifts import _noise as noise
from tacit.data.shifts import _published_blur, _published_digital, _published_weather
from tacit.data.shifts import _weather as weather
from tacit.data.shifts._dice import Dice
from tacit.data.shifts._published_strengths import CIFAR_C, IMAGENET_C
from tacit.data.shifts._strengths import STRENGTHS

__all__ = ["EXTRA", "SMALLEST", "TEST", "Strengths", "check", "check_images", "corrupt"]

Strengths = Literal["clothes", "imagenet-c", "cifar-c"]
"""Whose forms and strengths: graded on clothes and scaled with the picture, or published, in pixels of the picture."""

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

_PUBLISHED: dict[str, Callable[..., Tensor]] = _MAKERS | {
    "defocus_blur": _published_blur.defocus_blur,
    "glass_blur": _published_blur.glass_blur,
    "motion_blur": _published_blur.motion_blur,
    "zoom_blur": _published_blur.zoom_blur,
    "snow": _published_weather.snow,
    "frost": _published_weather.frost,
    "fog": _published_weather.fog,
    "elastic_transform": _published_digital.elastic_transform,
    "pixelate": _published_digital.pixelate,
    "gaussian_blur": _published_blur.gaussian_blur,
    "spatter": _published_weather.spatter,
    "saturate": _published_digital.saturate,
}

_GRADES = {"clothes": (_MAKERS, STRENGTHS), "imagenet-c": (_PUBLISHED, IMAGENET_C), "cifar-c": (_PUBLISHED, CIFAR_C)}

TEST = tuple(_MAKERS)[:15]
"""The 15 corruptions to report on, in the order of the published tables."""

EXTRA = tuple(_MAKERS)[15:]
"""The 4 corruptions to tune on: none of them is reported on."""

SMALLEST = 28


def corrupt(images: Tensor, name: str, severity: int, *, seed: int, strengths: Strengths = "clothes") -> Tensor:
    """A shifted copy of pictures, of the same shape and dtype.

    Each picture has a generator of its own, made from the seed, the name and its position, so its copy does not depend
    on the pictures beside it, and the global generator is not touched. A picture with NaN leaves the others alone.

    Args:
        images: N x C x H x W with one or three channels: uint8, or floats in [0, 1].
        name: One of `TEST` or `EXTRA`.
        severity: 1 to 5.
        seed: Of the random parts.
        strengths: "imagenet-c" (published, for 224 x 224 pixels), "cifar-c" (published, for 32 x 32) or "clothes"
            (graded on Fashion-MNIST; lengths grow with the picture).

    Returns:
        The copy.

    Raises:
        ValueError: There is no such shift, severity or grade, or the images are none.
    """
    check(name, severity, strengths)
    check_images(images)
    if not len(images):
        return images.clone()
    values = images.float() / 255 if images.dtype == torch.uint8 else images.float()
    makers, table = _GRADES[strengths]
    shifted = makers[name](values, Dice(seed, name, images), *table[name][severity - 1]).clamp(0, 1)
    return (shifted * 255).round().to(torch.uint8) if images.dtype == torch.uint8 else shifted.to(images.dtype)


def check(name: str, severity: int, strengths: str = "clothes") -> None:
    """Refuse a shift that does not exist, naming the nearest one, a severity other than 1 to 5, and other grades."""
    if name not in _MAKERS:
        near = get_close_matches(str(name), _MAKERS, n=1, cutoff=0.0)[0]
        raise ValueError(f"There is no shift {name!r}; did you mean {near!r}? All of them: {', '.join(_MAKERS)}.")
    if isinstance(severity, bool) or not isinstance(severity, int) or not 1 <= severity <= 5:
        raise ValueError(f"The severity is {severity!r}, but severities are whole numbers from 1 to 5.")
    if strengths not in _GRADES:
        raise ValueError(f"`strengths` is one of {', '.join(get_args(Strengths))}, not {strengths!r}.")


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
