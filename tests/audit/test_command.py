"""`tacit audit`."""

import json
import math
from pathlib import Path

import pytest

from tacit import pipeline
from tacit.cli import run
from tacit.privacy import Budget, Ledger, events


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as code:
        run(["audit", *arguments])
    return int(code.value.code or 0)


@pytest.fixture
def book(tmp_path: Path) -> Path:
    with Ledger(tmp_path / "ledger.db") as ledger:
        ledger.subject("a", Budget(100.0, 1e-5))
        ledger.charge("a", events.gaussian(1.0, 3), stage="finetune")
        ledger.charge("a", events.laplace(2.0), stage="calibrate")
        ledger.subject("b", Budget(100.0, 1e-5), neighbours="replace-one")
        ledger.charge("b", events.stream(1.0, 1 << 20, contributions=2, separation=3, blocks=1 << 20), stage="adapt")
        ledger.subject("c", Budget(math.inf, 1e-5), plan=[events.poisson(0.5, events.gaussian(0.5), 7)])
        ledger.charge("c", events.poisson(0.5, events.gaussian(0.5), 7), stage="finetune")
        ledger.charge("a", events.gaussian(0.9), stage="finetune")
    return tmp_path / "ledger.db"


def test_a_ledger(book: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(str(book), "--trials", "3000", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["holds"]
    assert [each["name"].split(" (")[0] for each in printed["findings"]] == [
        "finetune: Gaussian",
        "calibrate: Laplace",
        "adapt: Stream independent",
        "finetune: PoissonSampled",
        "finetune: Gaussian",
    ]
    assert printed["findings"][0]["tightness"] > 0.5
    assert printed["findings"][1]["delta"] == 0  # pure


def test_page_and_card_say_what_was_found(book: Path, tmp_path: Path) -> None:
    assert call(str(book), "--trials", "2000", "--report", str(tmp_path / "out")) == 0
    card = (tmp_path / "out" / "privacy-card.md").read_text()
    assert "## How it was attacked" in card
    assert "Attacked 5 kinds of release in " in card
    assert "finetune: Gaussian (noise" in card
    assert "How it was attacked" in (tmp_path / "out" / "report.html").read_text()
    assert len(json.loads((tmp_path / "out" / "run.json").read_text())["audit"]) == 5


def test_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = "import numpy as np\n\ndef noisy(present, trials):\n    return np.random.normal(present, 1.0, trials)\n"
    (tmp_path / "mine_to_audit.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert call("mine_to_audit:noisy", "--mu", "1", "--trials", "20000") == 0
    assert "No claim was contradicted" in capsys.readouterr().out
    assert call("mine_to_audit:noisy", "--mu", "0.5", "--trials", "20000") == 1
    assert "BROKEN: mine_to_audit:noisy" in " ".join(capsys.readouterr().out.split())
    assert call("mine_to_audit:noisy", "--epsilon", "0.2", "--delta", "1e-3", "--trials", "20000") == 1
    assert call("mine_to_audit:noisy") == 2
    assert "Say what mine_to_audit:noisy claims" in capsys.readouterr().err
    assert call("mine_to_audit:other", "--mu", "1") == 2
    assert call("nowhere:other", "--mu", "1") == 2


def test_a_pipeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a recipe will charge is attacked before any data is there."""
    recipe = tmp_path / "mine.toml"
    recipe.write_text(pipeline.starter("images"))
    assert call(str(recipe), "--trials", "5000", "--json") == 0
    printed = json.loads(capsys.readouterr().out)["findings"]
    assert printed
    assert printed[0]["name"].startswith("finetune: Gaussian")
    assert printed[0]["claimed"] == pytest.approx(pipeline.plan(pipeline.read(recipe)).total.mu, rel=1e-6)


def test_bad_targets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(str(tmp_path / "none.db")) == 2
    capsys.readouterr()
    assert call("pipeline.toml") == 2
