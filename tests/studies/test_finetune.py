"""Studies of fine-tuning: what is tuned, what is crossed, what is kept, and that a small one runs from its recipe."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from studies import runner, store
from studies.finetune import report
from studies.finetune import study as studying
from studies.finetune.arms import Grid
from studies.finetune.data import Data
from studies.finetune.study import Net, Pretraining, Study
from studies.multi_clip.motions import Motions
from tacit.models import ViT
from tacit.models._saved import load_net, save_net
from tacit.pretrain import Recipe


def quiet(what: str, done: int, total: int, *, spent: tuple[float, float] | None = None) -> None:
    del what, done, total, spent


@pytest.fixture
def features(tmp_path: Path) -> Path:
    """Two classes that lie apart, as features."""
    random = np.random.default_rng(0)
    labels = {part: random.integers(2, size=count) for part, count in (("train", 300), ("test", 100))}
    arrays = {f"{part}_labels": rows for part, rows in labels.items()}
    for part, rows in labels.items():
        noise = random.normal(size=(len(rows), 4)).astype(np.float32)
        arrays[f"{part}_features"] = noise + 3 * (2 * rows[:, None] - 1).astype(np.float32)
    np.savez(tmp_path / "features.npz", **arrays)
    return tmp_path / "features.npz"


def small(features: Path, **changed: object) -> Study:
    data = Data(kind="features", train=str(features), private=150, tuning=100, held_out=50, tested=100, classes=2)
    arms = (
        Grid(
            scheme=("linear",), optimizer=("dpgd",), epsilon=(1.0, math.inf), lr=(1e-300, 1.0), steps=(5,), tune_at=1.0
        ),
    )
    given = {"title": "small", "public": True, "data": data, "models": {"model": Net(features=4)}, "arms": arms}
    return Study(**{**given, "seeds": (0, 1), "workers": 1, **changed})  # type: ignore[arg-type]


def test_constants_are_tuned_and_the_rest_is_crossed() -> None:
    grid = Grid(scheme=("linear", "full"), epsilon=(1.0, 8.0), lr=(0.1, 1.0, 10.0), clip=(0.1, 1.0), tune_at=4.0)
    choices = list(grid.arms())
    assert [(c.arms[0].scheme, c.arms[0].epsilon) for c in choices] == [
        ("linear", 1.0),
        ("linear", 8.0),
        ("full", 1.0),
        ("full", 8.0),
    ]
    for choice in choices:
        assert {(arm.lr, arm.clip) for arm in choice.arms} == {(a, b) for a in (0.1, 1.0, 10.0) for b in (0.1, 1.0)}
        assert {trial.epsilon for trial in choice.trials} == {4.0}
        assert [replace(trial, epsilon=choice.arms[0].epsilon) for trial in choice.trials] == list(choice.arms)


def test_a_study_tunes_on_the_public_split_and_keeps_its_cells(features: Path, tmp_path: Path) -> None:
    study = small(features)
    result = studying.run(study, out=tmp_path / "out", progress=quiet)
    assert {arm.lr for arm in result.chosen} == {1.0}
    assert {(cell.split, cell.seed) for cell in result.outcomes} == {("tuning", 100), ("private", 0), ("private", 1)}
    without = next(arm for arm in result.chosen if math.isinf(arm.epsilon))
    mean, spread = result.score(without) or (0, 1)
    assert mean > 99
    assert spread == 0
    again = studying.read(study, tmp_path / "out")
    assert (again.chosen, again.outcomes) == (result.chosen, result.outcomes)
    table = report.by_epsilon(result).markdown()
    assert "ε = ∞" in table
    assert "| 10 |" in table  # two classes, four features, two biases
    assert report.render(result).facts["arms"][0]["epsilon"] == 1.0


def test_arms_that_differ_in_their_rule_alone_have_a_line_each(features: Path, tmp_path: Path) -> None:
    both = [Grid(scheme=("linear",), epsilon=(8.0,), rule=rule, batch_size=20, steps=(2,)) for rule in ("sgd", "adam")]
    for arms, names in ((both, ["model: linear, SGD", "model: linear, Adam"]), (both[:1], ["model: linear"])):
        result = studying.run(small(features, arms=tuple(arms)), out=tmp_path, progress=quiet)
        assert [row[0] for row in report.by_epsilon(result).rows] == names


def test_cells_are_computed_once(tmp_path: Path) -> None:
    done: list[Grid] = []

    def compute(cell: Grid) -> dict[str, float]:
        done.append(cell)
        return {"lr": cell.lr[0]}

    cells = [Grid(lr=(value,)) for value in (1.0, 2.0, 1.0)]
    options = {"folder": tmp_path, "workers": 1, "progress": quiet, "name": lambda _: "cell"}
    first = store.outcomes(cells, compute, **options)  # type: ignore[arg-type]
    second = store.outcomes(cells, compute, **options)  # type: ignore[arg-type]
    assert first == second == {cell: {"lr": cell.lr[0]} for cell in cells}
    assert len(done) == 2
    next(tmp_path.glob("*.json")).write_text("{")
    with pytest.raises(ValueError, match="delete it to run the cell again"):
        store.outcomes(cells, compute, **options)  # type: ignore[arg-type]


def test_what_cannot_be_studied_is_refused(features: Path) -> None:
    with pytest.raises(ValueError, match="public = true"):
        small(features, public=False)
    with pytest.raises(ValueError, match=r"no \[models.vit\]"):
        small(features, arms=(Grid(model=("vit",)),))
    with pytest.raises(ValueError, match="too few for the private part"):
        Data(kind="features", train=str(features), private=1000, classes=2).records(
            "private", next(Grid().arms()).arms[0]
        )


def test_videos_are_written_a_net_pretrained_and_clips_compared(tmp_path: Path) -> None:
    motions = Motions(frames=40)
    data = Data(kind="motions", private=8, tested=8, classes=2, tried=2, motions=motions)
    net = Net(
        widths=(16, 16),
        depths=(1, 1),
        pretraining=Pretraining(videos=8, motions=motions, train=Recipe(epochs=1, batch_size=8, augment=None)),
    )
    arms = (
        Grid(model=("video",), scheme=("selective",), clips=(1, 2), batch_size=4, steps=(1,)),
        Grid(model=("video",), scheme=("selective",), clips=(2,), level="clip", batch_size=4, steps=(1,)),
    )
    study = Study(
        title="v", public=True, data=data, models={"video": net}, arms=arms, seeds=(0,), workers=1, delta=1e-2
    )
    result = studying.run(study, out=tmp_path, progress=quiet)
    one, two, naive = (result.of(arm)[0] for arm in result.chosen)
    assert one.epsilon == two.epsilon == one.unit_epsilon  # k clips cost what one costs
    assert naive.unit_epsilon > naive.epsilon  # protecting clips is not protecting videos
    assert [arm.name for arm in result.chosen][-1] == "video: selective, 2 clips, clip-level"


def test_a_net_and_how_it_was_made_are_one_file(tmp_path: Path) -> None:
    made = {"channels": 1, "classes": 3, "size": 8, "patch": 4, "width": 8, "depth": 1, "heads": 2}
    net = ViT(**made).eval()  # type: ignore[arg-type]
    save_net(net, tmp_path / "net.safetensors", **made)
    rows = torch.rand(2, 1, 8, 8)
    assert torch.equal(load_net(tmp_path / "net.safetensors")(rows), net(rows))
    (tmp_path / "other").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="no small net"):
        load_net(tmp_path / "other")


def test_the_recipes_name_their_arms() -> None:
    for path in sorted(Path(__file__).parents[2].glob("studies/finetune/finetune*.toml")):
        kind, study = runner.read(path)
        assert kind == "finetune"
        assert study.choices()
