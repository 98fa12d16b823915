"""What is said of a set of videos before training, and what is not."""

import warnings
from pathlib import Path

import pytest
from films import write

from tacit.data import VideoClips


def test_what_was_left_out_is_said_without_a_number(tmp_path: Path) -> None:
    for name in ("run", "walk"):
        for number in range(3):
            write(tmp_path / name / f"{number}.mp4", 2 + number + 3 * (name == "run"))
    (tmp_path / "sit").mkdir()
    (tmp_path / "sit" / "broken.mp4").write_bytes(b"nothing")
    (tmp_path / "run" / "notes.txt").touch()
    with pytest.warns(UserWarning, match="Some") as said:
        data = VideoClips.folder(tmp_path)
    told = [str(warning.message) for warning in said]
    assert [sentence.split(":")[0] for sentence in told] == [
        "Some files were left out, because they cannot be read or are no videos",
        "Some classes have no video",
    ]
    assert {file.name for file, _ in data.skipped} == {"broken.mp4", "notes.txt"}
    assert (data.empty_classes, data.single_classes) == (["sit"], [])
    assert not any(character.isdigit() for sentence in told for character in sentence)
    assert data.overview().splitlines()[:1] == ["unit: video; 3 classes"]
    assert "3" not in "".join(data.overview().splitlines()[1:])
    assert data.overview(public=True).splitlines()[1:4] == ["  run   3", "  sit   0", "  walk  3"]


def test_a_folder_for_each_video_is_asked_about(tmp_path: Path) -> None:
    """WORD_N/video.mp4: every video would be a class."""
    for number in range(12):
        write(tmp_path / f"wave_{number}" / "video.mp4", 2 + number)
    with pytest.warns(
        UserWarning, match=r"There are 12 classes, and most have a single video: is each folder a class\?"
    ):
        VideoClips.folder(tmp_path)


def test_nothing_is_said_of_what_is_in_order(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{number}.mp4", 2 + number) for number in range(4)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert VideoClips(files, [0, 1, 0, 1]).overview() == "unit: video; 2 classes"
    with pytest.warns(UserWarning, match="single_classes"):
        assert VideoClips(files, [0, 0, 0, 1]).single_classes == ["1"]
