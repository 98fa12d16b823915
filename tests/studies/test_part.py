"""A part of a recipe: its cells are those of the whole that have the values, and nothing is tuned that is known."""

from pathlib import Path
from typing import Any

import pytest

from studies.__main__ import main
from studies.part import part, wanted
from studies.runner import read


def of(recipe: str, *said: str) -> Any:
    return read(Path(recipe), wanted(said))[1]


def test_cells_of_a_part_are_cells_of_the_whole() -> None:
    whole = set(of("dp_tta/dp-tta.toml").cells())
    some = set(of("dp_tta/dp-tta.toml", "method=tent,eata", "form=dp", "epsilon=10", "seeds=0,2").cells())
    assert some == {
        cell
        for cell in whole
        if cell.arm.method in ("tent", "eata")
        and (cell.arm.form, cell.arm.epsilon) == ("dp", 10.0)
        and cell.seed in (0, 2)
    }
    assert len(some) == 4


def test_known_constants_are_not_tuned() -> None:
    choices = of("finetune/finetune-image.toml", "optimizer=dpgd", "epsilon=inf,1", "steps=30", "lr=0.3").choices()
    assert [(len(choice.arms), choice.arms[0].epsilon) for choice in choices] == [(1, 1.0), (1, float("inf"))]
    assert {(arm.optimizer, arm.steps, arm.lr) for choice in choices for arm in choice.arms} == {("dpgd", 30, 0.3)}


def test_a_name_with_a_comma_and_the_studys_own_fields() -> None:
    study = of("linear_scaling/linear-scaling.toml", "name=random search, one run", "tasks=sst2", "epsilon=0.5")
    assert [method.name for method in study.methods] == ["random search, one run"]
    assert (list(study.tasks), study.epsilon) == (["sst2"], (0.5,))
    study = of("dpadapter/dpadapter.toml", "name=AMP", "of=AMP", "optimizer=dpsgd", "epsilon=1", "lr=0.1")
    assert [(group.of, group.optimizer, group.lr) for group in study.finetune] == [(("AMP",), ("dpsgd",), (0.1,))]
    assert not of("dpadapter/dpadapter.toml", "name=AMP", "of=none").finetune


BAD = [
    ("methd=tent", "There is no 'methd' in this recipe; did you mean 'method'?"),
    ("method", "'method' is not of the form KEY=VALUE or KEY=VALUE,VALUE."),
    ("method=tant", "Nothing of arms is left: see the values in the recipe."),
    ("seeds=7", "Nothing of seeds is left: see the values in the recipe."),
]


@pytest.mark.parametrize(("said", "sentence"), BAD)
def test_bad_parts_are_one_sentence(capsys: pytest.CaptureFixture[str], said: str, sentence: str) -> None:
    assert main(["tables", "runs/none", "dp_tta/dp-tta.toml", "--only", said]) == 2
    assert capsys.readouterr().err.strip() == sentence


def test_nothing_wanted_changes_nothing() -> None:
    study = of("dp_tta/dp-tta-collapse.toml")
    assert part(study, {}) == study
