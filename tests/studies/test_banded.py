"""The study of banded noise: equal epsilon for its arms, derived again, and a run of each."""

from pathlib import Path

import numpy as np
import pytest

from studies.finetune.banded import Cell, compute, derived, rows
from tacit.privacy import accounting


def cell(arm: str, **more: object) -> Cell:
    given: dict[str, object] = {"file": "", "private": 240, "steps": 12, "epsilon": 4.0, "lr": 5.0, "seed": 0}
    given["split"] = "private"
    return Cell(arm=arm, **(given | more))  # type: ignore[arg-type]


@pytest.mark.parametrize("arm", ["DP-SGD", "4 bands", "8 bands", "HyFreeDP"])
def test_what_is_derived_again_is_what_is_charged(arm: str) -> None:
    one = cell(arm, private=3000, steps=60)
    event = one.optimizer().event(1.3, 3000)
    found = accounting.guarantee(event, delta=1e-5, neighbours="zero-out").epsilon
    assert found == pytest.approx(derived(1.3, 60, one.bands, 1 / 60), rel=2e-3)


@pytest.mark.parametrize("arm", ["DP-SGD", "4 bands", "HyFreeDP"])
def test_a_run_of_each(arm: str, tmp_path: Path) -> None:
    chance = np.random.default_rng(0)
    labels = np.arange(240) % 2
    rows = (chance.normal(size=(240, 6)) + 3 * labels[:, None]).astype(np.float32)
    file = tmp_path / "features.npz"
    np.savez(file, train_features=rows, train_labels=labels, test_features=rows, test_labels=labels)
    found = compute(cell(arm, file=str(file)))
    assert found["epsilon"] <= 4.0
    assert found["accuracy"] > 60


def test_rates_are_chosen_on_rows_that_are_neither_trained_on_nor_tried(tmp_path: Path) -> None:
    file = tmp_path / "features.npz"
    places = np.arange(1200, dtype=np.float32)[:, None]
    np.savez(file, train_features=places, train_labels=places[:, 0], test_features=-places, test_labels=places[:, 0])
    (private, _), (tested, _) = rows(cell("DP-SGD", file=str(file)))
    (other, _), (held_out, _) = rows(cell("DP-SGD", file=str(file), split="tuning"))
    assert [list(part[[0, -1], 0]) for part in (private, other, held_out)] == [[0, 239], [240, 479], [480, 1199]]
    assert (tested <= 0).all()
    with pytest.raises(ValueError, match="too few training rows"):
        rows(cell("DP-SGD", file=str(file), private=500, split="tuning"))
