"""Public training: what it refuses, that it learns, that it is reproducible, and what augmentation does."""

import pytest
import torch
from torch import Tensor, nn

from tacit.models import ConvNet
from tacit.pretrain import Augment, Recipe, fit


def stripes(count: int = 128) -> tuple[Tensor, Tensor]:
    """Images with a bright top or a bright bottom half: a flip left to right does not change the class."""
    labels = torch.arange(count) % 2
    images = 0.2 * torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    images[labels == 0, :, :4] += 0.7
    images[labels == 1, :, 4:] += 0.7
    return images, labels


def small() -> ConvNet:
    torch.manual_seed(0)
    return ConvNet(channels=1, classes=2, widths=(8,), depths=(1,))


SHORT = Recipe(epochs=6, batch=32, lr=0.02, augment=Augment(rotate=0, scale=0, shift=0, erase=0.2))


def test_it_learns_and_is_reproducible() -> None:
    images, labels = stripes()
    first, second = (fit(small(), images, labels, SHORT, public=True) for _ in range(2))
    assert not first.training
    with torch.no_grad():
        assert (first(images).argmax(1) == labels).float().mean() > 0.95
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def test_private_data_is_refused() -> None:
    with pytest.raises(ValueError, match="public=True"):
        fit(small(), *stripes(), SHORT)


def test_too_few_images_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fill one batch"):
        fit(small(), *stripes(16), SHORT, public=True)


def test_progress_is_told_every_step() -> None:
    told: list[tuple[int, int]] = []
    fit(small(), *stripes(64), Recipe(epochs=2, batch=32), public=True, progress=lambda s, n, _: told.append((s, n)))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_without_bounds_augmentation_changes_nothing() -> None:
    images, _ = stripes(8)
    same = Augment(flip=False, rotate=0, scale=0, shift=0, erase=0)(images, torch.Generator().manual_seed(1))
    torch.testing.assert_close(same, images, atol=1e-5, rtol=0)


def test_flips_mirror_about_half_of_the_images() -> None:
    images = torch.rand(400, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    out = Augment(rotate=0, scale=0, shift=0, erase=0)(images, torch.Generator().manual_seed(1))
    mirrored = (out - images.flip(3)).abs().amax((1, 2, 3)) < 1e-4
    same = (out - images).abs().amax((1, 2, 3)) < 1e-4
    assert bool((mirrored | same).all())
    assert 130 < int(mirrored.sum()) < 270  # 200 expected, standard deviation 10: false alarm below 1e-11


def test_an_erased_box_is_one_tone_and_no_larger_than_allowed() -> None:
    images = torch.rand(50, 1, 20, 20, generator=torch.Generator().manual_seed(0))
    out = Augment(flip=False, rotate=0, scale=0, shift=0, erase=0.4)(images, torch.Generator().manual_seed(1))
    changed = (out - images).abs() > 1e-4
    for picture, where in zip(out, changed, strict=True):
        rows, columns = where[0].any(1), where[0].any(0)
        assert int(rows.sum()) <= 8 + 1
        assert int(columns.sum()) <= 8 + 1
        if where.any():
            assert float(picture[where].max() - picture[where].min()) < 1e-5


def test_rows_of_a_batch_never_meet() -> None:
    model = small().eval()
    images, _ = stripes(4)
    alone = model(images[:1])
    torch.testing.assert_close(model(images)[:1], alone)


def test_weight_decay_spares_scales_and_biases() -> None:
    from tacit.pretrain.fit import _groups

    decayed, spared = _groups(small(), 0.05)
    assert decayed["weight_decay"] == 0.05
    assert spared["weight_decay"] == 0.0
    parameters: list[nn.Parameter] = [*decayed["params"], *spared["params"]]  # type: ignore[misc]
    assert len(parameters) == len(list(small().parameters()))
