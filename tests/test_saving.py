"""Results that people can use: each stage's `save` writes plain weights, and the promise beside them."""

import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tacit import adapt, finetune, models, report
from tacit.calibrate import Result
from tacit.privacy import Budget, Guarantee, Ledger, events

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

SIZES = {"img_size": 32, "depth": 2, "embed_dim": 24, "num_heads": 2}
IMAGES = torch.rand(24, 3, 32, 32, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(24) % 3


def vit(classes: int = 3, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = timm.create_model("vit_tiny_patch16_224", num_classes=classes, **SIZES, **options)
    return model.eval()


def bert() -> Any:
    torch.manual_seed(0)
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=60, max_position_embeddings=32, num_labels=3, **size)
    return transformers.BertForSequenceClassification(config).eval()


def fitted(model: nn.Module, inputs: Tensor, ledger: Ledger, **options: Any) -> finetune.Fitted:
    steps = finetune.DPSGD(batch_size=8, steps=3, lr=0.5)
    terms = {"epsilon": 4.0, "delta": 1e-3, "size": 24, "ledger": ledger, "subject": "clinic"}
    return finetune.fit(model, (inputs, LABELS), optimizer=steps, classes=3, **terms, **options)


def logits(model: Any, inputs: Tensor) -> Tensor:
    with torch.no_grad():
        out = model(inputs)
    found: Tensor = getattr(out, "logits", out)
    return found


def test_a_timm_model_from_fit_to_plain_timm(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    result = fitted(vit(), IMAGES, ledger, scheme="selective")
    assert result.save(tmp_path / "out" / "clinic", title="Findings") == tmp_path / "out" / "clinic"
    folder = tmp_path / "out" / "clinic"
    loaded = vit(checkpoint_path=str(folder / "model.safetensors"))
    assert torch.equal(logits(loaded, IMAGES), logits(result.model, IMAGES))
    facts = json.loads((folder / "guarantee.json").read_text())
    assert Guarantee.from_json(facts["guarantee"]) == result.guarantee
    assert len({file.stat().st_mode for file in folder.iterdir()}) == 1, "weights can be read by who can read the card"
    assert facts["head"] == ledger.head
    assert facts["receipt"] == result.receipt
    assert facts["assumptions"] == result.assumptions
    assert facts["weights"]["sha256"] == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    card = (folder / "privacy-card.md").read_text()
    assert card.startswith("# Privacy card: Findings")
    assert ledger.head in card
    assert "## In plain words" in card
    assert card.index("In plain words") < card.index("differential privacy: when one sample")
    assert {file.name for file in folder.iterdir()} == {"guarantee.json", "model.safetensors", "privacy-card.md"}


def test_a_text_model_with_lora_from_fit_to_plain_transformers_and_to_peft(tmp_path: Path) -> None:
    tokens = torch.randint(5, 60, (24, 9), generator=torch.Generator().manual_seed(1))
    result = fitted(bert(), tokens, Ledger(tmp_path / "ledger.db"), scheme="lora")
    start = bert().bert.encoder.layer[0].attention.self.query.weight
    result.save(tmp_path / "plain")
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "plain").eval()
    assert not torch.equal(loaded.bert.encoder.layer[0].attention.self.query.weight, start)
    torch.testing.assert_close(logits(loaded, tokens), logits(result.model, tokens), rtol=0, atol=1e-6)
    result.save(tmp_path / "peft", format="peft")
    wrapped = peft.PeftModel.from_pretrained(bert(), tmp_path / "peft").eval()
    torch.testing.assert_close(logits(wrapped, tokens), logits(result.model, tokens), rtol=0, atol=1e-6)
    assert (tmp_path / "peft" / "privacy-card.md").exists()


def test_adapters_and_probes_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    result = fitted(vit(), IMAGES, ledger, scheme="adapter")
    with pytest.raises(ValueError, match="format='state_dict'"):
        result.save(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    result.save(tmp_path / "out", format="state_dict")
    again = models.with_head(vit(), 3)
    models.insert_adapters(again)
    again.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    assert torch.equal(logits(again.eval(), IMAGES), logits(result.model, IMAGES))
    with Ledger("sqlite://") as other:
        probe = fitted(vit(), IMAGES, other, scheme="linear", features="all")
    with pytest.raises(ValueError, match="features='last'"):
        probe.save(tmp_path / "probe")
    assert not (tmp_path / "probe").exists()


def test_a_head_on_cached_features_is_saved_with_its_backbone(tmp_path: Path) -> None:
    result = fitted(vit(), IMAGES, Ledger(tmp_path / "ledger.db"), scheme="linear", features="last")
    result.save(tmp_path / "out")
    loaded = vit(checkpoint_path=str(tmp_path / "out" / "model.safetensors"))
    assert torch.equal(logits(loaded, IMAGES), logits(result.model, IMAGES))


def test_an_adapted_model(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    privacy = adapt.DP(epsilon=1.0, delta=1e-6, clip=0.3)
    adapter = adapt.Tent(vit(), privacy=privacy, batch_size=8, lr=0.1, ledger=ledger, subject="camera")
    for batch in IMAGES.split(8):
        adapter(batch)
    adapter.save_model(tmp_path / "out")
    loaded = vit(checkpoint_path=str(tmp_path / "out" / "model.safetensors"))
    assert torch.equal(logits(loaded, IMAGES), logits(adapter.model, IMAGES))
    assert not torch.equal(logits(loaded, IMAGES), logits(vit(), IMAGES))
    facts = json.loads((tmp_path / "out" / "guarantee.json").read_text())
    assert facts["guarantee"]["epsilon"] == pytest.approx(1.0)
    assert facts["head"] == ledger.head
    assert "a stream of any length, one release in all" in (tmp_path / "out" / "privacy-card.md").read_text()


def test_an_adapted_model_of_transformers(tmp_path: Path) -> None:
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    model = transformers.ViTForImageClassification(
        transformers.ViTConfig(image_size=32, patch_size=16, num_labels=4, **size)
    )

    privacy = adapt.DP(epsilon=1.0, delta=1e-6, clip=0.3)
    ledger = Ledger(tmp_path / "ledger.db")
    adapter = adapt.Tent(model, privacy=privacy, batch_size=8, lr=0.1, ledger=ledger)
    before = logits(model, IMAGES)
    for batch in IMAGES.split(8):
        adapter(batch)
    adapter.save_model(tmp_path / "out")
    loaded = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(logits(loaded, IMAGES), logits(model, IMAGES))
    assert not torch.equal(logits(loaded, IMAGES), before)


def test_an_adapter_without_privacy_says_so(tmp_path: Path) -> None:
    adapter = adapt.Tent(vit(), batch_size=24)
    adapter(IMAGES)
    adapter.save_model(tmp_path / "out")
    facts = json.loads((tmp_path / "out" / "guarantee.json").read_text())
    assert facts["guarantee"] is None
    assert facts["private"] is False
    assert "makes no privacy guarantee" in (tmp_path / "out" / "privacy-card.md").read_text()


RESULT = Result(method="Acc-T", temperature=2.5, queries=3, epsilon=1.0, sources=20, unit="patient")


@pytest.mark.parametrize("kind", ["timm", "bert"])
def test_a_temperature_goes_into_the_head(kind: str, tmp_path: Path) -> None:
    if kind == "timm":
        model, inputs, made_up = vit(), IMAGES, {"inputs": IMAGES[:2]}
    else:
        model, inputs, made_up = bert(), torch.randint(5, 60, (4, 9)), {}
    calibrated = RESULT.wrap(model)
    before = logits(model, inputs)
    calibrated.save(tmp_path / "out", **made_up)
    if kind == "timm":
        loaded = vit(checkpoint_path=str(tmp_path / "out" / "model.safetensors"))
    else:
        loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    torch.testing.assert_close(logits(loaded, inputs), before / 2.5, rtol=0, atol=1e-6)
    assert torch.equal(logits(model, inputs), before), "saving changed the model"
    facts = json.loads((tmp_path / "out" / "guarantee.json").read_text())
    assert (facts["guarantee"]["epsilon"], facts["guarantee"]["unit"]) == (1.0, "patient")
    assert "each of the 20 sources" in (tmp_path / "out" / "privacy-card.md").read_text()
    assert not (tmp_path / "out" / "calibration.json").exists()


def test_a_calibration_that_cannot_be_merged_goes_beside(tmp_path: Path) -> None:
    bins = Result(method="histogram", confidences=(0.5, 0.6, 0.7), sources=2)
    calibrated = bins.wrap(vit())
    with pytest.raises(ValueError, match="merge=False"):
        calibrated.save(tmp_path / "out")
    calibrated.save(tmp_path / "out", merge=False)
    loaded = vit(checkpoint_path=str(tmp_path / "out" / "model.safetensors"))
    again = Result.from_json(json.loads((tmp_path / "out" / "calibration.json").read_text())).wrap(loaded)
    assert torch.equal(logits(again, IMAGES), logits(calibrated, IMAGES))
    RESULT.wrap(vit()).save(tmp_path / "out", inputs=IMAGES[:2])
    assert not (tmp_path / "out" / "calibration.json").exists(), "it would be applied to the new weights"


def test_a_model_whose_head_is_not_its_last_word_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(1))
    with pytest.raises(ValueError, match="merge=False"):
        RESULT.wrap(model).save(tmp_path / "out", inputs=torch.randn(5, 4))
    with pytest.raises(ValueError, match="inputs="):
        RESULT.wrap(model).save(tmp_path / "out")
    assert not (tmp_path / "out").exists()


# -- cards and pages of anything


def test_cards_of_everything_that_promises_something(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    account = {"checkpoint": tmp_path / "run.safetensors"}
    result = fitted(vit(), IMAGES, ledger, scheme="linear", **account)
    result.save(tmp_path / "out")
    things = [
        result,
        ledger,
        report.Book.of(ledger),
        result.guarantee,
        tmp_path / "ledger.db",
        f"sqlite:///{tmp_path / 'ledger.db'}",
        tmp_path / "out",
        tmp_path / "out" / "model.safetensors",
        tmp_path / "run.safetensors",
        RESULT,
        RESULT.wrap(vit()),
    ]
    for thing in things:
        assert "## In plain words" in report.card(thing), thing
        assert "<dt>Who is protected" in report.page(thing), thing
    for thing in (3, torch.zeros(1)):
        with pytest.raises(ValueError, match="carries no promise"):
            report.card(thing)
    empty = tmp_path / "empty"
    empty.mkdir()
    for bad in (empty, tmp_path / "nothing.db"):
        with pytest.raises(Exception, match=r"no privacy-card|nothing\.db"):
            report.card(bad)


def test_a_result_whose_ledger_paid_for_more(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.subject("other", budget=Budget(1.0, 1e-3), unit="sample")
    ledger.charge("other", events.gaussian(8.0), stage="count")
    result = fitted(vit(), IMAGES, ledger, scheme="linear")
    text = report.card(result)
    assert "Of this result alone: (4, 0.001)-differential privacy" in text
    assert ledger.total().epsilon > result.guarantee.epsilon
    shown = float(text.split("| epsilon | ")[1].split(" ")[0])
    assert ledger.total().epsilon <= shown < ledger.total().epsilon + 1e-3


def test_notebooks_show_results(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ledger = Ledger(tmp_path / "ledger.db")
        result = fitted(vit(), IMAGES, ledger, scheme="linear")
    for thing in (result, result.guarantee, ledger, RESULT, adapt.Tent(vit(), batch_size=4)):
        shown = thing._repr_html_()
        assert shown.startswith("<")
        assert "<script" not in shown
