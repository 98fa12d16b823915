"""Clips of real files: small videos are written here in which each frame shows its number."""

import shutil
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from films import numbers, write
from hypothesis import given, settings
from hypothesis import strategies as st

from tacit.data import VideoClips, clips_as_units
from tacit.data._cache import Cache
from tacit.data._file_state import Changed
from tacit.data._records import Records
from tacit.data._video_files import CHUNK, Look, pictures
from tacit.data._video_index import probe

VideoClips = partial(VideoClips, colour=False)  # one grey level is a number


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """A video of each length."""
    home = tmp_path_factory.mktemp("films")
    return {length: write(home / f"{length}.mp4", length) for length in (3, 10, 40, 200)}


GREY = Look(height=16, width=16, channels=1)


def test_frames_stay_within_the_memory_and_are_not_decoded_again(films: dict[int, Path], tmp_path: Path) -> None:
    copy = Path(shutil.copy(films[200], tmp_path / "copy.mp4"))
    video, cache = probe(copy), Cache(2 * CHUNK * 256)
    first = pictures(video, np.array([70, 1]), GREY, cache)
    assert cache.used == 2 * CHUNK * 256
    copy.unlink()
    assert np.array_equal(pictures(video, np.array([70, 1]), GREY, cache), first)
    cache.put("more", np.zeros(5, np.uint8))  # the chunk that was asked for least lately makes room
    assert cache.used == CHUNK * 256 + 5


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([3, 10, 40, 200]), st.integers(1, 6), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**31)
)
def test_each_clip_begins_in_its_own_part_of_the_time(
    films: dict[int, Path], length: int, clips: int, frames: int, stride: int, seed: int
) -> None:
    data = VideoClips([films[length]], [0], clips=clips, frames=frames, stride=stride)
    uniforms = torch.rand(1, clips, generator=torch.Generator().manual_seed(seed)).clamp_min(1e-9)
    uniforms[0, seed % clips] = (1.0, 1e-12)[seed % 2]  # the ends of the range
    shown = numbers(data.rows(torch.tensor([0]), uniforms).inputs)
    starts = max(length - (frames - 1) * stride, 1)
    assert len(shown) == clips
    for place, clip in enumerate(shown):
        expected = [min(clip[0] + step * stride, length - 1) for step in range(frames)]
        assert clip == expected
        assert int(place * starts / clips) <= clip[0] <= min((place + 1) * starts / clips, starts - 1)


def test_rows_have_their_form_and_their_owner(films: dict[int, Path]) -> None:
    data = VideoClips([films[40], films[200]], [7, 5], clips=3, frames=4, size=(8, 12), colour=True)
    assert isinstance(data, Records)
    assert (len(data), data.uniforms, data.most_rows, data.scored_by) == (2, 3, 3, "unit")
    rows = data.rows(torch.tensor([1, 0]), torch.full((2, 3), 0.5))
    assert rows.inputs.shape == (6, 4, 3, 8, 12)
    assert rows.inputs.dtype == torch.float32
    assert 0 <= float(rows.inputs.min()) <= float(rows.inputs.max()) <= 1
    assert rows.labels.tolist() == [5, 5, 5, 7, 7, 7]
    assert rows.owner.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.rows(torch.tensor([], dtype=torch.long), torch.empty(0, 3)).inputs.shape == (0, 4, 3, 8, 12)
    with pytest.raises(ValueError, match="uniforms"):
        data.rows(torch.tensor([0]), torch.rand(1, 2))


def test_short_videos_repeat_their_last_frame_and_their_clips(films: dict[int, Path]) -> None:
    data = VideoClips([films[3]], [0], clips=2, frames=4, stride=1)
    assert numbers(data.rows(torch.tensor([0]), torch.tensor([[0.1, 0.9]])).inputs) == [[0, 1, 2, 2]] * 2


def test_an_evaluation_shows_the_same_clips_at_even_distances(films: dict[int, Path]) -> None:
    data = VideoClips([films[40]], [0], clips=4, frames=1)
    shown = [numbers(data.rows(torch.tensor([0]), None).inputs) for _ in range(2)]
    assert shown == [[[5], [15], [25], [35]]] * 2


def test_the_files_of_a_group_are_one_unit_and_share_its_clips(films: dict[int, Path]) -> None:
    data = VideoClips([films[40], films[3], films[10]], [1, 0, 1], groups=["ann", "bob", "ann"], clips=5, frames=1)
    assert data.labels().tolist() == [1, 0]
    shown = numbers(data.rows(torch.tensor([0]), None).inputs)  # 50 places: 40 of one file, 10 of the other
    assert shown == [[5], [15], [25], [35], [5]]
    for groups in (torch.tensor([7, 8, 7]), np.array([7, 8, 7])):
        assert len(VideoClips([films[40], films[3], films[10]], [1, 0, 1], groups=groups)) == 2
    with pytest.raises(ValueError, match=r"40.mp4 and .*10.mp4 are of one group"):
        VideoClips([films[40], films[10]], [1, 0], groups=[3, 3])


