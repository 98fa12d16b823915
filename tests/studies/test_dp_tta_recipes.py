"""`python -m studies run` on small recipes of the kinds adapt and source-model: what is left, and what is refused."""

import json
from pathlib import Path

import pytest

from studies.__main__ import main as command
from tacit.cli import _main as main

RECIPE = """
kind = "adapt"
title = "small"
public = true
seeds = [0]
workers = 1
keep_ledgers = true
seeded_noise = false

[data]
images = "test"
shifts = "extra"
per_shift = 16

[[arms]]
method = ["source"]

[[arms]]
method = ["tent"]
form = ["dp"]
epsilon = [10.0]
clip = [0.3]
batch_size = [8]
"""


def tacit(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main.run(list(arguments))
    return int(end.value.code or 0)


def test_a_run_leaves_report_card_facts_pictures_and_ledger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "small.toml"
    recipe.write_text(RECIPE)
    assert command(["run", str(recipe), "--out", str(tmp_path / "out"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    arms = {cell["arm"]: cell for cell in facts["facts"]["cells"]}
    assert set(arms) == {"source", "DP-Tent (eps 10)"}
    assert arms["DP-Tent (eps 10)"]["epsilon"] == 10.0
    out = tmp_path / "out"
    assert {p.name for p in out.iterdir()} == {
        "cells", "ledgers", "picture-1.png", "privacy-card.md", "report.html", "run.json",
    }  # fmt: skip
    card = (out / "privacy-card.md").read_text()
    assert "one row per person" in card
    assert tacit("card", str(out)) == 0
    ledger = next((out / "ledgers").glob("*.db"))
    assert tacit("ledger", "verify", str(ledger)) == 0


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("per_shift", "per_shft", "per_shift"),
        ('"tent"', '"tant"', "tent"),
        ("public = true", "public = false", "public"),
        ("epsilon = [10.0]", "epsilon = [-1.0]", "epsilon"),
        ("per_shift = 16", "per_shift = 16000", "16000"),
    ],
)
def test_a_bad_recipe_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, told: str
) -> None:
    recipe = tmp_path / "bad.toml"
    recipe.write_text(RECIPE.replace(old, new))
    assert command(["run", str(recipe), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert "Traceback" not in error


def test_a_source_model_can_be_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import numpy as np

    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (64, 1, 28, 28), dtype=np.uint8)
    np.savez(tmp_path / "images.npz", images=images, labels=np.arange(64) % 4)
    recipe = tmp_path / "source.toml"
    recipe.write_text(
        f'kind = "source-model"\ntitle = "tiny"\npublic = true\nimages = "{tmp_path}/images.npz"\n'
        f'test = "{tmp_path}/images.npz"\nwidths = [4]\ndepths = [1]\n[train]\nepochs = 1\nbatch_size = 16\n'
    )
    assert command(["run", str(recipe), "--out", str(tmp_path / "out"), "--json"]) == 0
    assert 0 <= json.loads(capsys.readouterr().out)["facts"]["accuracy"] <= 100
    assert (tmp_path / "out" / "source.safetensors").exists()
