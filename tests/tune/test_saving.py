"""What a search found, on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from made_up import Steady
from safetensors.torch import load_file
from torch import nn

from tacit import tune
from tacit.privacy import Budget, Ledger

BOX, TWO = tune.Space(lr=(0.1, 1.0), steps=(2, 4)), Budget(2.0, 1e-5)


def test_weights_and_the_guarantee_of_the_whole_search(tmp_path: Path) -> None:
    rows, labels, ledger = torch.randn(2000, 4), torch.arange(2000) % 2, Ledger("sqlite://")
    trainable = tune.Finetuning(nn.Linear(4, 2), (rows, labels), size=2000, classes=2, standardise=None)
    found = tune.random_search(trainable, BOX, TWO, trials=2, ledger=ledger, subject="people")
    folder = found.save(tmp_path / "found", title="Two trials")
    saved = load_file(folder / "model.safetensors")
    assert {name: tensor.tolist() for name, tensor in saved.items()} == {
        name: tensor.tolist() for name, tensor in found.model.state_dict().items()
    }
    promise = json.loads((folder / "guarantee.json").read_text())
    assert promise["title"] == "Two trials"
    assert (
        "(2, 1e-05)" in (folder / "privacy-card.md").read_text()
    )  # of both trials and their scores, not of the winner
    assert found.final_run_guarantee is not None
    assert found.final_run_guarantee.epsilon < found.guarantee.epsilon <= 2.0


def test_what_is_no_model_is_not_saved(tmp_path: Path) -> None:
    found = tune.train(
        Steady(), tune.Hyperparameters(lr=1.0, steps=3), TWO, ledger=Ledger("sqlite://"), subject="people"
    )
    with pytest.raises(ValueError, match=r"no torch model to save, but 0\.7"):
        found.save(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