def test_a_video_is_never_in_two_units(films: dict[int, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="are the same file"):
        VideoClips([films[10], films[10].parent / ".." / films[10].parent.name / "10.mp4"], [0, 0])
    copy = Path(shutil.copy(films[10], tmp_path / "copy.mp4"))
    with pytest.raises(ValueError, match=r"10.mp4 and .*copy.mp4 hold the same video"):
        VideoClips([films[10], films[40], copy], [0, 0, 0])
    assert len(VideoClips([films[10], films[40], copy], [0, 0, 0], groups=[1, 2, 1])) == 2


def test_a_file_that_cannot_be_read_is_left_out_and_listed(films: dict[int, Path], tmp_path: Path) -> None:
    (tmp_path / "noise.mp4").write_bytes(bytes(range(256)) * 9)
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "cut.mp4").write_bytes(films[200].read_bytes()[:900])
    bad = [tmp_path / name for name in ("noise.mp4", "empty.mp4", "cut.mp4", "missing.mp4")]
    data = VideoClips([bad[0], films[10], *bad[1:]], [0, 1, 2, 3, 4])
    assert [file for file, _ in data.skipped] == bad
    assert data.labels().tolist() == [1]
    with pytest.raises(ValueError, match=r"noise.mp4 cannot be read"):
        VideoClips([films[10], bad[0]], [0, 1], strict=True)
    with pytest.raises(ValueError, match="None of the 4"):
        VideoClips(bad, [0, 1, 2, 3])


def test_a_file_that_breaks_later_raises_and_spoils_nobody_else(films: dict[int, Path], tmp_path: Path) -> None:
    copy = Path(shutil.copy(films[40], tmp_path / "copy.mp4"))
    data = VideoClips([films[10], copy], [0, 1], clips=2, frames=3)
    copy.write_bytes(b"no video any more")
    for uniforms in (None, torch.rand(2, 2)):
        with pytest.raises(Changed, match="not what it was"):
            data.rows(torch.tensor([1, 0]), uniforms)
    assert data.rows(torch.tensor([0]), None).inputs.isfinite().all()
    with pytest.raises(Changed):
        data.fingerprint()
    copy.unlink()
    with pytest.raises(OSError, match="No such file"):
        data.fingerprint()


def test_a_damaged_stretch_shows_what_came_before(tmp_path: Path) -> None:
    file = write(tmp_path / "film.avi", 40)
    content = bytearray(file.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 200] = bytes(200)
    file.write_bytes(content)
    shown = VideoClips([file], [0], clips=4).rows(torch.tensor([0]), None).inputs
    assert shown.isfinite().all()


def test_the_fingerprint_changes_with_content_labels_grouping_and_settings(films: dict[int, Path]) -> None:
    files = [films[10], films[40]]
    prints = [
        VideoClips(files, [0, 1]).fingerprint(),
        VideoClips([films[10], films[200]], [0, 1]).fingerprint(),
        VideoClips(files, [0, 2]).fingerprint(),
        VideoClips(files, [1, 1]).fingerprint(),
        VideoClips(files, [1, 1], groups=[0, 0]).fingerprint(),
        *(VideoClips(files, [0, 1], **{name: 3}).fingerprint() for name in ("clips", "frames", "stride", "size")),
        clips_as_units(VideoClips(files, [0, 1])).fingerprint(),
    ]
    assert len(set(prints)) == len(prints)
    assert prints[0] == VideoClips(files, [0, 1]).fingerprint()


def test_clips_as_units_lie_side_by_side(films: dict[int, Path]) -> None:
    videos = VideoClips([films[3], films[40], films[10]], [4, 5, 5], groups="abb", frames=4, stride=3)
    naive = clips_as_units(videos)
    assert isinstance(naive, Records)
    assert naive.owner.tolist() == [0, 1, 1, 1, 1, 1]  # 40 frames hold four clips of 10, 10 hold one, and so do 3
    assert (naive.largest_group, naive.scored_by, naive.most_rows) == (5, "row", 1)
    assert naive.labels().tolist() == [4, 5, 5, 5, 5, 5]
    rows = naive.rows(torch.arange(6), None)
    assert [clip[0] for clip in numbers(rows.inputs)] == [0, 0, 10, 20, 30, 0]
    assert rows.owner.tolist() == list(range(6))


def test_what_does_not_fit_is_said_before_anything_is_charged(films: dict[int, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="numbers of files, labels and groups differ"):
        VideoClips([films[3]], [0, 1])
    with pytest.raises(ValueError, match="stride is 0"):
        VideoClips([films[3]], [0], stride=0)
    with pytest.raises(ValueError, match="from 0 to 1"):
        VideoClips([films[3]], [2], classes=("a", "b"))
    wide = write(tmp_path / "wide.mp4", 2, width=32)
    with pytest.raises(ValueError, match=r"16 x 16 and .* 16 x 32"):
        VideoClips([films[3], wide], [0, 1])
    assert len(VideoClips([films[3], wide], [0, 1], size=8)) == 2


def test_without_pyav_the_way_out_is_named(films: dict[int, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ValueError, match=r"pip install 'tacit\[video\]'"):
        VideoClips([films[3]], [0])
