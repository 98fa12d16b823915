"""The motions: real files, the same for the same seed, and each class moves as it says."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from studies.multi_clip import motions
from studies.multi_clip.motions import Motions, write_motions
from tacit.data import VideoClips

SMALL = Motions(frames=16)
PURE = Motions(frames=12, moves=(40, 40), pauses=(1, 1), speed=(0.8, 0.8), drifting=0, distractor=0, noise=0)


def films(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*.mp4"))}


def test_the_same_seed_writes_the_same_files(tmp_path: Path) -> None:
    names = motions.PRIVATE[:3]
    for folder, seed in (("a", 5), ("b", 5), ("c", 6)):
        home = write_motions(tmp_path / folder, videos=7, classes=names, seed=seed, motions=SMALL)
        assert home == tmp_path / folder
    first = films(tmp_path / "a")
    assert first == films(tmp_path / "b")
    assert set(first) == set(films(tmp_path / "c"))
    assert all(first[name] != content for name, content in films(tmp_path / "c").items())
    assert sorted(name for name in first if name.startswith("right")) == [f"right/00{n}.mp4" for n in range(3)]
    manifest = json.loads((tmp_path / "a" / motions.MANIFEST).read_text())
    assert (manifest["videos"], manifest["seed"], manifest["motions"]["frames"]) == (7, 5, 16)


def test_they_are_clips_for_training(tmp_path: Path) -> None:
    write_motions(tmp_path / "a", videos=16, classes=motions.PUBLIC, seed=1, split="seen", motions=SMALL)
    data = VideoClips.folder(tmp_path / "a", clips=2, colour=False)
    assert data.classes == tuple(sorted(motions.PUBLIC))
    assert data.labels().bincount().tolist() == [2] * 8
    shown = data.rows(torch.arange(16), None).inputs
    assert shown.shape == (32, 8, 1, 32, 32)
    assert float(shown.view(16, -1).amax(1).min()) > 0.4  # in every video there is something to see


def test_sixteen_motions_half_of_them_for_pretraining() -> None:
    assert len(set(motions.PUBLIC) | set(motions.PRIVATE)) == 16
    assert len(motions.PUBLIC) == len(motions.PRIVATE) == 8


@pytest.mark.parametrize(("name", "x", "y"), [("right", 1, 0), ("up", 0, -1), ("down-left", -1, 1), ("spin", 0, 0)])
def test_the_sprite_moves_as_its_class_says(name: str, x: int, y: int) -> None:
    """The phase of the picture's first Fourier component turns by 2 pi / size for each pixel, across the edge, too."""
    sprite = torch.zeros(2, 1, 28, 28)
    sprite[:, :, 4:24, 9:19] = 255
    for seed in range(20):
        film = motions._film(name, sprite, PURE, np.random.default_rng(seed)).astype(float)
        waves = np.fft.fft2(film)
        steps = [
            float(np.mean(np.angle(wave[1:] / wave[:-1]))) * -32 / (2 * np.pi)
            for wave in (waves[:, 0, 1], waves[:, 1, 0])
        ]
        length = 0.8 / max(np.hypot(x, y), 1)
        assert steps == pytest.approx([length * x, length * y], abs=0.12)


def test_a_folder_is_not_written_over(tmp_path: Path) -> None:
    settings = {"videos": 2, "classes": ("left", "spin"), "seed": 3}
    home = write_motions(tmp_path / "a", **settings, motions=SMALL)
    before = [file.stat().st_mtime_ns for file in home.rglob("*.mp4")]
    write_motions(home, **settings, motions=SMALL)
    assert [file.stat().st_mtime_ns for file in home.rglob("*.mp4")] == before
    with pytest.raises(ValueError, match="holds something else already"):
        write_motions(home, **settings, motions=replace(SMALL, noise=0.1))


def test_wrong_classes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no motion 'jump': choose among left, .*"):
        write_motions(tmp_path / "a", videos=4, classes=("left", "jump"), seed=0)
    with pytest.raises(ValueError, match="1 videos of 2 motions"):
        write_motions(tmp_path / "a", videos=1, classes=("left", "right"), seed=0)
    assert not (tmp_path / "a").exists()
