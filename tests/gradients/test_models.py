"""Models as people have them, against brute force."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import assert_close, check
from torch import Tensor, nn

from tacit.gradients import Engine, clipped_sum

UNITS = [5, 5, 0, 2, 2, 2]


def class_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def text_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    out = model(input_ids=batch["ids"], attention_mask=batch["mask"])
    return F.cross_entropy(out.logits, batch["label"], reduction="none")


def word_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["ids"]).logits
    return F.cross_entropy(logits.transpose(1, 2), batch["ids"], reduction="none").mean(1)


def images(size: int = 16) -> tuple[Tensor, Tensor]:
    return torch.randn(6, 3, size, size).double(), torch.randint(0, 5, (6,))


def text() -> dict[str, Tensor]:
    mask = torch.ones(6, 7, dtype=torch.long)
    mask[1, 4:] = 0
    return {"ids": torch.randint(0, 40, (6, 7)), "mask": mask, "label": torch.randint(0, 2, (6,))}


def bert(kind: str = "BertForSequenceClassification", dropout: float = 0.0) -> nn.Module:
    import transformers

    config = transformers.BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=12,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return getattr(transformers, kind)(config).double()


@pytest.mark.parametrize("units", [None, UNITS])
def test_timm_vit(units: list[int] | None) -> None:
    import timm

    model = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=16,
        patch_size=8,
        embed_dim=12,
        depth=2,
        num_heads=2,
        num_classes=5,
        init_values=0.1,
    )
    check(model.double(), class_loss, images(), units=units)


@pytest.mark.parametrize("units", [None, UNITS])
def test_timm_convnext(units: list[int] | None) -> None:
    import timm

    model = timm.create_model("convnext_atto", depths=(1, 1, 1, 1), dims=(4, 4, 8, 8), num_classes=5)
    check(model.double(), class_loss, images(32), units=units)


def test_timm_swin_with_its_windows_and_relative_positions() -> None:
    import timm

    options = {
        "img_size": 16,
        "window_size": 2,
        "embed_dim": 8,
        "depths": (2, 2),
        "num_heads": (2, 2),
        "num_classes": 5,
    }
    check(timm.create_model("swin_tiny_patch4_window7_224", **options).double().eval(), class_loss, images())


def test_timm_resnet_with_frozen_statistics() -> None:
    import timm

    model = timm.create_model("resnet10t", num_classes=5).double()
    with pytest.raises(ValueError, match=r"BatchNorm.*eval\(\)"):
        clipped_sum(model, class_loss, images(), clip=1.0)
    x, y = images()
    check(model.eval(), class_loss, (x[:3], y[:3]), units=[1, 0, 0])


@pytest.mark.parametrize("units", [None, UNITS])
def test_transformers_bert(units: list[int] | None) -> None:
    check(bert(), text_loss, text(), units=units)


def test_transformers_bert_with_tied_words() -> None:
    check(bert("BertForMaskedLM"), word_loss, text(), units=UNITS)


def test_transformers_gpt2_with_its_own_linear_layer() -> None:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=40, n_embd=8, n_layer=1, n_head=2, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    check(transformers.GPT2LMHeadModel(config).double().eval(), word_loss, text(), units=UNITS)


@pytest.mark.parametrize("units", [None, UNITS])
def test_peft_lora(units: list[int] | None) -> None:
    import peft

    config = peft.LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS")
    model = peft.get_peft_model(bert(), config).double()
    result = check(model, text_loss, text(), units=units)
    assert any("lora_A" in name for name in result.sum)  # its gradient is zero at first, and it is reached


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    model, batch = bert().train(), text()
    expected = Engine(model, text_loss, clip=0.5)(batch, unit_ids=UNITS)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_close(Engine(model, text_loss, clip=0.5)(batch, unit_ids=UNITS).sum, expected.sum, 1e-10)


@pytest.mark.parametrize("inside", [True, False])
def test_autocast(inside: bool) -> None:
    model, batch = bert().float(), text()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            return text_loss(model, batch).float()

    engine = Engine(model, loss, clip=0.3)
    expected = Engine(model, text_loss, clip=0.3)(batch, unit_ids=UNITS)
    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        found = engine(batch, unit_ids=UNITS)
    assert_close(found.sum, expected.sum, 0.05)
    assert all(value.dtype == torch.float64 for value in found.sum.values())


def test_a_model_in_bfloat16_is_summed_in_float64() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)).bfloat16()
    found = clipped_sum(model, class_loss, (torch.randn(6, 5).bfloat16(), torch.randint(0, 3, (6,))), clip=0.1)
    assert all(value.dtype == torch.float64 for value in found.sum.values())


def test_dropout_keeps_the_rows_apart() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.5), nn.TransformerEncoderLayer(7, 1, 8, 0.5, batch_first=True))
    loss = lambda model, batch: model(batch).square().mean((1, 2))  # noqa: E731
    found = clipped_sum(model, loss, torch.randn(6, 3, 5), clip=0.01)
    assert float(torch.stack([v.square().sum() for v in found.sum.values()]).sum().sqrt()) <= 0.06


def test_frozen_parameters_have_no_entry() -> None:
    model = nn.Sequential(nn.Linear(5, 7).requires_grad_(False), nn.LayerNorm(7), nn.Linear(7, 5))
    model[2].weight.requires_grad_(False)
    x = torch.randn(6, 5).double()
    result = check(model.double(), class_loss, (x, torch.randint(0, 5, (6,))))
    assert set(result.sum) == {"1.weight", "1.bias", "2.bias"}
