"""A stream of texts: LoRA on labelled ones, then private adaptation to unlabelled ones, in one budget."""

import csv
import math
from pathlib import Path

import pytest
import torch

from tacit import pipeline
from tacit.privacy import mu_of
from tests.pipeline.killed import costs, killed_and_resumed, writes

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")
from tests.data.words import bert, saved  # noqa: E402

RECIPE = """
[model]
name = "transformers:bert"

[data]
kind = "text"
table = "texts.csv"
unit_ids = "user"
classes = 2
max_length = 12

[budget]
epsilon = 8.0
delta = 1e-3
unit = "user"

[finetune]
scheme = "lora"
steps = 3
lr = 0.5

[adapt]
batch_size = 6
every = 2

[adapt.data]
kind = "text"
table = "stream.csv"
unit_ids = "user"
classes = 2
max_length = 12
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Three texts of each user, of different lengths; the stream has no labels."""
    torch.manual_seed(0)
    saved(bert("BertForSequenceClassification"), tmp_path / "bert")
    for name, labels in (("texts.csv", True), ("stream.csv", False)):
        with (tmp_path / name).open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["text", *(["label"] if labels else []), "user"])
            for row in range(24):
                words = f"{'very ' * (row % 5)}{('bad', 'good')[row % 2]} film"
                owner = f"user {row // 3}" if labels else f"guest {row}"
                table.writerow([words, *([row % 2] if labels else []), owner])
    path = tmp_path / "mine.toml"
    path.write_text(RECIPE)
    return path


def test_a_stream_of_texts_shares_the_budget_and_leaves_plain_weights(recipe: Path) -> None:
    outcome = pipeline.run(pipeline.read(recipe), recipe.parent / "out")
    pipeline.write_report(outcome)
    whole = mu_of(8.0, 1e-3)
    for subject in ("train", "stream"):
        mu = mu_of(outcome.ledger.spent(subject).epsilon, 1e-3)
        assert mu == pytest.approx(whole / math.sqrt(2), rel=1e-6)  # equal parts of mu^2
    assert outcome.adapter is not None
    assert outcome.adapter.steps == 4
    now = outcome.adapter.parameters.items()
    moved = [name for name, value in now if not torch.equal(value, torch.ones_like(value))]
    assert any("LayerNorm.weight" in name for name in moved)
    where = recipe.parent / "out" / "model"
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(where).eval()
    words = transformers.AutoTokenizer.from_pretrained(where)("very good film", return_tensors="pt")
    with torch.no_grad():
        assert torch.allclose(plain(**words).logits, outcome.model(**words).logits, atol=1e-6)


def test_the_length_of_a_text_changes_the_shape_of_no_other(recipe: Path) -> None:
    from tacit.pipeline._data import load
    from tacit.pipeline._models import build

    read = pipeline.read(recipe)
    assert read.adapt is not None
    rows = load(read, read.adapt.data, build(read), labelled=False)
    for inputs, _ in rows.batches(5):
        assert {each.shape[1] for each in inputs.values()} == {12}


@pytest.mark.parametrize("after", [False, True])
def test_killed_on_texts_the_ledger_is_that_of_an_uninterrupted_run(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    count, uninterrupted = writes(monkeypatch, recipe, recipe.parent / "whole")
    for number in (count // 3, 2 * count // 3):
        out = recipe.parent / f"killed-{number}"
        outcome = killed_and_resumed(monkeypatch, recipe, out, number, after=after)
        assert costs(outcome) == costs(uninterrupted), f"killed at write {number} of {count}"
        assert outcome.total.epsilon <= 8.0


def test_a_tokenizer_of_another_model_is_refused_without_a_charge(recipe: Path) -> None:
    saved(bert("BertForSequenceClassification"), recipe.parent / "bert")
    words = transformers.AutoTokenizer.from_pretrained(recipe.parent / "bert")
    words.add_tokens(["unheard"])
    words.save_pretrained(recipe.parent / "bert")
    with pytest.raises(ValueError, match="15 tokens, and the model knows 14"):
        pipeline.run(pipeline.read(recipe), recipe.parent / "out")
    assert not (recipe.parent / "ledger.db").exists()


def test_a_method_for_images_is_refused_before_the_first_charge(recipe: Path) -> None:
    recipe.write_text(RECIPE.replace("batch_size = 6", 'batch_size = 6\nmethod = "deyo"'))
    with pytest.raises(ValueError, match="shuffles the patches of images"):
        pipeline.run(pipeline.read(recipe), recipe.parent / "out")
