"""Loading by name, choosing parameters by type, and the compatibility check."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tacit import models


class OwnNorm(nn.Module):
    """A normaliser that is none of torch's classes, as libraries write them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)


def small_net() -> nn.Sequential:
    body = [nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8, bias=False), OwnNorm(8), nn.Linear(8, 3)]
    return nn.Sequential(*body)


def with_batch() -> tuple[nn.Module, torch.Tensor]:
    return small_net(), torch.rand(4, 6)


def test_schemes_choose_by_type() -> None:
    net = small_net()
    expected = {
        "full": {"0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "4.weight", "5.weight", "5.bias"},
        "linear": {"5.weight", "5.bias"},
        "norms": {"1.weight", "1.bias", "4.weight"},
        "selective": {"1.weight", "1.bias", "4.weight", "5.weight", "5.bias"},
        "bias": {"0.bias", "1.bias", "5.weight", "5.bias"},
    }
    assert set(models.SCHEMES) - set(expected) == {
        "adapter",
        "lora",
        "last_block",
        "first_last_block",
    }  # which need blocks
    for scheme, names in expected.items():
        assert set(models.select(net, scheme)) == names
        assert {name for name, p in net.named_parameters() if p.requires_grad} == names


def test_a_scheme_that_finds_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="finds nothing to train"):
        models.select(nn.Sequential(nn.Linear(2, 2)), "norms")
    with pytest.raises(ValueError, match="Unknown scheme 'lora2'"):
        models.select(small_net(), "lora2")
    with pytest.raises(ValueError, match="no linear layer"):
        models.select(nn.Sequential(nn.Conv2d(1, 1, 1)), "linear")


def test_published_counts_of_adapted_parameters() -> None:
    vit = models.load("timm:vit_tiny_patch16_224").model
    assert sum(p.numel() for n, p in vit.named_parameters() if n in set(models.select(vit, "norms"))) == 25 * 2 * 192
    head = models.head_of(vit)
    assert head[0] == "head"
    assert head[1].out_features == 1000


def test_a_transformer_is_compatible() -> None:
    found = models.check(models.load("timm:vit_tiny_patch16_224", shape=(3, 224, 224)))
    assert found.trainable == found.parameters == 5_717_416
    assert sum(numbers for _, numbers in found.by_rule().values()) == found.trainable
    assert found.remarks == ()


def test_live_statistics_are_refused_and_frozen_ones_taken() -> None:
    loaded = models.load("timm:resnet18", shape=(3, 64, 64))
    with pytest.raises(ValueError, match=r"BatchNorm2d.*is live"):
        models.check(loaded)
    models.freeze_statistics(loaded.model)
    assert loaded.model.training
    assert models.check(loaded, "norms").trainable == 9_600


def test_a_text_model_by_its_type() -> None:
    found = models.check(models.load("transformers:distilbert"), "selective")
    assert found.trainable == 13 * 2 * 768 + 768 * 2 + 2


def test_own_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\nimport torch\n"
        "def net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(12, 3))\n"
        "def both():\n    return net(), torch.rand(5, 3, 2, 2)\n"
        "def wrong():\n    return 3\n"
    )
    monkeypatch.chdir(tmp_path)
    assert models.check(models.load("mine:net", shape=(3, 2, 2))).trainable == 39
    assert models.check(models.load("mine:both")).rules == {"1.weight": "linear", "1.bias": "linear"}
    with pytest.raises(ValueError, match="--input"):
        models.load("mine:net")
    with pytest.raises(ValueError, match=r"not a torch\.nn\.Module"):
        models.load("mine:wrong")
    with pytest.raises(ValueError, match="cannot be loaded"):
        models.load("mine:absent")


@pytest.mark.parametrize("name", ["resnet18", "timm:no_such_net", "transformers:no_such_type", "no.such:thing"])
def test_unknown_models_are_one_sentence(name: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+\.$"):
        models.load(name)
