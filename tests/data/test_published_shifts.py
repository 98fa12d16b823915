"""The published strengths: against frozen statistics of the reference implementation, and what can be computed by hand.

`imagecorruptions.json` holds, for three pictures of 224 x 224 (`photographs` of `test_shifts`), the mean PSNR and SSIM
between picture and copy under the package imagecorruptions 1.1.2 (numpy 2.4, scikit-image 0.26, OpenCV 5.0; over 30
draws of the random weather, one of glass blur, three of the others).
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage
from torch import Tensor

from tacit.data import streams
from tacit.data.shifts import EXTRA, TEST, corrupt
from tacit.data.shifts import _published_blur as blur
from tacit.data.shifts import _published_digital as digital
from tacit.data.shifts import _published_weather as weather
from tacit.data.shifts._dice import Dice
from tacit.data.shifts._published_strengths import CIFAR_C, IMAGENET_C

from .test_shifts import photographs

ALL = TEST + EXTRA
REFERENCE = json.loads((Path(__file__).parent / "imagecorruptions.json").read_text())
# dB and SSIM. The reference cuts off to whole levels where copies here are rounded: visible in the mildest blurs. Ice
# is drawn here and photographed there; the rim of a drop is found in another way.
BANDS = {"gaussian_blur": (0.8, 0.01), "defocus_blur": (0.7, 0.01), "fog": (0.8, 0.03), "frost": (1.5, 0.1)}
BANDS |= {"spatter": (2.0, 0.04), "snow": (0.4, 0.02), "motion_blur": (0.4, 0.02), "elastic_transform": (0.4, 0.02)}
RANDOM = {"fog": 6, "frost": 6, "snow": 3, "spatter": 6, "motion_blur": 2, "elastic_transform": 3}  # how many copies


def psnr(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    return float(10 * np.log10(255**2 / ((one - other) ** 2).mean()))


def ssim(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Structural similarity of the light, with the uniform 7 x 7 window."""
    x, y = (each @ np.array([0.299, 0.587, 0.114]) for each in (one, other))
    mean_x, mean_y = ndimage.uniform_filter(x, 7), ndimage.uniform_filter(y, 7)
    var_x = ndimage.uniform_filter(x * x, 7) - mean_x**2
    var_y = ndimage.uniform_filter(y * y, 7) - mean_y**2
    shared = ndimage.uniform_filter(x * y, 7) - mean_x * mean_y
    one, two = 2.55**2, 7.65**2
    found = (2 * mean_x * mean_y + one) * (2 * shared + two)
    return float((found / ((mean_x**2 + mean_y**2 + one) * (var_x + var_y + two))).mean())


def levels(images: Tensor) -> NDArray[np.float64]:
    return images.permute(0, 2, 3, 1).double().numpy()


@pytest.mark.parametrize("name", ALL)
def test_copies_are_as_far_from_the_picture_as_those_of_the_reference(name: str) -> None:
    images = (photographs(3, 3, 224) * 255).round().to(torch.uint8)
    decibels, structure = BANDS.get(name, (0.3, 0.015))
    for severity, told in REFERENCE[name].items():
        seeds = range(RANDOM.get(name, 1))
        copies = [corrupt(images, name, int(severity), seed=seed, strengths="imagenet-c") for seed in seeds]
        pairs = [(x, y) for copy in copies for x, y in zip(levels(images), levels(copy), strict=True)]
        assert np.mean([psnr(x, y) for x, y in pairs]) == pytest.approx(told["psnr"], abs=decibels), severity
        assert np.mean([ssim(x, y) for x, y in pairs]) == pytest.approx(told["ssim"], abs=structure), severity


@pytest.mark.parametrize("name", ALL)
def test_small_pictures_of_any_kind_get_the_strengths_of_cifar_c(name: str) -> None:
    images = photographs(6, 3, 32)
    copies = [corrupt(images, name, severity, seed=1, strengths="cifar-c") for severity in range(1, 6)]
    distance = [(copy - images).square().mean().item() for copy in copies]
    assert all(copy.shape == images.shape and copy.isfinite().all() for copy in copies)
    assert min(distance) > 1e-7
    if name not in ("saturate", "elastic_transform", "spatter"):  # whose severities differ in kind
        assert distance[4] > distance[0], distance
    grey = corrupt(photographs(2, 1, 28), name, 5, seed=1, strengths="cifar-c")
    assert grey.shape == (2, 1, 28, 28)
    assert grey.isfinite().all()


@pytest.mark.parametrize("name", ALL)
def test_published_copies_depend_on_the_seed_and_the_own_picture_alone(name: str) -> None:
    images = photographs(5, 3, 32)
    alone = corrupt(images[:2], name, 4, seed=9, strengths="cifar-c")
    among = corrupt(images, name, 4, seed=9, strengths="cifar-c")
    torch.testing.assert_close(among[:2], alone, atol=1e-5, rtol=0)
    broken = images.clone()
    broken[1] = torch.nan
    beside = corrupt(broken, name, 4, seed=9, strengths="cifar-c")
    torch.testing.assert_close(beside[[0, 2, 3, 4]], among[[0, 2, 3, 4]], atol=1e-5, rtol=0)


