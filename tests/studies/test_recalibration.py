"""Studies of recalibration: cells that are run once and kept, against plain simulations, and their report."""

import json
import math
import statistics
from pathlib import Path

import numpy as np
import pytest

from studies.__main__ import main as command
from studies.recalibration.data import OutputsFile, Shifted, shifted
from studies.recalibration.grid_search import GridSearch
from studies.recalibration.report import along, by_data, groups, headline, render
from studies.recalibration.study import PAPER, Result, Study, Sweep, run
from studies.runner import KINDS
from tacit import recipes
from tacit.calibrate import ECET, NLLT, AccT, HistogramBinning, Nothing, Simulation
from tacit.calibrate._simulation import reference
from tacit.data import fashion_mnist, shifts
from tacit.models import embedded
from tacit.privacy import Budget

LOGITS, LABELS = (part.numpy() for part in reference(0.1))
PURE, FREE = Budget(1.0, 0.0), Budget(math.inf, 0.0)


def quiet(what: str, done: int, total: int, *, spent: tuple[float, float] | None = None) -> None:
    del what, done, total, spent


SWEEPS = (
    Sweep(name="sources", vary="sources", sources=(5, 10), samples=(10,), headline=True),
    Sweep(
        name="bins", vary="bins", bins=(5, 10), methods=("histogram", "ece-t", "acc-t"), sources=(10,), samples=(10,)
    ),
    Sweep(name="open", epsilon=(math.inf,), sources=(10,), samples=(10,), methods=("nothing", "acc-t"), by_shift=True),
)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    out = tmp_path_factory.mktemp("study")
    np.savez(out / "made-up.npz", logits=LOGITS, labels=LABELS)
    files = (OutputsFile(name="made up", path=str(out / "made-up.npz"), form="logits"),)
    small = Shifted(shifts="extra", per_shift=200)
    made = Study(
        title="small", public=True, sweeps=SWEEPS, shifted=small, files=files, trials=20, diagram="speckle_noise"
    )
    return run(made, out=out, progress=quiet), out


def test_cells_are_what_a_simulation_gives(done: tuple[Result, Path]) -> None:
    result, _ = done
    simulation = Simulation(logits=LOGITS, labels=LABELS, sources=10, samples=10, trials=20)
    for method in (Nothing(), HistogramBinning(ask="totals"), NLLT(), ECET(), AccT()):
        (cell,) = [c for c in SWEEPS[0].cells() if c.method == method.name and c.sources == 10]
        found = result.outcomes["made up", cell]
        trials = simulation.run(method, budget=PURE, aggregate="sum")
        more = trials.ece_after - trials.ece_before
        assert found.harmed == pytest.approx(float((more > 0.01).double().mean()))
        assert found.mean == pytest.approx(float(trials.ece_after.mean()), rel=1e-9)
        assert found.median == pytest.approx(float(trials.ece_after.quantile(0.5)), rel=1e-9)
        assert found.low <= found.median <= found.high
        assert found.queries == trials.queries
    (cell,) = [c for c in SWEEPS[2].cells() if c.method == "acc-t"]
    free = simulation.run(AccT(), budget=FREE, aggregate="sum")
    assert result.outcomes["made up", cell].mean == pytest.approx(float(free.ece_after.mean()), rel=1e-9)


def test_redealing_is_dealing() -> None:
    rows = {"logits": LOGITS[:500], "labels": LABELS[:500], "trials": 3, "seed": 4}
    whole = Simulation(**rows, sources=3, samples=50)
    whole.run(ECET(), budget=PURE)
    again = whole.repartitioned(sources=20, samples=7)
    plain = Simulation(**rows, sources=20, samples=7)
    for method in (ECET(), HistogramBinning(), AccT()):
        one, other = again.run(method, budget=PURE), plain.run(method, budget=PURE)
        assert one.ece_after.tolist() == other.ece_after.tolist()
        assert one.ece_before.tolist() == other.ece_before.tolist()


