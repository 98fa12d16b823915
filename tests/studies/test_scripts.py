"""Studies that are scripts of their own: one cell of each, and the picture."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from studies.finetune import long_steps, loss_curve
from studies.linear_scaling import beyond, no_rate, pay_once, plots
from studies.linear_scaling.data import Task
from tacit.tune import Space


@pytest.fixture
def features(tmp_path: Path) -> str:
    chance = np.random.default_rng(0)
    labels = np.arange(2000) % 3
    rows = (chance.normal(size=(2000, 6)) + 3 * np.eye(3, 6)[labels]).astype(np.float32)
    path = tmp_path / "features.npz"
    np.savez(path, train_features=rows, train_labels=labels, test_features=rows[:500], test_labels=labels[:500])
    return str(path)


@pytest.mark.parametrize("arm", loss_curve.ARMS)
def test_a_loss_curve_without_noise_is_near_the_loss(arm: str, features: str) -> None:
    cell = loss_curve.Cell(file=features, private=2000, arm=arm, lr=0.5, epsilon=float("inf"), seed=0)
    found = loss_curve.compute(cell)
    assert found["noise"] == 0
    assert found["true"] < -0.3
    assert found["estimate"] == pytest.approx(found["true"], abs=0.06)


def test_where_steps_are_long_the_loss_at_the_start_ends_a_run() -> None:
    short = long_steps.Cell(classes=2, epsilon=float("inf"), lr=1.0, momentum=0.0, steps=20, stop="none", seed=0)
    found = long_steps.compute(short)
    assert found["change"] == pytest.approx(found["true"], abs=0.02)
    assert found["true"] < found["most"] + 0.02  # the clip is all that lies between
    assert long_steps.compute(replace(short, lr=100.0, stop="start"))["steps"] < 20


def test_one_line_serves_every_budget(features: str) -> None:
    task = Task(title="corners", file=features, private=2000, tested=500, classes=3)
    space = Space(lr=(0.5, 50.0), steps=(1, 20))
    found = pay_once.compute(pay_once.Cell(task=task, space=space, searched=1.0, delta=1e-5, seed=0))
    assert 0.4 < found["paid"] < 0.7  # what it costs is left over at the least budget
    assert [len(scores) for scores in found["scores"].values()] == [len(pay_once.BUDGETS)] * len(pay_once.ARMS)
    assert min(found["scores"]["default, no search"]) > 60


@pytest.mark.parametrize("arm", no_rate.ARMS)
def test_steps_without_a_rate_to_choose(arm: str, features: str) -> None:
    task = Task(title="corners", file=features, private=2000, tested=500, classes=3)
    found = no_rate.compute(no_rate.Cell(task=task, arm=arm, epsilon=8.0, delta=1e-5, steps=20, seed=0))
    assert found["accuracy"] > 60
    assert found["epsilon"] <= 8.0


@pytest.mark.parametrize("method", ["random search, one run", "linear scaling", "oracle"])
def test_zeroth_order_is_searched(method: Any, features: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with np.load(features) as found:
        arrays = {name: values % 2 if name.endswith("labels") else values for name, values in found.items()}
    (tmp_path / "features").mkdir()
    np.savez(tmp_path / "features" / "sst2-features.npz", **arrays)
    monkeypatch.setitem(beyond.ROWS, "dpzo", 2000)
    monkeypatch.setitem(beyond.BOXES, "dpzo", Space(lr=(0.01, 0.1), steps=(4, 8)))
    cell = beyond.Cell(data=str(tmp_path), arm="dpzo", method=method, epsilon=3.0, seed=0, share=0.5)
    outcome = beyond.compute(cell)
    assert 0 < outcome["spent"] <= 3.0
    assert 0.01 <= outcome["lr"] <= 0.1
    assert outcome["accuracy"] > 20


def test_the_picture_has_a_panel_for_each_task(tmp_path: Path) -> None:
    series = {arm: [(1.0, 80.0, 1.0), (8.0, 85.0, 0.5)] for arm in pay_once.ARMS}
    figure = plots.along(dict.fromkeys(("one", "two", "three", "four"), series))
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["one", "two", "three", "four"]
    figure.savefig(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
