"""A recipe on synthetic images: what it leaves behind, and what it refuses before anything is charged."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tacit import pipeline, recipes
from tacit.cli._main import run as command
from tacit.data import ImageFiles, ImageShape
from tacit.pipeline._data import Loaded
from tacit.privacy import Budget, Ledger, mu_of
from tests.pipeline.made_up_images import ADAPT, CALIBRATE, FINETUNE, IMAGES, make_images


def tacit(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        command(arguments)
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


@pytest.fixture
def whole(home: Path) -> Path:
    """A recipe with a fine-tuning, a stream and two sources."""
    make_images(home, "stream.csv", 30, seed=1)
    make_images(home, "calibration.csv", 48, seed=2, source=True)
    (home / "whole.toml").write_text(IMAGES + FINETUNE + ADAPT + CALIBRATE)
    return home / "whole.toml"


def test_a_fine_tuning_leaves_plain_weights_a_page_and_a_card(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "pipeline.toml").write_text(IMAGES + FINETUNE)
    code, out, _ = tacit(capsys, "run", str(home / "pipeline.toml"), "--out", str(home / "out"))
    assert code == 0
    assert "Images: 3 x 8 x 8, crop 1, bicubic, mean 0, std 1." in out
    monkeypatch.syspath_prepend(str(home))
    import tiny_model  # type: ignore[import-not-found]

    plain = tiny_model.tiny()
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    plain.load_state_dict(load_file(home / "out" / "model" / "model.safetensors"))
    changed = {name for name, value in plain.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"1.weight", "1.bias", "4.weight", "4.bias"}  # the normalization and the head
    facts = json.loads((home / "out" / "run.json").read_text())
    assert facts["privacy"]["epsilon"] == pytest.approx(8.0, rel=1e-9)
    assert (home / "out" / "report.html").exists()
    assert "patient" in (home / "out" / "privacy-card.md").read_text()
    assert json.loads((home / "out" / "model" / "guarantee.json").read_text())["guarantee"]["unit"] == "patient"


@pytest.mark.parametrize(
    ("more", "steps"),
    [("", 4), ('rule = "adam"\n', 0), ("track_loss = false\n", 0)],
    ids=["where it is possible", "not for Adam", "not wanted"],
)
def test_the_page_shows_the_training_loss_from_released_gradients(
    more: str, steps: int, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "pipeline.toml").write_text(IMAGES + FINETUNE + more)
    code, *_ = tacit(capsys, "run", str(home / "pipeline.toml"), "--out", str(home / "out"))
    assert code == 0
    facts = json.loads((home / "out" / "run.json").read_text())["facts"]["finetune"]
    assert [at[0] for at in facts["loss_curve"]] == list(range(steps))
    page = (home / "out" / "report.html").read_text()
    assert ("The training loss has changed by" in page) is bool(steps)
    assert ("training loss, less that at the start" in page) is bool(steps)


def test_the_training_loss_is_no_part_of_what_a_run_is(home: Path) -> None:
    """A run that was begun before there was such a curve, or without it, is resumed with it."""
    found = []
    for more in ("", "track_loss = false\n", "track_loss = true\n"):
        (home / "pipeline.toml").write_text(IMAGES + FINETUNE + more)
        found.append(recipes.fingerprint(pipeline.read(home / "pipeline.toml")))
    assert len(set(found)) == 1


def test_a_training_loss_that_cannot_be_told_is_refused_with_the_recipe(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "pipeline.toml").write_text(IMAGES + FINETUNE + 'rule = "adam"\ntrack_loss = true\n')
    code, _, err = tacit(capsys, "run", str(home / "pipeline.toml"), "--out", str(home / "out"))
    assert code == 2
    assert "track_loss is for the steps of rule sgd" in err
    assert not (home / "out").exists()


@pytest.mark.parametrize(("rate", "good"), [('"auto"', True), ("0.01", True), ('"fast"', False), ("-1.0", False)])
def test_the_rate_of_an_adaptation_is_a_number_or_auto(whole: Path, rate: str, good: bool) -> None:
    assert (found := pipeline.read(whole).adapt) is not None
    assert found.lr == "auto"
    whole.write_text(whole.read_text().replace('method = "tent"', f'method = "tent"\nlr = {rate}'))
    if good:
        assert (found := pipeline.read(whole).adapt) is not None
        assert str(found.lr) == rate.strip('"')
    else:
        with pytest.raises(ValueError, match="lr"):
            pipeline.read(whole)


def test_three_stages_share_one_budget(whole: Path) -> None:
    outcome = pipeline.run(pipeline.read(whole), whole.parent / "out")
    budget = Budget(8.0, 1e-5)
    assert outcome.total.epsilon <= 8.0
    assert outcome.total.epsilon == pytest.approx(8.0, abs=1e-6)
    for subject in ("train", "stream", "source clinic-a", "source clinic-b"):
        spent = outcome.ledger.spent(subject)
        assert mu_of(spent.epsilon, 1e-5) ** 2 == pytest.approx(budget.mu**2 / 3, rel=1e-6)  # equal parts of mu^2
    assert outcome.plan.total.epsilon == pytest.approx(outcome.total.epsilon, rel=1e-9)
    assert outcome.ledger.verify() > 0


def test_a_finished_run_charges_nothing_when_it_is_run_again(whole: Path) -> None:
    first = pipeline.run(pipeline.read(whole), whole.parent / "out")
    entries = len(first.ledger.entries())
    again = pipeline.run(pipeline.read(whole), whole.parent / "out")
    assert len(again.ledger.entries()) == entries
    assert again.result == first.result
    states = first.model.state_dict(), again.model.state_dict()
    assert all(torch.equal(a, b) for a, b in zip(*(state.values() for state in states), strict=True))


def test_one_budget_pays_for_one_run(home: Path) -> None:
    (home / "pipeline.toml").write_text(IMAGES + FINETUNE)
    recipe = pipeline.read(home / "pipeline.toml")
    pipeline.run(recipe, home / "out")
    with pytest.raises(ValueError, match="Another run has charged the subject 'train'"):
        pipeline.run(recipe, home / "elsewhere")


def test_a_search_and_its_final_run_stay_within_the_budget(home: Path) -> None:
    text = IMAGES.replace("epsilon = 8.0", "epsilon = 8.0\nsize = 200")
    (home / "pipeline.toml").write_text(
        text + '[tune]\nlr = [0.05, 2.0]\nsteps = [2, 4]\ntrials = 2\n\n[finetune]\nscheme = "linear"\n'
    )
    outcome = pipeline.run(pipeline.read(home / "pipeline.toml"), home / "out")
    assert len(outcome.tuned.trials) == 4
    assert outcome.total.epsilon == pytest.approx(8.0, abs=1e-6)
    charges = [entry for entry in outcome.ledger.entries() if entry.kind == "charge"]
    assert len(charges) == 9  # four trials with a score each, and the final run


def test_a_search_with_poisson_batches_is_composed_by_pld(home: Path) -> None:
    text = IMAGES.replace("epsilon = 8.0", "epsilon = 8.0\nsize = 200")
    search = "[tune]\nlr = [0.05, 2.0]\nsteps = [2, 3]\ntrials = 1\n\n"
    batches = '[finetune]\nscheme = "linear"\noptimizer = "dpsgd"\nbatch_size = 50\n'
    recipe = home / "pipeline.toml"
    recipe.write_text(text + search + batches)
    told = pipeline.read(recipe)
    planned = pipeline.plan(told)
    assert planned.lines[0].what == "2 trials with their scores, and a final run of 3 steps, composed by PLD"
    assert 7.9 < planned.total.epsilon <= 8.0
    outcome = pipeline.run(told, home / "out")
    assert outcome.ledger.subjects()[0].terms.mode.value == "plan"
    assert 7.5 < outcome.total.epsilon <= 8.0
    (home / "without.toml").write_text(IMAGES + search + batches)
    with pytest.raises(ValueError, match=r"budget\.size is missing"):
        pipeline.plan(pipeline.read(home / "without.toml"))
    recipe.write_text(text + search + batches + ADAPT)
    with pytest.raises(ValueError, match="compose only as a list"):
        pipeline.read(recipe)


@pytest.mark.parametrize("more", ["", ADAPT], ids=["alone", "with a stream"])
def test_poisson_batches_alone_and_beside_a_stream(home: Path, more: str) -> None:
    make_images(home, "stream.csv", 30, seed=1)
    text = IMAGES.replace("epsilon = 8.0", "epsilon = 8.0\nsize = 20")
    (home / "pipeline.toml").write_text(text + FINETUNE + 'optimizer = "dpsgd"\nbatch_size = 5\n' + more)
    outcome = pipeline.run(pipeline.read(home / "pipeline.toml"), home / "out")
    modes = {subject.name: subject.terms.mode.value for subject in outcome.ledger.subjects()}
    assert modes == ({"train": "renyi", "stream": "renyi"} if more else {"train": "plan"})
    assert 7.5 < outcome.total.epsilon <= 8.0


BAD = [
    ('unit_ids = "patient"', 'unit_ids = "pateint"', "has no column 'pateint'; did you mean 'patient'?"),
    ("tiny_model:tiny", "tiny_model:tinny", "'tiny_model:tinny' cannot be loaded: AttributeError"),
    ('folder = "images"', 'folder = "pictures"', "There is no folder"),
    ("labels.csv", "label.csv", "There is no file"),
    ('kind = "images"', 'kind = "imagse"', "pipeline.toml, line 6: data: there is no kind 'imagse'; did you mean"),
    (
        "delta = 1e-5",
        "delta = 1e-5\nepsilom = 3",
        "line 15: there is no key 'epsilom' in budget; did you",
    ),
    ("epsilon = 8.0", "epsilon = -1.0", "pipeline.toml, line 12: budget is invalid: Epsilon"),
    ("delta = 1e-5", "delta = 0.5", "a delta of 0.5 is no protection"),
    ("delta = 1e-5", "delta = 1e-3\nsize = 1000", "well below one over the number of patients"),
    ('unit = "patient"', 'unit = "sample"', "Rows have owners, so a unit is more than a sample"),
    ("size = 8", "size = 9", "The model does not take these rows"),
    ("steps = 4", 'steps = 4\noptimizer = "dpsgd"', "dpsgd needs batch"),
    ("steps = 4", "steps = 4\nepsilon = 9.0", "The stages do not fit into epsilon 8, delta 1e-05"),
    ('scheme = "selective"', 'scheme = "selectiv"', "selectiv"),
]


@pytest.mark.parametrize(("old", "new", "sentence"), BAD, ids=[new for _, new, _ in BAD])
def test_what_is_wrong_costs_nothing(
    home: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, sentence: str
) -> None:
    text = (IMAGES + FINETUNE).replace(old, new, 1)
    assert text != IMAGES + FINETUNE
    (home / "pipeline.toml").write_text(text)
    code, out, err = tacit(capsys, "run", str(home / "pipeline.toml"), "--out", str(home / "out"))
    assert (code, out) == (2, "")
    assert sentence in err
    assert len(err.splitlines()) == 1
    if (home / "ledger.db").exists():
        assert not [entry for entry in Ledger(home / "ledger.db").entries() if entry.kind == "charge"]


LATER = [
    ('scheme = "selective"', 'scheme = "linear"', 'method = "tent"', 'method = "tent"\nscheme = "normms"', "normms"),
    (
        'unit_ids = "patient"',
        'unit_ids = "patient"',
        'source = "clinic"',
        'source = "clinik"',
        "no column 'clinik'",
    ),
    ("clinic-b", "clinic-b", '["clinic-a", "clinic-b"]', '["clinic-a", "clinic-c"]', "other sources than"),
]


@pytest.mark.parametrize(("old", "new", "older", "newer", "sentence"), LATER, ids=[row[-1] for row in LATER])
def test_a_later_stage_is_tried_before_the_first_charge(
    whole: Path, old: str, new: str, older: str, newer: str, sentence: str
) -> None:
    whole.write_text(whole.read_text().replace(old, new, 1).replace(older, newer, 1))
    with pytest.raises(ValueError, match=sentence):
        pipeline.run(pipeline.read(whole), whole.parent / "out")
    ledger = whole.parent / "ledger.db"
    assert not ledger.exists() or not [e for e in Ledger(ledger).entries() if e.kind == "charge"]


def test_a_broken_image_or_label_is_told_to_nobody(home: Path) -> None:
    (home / "pipeline.toml").write_text(IMAGES + FINETUNE)
    (home / "images" / "labels-3.png").write_bytes(b"no image")  # it adds nothing, at every replay
    pipeline.run(pipeline.read(home / "pipeline.toml"), home / "out")
    assert not [file for file in (home / "out").rglob("*") if file.is_file() and b"labels-3" in file.read_bytes()]
    make_images(home)
    table = home / "labels.csv"
    table.write_text(table.read_text().replace(",1,p3", ",7,p3"))
    with pytest.raises(ValueError, match="some labels are no whole numbers from 0 to 1") as told:
        pipeline.run(pipeline.read(home / "pipeline.toml"), home / "elsewhere")
    assert "7" not in str(told.value)
    assert "p3" not in str(told.value)


TABLES = [
    (lambda text: text + text.splitlines()[1].replace(",0,", ",1,") + "\n", "some files are named in several lines"),
    (lambda text: text.replace(",p3", ",", 1), "some rows have nothing in the column 'patient'"),
    (lambda text: text.partition("\n")[2], "has none of the columns file, label, patient: its first line must name"),
    (lambda text: text.replace(",", ";"), "with commas between them"),
    (lambda _: "", "is empty: its first line names the columns"),
]


@pytest.mark.parametrize(("change", "sentence"), TABLES, ids=[sentence for _, sentence in TABLES])
def test_what_is_wrong_with_a_table_is_one_sentence_without_a_row(
    home: Path, change: Callable[[str], str], sentence: str
) -> None:
    table = home / "labels.csv"
    table.write_text(change(table.read_text()))
    (home / "pipeline.toml").write_text(IMAGES + FINETUNE)
    with pytest.raises(ValueError, match=sentence) as told:
        pipeline.run(pipeline.read(home / "pipeline.toml"), home / "out")
    assert "p3" not in str(told.value)
    assert "labels-0" not in str(told.value)


def test_details_are_for_the_curator_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = pipeline.write_starter("outputs", tmp_path / "pipeline.toml")
    (tmp_path / "outputs").mkdir()
    for clinic in ("clinic-a", "clinic-b"):
        (tmp_path / "outputs" / f"{clinic}.npz").write_bytes(b"no arrays")
    arguments = ["run", str(recipe), "--out", str(tmp_path / "out")]
    code, out, err = tacit(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("The data cannot be read. Nothing was charged. What went wrong may reveal rows: see it with ")
    assert err.endswith("with --details FILE.\n")
    code, _, err = tacit(capsys, *arguments, "--details", str(tmp_path / "why.txt"))
    assert code == 2
    assert "clinic-a.npz" not in err
    assert "clinic-a.npz" in (tmp_path / "why.txt").read_text()
    assert (tmp_path / "why.txt").stat().st_mode & 0o077 == 0


def test_rows_of_a_patient_and_views_of_a_row(home: Path) -> None:
    (home / "pipeline.toml").write_text(IMAGES + FINETUNE + "rows_each = 1\naugment = 2\n")
    outcome = pipeline.run(pipeline.read(home / "pipeline.toml"), home / "out")
    assert outcome.total.epsilon == pytest.approx(8.0, rel=1e-9)  # views of a row are their patient's
    assert outcome.fitted is not None
    assert outcome.fitted.steps == 4


def test_pretraining_on_public_images_comes_first_and_costs_nothing(home: Path) -> None:
    make_images(home, "public.csv", 20, seed=5)
    public = """
