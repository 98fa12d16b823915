"""Shifts: the same for a seed, graded by severity, and each of them what its name says."""

import io
import math
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tacit.data import fashion_mnist
from tacit.data.shifts import EXTRA, TEST, corrupt
from tacit.data.shifts import _blur as blur
from tacit.data.shifts import _jpeg as jpeg
from tacit.data.shifts import _noise as noise
from tacit.data.shifts import _tools as tools
from tacit.data.shifts import _weather as weather
from tacit.data.shifts._dice import Dice
from tacit.data.shifts._strengths import STRENGTHS

ALL = TEST + EXTRA


@cache
def photographs(count: int, channels: int, side: int) -> Tensor:
    """Something with edges, flat parts, colours and detail at every size: clothes, resized and put in layers."""
    clothes = fashion_mnist("test")[0][: count * channels].reshape(count, channels, 28, 28).float() / 255
    if side != 28:
        clothes = torch.nn.functional.interpolate(clothes, size=(side, side), mode="bilinear", antialias=True)
    return 0.05 + 0.8 * clothes


def test_the_names_and_their_order_are_the_published_ones() -> None:
    order = (
        "gaussian_noise shot_noise impulse_noise defocus_blur glass_blur motion_blur zoom_blur snow frost fog "
        "brightness contrast elastic_transform pixelate jpeg_compression"
    )
    assert " ".join(TEST) == order
    assert EXTRA == ("speckle_noise", "gaussian_blur", "spatter", "saturate")
    assert set(ALL) == set(STRENGTHS)
    assert all(len(levels) == 5 for levels in STRENGTHS.values())


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("channels", "side"), [(1, 28), (3, 32), (1, 64), (3, 64)])
def test_distance_from_the_clean_picture_grows_with_severity(name: str, channels: int, side: int) -> None:
    images = photographs(12, channels, side)
    shifted = [corrupt(images, name, severity, seed=3) for severity in range(1, 6)]
    distances = [(copy - images).square().mean().item() for copy in shifted]
    assert distances[0] > 1e-5
    assert all(low < high for low, high in pairwise(distances)), distances
    for copy in shifted:
        assert copy.shape == images.shape
        assert copy.min() >= 0
        assert copy.max() <= 1


@pytest.mark.parametrize("name", ALL)
def test_a_seed_decides_everything_and_the_global_generator_nothing(name: str) -> None:
    images = fashion_mnist("test")[0][:6]
    kept = images.clone()
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = corrupt(images, name, 4, seed=5)
    assert torch.get_rng_state().equal(state)
    torch.manual_seed(1)
    assert corrupt(images, name, 4, seed=5).equal(first)
    assert images.equal(kept)
    assert first.dtype == torch.uint8
    random = {*TEST, *EXTRA} - {"defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression"}
    random -= {"gaussian_blur", "saturate"}
    assert corrupt(images, name, 4, seed=6).equal(first) == (name not in random)


