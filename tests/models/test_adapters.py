"""Adapters: the same outputs to the last bit before training, and honest per-row gradients after it."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
import transformers
from oracle import check
from torch import Tensor, nn

from tacit import models
from tacit.gradients import Engine


def images(size: int = 32, channels: int = 3) -> Tensor:
    return torch.rand(4, channels, size, size)


def of_transformers(kind: str, task: str, **options: Any) -> nn.Module:
    return getattr(transformers, f"AutoModelFor{task}").from_config(transformers.AutoConfig.for_model(kind, **options))


def gpt2() -> nn.Module:
    return of_transformers(
        "gpt2", "SequenceClassification", n_embd=16, n_layer=2, n_head=2, vocab_size=40, pad_token_id=0
    )


def bert() -> nn.Module:
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    return of_transformers("bert", "SequenceClassification", vocab_size=40, **size)


def encoder() -> nn.Module:
    layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), 2)
    return nn.Sequential(layers, nn.Flatten(), nn.Linear(5 * 16, 3))


def of_sequentials() -> nn.Module:
    parts = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU()) for _ in range(2)]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))


def swin() -> nn.Module:
    return timm.create_model("swin_tiny_patch4_window7_224", embed_dim=12, num_heads=(1, 1, 2, 2), img_size=56)


NETS: dict[str, tuple[Any, Any, list[int]]] = {  # model, batch, the widths of its blocks
    "vit": (lambda: timm.create_model("vit_tiny_patch16_224", depth=2, img_size=32), images, [192] * 2),
    "convnext": (
        lambda: timm.create_model("convnext_atto", dims=(8, 16, 24, 32), depths=(1, 1, 2, 1)),
        images,
        [8, 16, 24, 24, 32],
    ),
    "swin": (swin, lambda: images(56), [12] * 2 + [24] * 2 + [48] * 6 + [96] * 2),
    "resnet": (lambda: timm.create_model("resnet26"), images, [256] * 2 + [512] * 2 + [1024] * 2 + [2048] * 2),
    "eca": (lambda: timm.create_model("ecaresnet26t"), images, [256] * 2 + [512] * 2 + [1024] * 2 + [2048] * 2),
    "bert": (bert, lambda: torch.randint(2, 39, (4, 6)), [16] * 2),
    "gpt2": (gpt2, lambda: torch.randint(2, 39, (4, 6)), [16] * 2),
    "encoder": (encoder, lambda: torch.rand(4, 5, 16), [16] * 2),
    "sequentials": (of_sequentials, lambda: images(channels=4), [4] * 2),
    "small video": (lambda: models.load("small:video").model, lambda: torch.rand(4, 8, 3, 32, 32), [32, 32, 64, 64]),
}


def logits(model: nn.Module, batch: Tensor) -> Tensor:
    out = model(batch)
    return getattr(out, "logits", out)


def train_a_little(model: nn.Module) -> None:
    with torch.no_grad():
        for _, adapter in models.adapters_of(model):
            adapter.up.weight.normal_(0, 0.1)


@pytest.mark.parametrize("name", NETS)
def test_identity_at_the_start_a_change_after_training_and_survival_of_copies(name: str) -> None:
    make, batch, widths = NETS[name]
    model, rows = make().eval(), batch()
    before = logits(model, rows)
    names = models.insert_adapters(model)
    assert [adapter.down.in_features for _, adapter in models.adapters_of(model)] == widths
    assert [n for n, _ in models.adapters_of(model)] == names
    assert torch.equal(logits(model, rows), before)

    train_a_little(model)
    after = logits(model, rows)
    assert not torch.allclose(after, before)
    assert torch.equal(logits(copy.deepcopy(model), rows), after)
    other = make().eval()
    models.insert_adapters(other)
    other.load_state_dict(model.state_dict())
    assert torch.equal(logits(other, rows), after)


def test_the_adapter_comes_after_the_block_once() -> None:
    model = of_sequentials()
    models.insert_adapters(model)
    train_a_little(model)
    x, block = images(channels=4), model[0]
    plain = block[2](block[1](block[0](x)))
    adapter = block.tacit_adapter
    change = torch.einsum("nhij,ch->ncij", F.gelu(torch.einsum("ncij,hc->nhij", plain, adapter.down.weight)
                          + adapter.down.bias[:, None, None]), adapter.up.weight)  # fmt: skip
    torch.testing.assert_close(block(x), plain + change)

    net = models.ResNet(channels=3, classes=2)
    plain = net.body[0](x := torch.rand(2, 16, 8, 8))
    models.insert_adapters(net)
    train_a_little(net)
    adapter = net.body[0].tacit_adapter
    change = adapter.up(F.gelu(adapter.down(plain.permute(0, 2, 3, 1)))).permute(0, 3, 1, 2)
    torch.testing.assert_close(net.body[0](x), plain + change)


def test_it_survives_a_file() -> None:
    model = models.load("small:vit").model
    models.select(model, "adapter")
    train_a_little(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    rows = images()
    assert torch.equal(torch.load(file, weights_only=False)(rows), model(rows))


def test_twice_is_refused_and_selecting_again_keeps_them() -> None:
    model = models.load("small:vit").model
    first = models.select(model, "adapter")
    kept = models.adapters_of(model)[0][1]
    assert models.head_of(model)[0] == "head"
    with pytest.raises(ValueError, match="adapters already"):
        models.insert_adapters(model)
    assert models.select(model, "adapter") == first
    assert models.adapters_of(model)[0][1] is kept
    assert models.trainable(model) == 4 * (2 * 64 * 16 + 16 + 64) + 64 * 10 + 10


def test_the_head_is_found_in_a_body_without_one() -> None:
    body = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    before = models.head_of(body)[0]
    models.insert_adapters(body)
    assert models.head_of(body)[0] == before == "layers.1.linear2"


def test_type_and_mode_follow_the_block() -> None:
    model = models.load("small:resnet").model.double().eval()
    models.insert_adapters(model, reduction=2)
    adapter = models.adapters_of(model)[0][1]
    assert adapter.down.weight.dtype == torch.float64
    assert not adapter.training
    assert adapter.down.out_features == 8
    with pytest.raises(ValueError, match="reduction"):
        models.insert_adapters(models.load("small:resnet").model, reduction=0)


def test_a_tensor_of_another_width_is_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"An adapter for 8 features met a tensor of shape \(2, 3, 4\)"):
        models.BottleneckAdapter(8)(torch.rand(2, 3, 4))


@pytest.mark.parametrize("name", ["small:vit", "small:convnet", "small:resnet"])
def test_gradients_of_adapters_are_served_fast_and_are_those_of_brute_force(name: str) -> None:
    model = models.load(name, shape=(3, 8, 8)).model.double()
    models.select(model, "adapter")
    train_a_little(model)

    def loss(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(net(batch[0]), batch[1], reduction="none")

    batch = images(8).double(), torch.arange(4)
    engine = Engine(model, loss, clip=1.0)
    engine.validate(batch)
    assert set(engine.served.values()) == {"linear"}
    check(model, loss, batch)