[pretrain]
public = true
epochs = 2
batch_size = 5
lr = 0.05

[pretrain.data]
kind = "images"
folder = "images"
table = "public.csv"
size = 8
"""
    (home / "pipeline.toml").write_text(IMAGES + public + FINETUNE.replace('"selective"', '"linear"'))
    seen: list[str] = []
    outcome = pipeline.run(
        pipeline.read(home / "pipeline.toml"), home / "out", after=lambda stage, _: seen.append(stage)
    )
    assert seen == ["pretrain", "finetune"]
    assert {entry.body["stage"] for entry in outcome.ledger.entries() if entry.kind == "charge"} == {"finetune"}


def test_sixteen_bits_of_grey_keep_their_greys(tmp_path: Path) -> None:
    greys = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    Image.fromarray(greys).save(tmp_path / "scan.png")
    assert Image.open(tmp_path / "scan.png").mode == "I;16"
    files = ImageFiles([tmp_path / "scan.png"], [0], shape=ImageShape(channels=1, height=8, width=8))
    read = files[0]
    pixels = read[0] if isinstance(read, tuple) else read
    assert torch.allclose(pixels[0].double(), torch.from_numpy(greys / 65535.0), atol=1 / 255)


def test_a_file_of_the_stream_that_asks_for_all_memory_is_a_row_that_cannot_be_read() -> None:
    """In the middle of a stream that is charged: its header must not end the run, nor be in an error."""

    def read(places: torch.Tensor) -> torch.Tensor:
        if 2 in places:
            raise MemoryError("Unable to allocate 4711 TiB")
        return places[:, None].float()

    rows = Loaded(records=None, inputs=read, labels=torch.zeros(4), blank=torch.zeros(1, 1))  # type: ignore[arg-type]
    found = torch.cat([inputs for inputs, _ in rows.batches(4)]).flatten()
    assert found[[0, 1, 3]].tolist() == [0, 1, 3]
    assert found[2].isnan()
