"""Flipped and shifted views: where each pixel comes from, and that a row's own numbers alone decide it."""

import pytest
import torch
from torch import Tensor

from tacit.data._views import FlipAndShift


def by_hand(image: Tensor, flip: bool, down: int, right: int) -> Tensor:
    """Pixel by pixel: mirrored first, then moved, edges repeated."""
    channels, height, width = image.shape
    out = torch.empty_like(image)
    for c in range(channels):
        for y in range(height):
            for x in range(width):
                place = width - 1 - x if flip else x
                out[c, y, x] = image[c, min(max(y + down, 0), height - 1), min(max(place + right, 0), width - 1)]
    return out


def test_every_pixel_comes_from_where_it_should() -> None:
    """All flips and all shifts of two pixels: 2 x 5 x 5 views of one image."""
    torch.manual_seed(0)
    image, views = torch.rand(3, 6, 5), FlipAndShift(shift=2)
    for flip in (0, 1):
        for down in range(5):
            for right in range(5):
                drawn_uniforms = torch.tensor([[(0.3, 0.7)[flip], (down + 0.5) / 5, (right + 0.5) / 5]])
                found = views(image[None], drawn_uniforms)[0]
                assert torch.equal(found, by_hand(image, flip == 0, down - 2, right - 2))


def test_the_ends_of_the_numbers_are_shifts_as_well() -> None:
    image = torch.arange(16.0).view(1, 1, 4, 4)
    views = FlipAndShift(flip=False, shift=1)
    assert torch.equal(views(image, torch.full((1, 3), 1.0))[0], by_hand(image[0], False, 1, 1))
    assert torch.equal(
        views(image, torch.full((1, 3), 2.0**-53, dtype=torch.float64))[0], by_hand(image[0], False, -1, -1)
    )


def test_shifts_are_equally_likely() -> None:
    """In (0, 1] cut into equal parts, each shift has one part: counted on a fine grid."""
    places = (torch.arange(9000, dtype=torch.float64) + 1) / 9000
    image = torch.arange(9.0).view(1, 1, 1, 9).expand(9000, 1, 1, 9)
    drawn_uniforms = torch.stack([torch.ones(9000), torch.ones(9000), places], 1)
    middle = FlipAndShift(flip=False, shift=4)(image, drawn_uniforms)[:, 0, 0, 4]
    assert middle.long().bincount().tolist() == [1000] * 9


@pytest.mark.parametrize("shape", [(6, 6), (3, 6, 6), (2, 3, 6, 6)])
def test_a_row_depends_on_its_own_numbers_alone(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    rows, drawn_uniforms = torch.rand(5, *shape), torch.rand(5, 3)
    views = FlipAndShift()
    found = views(rows, drawn_uniforms)
    assert found.shape == rows.shape
    for i in range(5):
        assert torch.equal(views(rows[i : i + 1], drawn_uniforms[i : i + 1])[0], found[i])
    others, fates = torch.rand(5, *shape), torch.rand(5, 3)
    others[2], fates[2] = rows[2], drawn_uniforms[2]
    assert torch.equal(views(others, fates)[2], found[2])


def test_bytes_stay_bytes_and_vectors_are_refused() -> None:
    assert FlipAndShift()(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.rand(2, 3)).dtype == torch.uint8
    with pytest.raises(ValueError, match="Only images"):
        FlipAndShift()(torch.zeros(2, 4), torch.rand(2, 3))
