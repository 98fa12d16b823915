"""The demo, made small: one ledger, one total, one page that says what its pictures show."""

import json
from importlib.resources import files
from pathlib import Path

import pytest

from tacit import pipeline
from tacit.cli._main import run as command
from tacit.data import fashion_mnist, shifts
from tacit.models import embedded
from tacit.pipeline._demo import _said
from tacit.privacy import Ledger


def small() -> str:
    """The demo's recipe with a few hundred images."""
    text = files("tacit.pipeline").joinpath("demo.toml").read_text("utf-8")
    changes = {
        "stop = 4000": "stop = 200",
        "start = 4000\nstop = 9000": "start = 4000\nstop = 4128",
        "start = 9000\nstop = 11500": "start = 9000\nstop = 9100",
        "trials = 20000": "trials = 1000",
        "steps = 40": "steps = 3",
    }
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


def test_the_demo_is_one_pipeline_with_one_total_and_a_second_starts_from_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "demo"
    facts = pipeline.demo(out, recipe=small(), tested=60, progress=False)
    assert facts["privacy"]["epsilon"] == pytest.approx(4.0, abs=1e-6)
    assert facts["privacy"]["epsilon"] <= 4.0
    subjects = {subject.name for subject in Ledger(out / "ledger.db").subjects()}
    assert subjects == {"train", "stream", *(f"source ward-{n}" for n in range(1, 6))}
    told = facts["facts"]
    images, labels = fashion_mnist("unseen")
    for camera in ("clean", "contrast", "gaussian_noise"):
        seen = images[-60:] if camera == "clean" else shifts.corrupt(images[-60:], camera, 3, seed=0)
        right = embedded()(seen.float() / 255).argmax(1) == labels[-60:]
        assert told["accuracy"]["the public model"][camera] == pytest.approx(100 * float(right.double().mean()))
    assert set(told["accuracy"]) == {"the public model", "after fine-tuning", "after adaptation"}
    page = (out / "report.html").read_text("utf-8")
    for words in ("Accuracy by camera", "How often predictions of a confidence are right", "Audit", "declared public"):
        assert words in page
    assert told["audit"]
    assert json.loads((out / "run.json").read_text())["facts"] == told

    real = pipeline.demo  # the second time as a command
    monkeypatch.setattr(pipeline, "demo", lambda out: real(out, recipe=small(), tested=30, progress=False))
    with pytest.raises(SystemExit) as stop:
        command(["demo", "--out", str(out)])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    for words in ("after adaptation", "Calibration error", "What each stage may spend by itself", str(out)):
        assert words in printed
    again = json.loads((out / "run.json").read_text())
    assert again["privacy"]["epsilon"] == pytest.approx(4.0, abs=1e-6)
    charges = [entry for entry in Ledger(out / "ledger.db").entries() if entry.kind == "charge"]
    assert len({entry.body["note"].rpartition("[run ")[2] for entry in charges}) == 1  # of the second run alone


def test_the_page_also_says_what_did_not_help() -> None:
    found = {
        "the public model": {"clean": 90.0, "fog": 70.0, "snow": 60.0},
        "after fine-tuning": {"clean": 90.0, "fog": 70.4, "snow": 60.0},
        "after adaptation": {"clean": 90.0, "fog": 70.0, "snow": 41.0},
    }
    assert _said(found) == (
        "Fine-tuning changed little: from 70.0 to 70.4 under fog. Adaptation hurt: from 60.0 to 41.0 under snow."
    )


def test_what_was_chosen_on_other_shifts_is_shown_on_these() -> None:
    told = pipeline.read(str(files("tacit.pipeline").joinpath("demo.toml")))
    assert told.adapt is not None
    assert told.calibrate is not None
    used = {each.shift for each in (told.data, told.adapt.data, told.calibrate.data)}  # type: ignore[union-attr]
    assert used <= set(shifts.TEST)
