"""LoRA layers, text models by name, and whole small language models against brute force under every scheme."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import check
from torch import Tensor, nn
from words import bert, gpt2, saved, tokenizer

from tacit import models
from tacit.finetune import Classes, NextToken
from tacit.finetune._tasks import loss_of
from tacit.gradients import Engine

UNITS = [5, 5, 0, 2, 2, 2]
TEXT_SCHEMES = ["full", "bias", "selective", "lora", "linear"]


def tokens() -> tuple[dict[str, Tensor], Tensor]:
    mask = torch.ones(6, 7, dtype=torch.long)
    mask[1, 4:] = 0
    mask[4, 2:] = 0
    inputs = {"input_ids": torch.randint(0, 14, (6, 7)), "attention_mask": mask}
    return inputs, torch.tensor([0, 1, 1, 0, 1, 0])


def next_tokens() -> tuple[dict[str, Tensor], Tensor]:
    inputs, _ = tokens()
    return inputs, inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)


def shaken(model: nn.Module) -> nn.Module:
    """Away from the start, where a zero head or a zero factor hides what lies behind it."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


# -- against brute force


@pytest.mark.parametrize("scheme", TEXT_SCHEMES)
def test_bert_with_pooling_by_mean(scheme: str) -> None:
    model = models.TextClassifier(bert(), 2).double().eval()
    models.select(model, scheme)
    loss, batch = loss_of(Classes(2)), tokens()
    check(shaken(model), loss, batch, units=UNITS)
    engine = Engine(model, loss, clip=1.0)
    engine.validate(batch)
    assert set(engine.served.values()) <= {"linear", "layer norm", "embedding", "addition"}  # all of them fast


@pytest.mark.parametrize("scheme", TEXT_SCHEMES)
def test_bert_with_the_head_of_transformers(scheme: str) -> None:
    model = bert("BertForSequenceClassification").double()
    models.select(model, scheme)
    check(shaken(model), loss_of(Classes(2)), tokens())


@pytest.mark.parametrize("scheme", TEXT_SCHEMES)
def test_gpt2_with_tied_words(scheme: str) -> None:
    model: Any = gpt2().double()
    names = models.select(model, scheme)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert ("transformer.wte.weight" in names) == (scheme != "lora")  # one name, for both of its uses
    check(shaken(model), loss_of(NextToken(14)), next_tokens(), units=UNITS)


def test_padding_changes_nothing() -> None:
    inputs, labels = tokens()
    longer = {key: F.pad(value, (0, 5)) for key, value in inputs.items()}
    rows = next_tokens()
    more = {key: F.pad(value, (0, 5)) for key, value in rows[0].items()}, F.pad(rows[1], (0, 5), value=-100)
    cases: list[tuple[nn.Module, Any, Any, Any]] = [
        (models.TextClassifier(bert(), 2), Classes(2), (inputs, labels), (longer, labels)),
        (gpt2(), NextToken(14), rows, more),
    ]
    for model, task, short, long in cases:
        engine = Engine(shaken(model).double(), loss_of(task), clip=0.5)
        one, other = engine(short, unit_ids=UNITS), engine(long, unit_ids=UNITS)
        for name, value in one.sum.items():
            torch.testing.assert_close(other.sum[name], value, rtol=1e-9, atol=1e-12)


# -- the layers


def test_nothing_changes_until_b_does_and_b_does_at_the_first_step() -> None:
    model = models.TextClassifier(bert(), 2)
    inputs, labels = tokens()
    nn.init.normal_(model.head.weight)
    before = model(**inputs)
    state = torch.get_rng_state()
    names = models.select(model, "lora")
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model(**inputs), before)
    factors = [name for name in names if "lora" in name]
    assert len(factors) == 2 * 2 * 2  # A and B beside query and value of two layers
    assert set(names) - set(factors) == {"head.weight", "head.bias"}
    assert models.trainable(model) == 4 * 8 * 2 * 16 + 2 * 16 + 2

    found = Engine(model, loss_of(Classes(2)), clip=1.0)((inputs, labels)).sum
    assert all(bool(found[name].any()) == ("lora_B" in name) for name in factors)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in found:
                parameter.sub_(0.1 * found[name])
    after = model(**inputs)
    assert not torch.allclose(after, before)
    found = Engine(model, loss_of(Classes(2)), clip=1.0)((inputs, labels)).sum
    assert all(found[name].any() for name in factors)

    plain = models.merge_lora(model)
    assert not models.lora_of(plain)
    torch.testing.assert_close(plain(**inputs), after)
    assert set(dict(plain.named_parameters())) == set(dict(models.TextClassifier(bert(), 2).named_parameters()))


def test_parameters_that_the_loss_does_not_reach_are_named() -> None:
    model: Any = models.TextClassifier(bert(), 2)
    models.select(model, "lora")
    layer = model.encoder.encoder.layer[1].attention.self.query
    layer._disable_adapters = True
    with pytest.raises(ValueError, match=r"does not reach 2 of 10 trainable.*layer\.1\.attention\.self\.query\.lora_A"):
        Engine(model, loss_of(Classes(2)), clip=1.0)(tokens())
    layer._disable_adapters = False
    engine = Engine(model, loss_of(Classes(2)), clip=1.0)
    other: Any = models.TextClassifier(bert(), 2)
    models.insert_lora(other)
    model.encoder.encoder.layer[0] = other.encoder.encoder.layer[0]
    with pytest.raises(ValueError, match="created, replaced or unfrozen after the engine"):
        engine(tokens())


