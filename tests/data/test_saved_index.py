"""The saved index: what it saves, when it does not count, and who can read it."""

import json
import os
import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from films import KINDS, of_kind, write
from hypothesis import given
from hypothesis import strategies as st

from tacit.data import VideoClips
from tacit.data import _saved_index as saved_index
from tacit.data._saved_index import SavedIndex, _numbers, _runs
from tacit.data._video_index import Video, probe


@given(st.lists(st.integers(-(2**40), 2**40), min_size=1, max_size=40, unique=True))
def test_numbers_survive_packing(numbers: list[int]) -> None:
    array = np.sort(np.array(numbers, np.int64))
    assert np.array_equal(_numbers(_runs(array)), array)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_back_is_what_was_found(tmp_path: Path, kind: str) -> None:
    file = of_kind(tmp_path, kind, 70)
    index = SavedIndex(tmp_path / "index.json")
    found = index.video(file)
    index.save()
    again = SavedIndex(tmp_path / "index.json").video(file)
    for name in Video.__dataclass_fields__:
        assert np.array_equal(getattr(again, name), getattr(found, name)), name


def test_a_second_start_opens_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [write(tmp_path / f"{length}.mp4", length) for length in (5, 6)]
    (tmp_path / "cut.mp4").write_bytes(files[0].read_bytes()[:100])
    how = {"index": tmp_path / "index.json", "colour": False, "clips": 2, "frames": 2}
    names, labels = [*files, tmp_path / "cut.mp4"], [0, 1, 0]
    first = VideoClips(names, labels, **how)
    told = first.fingerprint()

    def no(*_: object) -> None:
        raise AssertionError("a file was looked at")

    with monkeypatch.context() as patched:
        patched.setattr(saved_index, "probe", no)
        patched.setattr(saved_index, "digest", no)
        second = VideoClips(names, labels, **how)
        assert second.fingerprint() == told
    assert second.skipped == first.skipped
    both = torch.tensor([0, 1])
    assert torch.equal(second.rows(both, None).inputs, first.rows(both, None).inputs)
    assert stat.S_IMODE((tmp_path / "index.json").stat().st_mode) == 0o600


def test_a_file_that_changed_is_looked_at_again(tmp_path: Path) -> None:
    file = write(tmp_path / "film.mp4", 5)
    index = tmp_path / "index.json"
    before = VideoClips([file], [0], index=index).fingerprint()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1  # the same size
    file.write_bytes(content)
    state = file.stat()
    os.utime(file, ns=(state.st_atime_ns, json.loads(index.read_text())["videos"][str(file)]["state"][1]))
    after = VideoClips([file], [0], index=index)  # even the time of change was put back: that of the entry was not
    assert after.fingerprint() != before
    write(file, 9)
    assert SavedIndex(index).video(file).frames == probe(file).frames == 9


def test_what_is_no_index_is_said(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text("[]")
    file = write(tmp_path / "film.mp4", 5)
    with pytest.raises(ValueError, match="is no index of videos"):
        VideoClips([file], [0], index=tmp_path / "index.json")