def test_both_tables_have_five_severities_of_every_shift() -> None:
    for table in (IMAGENET_C, CIFAR_C):
        assert set(table) == set(ALL)
        assert all(len(each) == 5 for each in table.values())


def test_gaussian_blur_is_that_of_scipy_with_either_edge() -> None:
    image = torch.rand(1, 1, 30, 41, dtype=torch.float64)
    for edge, mode in (("replicate", "nearest"), ("mirror", "reflect")):
        for sigma, truncate in ((0.3, 4.0), (1.7, 4.0), (6.0, 3.0)):
            ours = blur.gaussian(image, sigma, truncate=truncate, edge=edge)[0, 0].numpy()
            theirs = ndimage.gaussian_filter(image[0, 0].numpy(), sigma, mode=mode, truncate=truncate)
            np.testing.assert_allclose(ours, theirs, atol=1e-12)


def test_pixelate_is_pillows_box_and_nearest() -> None:
    image = torch.randint(0, 256, (1, 3, 50, 61), dtype=torch.uint8)
    for severity, (share,) in enumerate(CIFAR_C["pixelate"], start=1):
        picture = Image.fromarray(image[0].permute(1, 2, 0).numpy())
        small = picture.resize((int(61 * share), int(50 * share)), Image.Resampling.BOX)
        wanted = np.asarray(small.resize((61, 50), Image.Resampling.NEAREST)).astype(int)
        found = corrupt(image, "pixelate", severity, seed=0, strengths="cifar-c")[0].permute(1, 2, 0).numpy()
        assert (np.abs(found.astype(int) - wanted) <= 1).mean() > 0.97  # a place half way between two may go to either


def test_saturation_is_that_of_the_colour_wheel() -> None:
    import colorsys

    pixels = torch.rand(1, 3, 28, 28, dtype=torch.float64)
    pixels[..., 0] = 0.4  # grey ones
    found = digital.saturate(pixels, Dice(0, "x", pixels), 2.0, 0.1)
    for row, column in ((3, 5), (10, 20), (4, 0)):
        hue, saturation, value = colorsys.rgb_to_hsv(*pixels[0, :, row, column].tolist())
        wanted = colorsys.hsv_to_rgb(hue, min(1.0, 2 * saturation + 0.1), value)
        np.testing.assert_allclose(found[0, :, row, column].numpy(), wanted, atol=1e-12)


def test_pixels_behind_frosted_glass_take_colours_from_at_most_two_rounds_away() -> None:
    places = torch.arange(30 * 40, dtype=torch.float32).view(1, 1, 30, 40).repeat(2, 3, 1, 1)
    found = blur.scattered(places, Dice(0, "x", places), 2, 1)
    assert found[:, 0].equal(found[:, 2])
    assert not found[0].equal(found[1])
    assert found[..., :2, :].equal(places[..., :2, :])  # the reference leaves a rim as it is
    slow = places[0, 0].clone()
    draws = (Dice(0, "x", places).uniform(2, 30, 40)[0] * 4).floor().long() - 2
    for row in range(28, 2, -1):
        for column in range(38, 2, -1):
            slow[row, column] = slow[row + draws[0, row, column], column + draws[1, row, column]]
    assert found[0, 0].equal(slow)


def test_clouds_are_periodic_plasma_between_zero_and_one() -> None:
    images = torch.zeros(3, 1, 28, 28)
    clouds = weather.plasma(Dice(0, "x", images), 32, 2.0)
    assert clouds.shape == (3, 32, 32)
    assert clouds.amin((1, 2)).eq(0).all()
    assert clouds.amax((1, 2)).eq(1).all()
    assert not clouds[0].equal(clouds[1])
    around = (clouds - clouds.roll(1, 2)).abs()
    assert around[..., 0].mean() < 3 * around[..., 1:].mean()  # no seam


def test_streams_take_the_published_strengths_and_unknown_ones_are_refused() -> None:
    images, labels = (photographs(8, 3, 32) * 255).to(torch.uint8), torch.arange(8)
    stream = streams.corrupted(images, labels, shifts=("fog",), per_shift=8, strengths="cifar-c")
    batch = next(stream.batches(8))
    wanted = corrupt(images[stream.rows[0]], "fog", 3, seed=0, strengths="cifar-c")
    torch.testing.assert_close(batch.images, wanted.float() / 255)
    with pytest.raises(ValueError, match="one of clothes, imagenet-c, cifar-c, not 'coco'"):
        corrupt(images, "fog", 3, seed=0, strengths="coco")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not 'coco'"):
        streams.corrupted(images, labels, shifts=("clean",), per_shift=8, strengths="coco")  # type: ignore[arg-type]