def test_which_layers() -> None:
    def inserted(model: nn.Module, **options: Any) -> set[str]:
        return {name.partition(".layer.0.")[2] or name for name in models.insert_lora(model, **options)}

    assert {name.rpartition(".")[2] for name in models.insert_lora(gpt2())} == {"c_attn"}
    assert "attention.self.query" in inserted(bert())
    vit = models.load("small:vit").model  # of a kind that peft does not know: every linear layer of the blocks
    assert {name.rpartition(".")[2] for name in models.insert_lora(vit, rank=2)} == {"ask", "answer", "up", "down"}
    assert models.head_of(vit)[0] == "head"
    body: Any = bert()
    assert models.insert_lora(body, targets=["encoder.layer.1.output.dense"], rank=3, alpha=6) == [
        "encoder.layer.1.output.dense"
    ]
    assert body.encoder.layer[1].output.dense.lora_A["tacit"].weight.shape == (3, 24)
    assert body.encoder.layer[1].output.dense.scaling["tacit"] == 2.0
    with pytest.raises(ValueError, match="LoRA layers already"):
        models.insert_lora(body)
    with pytest.raises(ValueError, match="no linear layer of this model"):
        models.insert_lora(bert(), targets=["dense"])
    with pytest.raises(ValueError, match="rank is at least 1"):
        models.insert_lora(bert(), rank=0)
    with pytest.raises(ValueError, match="no linear layer of their own"):
        models.insert_lora(nn.Sequential(*(nn.Sequential(nn.Conv1d(2, 2, 1), nn.Conv1d(2, 2, 1)) for _ in range(2))))


def test_selecting_again_keeps_them_and_the_same_seed_gives_the_same() -> None:
    model, other = models.TextClassifier(bert(), 2).double(), models.TextClassifier(bert(), 2).double()
    first = models.select(model, "lora")
    assert models.select(model, "lora") == first
    models.select(other, "lora")
    pairs = zip(models.lora_of(model), models.lora_of(other), strict=True)
    for (_, a), (_, b) in pairs:
        factors: Any = (a, b)
        assert torch.equal(*(layer.lora_A["tacit"].weight for layer in factors))
        assert a.lora_A["tacit"].weight.dtype == torch.float64  # type: ignore[index, union-attr]


# -- heads and names


def test_fresh_heads() -> None:
    classifier = models.with_head(models.TextClassifier(bert(), 2), 5)
    assert classifier(**tokens()[0]).shape == (6, 5)
    with pytest.raises(ValueError, match="head='keep'"):
        models.with_head(gpt2(), 14)
    untied = gpt2(tie_word_embeddings=False)
    models.with_head(untied, 14)
    assert not untied.lm_head.weight.any()


def test_the_mean_is_over_the_tokens_that_are_there() -> None:
    model = models.TextClassifier(bert(), 2)
    nn.init.normal_(model.head.weight)
    inputs, _ = tokens()
    states = model.encoder(**inputs).last_hidden_state
    expected = torch.stack(
        [row[: int(m.sum())].mean(0) for row, m in zip(states, inputs["attention_mask"], strict=True)]
    )
    torch.testing.assert_close(model(**inputs), model.head(expected))
    assert not any("pooler" in name for name, _ in model.named_parameters())


def test_models_by_folder_and_by_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(encoder := bert(), tmp_path / "encoder")
    model: Any
    model, words = models.text(folder, classes=3)
    assert type(model).__name__ == "TextClassifier"
    assert model.head.out_features == 3
    assert torch.equal(model.encoder.embeddings.word_embeddings.weight, encoder.embeddings.word_embeddings.weight)
    assert words("good film")["input_ids"] == tokenizer()("good film")["input_ids"]

    made = saved(bert("BertForSequenceClassification", num_labels=4), tmp_path / "classifier")
    for classes in (4, 2):
        model, _ = models.text(made, classes=classes)
        assert model.classifier.out_features == classes

    package = tmp_path / "carries_a_model"
    saved(gpt2(), package / "model", marks=False)
    (package / "__init__.py").write_text("raise RuntimeError('is never run')\n")
    monkeypatch.syspath_prepend(tmp_path)
    causal, _ = models.text("package:carries_a_model", task="next-token")
    assert causal(torch.zeros(1, 3, dtype=torch.long)).logits.shape == (1, 3, 14)
    assert "carries_a_model" not in sys.modules


def test_what_is_not_there_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("no connection is ever tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    with pytest.raises(ValueError, match=r"neither a folder nor in the local cache.*hf download nobody/has-this"):
        models.text("nobody/has-this")
    with pytest.raises(ValueError, match="no installed package"):
        models.text("package:nobody_has_this")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="carries no model"):
        models.text("package:empty")
    with pytest.raises(ValueError, match=r"no config\.json"):
        models.text(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot be loaded"):
        models.text(tmp_path / "empty")
    with pytest.raises(ValueError, match="A task is"):
        models.text(tmp_path, task="translation")  # type: ignore[arg-type]


def test_without_peft_the_way_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"pip install 'tacit\[text\]'"):
        models.insert_lora(bert())
