"""Private statistics against frozen ones: a table by hand, and a run that goes on where it was stopped."""

import json
from pathlib import Path

import pytest
import torch

from studies.dp_tta import batch_norm

FOUND: batch_norm.Found = {
    "source": {"0": {"fog": 60.0, "snow": 70.0}, "1": {"fog": 62.0, "snow": 72.0}},
    "as published": {"0": {"fog": 80.0, "snow": 80.0}},
    "private, eps 10": {"0": {"fog": 70.0, "snow": 80.0}, "1": {"fog": 74.0, "snow": 80.0}},
    "frozen, eps 10": {"0": {"fog": 62.0, "snow": 70.0}, "1": {"fog": 62.0, "snow": 72.0}},
}


def test_differences_are_taken_seed_by_seed() -> None:
    assert batch_norm.means(FOUND, "private, eps 10") == {"0": 75.0, "1": 77.0}
    gain = batch_norm.above(FOUND, "private, eps 10", "frozen, eps 10")
    assert gain is not None
    assert gain.mean == pytest.approx(9.5)  # 9 and 10
    assert gain.std == pytest.approx(0.5**0.5)
    assert batch_norm.above(FOUND, "private, eps 10", "as published") == (-5.0, 0.0)  # the one seed of both
    assert "| private, eps 10 | 76.0 ± 1.4 | 10.0 ± 0.0 | 9.5 ± 0.7 |" in batch_norm.table(FOUND)


def test_cells_that_are_kept_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_norm, "SEEDS", (0,))
    monkeypatch.setattr(batch_norm, "EPSILONS", (10.0,))
    torch.manual_seed(0)
    torch.save(batch_norm.net().state_dict(), tmp_path / "net.pt")
    kept = {name: {"0": {"fog": 50.0}} for name in ("source", "as published", "private, eps 10")}
    (tmp_path / "accuracy.json").write_text(json.dumps(kept))
    with pytest.warns(UserWarning, match="No ledger was given"):
        found = batch_norm.main(tmp_path, 4)
    assert {name: found[name] for name in kept} == kept
    assert len(found["frozen, eps 10"]["0"]) == 15
    assert json.loads((tmp_path / "accuracy.json").read_text()) == found
    assert len(batch_norm.curve(found).axes) == 1
