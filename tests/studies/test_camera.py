"""Photographs under a moving camera: files, features of clips, and records of them."""

import zipfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from studies.finetune.arms import Grid
from studies.finetune.data import Data
from studies.multi_clip.camera import CLASSES, Camera, _path, write_camera
from studies.multi_clip.head import TemporalHead
from studies.prepare.camera_features import compared
from tacit.data import VideoClips

CAMERA = Camera(frames=8, size=32)


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    with zipfile.ZipFile(tmp_path / "images.zip", "w") as opened:
        for number in range(8):
            content = BytesIO()
            Image.fromarray(random.integers(0, 255, (48, 48, 3), np.uint8)).save(content, "jpeg")
            opened.writestr(f"000/{number}.jpg", content.getvalue())
    return tmp_path / "images.zip"


def test_files_are_videos_and_splits_share_no_photograph(photographs: Path, tmp_path: Path) -> None:
    homes = [
        write_camera(tmp_path / name, photographs, start=start, videos=4, seed=1, camera=CAMERA)
        for name, start in (("a", 0), ("b", 4), ("c", 0))
    ]
    first, second, again = (VideoClips.folder(home, clips=1, frames=8, stride=1) for home in homes)
    assert first.classes == tuple(sorted(CLASSES))
    shown = [one.rows(torch.arange(4), None).inputs for one in (first, second, again)]
    assert shown[0].shape == (4, 8, 3, 32, 32)
    assert torch.equal(shown[0], shown[2])
    assert float((shown[0] - shown[1]).abs().mean()) > 0.05
    assert write_camera(tmp_path / "a", photographs, start=0, videos=4, seed=1, camera=CAMERA) == homes[0]
    with pytest.raises(ValueError, match="too few"):
        write_camera(tmp_path / "d", photographs, start=6, videos=4, seed=1, camera=CAMERA)


@pytest.mark.parametrize("name", CLASSES)
def test_the_class_moves_most_along_its_own_way(name: str) -> None:
    random = np.random.default_rng(2)
    moved = np.mean([np.abs(np.diff(_path(name, Camera(), random), axis=0)).mean(0) for _ in range(200)], 0)
    assert CLASSES[int(moved.argmax())] == name
    assert moved.max() > 1.5 * np.sort(moved)[-2]


def test_tokens_that_move_are_found_a_neighbour_further() -> None:
    """Random tokens, moved by one place to the right: each is like the neighbour at (0, +1) one frame later."""
    tokens = torch.randn(1, 6, 7, 16, generator=torch.Generator().manual_seed(0))
    frames = torch.cat([tokens[:, :, 1:], tokens[:, :, :-1]])
    found = compared(frames).view(1, 9, 9).mean(2)[0]
    assert int(found.argmax()) == 5  # y = 1, x = 2 of the nine offsets


def test_clips_of_a_video_are_rows_of_its_unit(tmp_path: Path) -> None:
    arrays = {}
    for split, videos in (("private", 6), ("test", 3)):
        arrays[f"{split}_features"] = np.random.default_rng(0).normal(size=(videos, 5, 6)).astype(np.float32)
        arrays[f"{split}_labels"] = np.arange(videos) % 2
    np.savez(tmp_path / "clips.npz", **arrays)
    data = Data(kind="clips", train=str(tmp_path / "clips.npz"), private=6, tested=3, classes=2)
    (choice,) = Grid(clips=(2,)).arms()
    train, test = (data.records(split, choice.arms[0]) for split in ("private", "test"))  # type: ignore[arg-type]
    assert (len(train), train.unit, train.most_rows, train.scored_by, test.most_rows) == (6, "video", 2, "unit", 5)
    rows = train.rows(torch.tensor([4]), torch.rand(1, train.uniforms).clamp_min(1e-6))
    own = torch.from_numpy(arrays["private_features"][4])
    assert all(any(torch.equal(row, clip) for clip in own) for row in rows.inputs)
    assert TemporalHead(moments=3, features=2, classes=2)(rows.inputs).shape == (2, 2)