def test_nothing_is_run_twice(done: tuple[Result, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    result, out = done

    def refuse(*_: object) -> None:
        raise AssertionError("a cell was run again")

    monkeypatch.setattr("studies.recalibration.study.Cell.run", refuse)
    monkeypatch.setattr("studies.recalibration.data._compute", refuse)
    again = run(Study(**{**vars(result.study), "diagram": None}), out=out, progress=quiet)
    assert again.outcomes == result.outcomes


def test_a_damaged_cell_is_named(done: tuple[Result, Path], tmp_path: Path) -> None:
    result, out = done
    (tmp_path / "cells").mkdir()
    for path in (out / "cells").glob("*.json"):
        (tmp_path / "cells" / path.name).write_text("{")
    study = Study(**{**vars(result.study), "shifted": None})
    with pytest.raises(ValueError, match="delete it to run the cell again"):
        run(study, out=tmp_path, progress=quiet)


def test_outputs_are_those_of_the_model_under_the_shift(tmp_path: Path) -> None:
    config = Shifted(shifts="extra", per_shift=40, severity=2)
    data = {one.name: one for one in shifted(config, tmp_path, quiet)}
    assert list(data) == ["clean", *shifts.EXTRA]
    images, labels = fashion_mnist("unseen")
    seen = shifts.corrupt(images[:40], "spatter", 2, seed=0)
    np.testing.assert_allclose(data["spatter"].logits, embedded()(seen.float() / 255).detach().numpy(), atol=1e-4)
    assert data["spatter"].labels.tolist() == labels[:40].tolist()
    with pytest.raises(ValueError, match="There are 15000 images"):
        shifted(Shifted(per_shift=20_000), tmp_path, quiet)


def test_the_report_shows_means_over_data_sets(done: tuple[Result, Path]) -> None:
    result, _ = done
    assert groups(result) == {"shifts": list(shifts.EXTRA), "clean": ["clean"], "made up": ["made up"]}
    (table,) = headline(result)
    row = next(cells for cells in table.rows if cells[0] == "Acc-T")
    cells = [cell for cell in SWEEPS[0].cells() if cell.method == "acc-t"]
    found = [result.outcomes[name, cell].mean for name in shifts.EXTRA for cell in cells]
    assert row[1] == pytest.approx(statistics.median(found))
    assert row[2] == pytest.approx(statistics.fmean(found))
    assert [row[0] for row in along(result, SWEEPS[1], "shifts").rows] == ["5", "10"]
    bins = along(result, SWEEPS[1], "made up")
    assert bins.rows[0][3] == bins.rows[1][3]  # Acc-T has no bins: the same everywhere
    assert bins.rows[0][1] != bins.rows[1][1]
    assert [row[0] for row in by_data(result, SWEEPS[2]).rows][:2] == ["clean", "speckle noise"]
    findings = render(result)
    assert findings.facts["headline"]["shifts"]["acc-t"]["settings"] == 8
    assert sum(len(section.figures) for section in findings.sections) == 3 + 3 + 1
    assert "declared public" in findings.lead
    assert json.dumps(findings.facts)


def test_grid_search_without_noise_takes_the_best_of_its_points() -> None:
    simulation = Simulation(logits=LOGITS, labels=LABELS, sources=10, samples=100, trials=5)
    found = simulation.run(GridSearch(iterations=24), budget=FREE)
    golden = simulation.run(AccT(iterations=20), budget=FREE)
    assert (found.temperature - golden.temperature).abs().max() <= 0.05 + 1e-6  # half a step, and a little
    assert found.queries == 25


@pytest.mark.parametrize("name", ["recalibration", "recalibration-cifar"])
def test_the_recipes_are_read(name: str) -> None:
    path = Path(__file__).parents[2] / "studies/recalibration" / f"{name}.toml"
    kind, study = recipes.read(path, {"recalibration": Study})
    assert kind in KINDS
    assert study.trials == 500
    assert sum(sweep.headline for sweep in study.sweeps) == 3
    cells = [cell for sweep in study.sweeps if sweep.headline for cell in sweep.cells()]
    assert len(set(cells)) == 7 * 43  # (50 sources, 10 samples) and (50, 30, epsilon 1) are each in two sweeps


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("public = false", "declare public = true"),
        ("trials = 0", "at least one sweep and one trial"),
        ('shifted = "none"', "needs outputs"),
        ('[[sweeps]]\nname = "x"\nmethods = ["acct"]', "did you mean 'acc-t'"),
    ],
)
def test_a_bad_recipe_is_one_sentence(tmp_path: Path, change: str, sentence: str) -> None:
    text = 'kind = "recalibration"\ntitle = "t"\npublic = true\ntrials = 2\n'
    key = change.partition(" =")[0]
    lines = [line for line in text.splitlines() if not line.startswith(f"{key} =")]
    sweep = '\n[[sweeps]]\nname = "a"\n'
    whole = "\n".join(lines) + ("\n" + change if not change.startswith("[[") else "") + sweep
    whole += change if change.startswith("[[") else ""
    (tmp_path / "bad.toml").write_text(whole)
    with pytest.raises(recipes.RecipeError, match=sentence):
        recipes.read(tmp_path / "bad.toml", {"recalibration": Study})


RECIPE = """
kind = "recalibration"
title = "small"
public = true
trials = 5
shifted = "none"
diagram = "made up"

[[files]]
name = "made up"
path = "outputs.npz"
form = "logits"

[[sweeps]]
name = "sources"
headline = true
vary = "sources"
sources = [5, 10]
samples = [20]
"""


def test_a_recipe_leaves_a_report(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("outputs.npz", logits=LOGITS, labels=LABELS)
    Path("small.toml").write_text(RECIPE)
    assert command(["run", "small.toml", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["facts"]["headline"]["made up"]
    assert found["nothing"]["settings"] == 2
    assert found["best of the paper's methods by median"] in PAPER
    left = {path.name for path in Path("runs/small").iterdir()}
    assert left == {"cells", "picture-1.png", "picture-2.png", "privacy-card.md", "report.html", "run.json"}
    assert "declared public" in Path("runs/small/report.html").read_text()
