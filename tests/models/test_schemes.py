"""What a scheme trains, where the blocks are, fresh heads and fresh nets."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import timm
import torch
import transformers
from torch import nn

from tacit import models

TINY = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}


def of_transformers(kind: str, task: str = "SequenceClassification", **options: Any) -> nn.Module:
    config = transformers.AutoConfig.for_model(kind, **options)
    return getattr(transformers, f"AutoModelFor{task}").from_config(config)


def encoder() -> nn.TransformerEncoder:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), 3)


def bert() -> nn.Module:
    return of_transformers("bert", vocab_size=40, **TINY)


@pytest.mark.parametrize(
    ("make", "kind", "count", "first", "last"),
    [
        (lambda: timm.create_model("vit_tiny_patch16_224"), "Block", 12, "blocks.0", "blocks.11"),
        (lambda: timm.create_model("convnext_atto"), "ConvNeXtBlock", 12, "stages.0.blocks.0", "stages.3.blocks.1"),
        (
            lambda: timm.create_model("swin_tiny_patch4_window7_224", embed_dim=24),
            "SwinTransformerBlock",
            12,
            "layers.0.blocks.0",
            "layers.3.blocks.1",
        ),
        (lambda: timm.create_model("resnet18"), "BasicBlock", 8, "layer1.0", "layer4.1"),
        (lambda: timm.create_model("resnet26"), "Bottleneck", 8, "layer1.0", "layer4.1"),
        (bert, "BertLayer", 3, "bert.encoder.layer.0", "bert.encoder.layer.2"),
        (
            lambda: of_transformers("gpt2", n_embd=16, n_layer=3, n_head=2),
            "GPT2Block",
            3,
            "transformer.h.0",
            "transformer.h.2",
        ),
        (
            lambda: of_transformers("distilbert", dim=16, n_layers=3, n_heads=2, hidden_dim=24),
            "TransformerBlock",
            3,
            "distilbert.transformer.layer.0",
            "distilbert.transformer.layer.2",
        ),
        (lambda: of_transformers("vit", "ImageClassification", **TINY), "ViTLayer", 3, None, None),
        (
            # its layers hold Sequentials of convolutions with their norms, which are no blocks
            lambda: of_transformers(
                "resnet", "ImageClassification", layer_type="basic", depths=[2, 2], hidden_sizes=[8, 8]
            ),
            "ResNetBasicLayer",
            4,
            None,
            None,
        ),
        (
            # its layers hold a ModuleList of attention and MLP, which are no blocks either
            lambda: of_transformers("t5", d_model=16, num_layers=3, num_heads=2, d_ff=24),
            "T5Block",
            6,
            None,
            None,
        ),
        (encoder, "TransformerEncoderLayer", 3, "layers.0", "layers.2"),
        (models.embedded, "Block", 8, "body.2", "body.11"),
        (lambda: models.load("small:vit").model, "TransformerBlock", 4, "body.0", "body.3"),
        (lambda: models.load("small:resnet").model, "BasicBlock", 6, "body.0", "body.5"),
        (lambda: models.load("small:video").model, "TransformerBlock", 4, "body.0", "body.4"),
        (lambda: models.ConvNet(channels=1, classes=2, depths=(1, 1)), "Block", 2, "body.2", "body.5"),
        (lambda: models.ResNet(channels=1, classes=2, depths=(1, 1, 1)), "BasicBlock", 3, "body.0", "body.2"),
    ],
)
def test_blocks_are_found_by_structure(make: Any, kind: str, count: int, first: str | None, last: str | None) -> None:
    found = models.blocks_of(make())
    assert Counter(type(block).__name__ for _, block in found) == {kind: count}
    if first is not None:
        assert (found[0][0], found[-1][0]) == (first, last)


def test_a_net_of_plain_sequentials_has_blocks_and_a_flat_one_has_none() -> None:
    def part() -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU())

    assert [name for name, _ in models.blocks_of(nn.Sequential(part(), part(), nn.Flatten()))] == ["0", "1"]
    with pytest.raises(ValueError, match="no repeated blocks"):
        models.blocks_of(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    with pytest.raises(ValueError, match="no repeated blocks"):
        models.select(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), "last_block")


@pytest.mark.parametrize(
    ("name", "linear", "selective", "adapter"),
    [("vit_small_patch16_224", 38_500, 57_700, 928_996), ("convnext_tiny", 76_900, 93_220, 1_702_588)],
)
def test_published_sizes(name: str, linear: int, selective: int, adapter: int) -> None:
    model = timm.create_model(name, num_classes=100)
    for scheme, expected in {"linear": linear, "selective": selective, "adapter": adapter}.items():
        models.select(model, scheme)
        assert models.trainable(model) == expected


def test_blocks_are_trained_whole_and_the_last_norm_stays() -> None:
    net = models.ViT(channels=3, classes=5, depth=3)
    head = {"head.weight", "head.bias"}
    last = {f"body.2.{name}" for name, _ in net.body[2].named_parameters()}
    first = {f"body.0.{name}" for name, _ in net.body[0].named_parameters()}
    assert set(models.select(net, "last_block")) == last | head
    assert set(models.select(net, "first_last_block")) == first | last | head
    assert not net.norm.weight.requires_grad
    assert not net.positions.requires_grad


def test_bias_is_every_bias_and_the_whole_head() -> None:
    model = nn.Sequential(encoder(), nn.LSTM(16, 4))
    model.append(nn.Linear(4, 3))
    biases = {name for name, _ in model.named_parameters() if "bias" in name.rpartition(".")[2]}
    assert len(biases) == 3 * 6 + 2 + 1  # in_proj, out_proj, two linear, two norms; ih and hh; head
    assert set(models.select(model, "bias")) == biases | {"2.weight"}


def test_a_fresh_head() -> None:
    vit = timm.create_model("vit_tiny_patch16_224", depth=1)
    kept = vit.blocks[0].mlp.fc1.weight
    assert models.with_head(vit, 7) is vit
    assert (vit.head.out_features, vit.num_classes) == (7, 7)
    assert not vit.head.weight.any()
    assert vit.blocks[0].mlp.fc1.weight is kept
    before = vit.head
    models.with_head(vit, 7, bias=False, zero=False)
    assert vit.head is not before
    assert vit.head.bias is None
    assert vit.head.weight.any()


def test_a_fresh_head_deep_inside_or_of_a_text_model() -> None:
    net = timm.create_model("convnext_atto")
    assert models.with_head(net, 4).head.fc.out_features == net.num_classes == 4
    text = models.with_head(bert().double(), 5)
    assert (text.config.num_labels, text.num_labels, len(text.config.id2label)) == (5, 5, 5)
    found = text(torch.randint(2, 39, (3, 6)), labels=torch.tensor([4, 0, 1]))
    assert found.loss.item() == pytest.approx(torch.tensor(5.0).log().item())  # all classes equally likely
    assert isinstance(models.with_head(nn.Linear(3, 2), 4), nn.Linear)


def test_a_body_without_a_head_is_not_beheaded() -> None:
    with pytest.raises(ValueError, match="this model has no head"):
        models.with_head(encoder(), 3)
    with pytest.raises(ValueError, match="at least one class"):
        models.with_head(nn.Linear(3, 2), 0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: timm.create_model("vit_tiny_patch16_224", depth=1, init_values=0.5),
        lambda: timm.create_model("convnext_atto"),
        lambda: of_transformers("gpt2", n_embd=16, n_layer=2, n_head=2, vocab_size=40),
        encoder,
        lambda: models.ViT(channels=1, classes=3, pooling="token"),
    ],
)
def test_scratch_forgets_everything_and_repeats_itself(make: Any) -> None:
    one, other = make(), make()
    with torch.no_grad():
        for parameter in (*one.parameters(), *other.parameters()):
            parameter.copy_(torch.randn_like(parameter) * 7)
    state = torch.get_rng_state()
    models.scratch(one, 3)
    models.scratch(other, 3)
    assert torch.equal(torch.get_rng_state(), state)
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name
    assert all(torch.equal(m.weight, torch.ones_like(m.weight)) for _, m in models.normalisers(one))
    different = models.scratch(other, 4).state_dict()
    assert any(not torch.equal(value, different[name]) for name, value in one.state_dict().items())


def test_scratch_fills_bare_parameters_with_small_normals() -> None:
    vit = models.scratch(timm.create_model("vit_tiny_patch16_224", depth=1), 0)
    assert vit.pos_embed.abs().max() <= 0.04
    # a normal cut at two deviations has 0.8796 of its deviation; 197 x 192 draws know it to 0.5%
    assert vit.pos_embed.std().item() == pytest.approx(0.02 * 0.8796, rel=0.03)
    frozen = timm.create_model("resnet10t")
    frozen.bn1.running_mean.fill_(3.0)
    assert not models.scratch(frozen, 0).bn1.running_mean.any()
