"""Every kind of file that is read, frame by frame: B-frames, turned, oddly named, uneven, cut, rotten."""

from pathlib import Path

import av
import films
import numpy as np
import pytest
import torch
from films import KINDS, number_of, numbers, of_kind, sound_only, turned_by_a_phone, write

from tacit.data import VideoClips
from tacit.data._cache import Cache
from tacit.data._file_state import Changed
from tacit.data._video_files import Look, pictures
from tacit.data._video_index import Unreadable, probe

GREY = {"colour": False, "frames": 1, "clips": 1}


def shown(file: Path, wanted: list[int]) -> list[int]:
    """Which frames come out where these are asked for."""
    video = probe(file)
    look = Look(height=video.height, width=video.width, channels=1)
    return [number_of(frame[..., 0]) for frame in pictures(video, np.array(wanted), look, Cache(0))]


@pytest.mark.parametrize("kind", KINDS)
def test_any_frames_of_any_kind_are_the_right_ones(tmp_path: Path, kind: str) -> None:
    file = of_kind(tmp_path, kind, 200)
    assert probe(file).frames == 200
    for wanted in ([0, 199], [150, 3, 3, 190], [63, 64], [199], [130], list(range(200))):
        assert shown(file, wanted) == wanted


@pytest.mark.parametrize("kind", ["h264-b-avi", "h264-b-ts", "h264-b-mp4", "wmv"])
def test_decoding_begins_at_a_key_frame(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last frames of a long file cost a group of pictures, not the file."""
    video = probe(of_kind(tmp_path, kind, 220))
    assert len(video.keys) > 4
    given = []
    from tacit.data import _video_files as video_files

    decoded = video_files.frames_of
    monkeypatch.setattr(video_files, "frames_of", lambda packet: given.append(1) or decoded(packet))
    look = Look(height=video.height, width=video.width, channels=1)
    assert number_of(pictures(video, np.array([215]), look, Cache(0))[0, ..., 0]) == 215
    assert len(given) < 80


def test_the_stamps_of_an_avi_with_b_frames_are_indeed_in_disorder(tmp_path: Path) -> None:
    """What this guards against: sorted by its stamps, this file would be shown in another order."""
    with av.open(str(of_kind(tmp_path, "h264-b-avi", 20))) as container:
        stamps = [frame.pts for frame in container.decode(video=0)]
    assert stamps != sorted(stamps)


def test_a_turned_film_is_shown_upright(tmp_path: Path) -> None:
    """A landscape file whose matrix says a quarter turn clockwise: left comes up."""
    file = write(tmp_path / "phone.mp4", 5, height=16, width=32)
    turned_by_a_phone(file)
    video = probe(file)
    assert (video.height, video.width, video.turn) == (32, 16, 3)
    shown = VideoClips([file], [0], **GREY).rows(torch.tensor([0]), None).inputs[0, 0, 0] * 255
    assert shown.shape == (32, 16)
    top, bottom = shown[2:14].mean(), shown[18:30].mean()  # the left half carries the number, 2; the right half 0
    assert (float(top), float(bottom)) == pytest.approx((20 + 14 * 2, 20), abs=2)


@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_every_quarter_turn(tmp_path: Path, degrees: int) -> None:
    file = write(tmp_path / "film.mp4", 2, height=16, width=32, turned=degrees)
    with av.open(str(file)) as container:
        frame = next(container.decode(video=0))
        expected = np.rot90(frame.to_ndarray(format="gray"), frame.rotation // 90)  # counterclockwise
    found = VideoClips([file], [0], **GREY).rows(torch.tensor([0]), torch.ones(1, 1)).inputs[0, 0, 0] * 255
    assert frame.rotation % 360 == degrees
    assert np.abs(found.numpy() - expected).max() <= 2


@pytest.mark.parametrize("ending", ["mp4", "avi", "mkv"])
def test_metadata_in_another_encoding_does_not_matter(tmp_path: Path, ending: str) -> None:
    file = write(tmp_path / f"film.{ending}", 30, title="Fr?d?ric")
    content = file.read_bytes()
    assert b"Fr?d?ric" in content
    file.write_bytes(content.replace(b"Fr?d?ric", b"Fr\xe9d\xe9ric"))
    with pytest.raises(UnicodeDecodeError), av.open(str(file)) as container:
        str(container.metadata)
    assert shown(file, [0, 29, 7]) == [0, 29, 7]


def test_clips_of_uneven_frames_go_by_time(tmp_path: Path) -> None:
    """30 frames at 25 a second, then 10 at 5 a second: half of the time is in the last ten frames."""
    times = [40 * i for i in range(30)] + [1200 + 200 * i for i in range(10)]
    file = write(tmp_path / "phone.mkv", 40, codec="libx264", milliseconds=times)
    whole = 1200 + 9 * 200 + 40  # the last frame is shown as long as most are
    own = VideoClips([file], [0], clips=4, frames=1, colour=False)
    even = whole / 40
    first = [int((place + 0.5) * 40 / 4) for place in range(4)]
    on_screen = [max(i for i, time in enumerate(times) if time <= even * place + 10) for place in first]
    assert [clip[0] for clip in numbers(own.rows(torch.tensor([0]), None).inputs)] == on_screen
    slow = VideoClips([file], [0], clips=1, frames=15, stride=1, fps=5, colour=False)
    on_screen = [max(i for i, time in enumerate(times) if time <= 200 * place + 10) for place in range(15)]
    assert numbers(slow.rows(torch.tensor([0]), torch.ones(1, 1)).inputs) == [on_screen]


@pytest.mark.parametrize(("fps", "expected"), [(25, range(8)), (12.5, range(0, 16, 2)), (50, [0, 0, 1, 1, 2, 2, 3, 3])])
def test_a_rate_makes_strides_a_time(tmp_path: Path, fps: float, expected: list[int]) -> None:
    """Two copies of one film at 25 and (every frame twice) 50 frames a second look alike at one rate."""
    for name, twice in (("25.mp4", False), ("25.avi", False), ("50.mkv", True)):
        if twice:
            file = write(tmp_path / name, 60, codec="libx264", milliseconds=[20 * i for i in range(60)])
            wanted = [2 * i for i in expected] if fps <= 25 else list(range(8))
        else:
            file, wanted = write(tmp_path / name, 30), list(expected)
        data = VideoClips([file], [0], clips=1, frames=8, stride=1, fps=fps, colour=False)
        assert numbers(data.rows(torch.tensor([0]), torch.ones(1, 1)).inputs) == [wanted]


@pytest.mark.parametrize(
    "kind", ["h264-b-avi", "mpeg4-avi", "h264-b-ts", "mpg", "h264-b-mkv", "vp8-webm", "h264-b-flv"]
)
def test_a_file_that_was_cut_shows_what_is_there(tmp_path: Path, kind: str) -> None:
    file = of_kind(tmp_path, kind, 120)
    content = file.read_bytes()
    file.write_bytes(content[: len(content) * 6 // 10])
    frames = probe(file).frames
    assert 15 < frames < 120
    sure = frames - 6  # the last ones may be incomplete
    assert shown(file, list(range(sure))) == list(range(sure))


def test_an_mp4_without_its_table_is_unreadable(tmp_path: Path) -> None:
    file = write(tmp_path / "film.mp4", 100)
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(Unreadable, match=r"film.mp4 cannot be read"):
        probe(file)


@pytest.mark.parametrize("kind", KINDS)
def test_rotten_files_show_the_same_whatever_else_is_asked_for(tmp_path: Path, kind: str) -> None:
    """What a step shows must not depend on what was decoded before: a replay would show something else."""
    file = of_kind(tmp_path, kind, 150)
    content = bytearray(file.read_bytes())
    random = np.random.default_rng(3)
    for place in random.integers(len(content) // 4, len(content) * 3 // 4, 12):
        content[place] ^= 0x55
    file.write_bytes(content)
    try:
        video = probe(file)
    except Unreadable:
        return
    look = Look(height=video.height, width=video.width, channels=3)
    everything = pictures(video, np.arange(video.frames), look, Cache(0))
    for number in range(0, video.frames, 21):
        assert np.array_equal(pictures(video, np.array([number]), look, Cache(0))[0], everything[number])
    assert [len(everything), video.frames] == [video.frames] * 2


def test_sound_without_pictures_is_no_video(tmp_path: Path) -> None:
    file = sound_only(tmp_path / "voice.mp4")
    with pytest.raises(Unreadable, match="it has no video stream"):
        probe(file)


@pytest.mark.parametrize("ending", ["mp4", "avi", "gif", "mkv"])
def test_one_frame_is_a_video(tmp_path: Path, ending: str) -> None:
    file = write(tmp_path / f"one.{ending}", 1, codec="gif" if ending == "gif" else "mpeg4")
    assert shown(file, [0]) == [0]
    for fps in (None, 10.0):
        data = VideoClips([file], [0], clips=3, frames=4, fps=fps, colour=False)
        assert numbers(data.rows(torch.tensor([0]), None).inputs) == [[0] * 4] * 3


def test_a_folder_is_read_by_its_endings_and_the_rest_is_listed(tmp_path: Path) -> None:
    for kind in ("wmv", "flv", "gif", "mpg", "vp9-webm", "h264-b-ts", "h264-b-mkv"):
        of_kind(tmp_path / "walk", kind, 12)
    (tmp_path / "walk" / "notes.txt").write_text("to do")
    (tmp_path / "walk" / "more").mkdir()
    sound_only(tmp_path / "walk" / "voice.mp4")
    data = VideoClips.folder(tmp_path, size=16, clips=1)
    assert len(data) == 7
    assert {file.name for file, _ in data.skipped} == {"notes.txt", "more", "voice.mp4"}


def test_a_file_that_is_not_what_it_was_raises(tmp_path: Path) -> None:
    file = films.of_kind(tmp_path, "h264-b-mp4", 40)
    data = VideoClips([file], [0], **GREY)
    content = file.read_bytes()
    file.unlink()
    with pytest.raises(Changed):
        data.rows(torch.tensor([0]), None)
    file.write_bytes(content)  # the same bytes, but who is to say so?
    with pytest.raises(Changed):
        data.rows(torch.tensor([0]), None)
    assert VideoClips([file], [0], **GREY).rows(torch.tensor([0]), None).inputs.isfinite().all()