@pytest.mark.parametrize("name", ALL)
def test_a_picture_does_not_depend_on_those_beside_it(name: str) -> None:
    images = photographs(7, 3, 32)
    alone, among = corrupt(images[:2], name, 3, seed=9), corrupt(images, name, 3, seed=9)
    torch.testing.assert_close(among[:2], alone, atol=1e-5, rtol=0)
    broken = images.clone()
    broken[1] = math.nan
    beside = corrupt(broken, name, 3, seed=9)
    torch.testing.assert_close(beside[[0, 2, 3, 4, 5, 6]], among[[0, 2, 3, 4, 5, 6]], atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_dtype_stays_and_eight_bits_mean_the_same_as_floats(dtype: torch.dtype) -> None:
    eight = fashion_mnist("test")[0][:3]
    images = eight if dtype == torch.uint8 else (eight.double() / 255).to(dtype)
    shifted = corrupt(images, "fog", 3, seed=0)
    assert shifted.dtype == dtype
    level = shifted.double() if dtype == torch.uint8 else shifted.double() * 255
    tolerance = {torch.float16: 0.6, torch.bfloat16: 2.0}.get(dtype, 0.51)
    exact = corrupt(eight.double() / 255, "fog", 3, seed=0) * 255
    assert (level - exact).abs().max() <= tolerance


@pytest.mark.parametrize("name", ALL)
def test_no_rows_and_pictures_that_are_not_square_are_fine(name: str) -> None:
    assert corrupt(torch.zeros(0, 1, 28, 28), name, 3, seed=0).shape == (0, 1, 28, 28)
    assert corrupt(torch.rand(2, 3, 31, 45), name, 5, seed=0).shape == (2, 3, 31, 45)
    assert corrupt(torch.zeros(1, 1, 28, 28), name, 5, seed=0).isfinite().all()


@pytest.mark.parametrize(
    ("images", "name", "severity", "message"),
    [
        (torch.zeros(1, 1, 28, 28), "gausian_noise", 3, "did you mean 'gaussian_noise'"),
        (torch.zeros(1, 1, 28, 28), "FOG", 3, "There is no shift 'FOG'"),
        (torch.zeros(1, 1, 28, 28), "fog", 0, "from 1 to 5"),
        (torch.zeros(1, 1, 28, 28), "fog", 6, "from 1 to 5"),
        (torch.zeros(1, 1, 28, 28), "fog", 2.0, "from 1 to 5"),
        (torch.zeros(1, 1, 28, 28), "fog", True, "from 1 to 5"),
        (torch.zeros(1, 28, 28), "fog", 3, r"not of shape \(1, 28, 28\)"),
        (torch.zeros(1, 2, 28, 28), "fog", 3, "1 or 3 channels"),
        (torch.zeros(1, 1, 28, 27), "fog", 3, "28 x 27 pixels are too small"),
        (torch.zeros(1, 1, 28, 28, dtype=torch.int64), "fog", 3, "not torch.int64"),
        (torch.full((1, 1, 28, 28), 255.0), "fog", 3, "divide by 255"),
        (torch.full((1, 1, 28, 28), -1.0), "fog", 3, r"lie in \[0, 1\]"),
        (np.zeros((1, 1, 28, 28)), "fog", 3, "a torch tensor, not ndarray"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(images: Tensor, name: str, severity: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        corrupt(images, name, severity, seed=0)


# What each of them is, against what is known about it. The statistical bounds lie six standard errors out: a false
# alarm has a chance below 1e-8, and the seeds are fixed.


def flat(level: float, count: int = 20, side: int = 64) -> Tensor:
    return torch.full((count, 1, side, side), level)


@pytest.mark.parametrize("level", [0.2, 0.5])
def test_shot_noise_has_the_variance_of_counted_light(level: float) -> None:
    images = flat(level)
    photons = 60.0
    counts = noise.shot_noise(images, Dice(0, "x", images), photons) * photons
    torch.testing.assert_close(counts, counts.round(), atol=1e-4, rtol=0)
    rate, size = level * photons, counts.numel()
    assert abs(counts.mean().item() - rate) < 6 * math.sqrt(rate / size)
    assert abs(counts.var().item() - rate) < 6 * rate * math.sqrt(2 / size + 1 / (rate * size))


def test_gaussian_and_speckle_noise_have_the_deviation_of_the_table() -> None:
    for name, level, factor in (("gaussian_noise", 0.5, 1.0), ("speckle_noise", 0.4, 0.4)):
        wanted = STRENGTHS[name][0][0] * factor
        shifted = corrupt(flat(level), name, 1, seed=0)
        assert abs(shifted.std().item() / wanted - 1) < 6 / math.sqrt(2 * shifted.numel())
        assert abs(shifted.mean().item() - level) < 6 * wanted / math.sqrt(shifted.numel())


def test_impulse_noise_hits_the_share_of_the_table_half_black_half_white() -> None:
    for severity, (share,) in enumerate(STRENGTHS["impulse_noise"], start=1):
        shifted = corrupt(flat(0.5), "impulse_noise", severity, seed=0)
        bound = 6 * math.sqrt(share / 2 / shifted.numel())
        assert abs((shifted == 0).float().mean().item() - share / 2) < bound
        assert abs((shifted == 1).float().mean().item() - share / 2) < bound
        assert ((shifted == 0.5) | (shifted == 0) | (shifted == 1)).all()


@pytest.mark.parametrize("side", [32, 64])
def test_gaussian_blur_of_a_point_is_the_bell_whose_width_follows_the_side(side: int) -> None:
    image = torch.zeros(1, 1, side + 1, side)  # the shorter side decides
    image[0, 0, side // 2, side // 2] = 1
    sigma = STRENGTHS["gaussian_blur"][1][0] * side / 32
    places = np.arange(side) - side // 2
    bell = np.exp(-(places**2) / (2 * sigma**2))
    expected = np.outer(bell, bell) / bell.sum() ** 2
    shifted = corrupt(image, "gaussian_blur", 2, seed=0)[0, 0, :side].numpy()
    np.testing.assert_allclose(shifted, expected, atol=2e-4 * expected.max())


def test_defocus_of_a_point_is_a_round_disc_of_the_radius() -> None:
    kernel = blur.disc(3.0)
    assert kernel.sum().item() == pytest.approx(1)
    assert kernel.equal(kernel.T)
    assert kernel.equal(kernel.flip(0))
    area = 1 / kernel.max().item()  # inside, all weights are the same
    assert area == pytest.approx(math.pi * 9, rel=0.05)


def test_blurs_keep_the_light_of_a_point_far_from_the_rim() -> None:
    image = torch.zeros(1, 1, 64, 64)
    image[0, 0, 32, 32] = 1
    for name in ("defocus_blur", "motion_blur", "gaussian_blur", "glass_blur"):
        assert corrupt(image, name, 3, seed=1).sum().item() == pytest.approx(1, abs=0.02), name


def test_motion_blur_spreads_along_one_line_of_the_length() -> None:
    image = torch.zeros(1, 1, 64, 64)
    image[0, 0, 32, 32] = 1
    weights = tools.streak(image, 8.0, torch.tensor([0.0]))[0, 0]
    assert weights[:32].sum() + weights[33:].sum() == pytest.approx(0, abs=1e-6)
    torch.testing.assert_close(weights[32, 28:37], torch.full((9,), 1 / 9), atol=1e-5, rtol=0)
    upright = tools.streak(image, 8.0, torch.tensor([math.pi / 2]))[0, 0]
    torch.testing.assert_close(upright, weights.T, atol=1e-5, rtol=0)


def test_zoom_blur_leaves_the_middle_and_moves_the_rim() -> None:
    image = torch.zeros(1, 1, 33, 33)
    image[0, 0, 16, 16] = image[0, 0, 16, 24] = 1
    shifted = corrupt(image, "zoom_blur", 3, seed=0)[0, 0]
    assert shifted[16, 17:24].max() < shifted[16, 25:].max()  # outwards only
    middle = corrupt(torch.full((1, 3, 32, 32), 0.3), "zoom_blur", 5, seed=0)
    torch.testing.assert_close(middle, torch.full_like(middle, 0.3))


@pytest.mark.parametrize("reach", [1, 2, 3])
def test_traded_pixels_are_all_still_there_and_not_far(reach: int) -> None:
    places = torch.arange(30 * 40, dtype=torch.float32).view(1, 1, 30, 40).repeat(2, 3, 1, 1)
    traded = blur.trade(places, Dice(0, "x", places), reach, 0.5)
    assert traded[0, 0].flatten().sort().values.equal(places[0, 0].flatten())
    assert traded[:, 0].equal(traded[:, 2])  # a pixel moves with its colours
    assert not traded[0].equal(traded[1])
    once = blur.trade(places, Dice(0, "x", places), 1, 1.0)
    assert once[0, 0].flatten().sort().values.equal(places[0, 0].flatten())


def test_trading_nowhere_changes_nothing() -> None:
    images = torch.rand(2, 1, 28, 28)
    assert blur.trade(images, Dice(0, "x", images), 2, 0.0).equal(images)


def test_brightness_lifts_the_value_and_keeps_the_hue() -> None:
    lift = STRENGTHS["brightness"][4][0]
    grey = torch.rand(4, 1, 28, 28)
    torch.testing.assert_close(corrupt(grey, "brightness", 5, seed=0), (grey + lift).clamp(max=1))
    colour = torch.tensor([0.5, 0.25, 0.1]).view(1, 3, 1, 1).expand(1, 3, 28, 28)
    shifted = corrupt(colour, "brightness", 5, seed=0)[0, :, 0, 0]
    torch.testing.assert_close(shifted, torch.tensor([1.0, 0.5, 0.2]) * (0.5 + lift))
    assert corrupt(torch.zeros(1, 3, 28, 28), "brightness", 5, seed=0).unique().item() == pytest.approx(lift)


def test_contrast_keeps_the_mean_and_scales_the_deviation() -> None:
    images = torch.rand(5, 3, 40, 28)
    for severity, (factor,) in enumerate(STRENGTHS["contrast"], start=1):
        shifted = corrupt(images, "contrast", severity, seed=0)
        torch.testing.assert_close(shifted.mean((2, 3)), images.mean((2, 3)))
        torch.testing.assert_close(shifted.std((2, 3)), factor * images.std((2, 3)))


def test_saturate_leaves_the_light_of_a_dull_colour_and_drives_grey_pictures_apart() -> None:
    colour = torch.tensor([0.5, 0.45, 0.4]).view(1, 3, 1, 1).expand(1, 3, 28, 28)
    shifted = corrupt(colour, "saturate", 3, seed=0)
    torch.testing.assert_close(weather.grey(shifted), weather.grey(colour))
    spread = [image[0, 0, 0, 0].item() - image[0, 2, 0, 0].item() for image in (colour, shifted)]
    assert spread[1] / spread[0] == pytest.approx(STRENGTHS["saturate"][2][0], rel=1e-4)
    grey = torch.full((1, 1, 28, 28), 0.45)
    grey[..., :14] = 0.55
    factor = STRENGTHS["saturate"][1][0]
    torch.testing.assert_close(corrupt(grey, "saturate", 2, seed=0), 0.5 + factor * (grey - 0.5))


def test_pixelate_gives_blocks_of_their_mean() -> None:
    images = torch.rand(2, 3, 64, 64)
    assert STRENGTHS["pixelate"][1] == (2.0,)  # on 64 pixels: blocks of 4
    blocks = images.reshape(2, 3, 16, 4, 16, 4).mean((3, 5))
    expected = blocks.repeat_interleave(4, 2).repeat_interleave(4, 3)
    torch.testing.assert_close(corrupt(images, "pixelate", 2, seed=0), expected)


@pytest.mark.parametrize("name", ["snow", "spatter", "frost", "fog"])
def test_weather_has_soft_texture_that_differs_between_pictures(name: str) -> None:
    images = flat(0.2, count=40, side=32)
    shifted = corrupt(images, name, 3, seed=0)
    assert (shifted[0] - shifted[1]).abs().mean() > 0.01
    assert shifted.std((2, 3)).min() > 0.005
    right = (shifted[..., 1:] - shifted[..., :-1]).square().mean()
    assert right < 0.9 * 2 * shifted.var()  # of independent pixels it would be twice the variance


def test_drops_cover_the_share_of_the_table() -> None:
    drops, _ = STRENGTHS["spatter"][4]
    shifted = corrupt(flat(0.0, count=200, side=32), "spatter", 5, seed=0)
    assert (shifted > shifted.max() / 2).float().mean().item() == pytest.approx(drops, rel=0.1)


def test_fog_is_no_brighter_than_the_picture_was() -> None:
    images = photographs(5, 3, 32)
    brightest = images.amax((1, 2, 3))
    shifted = corrupt(images, "fog", 5, seed=0)
    assert (shifted.amax((1, 2, 3)) <= brightest + 1e-5).all()


def test_elastic_moves_things_about_as_far_as_the_table_says() -> None:
    stretch, _ = STRENGTHS["elastic_transform"][0]
    ramp = (torch.arange(64) / 63).view(1, 1, 1, 64).expand(200, 1, 64, 64)
    moved = (corrupt(ramp, "elastic_transform", 1, seed=0) - ramp)[..., 16:48, 16:48] * 63
    assert moved.std().item() == pytest.approx(2 * stretch, rel=0.1)


@pytest.mark.parametrize("quality", [3, 8, 25, 50, 75])
@pytest.mark.parametrize("channels", [1, 3])
def test_jpeg_agrees_with_libjpeg(quality: int, channels: int) -> None:
    images = photographs(3, channels, 45)
    ours = jpeg.jpeg_compression(images, Dice(0, "x", images), quality).clamp(0, 1)
    theirs = torch.stack([through_pillow(image, quality) for image in images])
    # libjpeg computes in integers, so a wave that lies between two steps may fall to either side
    assert (ours - theirs).abs().mean() * 255 < 1.2
    assert (ours - theirs).square().mean() < 0.15 * (theirs - images).square().mean()


def through_pillow(image: Tensor, quality: int) -> Tensor:
    values = (image * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    stored = io.BytesIO()
    picture = Image.fromarray(values.squeeze(2) if values.shape[2] == 1 else values)
    picture.save(stored, "JPEG", quality=quality, subsampling="4:2:0")
    read = torch.from_numpy(np.array(Image.open(stored))).float() / 255
    return read[None] if read.ndim == 2 else read.permute(2, 0, 1)
