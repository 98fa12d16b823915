"""From BatchNorm to GroupNorm: the same scale and shift, and no row meets another."""

from __future__ import annotations

import warnings

import pytest
import timm
import torch
from torch import nn

from tacit import models

LOST = "running statistics of BatchNorm are lost"


def test_a_resnet_keeps_its_scales_and_its_rows_apart() -> None:
    model = timm.create_model("resnet10t", num_classes=3)
    scale, shift = model.layer1[0].bn1.weight, model.layer1[0].bn1.bias
    with pytest.warns(UserWarning, match=LOST):
        assert models.to_groupnorm(model) is model
    assert not any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    new = model.layer1[0].bn1
    assert isinstance(new, nn.GroupNorm)
    assert new.weight is scale
    assert new.bias is shift
    assert new.num_groups == 32
    rows = torch.rand(4, 3, 64, 64)
    torch.testing.assert_close(model(rows)[:2], model(rows[:2]))  # in training mode
    loaded = models.Loaded(name="converted", model=model, batch=rows, loss=models.load("small:vit").loss)
    assert models.check(loaded, "norms").trainable > 0


@pytest.mark.parametrize(("channels", "groups", "expected"), [(64, 32, 32), (48, 32, 24), (7, 32, 7), (10, 4, 2)])
def test_groups_divide_the_channels(channels: int, groups: int, expected: int) -> None:
    with pytest.warns(UserWarning, match=LOST):
        (new,) = models.to_groupnorm(nn.Sequential(nn.BatchNorm2d(channels, eps=1e-3)), groups)
    assert isinstance(new, nn.GroupNorm)
    assert (new.num_groups, new.num_channels, new.eps) == (expected, channels, 1e-3)


def test_vectors_keep_something_to_compare() -> None:
    with pytest.warns(UserWarning, match=LOST):
        new = models.to_groupnorm(nn.BatchNorm1d(8, affine=False).eval())
    assert isinstance(new, nn.GroupNorm)
    assert (new.num_groups, new.weight, new.training) == (4, None, False)
    assert new(torch.rand(3, 8)).std() > 0.5  # one channel per group would be all zeros


def test_activations_inside_a_norm_follow_it_and_shared_norms_stay_shared() -> None:
    net = timm.create_model("efficientnet_lite0")
    act = type(net.bn1.act)
    shared = nn.BatchNorm3d(4)
    with pytest.warns(UserWarning, match=LOST):
        models.to_groupnorm(net)
    with pytest.warns(UserWarning, match=LOST):
        both = models.to_groupnorm(nn.Sequential(shared, nn.ReLU(), shared))
    assert isinstance(net.bn1[0], nn.GroupNorm)
    assert isinstance(net.bn1[-1], act)
    assert net(torch.rand(2, 3, 32, 32)).shape == (2, 1000)
    assert both[0] is both[2]


def test_without_batch_norm_nothing_happens() -> None:
    net = models.load("small:resnet").model
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert models.to_groupnorm(net) is net
    with pytest.raises(ValueError, match="groups"):
        models.to_groupnorm(net, 0)
