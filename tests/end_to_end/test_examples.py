"""The scripts that people copy, run as they are."""

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from studies.multi_clip.motions import PRIVATE, Motions, write_motions

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_timm_vit_adapts_to_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "camera"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(3):
        Image.fromarray(rng.integers(0, 256, (40, 50, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    arguments = [
        str(folder),
        "--model",
        "vit_tiny_patch16_224",
        "--batch-size",
        "2",
        "--ledger",
        str(tmp_path / "l.db"),
    ]
    monkeypatch.setattr(sys, "argv", ["adapt_a_timm_vit.py", *arguments])
    runpy.run_path(str(EXAMPLES / "adapt_a_timm_vit.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert "mean (0.5, 0.5, 0.5)" in out
    assert [line.split()[0] for line in out.splitlines() if line[0].isdigit()] == ["0.png", "1.png", "2.png"]
    assert "(1, 1e-06)-differential privacy" in out


def test_a_text_model_is_fine_tuned_on_sentences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "data")
    from words import bert, saved, sayings

    model = saved(bert(), tmp_path / "model")
    for name, seed in (("train", 0), ("test", 1)):
        lines = [f"{text}\t{label}" for text, label in zip(*sayings(40, seed), strict=True)]
        (tmp_path / f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *lines]))
    files = [str(tmp_path / "train.tsv"), "--test", str(tmp_path / "test.tsv"), "--model", str(model)]
    more = [
        "--size",
        "40",
        "--steps",
        "2",
        "--batch-size",
        "10",
        "--max-length",
        "16",
        "--ledger",
        f"sqlite:///{tmp_path / 'l.db'}",
    ]
    monkeypatch.setattr(sys, "argv", ["finetune_text.py", *files, *more])
    runpy.run_path(str(EXAMPLES / "finetune_text.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert "lora: 1,058 numbers trained in 2 steps" in out
    assert "accuracy on 40 public sentences:" in out
    assert "(8, 1e-05)-differential privacy" in out


def test_a_video_net_is_fine_tuned_on_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_motions(tmp_path / "films", videos=8, classes=PRIVATE[:2], seed=0, motions=Motions(frames=20))
    arguments = "films --size 8 --clips 2 --batch-size 4 --steps 2 --delta 0.01 --ledger l.db"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["finetune_videos.py", *arguments.split()])
    runpy.run_path(str(EXAMPLES / "finetune_videos.py"), run_name="__main__")
    told = capsys.readouterr()
    assert "trained in 2 steps of 2 clips per video" in told.out
    assert "(8, 0.01)-differential privacy: when one video is added or removed" in " ".join(told.out.split())
    assert "DPSGD: 2 of 2; privacy spent: eps" in told.err
