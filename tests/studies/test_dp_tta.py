"""Studies: arms from recipes, cells that are run once and kept, scores against a hand count, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from studies import runner
from studies.dp_tta.arms import Arm, Grid
from studies.dp_tta.cells import Data, Outcome, compute
from studies.dp_tta.report import by_shift, overview, paired, render
from studies.dp_tta.study import Result, Study, run
from tacit.adapt import DP, Clip
from tacit.adapt._evaluate_stream import follow
from tacit.data import fashion_mnist, streams
from tacit.gradients import AdaptiveQuantile, BatchClip, FilterByBoth, FilterByLoss, FilterByNorm
from tacit.models import embedded
from tacit.privacy import Ledger, epsilon_of
from tacit.report import Column, Spread

SMALL = Data(images="test", shifts="extra", per_shift=24)


def quiet(what: str, done: int, total: int, *, spent: tuple[float, float] | None = None) -> None:
    del what, done, total, spent


def study(**changes: object) -> Study:
    arms = (
        Grid(method=("source",)),
        Grid(method=("tent",), form=("dp",), epsilon=(1.0,), clip=(0.3,), batch_size=(8,)),
    )
    settings: dict[str, object] = {"title": "small", "public": True, "arms": arms, "data": SMALL, "workers": 1}
    return Study(**(settings | {"seeds": (0, 1)} | changes))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    out = tmp_path_factory.mktemp("study")
    return run(study(keep_ledgers=True), out=out, progress=quiet), out


def test_scores_are_those_of_a_hand_count() -> None:
    images, labels = fashion_mnist("test")
    stream = streams.corrupted(images, labels, shifts=("speckle_noise", "clean"), per_shift=30, seed=3)
    scores = follow(embedded(), stream, batch_size=8, public=True)
    for name in stream.shifts:
        rows = [(b.images[i], b.labels[i]) for b in stream.batches(8) for i in range(len(b)) if b.shifts[i] == name]
        with torch.no_grad():
            right = sum(int(embedded()(image[None]).argmax() == label) for image, label in rows)
        assert scores.accuracy[name] == pytest.approx(100 * right / 30)
        assert (len(scores.hits[name]), sum(scores.hits[name])) == (30, right)
    assert scores.steps == 8
    with pytest.raises(ValueError, match="public=True"):
        follow(embedded(), stream, batch_size=8)


def test_cells_are_run_once_and_kept(done: tuple[Result, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    result, out = done
    monkeypatch.setattr("studies.dp_tta.study.compute", lambda *_: pytest.fail("computed again"))
    again = run(study(keep_ledgers=True), out=out, progress=quiet)
    assert again.outcomes == result.outcomes
    assert len(list((out / "cells").iterdir())) == 4


def test_a_cell_file_says_what_it_is(done: tuple[Result, Path]) -> None:
    for path in (done[1] / "cells").iterdir():
        kept = json.loads(path.read_text())
        assert set(kept) == {"cell", "outcome"}
        assert kept["cell"]["data"]["per_shift"] == 24


def test_each_private_cell_has_a_ledger_of_its_own(done: tuple[Result, Path]) -> None:
    result, _ = done
    assert len(result.ledgers) == 2
    for path in result.ledgers.values():
        ledger = Ledger(path, create=False)
        assert ledger.verify() > 0
        assert [entry.kind for entry in ledger.entries()].count("charge") == 1
        assert ledger.spent("stream").epsilon == pytest.approx(1.0, rel=1e-6)
        sigma = ledger.receipt(next(e.receipt for e in ledger.entries() if e.kind == "charge") or "").event
        assert epsilon_of(2 / sigma.noise_multiplier, 1e-6) == pytest.approx(1.0, rel=1e-6)


def test_the_same_cell_gives_the_same_numbers(done: tuple[Result, Path]) -> None:
    result, _ = done
    cell = next(cell for cell in result.outcomes if cell.arm.private)
    assert compute(cell)["accuracy"] == result.outcomes[cell].accuracy


def test_the_report_tells_every_arm(done: tuple[Result, Path]) -> None:
    result, _ = done
    findings = render(result)
    assert len(findings.ledgers) == 2
    assert [row[0] for row in by_shift(result, "continual").rows] == ["source", "DP-Tent (eps 1)"]
    gain = overview(result, "continual").rows[1][5]
    means = [result.mean(arm, "continual") for arm in result.arms]
    assert means[0] is not None
    assert means[1] is not None
    assert gain == pytest.approx(means[1][0] - means[0][0])


def test_a_gain_is_told_image_by_image(done: tuple[Result, Path]) -> None:
    """Of n images b are right with the arm alone, c with the other alone: variance (b + c - (b - c)^2/n) / (n - 1)."""
    source, private = done[0].arms
    gain = done[0].against(private, source, "continual")
    assert gain is not None
    cells = {(cell.arm, cell.seed): outcome.hits for cell, outcome in done[0].outcomes.items()}
    parts = []
    for seed in (0, 1):
        for name, mine in cells[private, seed].items():
            b = sum(x + y == "10" for x, y in zip(mine, cells[source, seed][name], strict=True))
            c = sum(x + y == "01" for x, y in zip(mine, cells[source, seed][name], strict=True))
            parts.append(((b - c) / 24, (b + c - (b - c) ** 2 / 24) / 23 / 24))
    assert len(parts) == 8
    assert gain.mean == pytest.approx(100 * sum(mean for mean, _ in parts) / 8)
    assert gain.std == pytest.approx(100 * sum(variance for _, variance in parts) ** 0.5 / 8)
    overall = [done[0].mean(arm, "continual") for arm in (private, source)]
    assert overall[0] is not None
    assert overall[1] is not None
    assert gain.mean == pytest.approx(overall[0].mean - overall[1].mean)
    assert paired(done[0], "continual")[0].rows == [["DP-Tent (eps 1)", gain]]


def test_gains_over_the_published_form_and_the_default_rate() -> None:
    """The published form counts with its better rate; differences of 2 and 1 images of 4, by hand."""
    arms = (
        Grid(method=("source",)),
        Grid(method=("tent",), lr=(0.01, 0.1)),
        Grid(method=("tent",), form=("dp",), epsilon=(1.0,), clip=(0.3,), lr=("auto", 0.03)),
    )
    small = study(arms=arms, seeds=(0,))
    hits = dict(zip(small.cells(), ("0000", "1100", "1000", "1110", "1111"), strict=True))
    rest: dict[str, Any] = {"seconds": 0.0, "steps": 1, "touched": None, "epsilon": None, "promise": ""}
    outcomes = {
        cell: Outcome(accuracy={"fog": 25.0 * word.count("1")}, hits={"fog": word}, **rest)
        for cell, word in hits.items()
    }
    table = paired(Result(study=small, outcomes=outcomes), "continual")[0]
    assert [column.name if isinstance(column, Column) else column for column in table.columns] == [
        "arm", "above source", "above published", "above lr = auto",
    ]  # fmt: skip
    points = [[None if gain is None else gain.mean for gain in row[1:]] for row in table.rows]  # type: ignore[union-attr]
    assert points == [[50, None, None], [25, None, None], [75, 25, None], [100, 50, 25]]
    untuned = table.rows[3][3]
    assert isinstance(untuned, Spread)
    assert untuned.std == pytest.approx(25)  # 0, 0, 0, 100: the standard deviation 50 over the root of 4


def test_a_damaged_cell_is_named(tmp_path: Path) -> None:
    one = study(arms=(Grid(method=("source",)),), seeds=(0,))
    run(one, out=tmp_path, progress=quiet)
    path = next((tmp_path / "cells").iterdir())
    path.write_text("{")
    with pytest.raises(ValueError, match=path.name):
        run(one, out=tmp_path, progress=quiet)


def test_what_is_not_public_is_refused() -> None:
    with pytest.raises(ValueError, match="public = true"):
        study(public=False)


def test_a_grid_is_all_combinations() -> None:
    grid = Grid(method=("tent", "eata"), form=("dp",), epsilon=(1.0, 10.0), clip=(0.3,), lr=(0.01, 0.03))
    arms = list(grid.arms())
    assert len(arms) == len(set(arms)) == 8
    assert {(a.method, a.epsilon, a.lr) for a in arms} == {
        (m, e, lr) for m in ("tent", "eata") for e in (1.0, 10.0) for lr in (0.01, 0.03)
    }


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"method": "tant"}, "method is one of"),
        ({"form": "dp", "clip": 1.0}, "needs its epsilon"),
        ({"form": "clip"}, "needs a clip"),
        ({"method": "eata", "parts": ("filter-1",)}, "tent alone"),
    ],
)
def test_an_arm_that_makes_no_sense_is_refused(settings: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Arm(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("clipping", "kind"),
    [
        ("sample", float),
        ("batch", BatchClip),
        ("norm-filter", FilterByNorm),
        ("loss-filter", FilterByLoss),
        ("both-filters", FilterByBoth),
        ("either-filter", FilterByBoth),
        ("quantile", AdaptiveQuantile),
    ],
)
def test_every_clipping_of_the_ablations(clipping: str, kind: type) -> None:
    arm = Arm(form="clip", clip=1.0, clipping=clipping)  # type: ignore[arg-type]
    adapter = arm.adapter(embedded(), anchor=None, classes=10, horizon=4)
    assert isinstance(adapter.privacy, Clip)
    assert isinstance(adapter.privacy.clip, kind)


def test_noise_in_blocks_is_correlated_over_256_steps_whatever_the_length() -> None:
    arm = Arm(form="dp", epsilon=1.0, clip=0.3, noise="blocks")
    assert arm.name == "DP-Tent (eps 1, blocks)"
    adapter = arm.adapter(embedded(), anchor=None, classes=10, horizon=7, ledger=Ledger("sqlite://"))
    assert isinstance(adapter.privacy, DP)
    assert (adapter.privacy.noise, adapter.privacy.horizon) == ("correlated", 256)


def test_an_arm_is_the_adapter_it_says() -> None:
    arm = Arm(method="sar-come", form="dp-v2", epsilon=3.0, clip=0.2, noise="correlated", batch_size=8, radius=0.1)
    adapter = arm.adapter(embedded(), anchor=None, classes=10, horizon=7, ledger=Ledger("sqlite://"))
    assert adapter.privacy == DP(3.0, 1e-6, clip=0.2, noise="correlated", horizon=7, filters="per-sample")
    assert (adapter.method.name, adapter.method.sharpness, adapter.batch_size) == ("SAR-COME", 0.1, 8)


RECIPES = runner.listed()


@pytest.mark.parametrize("path", RECIPES, ids=[path.stem for path in RECIPES])
def test_every_recipe_can_be_read(path: Path) -> None:
    kind, config = runner.read(path)
    if kind == "adapt":
        assert len(list(config.cells())) > 0
        tuned = config.data.shifts == "extra"
        assert tuned == ("tuning" in path.stem)  # what is chosen on the extra shifts is evaluated on the others
