"""CheXpert's CSV layout, in small: patients are units."""

from pathlib import Path

import pytest
import torch
from PIL import Image

from tacit.data import ImageShape, chexpert
from tacit.data._chexpert import COMPETITION
from tacit.data._records import Records

HEADER = (
    "Path,Sex,Age,Frontal/Lateral,AP/PA,No Finding,Enlarged Cardiomediastinum,Cardiomegaly,Lung Opacity,Lung Lesion,"
    "Edema,Consolidation,Pneumonia,Atelectasis,Pneumothorax,Pleural Effusion,Pleural Other,Fracture,Support Devices"
)


def line(patient: int, study: int, view: int, *, lateral: bool = False, **labels: str) -> str:
    side = "lateral" if lateral else "frontal"
    path = f"CheXpert-v1.0-small/train/patient{patient:05}/study{study}/view{view}_{side}.jpg"
    cells = [labels.get(name.replace(" ", "_"), "") for name in HEADER.split(",")[5:]]
    return ",".join([path, "Female", "68", side.title(), "AP", *cells])


LINES = [
    line(1, 1, 1, Edema="1.0", Pleural_Effusion="-1.0"),
    line(2, 1, 1, Atelectasis="-1.0", Cardiomegaly="0.0"),
    line(2, 1, 2, lateral=True, Consolidation="1.0"),
    *[line(2, study, 1) for study in range(2, 8)],
    line(3, 1, 1, Cardiomegaly="1.0"),
]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Grey images, each with its own level: 20, 40, ..."""
    for number, text in enumerate(LINES, 1):
        file = tmp_path / text.split(",")[0]
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (39, 32), 20 * number).save(file, quality=95)
    (tmp_path / "train.csv").write_text("\n".join([HEADER, *LINES]) + "\n")
    return tmp_path


def test_a_patient_is_a_unit(home: Path) -> None:
    data = chexpert(home / "train.csv", home, size=8, rows=3)
    assert isinstance(data, Records)
    assert (len(data), data.uniforms, data.most_rows, data.scored_by) == (3, 3, 3, "row")
    assert data.classes == COMPETITION
    rows = data.rows(torch.tensor([2, 0, 1]), None)  # an evaluation: all images
    assert rows.inputs.shape == (9, 1, 8, 8)
    assert rows.owner.tolist() == [0, 1, *[2] * 7]
    assert (rows.inputs.mean((1, 2, 3)) * 255).round().tolist() == [200, 20, 40, *range(80, 200, 20)]
    assert rows.labels[:2].tolist() == [[0, 1, 0, 0, 0], [0, 0, 0, 1, 1]]
    assert len(chexpert(home / "train.csv", home, views="all").labels()) == 10


def test_the_images_of_a_step_are_drawn_without_replacement(home: Path) -> None:
    data = chexpert(home / "train.csv", home, size=4, rows=3)
    uniforms = torch.rand(600, 3, generator=torch.Generator().manual_seed(1)).clamp_min(1e-9)
    rows = data.rows(torch.ones(600, dtype=torch.long), uniforms)
    levels = (rows.inputs.mean((1, 2, 3)) * 255).round().view(600, 3)
    assert all(len(set(three)) == 3 for three in levels.tolist())
    # each of 7 images is in a draw of 3 with probability 3/7: 257 of 600 expected, standard deviation 12, 7 of them
    counts = [int((levels == level).sum()) for level in (40, *range(80, 200, 20))]
    assert sum(counts) == 1800
    assert all(abs(count - 1800 / 7) < 85 for count in counts)
    few = data.rows(torch.tensor([0]), uniforms[:1])
    assert few.owner.tolist() == [0]


@pytest.mark.parametrize(("uncertain", "value"), [("ones", 1.0), ("zeros", 0.0), ("ignore", float("nan"))])
def test_uncertain_labels_follow_the_policy_and_blank_is_absent(home: Path, uncertain: str, value: float) -> None:
    data = chexpert(home / "train.csv", home, uncertain=uncertain, size=4)  # type: ignore[arg-type]
    expected = torch.zeros(9, 5)
    expected[0, 3], expected[0, 4], expected[1, 0], expected[8, 1] = 1, value, value, 1
    assert torch.equal(data.labels().nan_to_num(7), expected.nan_to_num(7))


def test_missing_images_are_listed_and_broken_ones_are_nan(home: Path) -> None:
    missing, broken = (home / LINES[place].split(",")[0] for place in (9, 0))
    missing.unlink()
    broken.write_bytes(b"no image")
    data = chexpert(home / "train.csv", home / "CheXpert-v1.0-small", size=4)  # paths begin with that folder's name
    assert [file.name for file in data.skipped] == ["view1_frontal.jpg"]
    assert len(data) == 2
    rows = data.rows(torch.tensor([0, 1]), torch.rand(2, data.uniforms).clamp_min(1e-9))
    assert rows.inputs[0].isnan().all()
    assert rows.inputs[1:].isfinite().all()


def test_an_image_that_is_not_what_it_was_raises(home: Path) -> None:
    """NaN then, and the image at a replay, would be two sums under the same noise."""
    file = home / LINES[0].split(",")[0]
    data = chexpert(home / "train.csv", home, size=4)
    content = file.read_bytes()
    for change in (file.unlink, lambda: file.write_bytes(b"no image any more"), lambda: file.write_bytes(content)):
        change()
        with pytest.raises(OSError, match="data file"):
            data.rows(torch.tensor([0]), None)
    file.unlink()
    with pytest.raises(OSError, match="No such file"):
        data.fingerprint()


def test_images_as_nets_for_photographs_take_them(home: Path) -> None:
    grey = chexpert(home / "train.csv", home, size=8).rows(torch.tensor([0]), None).inputs
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    data = chexpert(home / "train.csv", home, size=8, colour=True, mean=mean, std=std)
    rows = data.rows(torch.tensor([0]), None).inputs
    assert rows.shape == (1, 3, 8, 8)
    for channel in range(3):
        assert torch.allclose(rows[0, channel], (grey[0, 0] - mean[channel]) / std[channel], atol=1e-6)
    shaped = chexpert(home / "train.csv", home, shape=ImageShape(height=8, width=8, mean=mean, std=std))
    assert torch.equal(shaped.rows(torch.tensor([0]), None).inputs, rows)


def test_the_fingerprint_changes_with_images_labels_and_patients(home: Path) -> None:
    prints = [
        chexpert(home / "train.csv", home).fingerprint(),
        chexpert(home / "train.csv", home, size=9).fingerprint(),
    ]
    prints.append(chexpert(home / "train.csv", home, uncertain="zeros").fingerprint())
    Image.new("L", (39, 32), 3).save(home / LINES[0].split(",")[0])
    prints.append(chexpert(home / "train.csv", home).fingerprint())
    assert len(set(prints)) == 4


def test_what_is_wrong_with_the_file_is_said(home: Path) -> None:
    table = home / "train.csv"
    with pytest.raises(ValueError, match=r"no column 'Oedema'; did you mean 'Edema'\?"):
        chexpert(table, home, diseases=("Oedema",))
    with pytest.raises(ValueError, match="There is no file"):
        chexpert(home / "valid.csv", home)
    with pytest.raises(ValueError, match="There is no folder"):
        chexpert(table, home / "nowhere")
    with pytest.raises(ValueError, match="choose one of ones, zeros, ignore"):
        chexpert(table, home, uncertain="maybe")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="none of its 9 files is below"):
        chexpert(table, home / "CheXpert-v1.0-small" / "train")
    for text, match in (
        ("", "is empty"),
        (HEADER + "\n", "is empty"),
        ("\n".join([HEADER, line(1, 1, 1, lateral=True)]), "no frontal view"),
        ("\n".join([HEADER, LINES[0], LINES[1].replace("patient", "person")]), "line 3: .* names no patient"),
        ("\n".join([HEADER, line(1, 1, 1, Edema="2.0")]), r"line 2, Edema: '2.0' is none of"),
    ):
        table.write_text(text)
        with pytest.raises(ValueError, match=match):
            chexpert(table, home)
