"""Starter recipes as a new user takes them: written, edited in a few lines, planned and run."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

from tacit import pipeline
from tacit.cli._main import run as command
from tests.data.words import bert, saved
from tests.pipeline.made_up_images import make_images


def tacit(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        command(arguments)
    return int(stop.value.code or 0)


def edited(path: Path, changes: dict[str, str]) -> None:
    text = path.read_text()
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    path.write_text(text)


@pytest.mark.parametrize("kind", pipeline.KINDS)
def test_every_starter_is_a_recipe_with_a_plan(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    assert tacit("init", kind, str(path)) == 0
    assert tacit("run", str(path), "--plan") == 0
    assert "Total: (8, 1e-05)-differential privacy" in capsys.readouterr().out
    assert sorted(tmp_path.iterdir()) == [path], "a plan touches nothing"
    before = path.read_text()
    assert tacit("init", kind, str(path)) == 2
    assert "There is a file" in capsys.readouterr().err
    assert path.read_text() == before


def test_an_unknown_starter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tacit("init", "sounds", str(tmp_path / "mine.toml")) == 2
    assert "There is no starter recipe 'sounds'" in capsys.readouterr().err


def test_images_with_timm_give_weights_that_plain_timm_loads(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    make_images(tmp_path, rows=12)
    path = pipeline.write_starter("images", tmp_path / "mine.toml")
    small = "timm:test_vit.r160_in1k"
    edited(
        path,
        {
            'name = "timm:vit_tiny_patch16_224"': f'name = "{small}"\npretrained = false',
            "steps = 30": "steps = 2",
        },
    )
    outcome = pipeline.run(pipeline.read(path), tmp_path / "out")
    pipeline.write_report(outcome)
    config = timm.data.resolve_model_data_config(outcome.model)
    assert outcome.shape.startswith(f"3 x {config['input_size'][1]} x {config['input_size'][2]}, crop")
    plain = timm.create_model(
        small.removeprefix("timm:"),
        num_classes=2,
        checkpoint_path=str(tmp_path / "out" / "model" / "model.safetensors"),
    )
    rows = torch.rand(2, *config["input_size"])
    with torch.no_grad():
        assert torch.equal(plain.eval()(rows), outcome.model(rows))


def test_texts_with_lora_give_weights_that_plain_transformers_loads(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    saved(bert("BertForSequenceClassification"), tmp_path / "bert")
    with (tmp_path / "texts.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label", "user"])
        for row in range(24):
            writer.writerow([f"{'very ' * (row % 3)}{('bad', 'good')[row % 2]} film", row % 2, f"user {row // 3}"])
    path = pipeline.write_starter("text", tmp_path / "mine.toml")
    changes = {"transformers:distilbert-base-uncased": "transformers:bert", "steps = 30": "steps = 3"}
    edited(path, changes | {"max_length = 128": "max_length = 16"})
    outcome = pipeline.run(pipeline.read(path), tmp_path / "out")
    pipeline.write_report(outcome)
    assert str(outcome.ledger.subjects()[0].terms.unit) == "user"
    where = tmp_path / "out" / "model"
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(where).eval()
    words = transformers.AutoTokenizer.from_pretrained(where)("very good film", return_tensors="pt")
    with torch.no_grad():
        same = outcome.model(**words).logits
        assert torch.allclose(plain(**words).logits, same, atol=1e-6)
    assert not torch.allclose(same, torch.zeros_like(same))


def test_outputs_on_disk_need_no_model(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    (tmp_path / "outputs").mkdir()
    for clinic in ("clinic-a", "clinic-b"):
        labels = rng.integers(0, 3, 400)
        logits = 4.0 * rng.standard_normal((400, 3)) + 4.0 * np.eye(3)[labels]
        names = np.array([f"{clinic} {row // 2}" for row in range(400)])
        np.savez(tmp_path / "outputs" / f"{clinic}.npz", logits=logits, labels=labels, patient=names)
    path = pipeline.write_starter("outputs", tmp_path / "mine.toml")
    outcome = pipeline.run(pipeline.read(path), tmp_path / "out")
    assert outcome.result is not None
    assert outcome.result.sources == 2
    assert outcome.result.temperature > 1.2  # logits four times as large as they should be
    assert outcome.total.epsilon == pytest.approx(8.0, abs=1e-6)
    pipeline.write_report(outcome)
    assert not (tmp_path / "out" / "model").exists()


def test_videos_of_a_folder_per_class(tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    for kind in range(2):
        (tmp_path / "videos" / f"class-{kind}").mkdir(parents=True)
        for number in range(3):
            with av.open(str(tmp_path / "videos" / f"class-{kind}" / f"{number}.mp4"), "w") as file:
                stream = file.add_stream("mpeg4", rate=10)
                stream.width = stream.height = 32
                for frame in range(12):
                    pixels = np.full((32, 32, 3), 100 * kind + 5 * frame + number, np.uint8)
                    for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                        file.mux(packet)
                for packet in stream.encode():
                    file.mux(packet)
    path = pipeline.write_starter("video", tmp_path / "mine.toml")
    edited(path, {"steps = 30": "steps = 2", "clips = 4": "clips = 2"})
    outcome = pipeline.run(pipeline.read(path), tmp_path / "out")
    pipeline.write_report(outcome)
    assert str(outcome.ledger.subjects()[0].terms.unit) == "video"
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()
