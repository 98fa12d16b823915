"""Saved weights give the same logits in plain timm, transformers and peft, for every scheme."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tacit.models import (
    SCHEMES,
    TextClassifier,
    insert_adapters,
    insert_lora,
    plain_copy,
    save_weights,
    select,
    text,
    with_head,
)

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

IMAGES = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
TOKENS = torch.randint(5, 60, (3, 9), generator=torch.Generator().manual_seed(1))
MERGED = {"lora"}


def timm_vit() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = timm.create_model(
        "vit_tiny_patch16_224", num_classes=4, img_size=32, depth=2, embed_dim=24, num_heads=2
    )
    return model.eval()


def bert(labels: int = 4) -> Any:
    torch.manual_seed(0)
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=60, max_position_embeddings=32, num_labels=labels, **size)
    return transformers.BertForSequenceClassification(config).eval()


def hf_vit() -> Any:
    torch.manual_seed(0)
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.ViTConfig(image_size=32, patch_size=16, num_labels=4, **size)
    return transformers.ViTForImageClassification(config).eval()


MODELS: dict[str, tuple[Callable[[], Any], Tensor]] = {
    "timm": (timm_vit, IMAGES),
    "bert": (bert, TOKENS),
    "vit": (hf_vit, IMAGES),
}


def logits(model: Any, inputs: Tensor) -> Tensor:
    with torch.no_grad():
        out = model(inputs)
    found: Tensor = getattr(out, "logits", out)
    return found


def trained(kind: str, scheme: str, *, head: int | None = 5, bias: bool = True) -> Any:
    """A model as a run of this scheme leaves it: every trained number has moved."""
    model = MODELS[kind][0]()
    if head is not None:
        model = with_head(model, head, bias=bias)
    select(model, scheme)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def plainly_loaded(kind: str, folder: Path, classes: int = 5) -> nn.Module:
    """What somebody does who has never heard of tacit."""
    if kind == "timm":
        model: nn.Module = timm.create_model(
            "vit_tiny_patch16_224",
            num_classes=classes,
            img_size=32,
            depth=2,
            embed_dim=24,
            num_heads=2,
            checkpoint_path=str(folder / "model.safetensors"),
        )
        return model.eval()
    auto = transformers.AutoModelForSequenceClassification if kind == "bert" else None
    loaded, report = (auto or transformers.AutoModelForImageClassification).from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return loaded.eval()  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if scheme != "adapter"])
def test_every_scheme_gives_the_same_logits_elsewhere(kind: str, scheme: str, tmp_path: Path) -> None:
    model, inputs = trained(kind, scheme), MODELS[kind][1]
    before, state = logits(model, inputs), {k: v.clone() for k, v in model.state_dict().items()}
    save_weights(model, tmp_path / "saved")
    after = logits(plainly_loaded(kind, tmp_path / "saved"), inputs)
    assert before.shape == (3, 5)
    if scheme in MERGED:
        torch.testing.assert_close(after, before, rtol=0, atol=1e-6)
    else:
        assert torch.equal(after, before)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items()), "saving changed the model"
    assert torch.equal(logits(model, inputs), before)


@pytest.mark.parametrize("kind", MODELS)
def test_lora_of_a_model_that_was_trained_changes_its_plain_weights(kind: str, tmp_path: Path) -> None:
    """Not only equal logits: the file differs from the model it came from, so LoRA is really in it."""
    start = dict(MODELS[kind][0]().state_dict())
    save_weights(trained(kind, "lora", head=None), tmp_path)
    found = plainly_loaded(kind, tmp_path, classes=4).state_dict()
    assert {*found} == {*start}
    model = MODELS[kind][0]()
    layers = insert_lora(model)
    assert len(layers) >= 2
    assert all(not torch.equal(found[f"{name}.weight"], start[f"{name}.weight"]) for name in layers)


@pytest.mark.parametrize("kind", MODELS)
def test_adapters_are_refused_with_the_way_out_that_works(kind: str, tmp_path: Path) -> None:
    model, inputs = trained(kind, "adapter"), MODELS[kind][1]
    with pytest.raises(ValueError, match=r"format='state_dict'.*insert_adapters.*scheme='lora'"):
        save_weights(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    assert not list(tmp_path.iterdir())
    save_weights(model, tmp_path / "saved", format="state_dict")
    again = with_head(MODELS[kind][0](), 5)
    insert_adapters(again)
    again.load_state_dict(load_file(tmp_path / "saved" / "model.safetensors"))
    assert torch.equal(logits(again.eval(), inputs), logits(model, inputs))


@pytest.mark.parametrize("kind", MODELS)
def test_adapters_that_were_never_trained_are_left_out(kind: str, tmp_path: Path) -> None:
    model, inputs = MODELS[kind][0](), MODELS[kind][1]
    before = logits(model, inputs)
    insert_adapters(model)
    save_weights(model, tmp_path / "saved")
    assert torch.equal(logits(plainly_loaded(kind, tmp_path / "saved", classes=4), inputs), before)


@pytest.mark.parametrize("kind", MODELS)
def test_a_head_without_a_bias_is_saved_with_one_of_zeros(kind: str, tmp_path: Path) -> None:
    model, inputs = trained(kind, "linear", bias=False), MODELS[kind][1]
    save_weights(model, tmp_path / "saved")
    torch.testing.assert_close(
        logits(plainly_loaded(kind, tmp_path / "saved"), inputs), logits(model, inputs), rtol=0, atol=1e-6
    )


def test_a_head_with_a_bias_that_the_class_has_no_place_for_is_refused(tmp_path: Path) -> None:
    """`from_pretrained` would drop it with no more than a warning."""
    config = transformers.GPT2Config(vocab_size=60, n_positions=32, n_embd=16, n_layer=2, n_head=2, num_labels=3)
    config.pad_token_id = 0
    model = with_head(transformers.GPT2ForSequenceClassification(config), 3, bias=True)
    with pytest.raises(ValueError, match=r"score.bias.*bias="):
        save_weights(model, tmp_path / "saved")
    save_weights(with_head(model, 3, bias=False), tmp_path / "saved")


@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_save_pretrained_of_a_model_with_lora_writes_what_it_computes(kind: str, tmp_path: Path) -> None:
    """It used to write query.base_layer.weight, and from_pretrained drew query and value at random."""
    model, inputs = trained(kind, "lora"), MODELS[kind][1]
    for way in (model, copy.deepcopy(model)):
        way.save_pretrained(tmp_path)
        after = logits(plainly_loaded(kind, tmp_path), inputs)
        torch.testing.assert_close(after, logits(model, inputs), rtol=0, atol=1e-6)


def test_save_pretrained_of_a_copy_saves_the_copy(tmp_path: Path) -> None:
    model = trained("bert", "lora")
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.classifier.bias.add_(1.0)
    other.save_pretrained(tmp_path)
    after = logits(plainly_loaded("bert", tmp_path), TOKENS)
    torch.testing.assert_close(after, logits(model, TOKENS) + 1, rtol=0, atol=1e-6)


def test_save_pretrained_of_a_model_with_adapters_refuses(tmp_path: Path) -> None:
    """It used to write them under names that from_pretrained drops."""
    with pytest.raises(ValueError, match="trained adapters"):
        trained("bert", "adapter").save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", MODELS)
def test_peft_format_is_loaded_by_peft(kind: str, tmp_path: Path) -> None:
    model, inputs = trained(kind, "lora"), MODELS[kind][1]
    save_weights(model, tmp_path / "saved", format="peft")
    base = with_head(MODELS[kind][0](), 5)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "saved").eval()
    torch.testing.assert_close(logits(loaded, inputs), logits(model, inputs), rtol=0, atol=1e-6)
    assert not (tmp_path / "saved" / "model.safetensors").exists()


def test_peft_format_refuses_what_it_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="scheme='lora'"):
        save_weights(trained("bert", "full"), tmp_path / "saved", format="peft")
    model = trained("bert", "lora")
    select(model, "full")
    with pytest.raises(ValueError, match="format='plain'"):
        save_weights(model, tmp_path / "saved", format="peft")
    assert not list(tmp_path.iterdir())


def test_a_model_that_peft_itself_wrapped(tmp_path: Path) -> None:
    config = peft.LoraConfig(target_modules=["query", "value"], modules_to_save=["classifier"], init_lora_weights=False)
    model = peft.get_peft_model(bert(), config).eval()
    save_weights(model, tmp_path)
    after = logits(plainly_loaded("bert", tmp_path), TOKENS)
    torch.testing.assert_close(after, logits(model, TOKENS), rtol=0, atol=1e-6)


def test_timm_loads_the_folder_where_the_name_says_everything(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=3).eval()
    files = save_weights(model, tmp_path / "saved")
    assert [file.name for file in files] == ["model.safetensors", "config.json"]
    again = timm.create_model(f"local-dir:{tmp_path / 'saved'}", pretrained=True).eval()
    images = torch.rand(2, *model.pretrained_cfg["input_size"])
    assert torch.equal(logits(again, images), logits(model, images))
    save_weights(timm_vit(), tmp_path / "saved")  # made with arguments that config.json would not tell
    assert [file.name for file in (tmp_path / "saved").iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("scheme", ["full", "lora"])
def test_a_text_classifier_comes_back_and_its_encoder_is_plain(scheme: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = TextClassifier(bert().bert, 3)
    select(model, scheme)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter) * parameter.requires_grad)
    model.eval()
    words = tmp_path / "words.txt"
    words.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]))
    tokenizer = transformers.BertTokenizer(str(words))
    save_weights(model, tmp_path / "saved", tokenizer=tokenizer)
    mask = torch.ones_like(TOKENS)
    again, _ = text(tmp_path / "saved")
    torch.testing.assert_close(again(TOKENS, mask), model(TOKENS, mask), rtol=0, atol=1e-6)
    encoder = transformers.AutoModel.from_pretrained(tmp_path / "saved").eval()
    head = load_file(tmp_path / "saved" / "head.safetensors")
    by_hand = encoder(TOKENS).last_hidden_state.mean(1) @ head["weight"].T + head["bias"]
    torch.testing.assert_close(by_hand, model(TOKENS, mask), rtol=0, atol=1e-6)


def test_tied_weights_are_written_for_load_state_dict(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))  # type: ignore[no-any-return]

    model, again = Tied(), Tied()
    save_weights(model, tmp_path / "saved")
    again.load_state_dict(load_file(tmp_path / "saved" / "model.safetensors"))
    assert torch.equal(again(torch.ones(1, 4)), model(torch.ones(1, 4)))


def test_what_is_in_the_way_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        save_weights(nn.Linear(2, 2), tmp_path / "file")
    with pytest.raises(ValueError, match="'plain', 'peft' or 'state_dict'"):
        save_weights(nn.Linear(2, 2), tmp_path / "saved", format="onnx")  # type: ignore[arg-type]


def test_an_earlier_result_leaves_nothing_that_would_be_loaded_by_mistake(tmp_path: Path) -> None:
    save_weights(trained("bert", "lora"), tmp_path, format="peft")
    (tmp_path / "notes.txt").write_text("mine")
    save_weights(trained("bert", "lora"), tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", "model.safetensors", "notes.txt"}
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["BertForSequenceClassification"]


def test_the_plain_copy_shares_what_it_does_not_change() -> None:
    model = trained("bert", "lora")
    copied = plain_copy(model)
    assert copied.bert.embeddings.word_embeddings.weight is model.bert.embeddings.word_embeddings.weight  # type: ignore[union-attr,attr-defined]
