"""Records say what their units are, and only grouping makes other ones."""

from pathlib import Path

import numpy as np
import pytest
import torch
from test_videos import write

from tacit.data import Grouped, ImageShape, Texts, VideoClips, clips_as_units
from tacit.data._records import Records, unit_ids_of
from tacit.data._tensor_records import TensorRecords
from tacit.tune._random_split import Part, part_of

INPUTS, LABELS = torch.arange(12.0).view(6, 2), torch.tensor([0, 1, 0, 1, 0, 1])
NAMES = ["eve", "bob", "eve", "ann", "bob", "eve"]


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> VideoClips:
    home = tmp_path_factory.mktemp("films")
    files = [write(home / f"{i}.mp4", 20 + 10 * i) for i in range(4)]
    return VideoClips(files, [0, 1, 0, 1], clips=2, frames=3, stride=1)


def test_every_kind_of_records_says_what_its_units_are(videos: VideoClips) -> None:
    assert TensorRecords(INPUTS, LABELS).unit == "sample"
    assert TensorRecords(INPUTS, LABELS, NAMES).unit == "user"
    assert TensorRecords(INPUTS, LABELS, NAMES, unit="patient").unit == "patient"
    assert videos.unit == "video"
    assert clips_as_units(videos).unit == "clip"
    assert Part(videos, torch.tensor([1])).unit == "video"
    assert part_of(TensorRecords(INPUTS, LABELS), torch.tensor([1])).unit == "sample"
    for records in (TensorRecords(INPUTS, LABELS), videos, clips_as_units(videos), Part(videos, torch.tensor([1]))):
        assert isinstance(records, Records)


def test_a_name_alone_makes_no_unit(videos: VideoClips) -> None:
    with pytest.raises(ValueError, match="A row is a sample: for unit='patient' give owners"):
        TensorRecords(INPUTS, LABELS, unit="patient")
    with pytest.raises(ValueError, match="more than a sample"):
        TensorRecords(INPUTS, LABELS, NAMES, unit="sample")
    with pytest.raises(ValueError, match="A file is a video: for unit='patient' give groups"):
        VideoClips([], [], unit="patient")
    for build in (videos.group_by, TensorRecords(INPUTS, LABELS).group_by):
        with pytest.raises(ValueError, match="one integer or string per"):
            build([1, 2, 3], unit="patient")
        with pytest.raises(ValueError, match="at least 1"):
            build([1] * 4, unit="patient", at_most=0)
        with pytest.raises(ValueError, match="short noun"):
            build([1] * (4 if build == videos.group_by else 6), unit=" ")


@pytest.mark.parametrize("ids", [NAMES, [7, 2, 7, 1, 2, 7], torch.tensor([7, 2, 7, 1, 2, 7]), np.array(NAMES)])
def test_rows_of_a_table_with_one_id_are_one_unit(ids: list[str]) -> None:
    grouped = TensorRecords(INPUTS, LABELS).group_by(ids, unit="patient")
    assert (grouped.unit, len(grouped), grouped.most_rows) == ("patient", 3, 3)
    rows = grouped.rows(torch.tensor([2, 0]), None)
    assert rows.inputs[:, 0].tolist() == [0, 4, 10, 6]  # eve's, then ann's
    assert rows.owner.tolist() == [0, 0, 0, 1]
    assert rows.labels.tolist() == [0, 0, 1, 1]
    assert len(unit_ids_of(grouped) or []) == 3
    assert grouped.fingerprint() != TensorRecords(INPUTS, LABELS).fingerprint()


def test_units_that_have_owners_are_grouped_once_more() -> None:
    """Users of households: all rows of a household are one unit."""
    users = TensorRecords(INPUTS, LABELS, NAMES)  # ann, bob, eve
    homes = users.group_by(["a", "b", "a"], unit="household")
    assert isinstance(homes, Grouped)
    assert (homes.unit, homes.unit_ids, len(homes), homes.most_rows) == ("household", ["a", "b"], 2, 6)
    rows = homes.rows(torch.tensor([1, 0]), torch.empty(2, 0))
    assert rows.inputs[:, 0].tolist() == [2, 8, 6, 0, 4, 10]
    assert rows.owner.tolist() == [0, 0, 1, 1, 1, 1]
    again = homes.group_by([5, 5], unit="street")
    assert again.rows(torch.tensor([0]), torch.empty(1, 0)).owner.tolist() == [0] * 6


