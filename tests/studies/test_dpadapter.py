"""The study of robust pretraining: which rows play which part, what is crossed, and a small one from end to end."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from studies import runner
from studies.__main__ import main as command
from studies.dpadapter import report
from studies.dpadapter import study as studying
from studies.dpadapter.arms import Finetuning, Pretraining
from studies.dpadapter.cells import Finetuned, Net, Noise, compute, weights
from studies.dpadapter.data import Data
from studies.dpadapter.study import Study
from tacit.data import fashion_mnist
from tacit.pretrain import Training

RECIPES = Path(__file__).parents[2] / "studies/dpadapter"
ODD = (1, 3, 5, 7, 9)


def quiet(what: str, done: int, total: int, *, spent: tuple[float, float] | None = None) -> None:
    del what, done, total, spent


def small(**changed: Any) -> Study:
    given: dict[str, Any] = {
        "title": "small",
        "public": True,
        "data": Data(kind="embedded", public_classes=ODD, public=60, private=60, tuning=40, held_out=20, tested=40),
        "net": Net(widths=(8,), depths=(1,)),
        "noise": Noise(stds=(0.1, 0.3), relative=(0.2,), draws=2, rows=20, rho_rows=1),
        "train": Training(steps=4, batch_size=10, lr=0.01),
        "pretrain": (
            Pretraining(name="scratch", method="scratch"),
            Pretraining(name="standard", method="standard"),
            Pretraining(name="standard, equal compute", method="standard", equal_compute="dpadapter"),
            Pretraining(name="dpadapter", method="dpadapter", radius=(0.5,), perturb_batch=(30,)),
            Pretraining(name="radius", method="dpadapter", radius=(0.1, 0.5), perturb_batch=(30,)),
        ),
        "finetune": (
            Finetuning(
                of=("dpadapter",),
                optimizer=("dpsgd", "gep", "adpalloc", "adpclip"),
                epsilon=(4.0,),
                lr=(0.1,),
                batch_size=20,
                steps=2,
                public_rows=8,
                dimensions=4,
            ),
            Finetuning(of=("radius",), epsilon=(4.0,), lr=(0.1,), batch_size=20, steps=2, public_rows=8, dimensions=4),
            Finetuning(of=("scratch",), epsilon=(4.0,), lr=(1e-9, 0.1), batch_size=20, steps=2),
        ),
        "seeds": (0, 1),
        "workers": 1,
        "delta": 1e-3,
    }
    return Study(**{**given, **changed})


def test_a_small_study_from_end_to_end(tmp_path: Path) -> None:
    study = small(seeds=(0,))
    result = studying.run(study, out=tmp_path, progress=quiet)
    assert len(result.before) == 5  # the one in both groups once
    assert {(c.downstream.optimizer, c.downstream.epsilon) for c in result.after} == {
        (kind, 4.0) for kind in ("dpsgd", "gep", "adpalloc", "adpclip")
    }
    assert all(found.epsilon <= 4.0 for found in result.after.values())
    assert len(list((tmp_path / "cells").iterdir())) == 5 + 2 + 4 + 1 + 1  # trials too; nothing twice
    again = studying.read(study, tmp_path)
    assert (again.before, again.after) == (result.before, result.after)
    findings = report.render(again)
    text = "\n".join(table.markdown() for table in findings.summary)
    for words in ("standard, equal compute", "scratch", "AdpClip, ε = 4", "std 0.3", "rho"):
        assert words in text
    assert sum(len(section.figures) for section in findings.sections) == 4
    swept = report.sweep(result, study.pretrain[-1])
    assert swept is not None
    assert report.sweep(result, study.pretrain[0]) is None
    assert [row[0] for row in swept.rows] == [0.1, 0.5]
    # a cell that is there is read, not computed
    for path in (tmp_path / "weights").iterdir():
        path.unlink()
    assert studying.run(study, out=tmp_path, progress=quiet).after == result.after


def test_equal_compute_is_equal() -> None:
    """Counted as rows that go forward and backward: 4 steps of 10, each with 30 more, are 16 steps of 10."""
    ways = small().upstreams()
    standard, longer, adapter = (ways[name][0] for name in ("standard", "standard, equal compute", "dpadapter"))
    assert (standard.passes(60), longer.passes(60), adapter.passes(60)) == (40, 160, 160)
    assert longer.train.steps == 16
    assert ways["scratch"][0].passes(60) == 0


def test_constants_are_crossed_and_learning_rates_chosen_per_way() -> None:
    group = Pretraining(name="x", method="dpadapter", radius=(1.0, 2.0), perturb_batch=(10, 20), batch_size=(5,))
    found = [(w.value("radius"), w.value("perturb_batch"), w.train.batch_size) for w in group.upstreams(Training())]
    assert found == [(1.0, 10.0, 5), (1.0, 20.0, 5), (2.0, 10.0, 5), (2.0, 20.0, 5)]
    assert group.swept == ("radius", "perturb_batch")
    study = small()
    tuned = replace(study.finetune[0], of=("scratch", "dpadapter"), epsilon=(1.0, 4.0), lr=(0.1, 0.2), tune_at=1.0)
    study = replace(study, finetune=(tuned,))
    choices = list(studying._choices(study, Path()))
    assert len(choices) == 2 * 4 * 2  # two ways to pretrain, four optimizers, two epsilons
    for choice in choices:
        trials = [trial for trials in choice.trials for trial in trials]
        assert {t.downstream.epsilon for t in trials} == {1.0}
        assert {t.split for t in trials} == {"tuning"}
        assert {t.before.seed for t in trials} == {0}
        assert [[c.before.seed for c in line] for line in choice.candidates] == [[0, 1], [0, 1]]
        assert {c.split for line in choice.candidates for c in line} == {"private"}


def test_a_learning_rate_is_chosen_by_the_mean_over_several_nets() -> None:
    tuned = Finetuning(of=("standard",), epsilon=(4.0,), lr=(0.1, 0.2), batch_size=20, steps=2)
    study = small(finetune=(tuned,), seeds=(0, 1, 2), tuned_with=2)
    (choice,) = studying._choices(study, Path())
    assert [[t.before.seed for t in trials] for trials in choice.trials] == [[0, 1], [0, 1]]
    scores = {0.1: (0.9, 0.1), 0.2: (0.6, 0.6)}  # the first net alone would choose 0.1
    tried = {
        t: Finetuned(accuracy=a, robust=0.0, noise_multiplier=1.0, epsilon=4.0, seconds=0.0, promise="")
        for trials in choice.trials
        for t, a in zip(trials, scores[trials[0].downstream.lr], strict=True)
    }
    assert [c.downstream.lr for c in choice.best(tried)] == [0.2] * 3
    with pytest.raises(ValueError, match="at least 1"):
        small(tuned_with=0)


def test_public_and_private_rows_are_different_ones() -> None:
    data = small().data
    images, labels = fashion_mnist("train")
    rows, mine = data.rows("public")
    first = [place for place in range(len(labels)) if int(labels[place]) in ODD][:60]
    assert torch.equal(rows, images[first].float() / 255)
    assert mine.tolist() == [ODD.index(int(labels[place])) for place in first]
    rest = [place for place in range(len(labels)) if int(labels[place]) not in ODD]
    for split, places in (("private", rest[:60]), ("tuning", rest[60:100]), ("held_out", rest[100:120])):
        assert torch.equal(data.rows(split)[0], images[places].float() / 255)  # type: ignore[arg-type]
    assert (data.public_labels, data.private_labels) == (5, 5)


def test_one_distribution_is_cut_nine_to_one(tmp_path: Path) -> None:
    pixels = np.arange(100, dtype=np.uint8).reshape(100, 1, 1, 1) * np.ones((1, 1, 2, 2), np.uint8)
    np.savez(tmp_path / "a.npz", images=pixels, labels=np.arange(100) % 3)
    np.savez(tmp_path / "b.npz", images=pixels[:4], labels=np.arange(4) % 4)
    file, other = str(tmp_path / "a.npz"), str(tmp_path / "b.npz")
    data = Data(kind="images", train=file, test=file, public=90, private=10, tested=2)
    assert (255 * data.rows("public")[0][:, 0, 0, 0]).round().tolist() == list(range(90))
    assert (255 * data.rows("private")[0][:, 0, 0, 0]).round().tolist() == list(range(90, 100))
    data = replace(data, private_train=other, private_test=other, private=4)
    assert data.private_labels == 4
    assert len(data.rows("private")[1]) == 4
    with pytest.raises(ValueError, match="too few for the private part"):
        replace(data, private=5).rows("private")
    embedded = Data(kind="embedded", public=20_700, private=2_300)
    assert len(embedded.rows("private")[1]) == 2_300
    assert embedded.private_labels == 10


def test_pretraining_is_kept_and_seeds_differ(tmp_path: Path) -> None:
    study = small()
    cells = [replace(c, folder=tmp_path) for c in studying._before(study, tmp_path)["dpadapter"]]
    first, second = (weights(cell) for cell in cells)
    assert not torch.equal(first.head.weight, second.head.weight)  # type: ignore[union-attr, arg-type]
    again = weights(cells[0])
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    told = compute(cells[0])
    assert told["passes"] == 160
    assert [one["std"] for one in told["noisy"]] == [0.1, 0.3, 0.2]


def test_what_cannot_be_studied_is_refused() -> None:
    with pytest.raises(ValueError, match="public = true"):
        small(public=False)
    with pytest.raises(ValueError, match=r"no \[\[pretrain\]\] called 'amp'"):
        small(finetune=(Finetuning(of=("amp",)),))
    with pytest.raises(ValueError, match="name of its own"):
        small(pretrain=(Pretraining(name="a", method="sam"), Pretraining(name="a", method="amp")), finetune=())
    with pytest.raises(ValueError, match="must be above 0"):
        small(data=Data(kind="embedded", public=10, private=10))
    twice = Finetuning(of=("dpadapter",), epsilon=(4.0,), lr=(0.7,))
    with pytest.raises(ValueError, match="by dpsgd at epsilon 4 in two ways"):
        small(finetune=(small().finetune[1], twice))
    with pytest.raises(ValueError, match="only standard training"):
        Pretraining(name="a", method="sam", equal_compute="b")
    with pytest.raises(ValueError, match="has no files"):
        Data(kind="embedded", train="x.npz", public=1, private=1)
    with pytest.raises(ValueError, match="files train and test"):
        Data(kind="images", public=1, private=1)
    with pytest.raises(ValueError, match="go together"):
        Data(kind="images", train="a", test="b", private_train="c", public=1, private=1)
    with pytest.raises(ValueError, match="at least two"):
        Data(kind="embedded", public_classes=tuple(range(9)), public=1, private=1)
    with pytest.raises(ValueError, match="one of the stds"):
        Noise(stds=(0.2,))
    with pytest.raises(ValueError, match="as many dimensions"):
        Finetuning(of=("a",), public_rows=3, dimensions=4)
    with pytest.raises(ValueError, match="every epsilon"):
        Finetuning(of=("a",), epsilon=(0.0,))


def test_the_recipes_are_read() -> None:
    paths = sorted(RECIPES.glob("dpadapter*.toml"))
    assert len(paths) == 5
    for path in paths:
        kind, study = runner.read(path)
        assert kind == "pretrain"
        methods = {group.method for group in study.pretrain}
        assert {"standard", "dpadapter"} <= methods
        assert list(studying._choices(study, Path()))


def test_a_misspelt_key_is_an_error_that_names_the_nearest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (RECIPES / "dpadapter.toml").read_text().replace("perturb_batch", "perturb_bach")
    (tmp_path / "study.toml").write_text(text)
    assert command(["run", str(tmp_path / "study.toml"), "--out", str(tmp_path / "out")]) == 2
    assert "did you mean 'perturb_batch'?" in " ".join(capsys.readouterr().err.split())
