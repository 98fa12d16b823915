"""Whole pipelines with canaries: nothing is found beyond the budget, and a run without its noise is caught."""

import json
from pathlib import Path

import pytest
import torch

from tacit import audit, pipeline
from tacit.audit import Finding
from tacit.cli._main import run as command
from tacit.privacy import mu_of
from tacit.privacy.mechanisms import _mechanisms
from tests.data.words import bert, saved
from tests.pipeline.made_up_images import ADAPT, CALIBRATE, FINETUNE, IMAGES

EMBEDDED = """
model.name = "embedded"
data.kind = "embedded"
budget = {epsilon = 0.4, delta = 1e-5}
finetune = {scheme = "linear", head = "keep", steps = 3, lr = 0.1}
"""
TEXTS = """
model = {name = "transformers:bert", pooling = "mean"}
data = {kind = "text", table = "texts.csv", unit_ids = "user", max_length = 16}
budget = {epsilon = 0.4, delta = 1e-5, unit = "user"}
finetune = {scheme = "full", head = "keep", steps = 2, lr = 0.001}
"""
VIDEOS = """
model.name = "small:video"
data = {kind = "video", folder = "videos", frames = 8, size = 32}
budget = {epsilon = 0.4, delta = 1e-5, unit = "video"}
finetune = {scheme = "full", head = "keep", steps = 2, lr = 0.001}
"""
COUNT = 120


def attacked(path: Path, count: int = COUNT) -> Finding:
    run = pipeline.CanaryRun(pipeline.read(path), canaries=count)
    return audit.run(run, count, run.claim, neighbours=run.neighbours, name=path.stem, strict=False)


@pytest.fixture
def noiseless(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mechanism forgets its noise; everything else is as charged."""
    drawn = _mechanisms._draw
    monkeypatch.setattr(_mechanisms, "_draw", lambda *told: torch.zeros_like(drawn(*told)))


@pytest.mark.parametrize("recipe", [EMBEDDED, TEXTS, VIDEOS], ids=["images", "texts", "videos"])
def test_a_pipeline_without_its_noise_is_caught(tmp_path: Path, noiseless: None, recipe: str) -> None:
    """One gradient of everybody, exactly: most coins are guessed right. A text is replaced: twice the mu."""
    del noiseless
    saved(bert("BertForSequenceClassification", initializer_range=0.3), tmp_path / "bert")
    (tmp_path / "mine.toml").write_text(recipe)
    found = attacked(tmp_path / "mine.toml")
    assert found.claimed == pytest.approx(mu_of(0.4, 1e-5) * (2 if recipe is TEXTS else 1), rel=1e-6)
    assert not found.holds, str(found)


def test_all_stages_with_their_noise_hold_and_nothing_private_is_read(home: Path) -> None:
    """Fine-tuning, a stream and two sources: the claim is what one person in all of them was charged."""
    for file in (home / "images").iterdir():
        file.unlink()
    (home / "whole.toml").write_text(IMAGES + FINETUNE + ADAPT + CALIBRATE)
    found = attacked(home / "whole.toml", 60)
    assert found.claimed == pytest.approx(pipeline.plan(pipeline.read(home / "whole.toml")).total.mu, rel=1e-6)
    assert found.holds
    assert not (home / "ledger.db").exists()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.toml").write_text(EMBEDDED)
    with pytest.raises(SystemExit) as stop:
        command(["audit", str(tmp_path / "mine.toml"), "--trials", "2000", "--canaries", "20", "--json"])
    assert stop.value.code == 0
    told = json.loads(capsys.readouterr().out)["findings"]
    assert told[-1]["name"] == "the whole pipeline, one run"
    assert told[-1]["trials"] == 20
    with pytest.raises(SystemExit) as stop:
        command(["audit", str(tmp_path / "ledger.db"), "--canaries", "20"])
    assert stop.value.code == 2


def test_a_recipe_that_leaves_nothing_in_a_model(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(pipeline.starter("outputs"))
    with pytest.raises(ValueError, match="neither"):
        pipeline.CanaryRun(pipeline.read(tmp_path / "mine.toml"))