def test_a_patient_with_several_videos_is_one_unit(videos: VideoClips) -> None:
    """The clips of a patient are those that each video would show with the same chances; labels may differ."""
    patients = videos.group_by(["x", "y", "y", "x"], unit="patient")
    assert (patients.unit, len(patients), patients.uniforms, patients.most_rows) == ("patient", 2, 4, 4)
    drawn_uniforms = torch.rand(2, 4)
    rows = patients.rows(torch.tensor([1, 0]), drawn_uniforms)
    alone = videos.rows(torch.tensor([1, 2, 0, 3]), drawn_uniforms.view(4, 2))
    assert torch.equal(rows.inputs, alone.inputs)
    assert rows.labels.tolist() == [1, 1, 0, 0, 0, 0, 1, 1]
    assert rows.owner.tolist() == [0] * 4 + [1] * 4
    assert patients.fingerprint() != videos.group_by(["x", "y", "x", "y"], unit="patient").fingerprint()


def test_clips_grouped_by_their_video_are_its_unit_again(videos: VideoClips) -> None:
    clips = clips_as_units(videos)
    again = clips.group_by(clips.owner, unit="video")
    assert (again.unit, len(again)) == ("video", 4)
    assert again.most_rows == clips.largest_group


def test_at_most_so_many_members_are_shown_and_everybody_can_be() -> None:
    users = TensorRecords(INPUTS, LABELS, torch.arange(6), unit="user")
    for homes in (
        users.group_by([0, 0, 0, 0, 1, 1], unit="household", at_most=2),
        TensorRecords(INPUTS, LABELS).group_by([0, 0, 0, 0, 1, 1], unit="household", at_most=2),
    ):
        assert (homes.most_rows, homes.uniforms) == (2, 2)
        seen: set[float] = set()
        for drawn_uniforms in torch.rand(200, 2, 2):
            rows = homes.rows(torch.arange(2), drawn_uniforms)
            assert rows.owner.tolist() == [0, 0, 1, 1]
            assert len(set(rows.inputs[:, 0].tolist())) == 4
            seen |= set(rows.inputs[:, 0].tolist())
        assert len(seen) == 6  # of four rows one is never drawn with probability 4 * 2^-200
        assert len(homes.rows(torch.tensor([0]), None).owner) == 4  # an evaluation shows everything


def test_grouped_texts_know_their_sizes() -> None:
    from words import tokenizer

    texts = Texts(tokenizer(), ["good", "good bad good bad good bad", "bad"], [1, 0, 0], bucket=2)
    users = texts.group_by(["a", "a", "b"], unit="user")
    sizes = texts.sizes
    assert sizes is not None
    assert users.sizes.tolist() == [int(sizes[:2].max()), int(sizes[2])]  # type: ignore[attr-defined]
    homes = users.group_by([0, 0], unit="household")
    assert homes.sizes.tolist() == [int(sizes.max())]  # type: ignore[attr-defined]
    assert homes.synthetic().labels.shape == texts.synthetic().labels.shape  # type: ignore[attr-defined]


def test_patients_keep_their_names(tmp_path: Path) -> None:
    from tacit.data._chexpert import Films, Patients

    files = [tmp_path / "a.png", tmp_path / "b.png"]
    for file in files:
        file.touch()
    films = Films(files, ImageShape(channels=1, height=8, width=8), 1000)
    people = Patients(films, torch.zeros(2, 1), ["patient2", "patient1"], rows=1, skipped=[], diseases=["x"])
    assert (people.unit, people.unit_ids) == ("patient", ["patient1", "patient2"])
