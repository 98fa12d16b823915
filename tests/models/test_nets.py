"""The small nets: rows stay apart, every layer has a fast rule, and gradients are those of brute force."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import check
from torch import Tensor, nn

from tacit import models
from tacit.gradients import Engine

FAST = {"linear", "convolution", "layer norm", "group norm", "batch norm", "scaling", "addition", "expansion"}


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def image(side: int) -> tuple[int, ...]:
    return (3, side, side)


NETS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "vit by mean": (lambda: models.ViT(channels=3, classes=5, size=8, width=16, depth=2, heads=2), image(8)),
    "vit by token": (
        lambda: models.ViT(channels=3, classes=5, size=8, width=16, depth=2, heads=2, pooling="token"),
        image(8),
    ),
    "resnet": (lambda: models.ResNet(channels=3, classes=5, widths=(8, 16), depths=(1, 2), groups=4), image(8)),
    "convnet": (lambda: models.ConvNet(channels=3, classes=5, widths=(8, 16), depths=(1, 1)), image(8)),
    "video": (
        lambda: models.VideoNet(classes=5, frames=4, size=16, tube=(2, 4, 4), widths=(8, 16), depths=(1, 2)),
        (4, 3, 16, 16),
    ),
}


@pytest.mark.parametrize("name", NETS)
def test_gradients_are_those_of_brute_force(name: str) -> None:
    make, row = NETS[name]
    model, batch = make().double(), (torch.rand(6, *row).double(), torch.randint(0, 5, (6,)))
    check(model, loss, batch)
    check(model, loss, batch, units=[5, 5, 0, 2, 2, 2])


@pytest.mark.parametrize("name", ["small:vit", "small:resnet", "small:convnet", "small:video"])
def test_every_layer_is_served_by_a_fast_rule(name: str) -> None:
    loaded = models.load(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = Engine(loaded.model, loaded.loss, clip=1.0)
        engine(loaded.batch)
    assert set(engine.served) == {n for n, _ in loaded.model.named_parameters()}
    assert set(engine.served.values()) <= FAST
    assert sum(p.numel() for p in loaded.model.parameters()) < 200_000


@pytest.mark.parametrize("name", NETS)
def test_they_normalise_inside(name: str) -> None:
    make, row = NETS[name]
    model, x = make().double().eval(), torch.rand(2, *row).double()
    before = model(x)
    model.mean.fill_(0.1)
    model.std.fill_(0.25)
    torch.testing.assert_close(model((x - 0.5) / 0.5 * 0.25 + 0.1), before)


def test_a_video_net_knows_places_and_pools_neighbours() -> None:
    net = models.VideoNet(classes=3)
    coarser = net.body[2]
    tokens = torch.rand(2, 64, 32)
    grid = coarser.norm(tokens).reshape(2, 4, 4, 4, 32)
    square = grid[:, 1, 2:4, 0:2].mean((1, 2))  # time 1, second row of squares, first column: the seventh token
    torch.testing.assert_close(coarser(tokens)[:, 1 * 4 + 1 * 2 + 0], coarser.widen(square))
    clips = torch.rand(2, 8, 3, 32, 32)
    assert net(clips).shape == (2, 3)
    assert not torch.allclose(net(clips), net(clips.flip(1)))


def test_a_resnet_halves_and_widens() -> None:
    net = models.ResNet(channels=3, classes=4)
    assert net.body(torch.rand(2, 16, 32, 32)).shape == (2, 64, 8, 8)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in net.modules())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: models.ViT(channels=3, classes=2, size=30), "patches of 4"),
        (lambda: models.ViT(channels=3, classes=2, width=30), "4 heads"),
        (lambda: models.ViT(channels=3, classes=2, pooling="max"), "'mean' or 'token'"),
        (lambda: models.ResNet(channels=3, classes=2, widths=(12, 24, 48)), "8 groups"),
        (lambda: models.VideoNet(classes=2, frames=7), "7 frames"),
        (lambda: models.VideoNet(classes=2, size=24), "24x24"),
    ],
)
def test_sizes_that_do_not_fit_are_one_sentence(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_loading_by_name() -> None:
    assert models.load("small:vit", shape=(1, 28, 28)).model(torch.rand(2, 1, 28, 28)).shape == (2, 10)
    assert models.load("small:video", shape=(4, 1, 16, 16)).batch.shape == (2, 4, 1, 16, 16)
    with pytest.raises(ValueError, match="choose one of vit, resnet, convnet, video"):
        models.load("small:gpt")
    with pytest.raises(ValueError, match="takes rows such as 3x32x32, not 32x32"):
        models.load("small:resnet", shape=(32, 32))


def test_the_check_counts_the_adapters() -> None:
    found = models.check(models.load("small:convnet"), "adapter")
    adapters = sum(4 * (2 * w * (w // 4) + w // 4 + w) for w in (32, 64))
    assert found.trainable == adapters + 650
    assert found.parameters == 103_786 + adapters
    assert found.remarks == ()


def test_a_kink_within_rounding_does_not_cost_the_fast_path() -> None:
    """With these weights one ReLU of a synthetic row falls to either side, by the kernel that computes it."""
    torch.manual_seed(8)
    loaded = models.load("small:resnet")
    engine = Engine(loaded.model, loaded.loss, clip=1.0)
    engine(loaded.batch)
    assert set(engine.served.values()) <= FAST
