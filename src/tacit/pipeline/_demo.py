"""The demo: the pipeline of demo.toml on the embedded images, scored on others that are declared public."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tacit import calibrate
from tacit.models import embedded
from tacit.pipeline import _data, _report, _run
from tacit.pipeline._models import Built
from tacit.pipeline._schema import Pipeline
from tacit.pipeline._schema_data import Embedded
from tacit.recipes import Progress
from tacit.report import Cell, Column, Picture, Section, Table, write_pictures

TESTED = 2000  # images that no stage sees, declared public
CLEAN, START, FITTED, ADAPTED = "clean", "the public model", "after fine-tuning", "after adaptation"
STAGES = (START, FITTED, ADAPTED)


@dataclass
class Scores:
    """Logits of public images after each stage, by the camera that they come from."""

    rows: dict[str, _data.Loaded]
    logits: dict[tuple[str, str], Tensor] = field(default_factory=dict)

    def __call__(self, stage: str, model: nn.Module) -> None:
        name = {"start": START, "finetune": FITTED, "adapt": ADAPTED}.get(stage)
        if name is None:
            return
        with torch.no_grad():
            for camera, rows in self.rows.items():
                self.logits[name, camera] = torch.cat([model(batch) for batch, _ in rows.batches(250)])

    def accuracy(self, stage: str, camera: str) -> float:
        """In percent."""
        right = self.logits[stage, camera].argmax(1) == self.rows[camera].labels
        return 100 * float(right.double().mean())

    def table(self) -> dict[str, dict[str, float]]:
        """Accuracy by stage and camera."""
        return {stage: {camera: self.accuracy(stage, camera) for camera in self.rows} for stage in STAGES}


def demo(
    out: str | Path, *, recipe: str | None = None, tested: int = TESTED, progress: Progress | bool = True
) -> dict[str, Any]:
    """Run the demo from nothing, with fresh noise, and write its page.

    Args:
        out: The folder; what an earlier demo left there is taken away.
        recipe: Another text than that of demo.toml.
        tested: How many public images the models are scored on.
        progress: True shows a bar.

    Returns:
        What `run.json` says.

    Raises:
        ValueError: The recipe does not fine-tune and adapt on embedded data.
        OSError: The folder cannot be written.
    """
    out = Path(out)
    _clear(out)
    out.mkdir(parents=True, exist_ok=True)
    text = recipe or files("tacit.pipeline").joinpath("demo.toml").read_text("utf-8")
    (out / "demo.toml").write_text(text, "utf-8")
    settings = _run.read(out / "demo.toml")
    scores = Scores(_cameras(settings, tested))
    scores("start", embedded())
    outcome = _run.run(settings, out, progress=progress, after=scores)
    sections = _sections(outcome, scores)
    facts = _report.write(outcome, before=sections, more=_facts(outcome, scores))
    write_pictures(out, sections)
    return facts


def _clear(out: Path) -> None:
    for folder in ("stages", "model"):
        shutil.rmtree(out / folder, ignore_errors=True)
    for file in [*out.glob("ledger.db*"), *out.glob("tacit-*")]:
        file.unlink()


def _cameras(settings: Pipeline, tested: int) -> dict[str, _data.Loaded]:
    """Public test images without a shift, with that of the labelled data and with that of the stream."""
    stream = None if settings.adapt is None else settings.adapt.data
    if not isinstance(settings.data, Embedded) or not isinstance(stream, Embedded):
        raise ValueError("The demo has [finetune] and [adapt] on embedded data.")
    rows = replace(settings.data, start=15_000 - tested, stop=None)
    return {
        shift or CLEAN: _data.load(settings, replace(rows, shift=shift), Built(model=nn.Identity()), public=True)
        for shift in (None, settings.data.shift, stream.shift)
    }


def _sections(outcome: _run.PipelineResult, scores: Scores) -> list[Section]:
    """What the model can do after each stage, with what each picture shows."""
    from tacit.report import plots  # matplotlib is slow to load

    cameras, found = list(scores.rows), scores.table()
    arms: dict[str, list[Cell]] = {stage: list(values.values()) for stage, values in found.items()}
    rows: list[list[Cell]] = [[stage, *cells] for stage, cells in arms.items()]
    columns: list[Column | str] = ["", *(Column(_plain(camera), ".1f") for camera in cameras)]
    ability = Section(
        "What the model can do",
        f"Scored on {len(scores.rows[CLEAN]):,} images that no stage saw, declared public: as they are, and as the two "
        f"cameras show them. {_said(found)}",
        tables=[Table("Accuracy in percent", columns, rows, note="One run, with fresh noise: another one differs.")],
        figures=[
            Picture(
                plots.bars_by_shift([_plain(camera) for camera in cameras], arms, reference=START),
                caption="Accuracy by camera. Each line has the public model, the model after private fine-tuning on "
                "labelled images of the first clinic, and after private adaptation to unlabelled ones of the second.",
            )
        ],
    )
    errors = {name: calibrate.ece(logits=s, labels=y) for name, (s, y) in _confidences(outcome, scores).items()}
    sure = Section(
        "How sure it is",
        f"The calibration error (mean gap between confidence and accuracy) is {100 * errors['before']:.1f}% before and "
        f"{100 * errors['after']:.1f}% after the recalibration from five private sources.",
        figures=[
            Picture(
                plots.reliability({name: _bins(*each) for name, each in _confidences(outcome, scores).items()}),
                caption="How often predictions of a confidence are right, on images of the second clinic. On the "
                "diagonal the model is as sure as it should be; below it, too sure. The bars below count predictions.",
            )
        ],
    )
    return [ability, *([sure] if outcome.result is not None else [])]


def _plain(camera: str) -> str:
    return camera.replace("_", " ")


def _said(found: dict[str, dict[str, float]]) -> str:
    """What each stage did for the camera that it is for; also where it did nothing good."""
    _, first, second = found[START]
    words = []
    for stage, before, camera, name in (
        (FITTED, START, first, "Fine-tuning"),
        (ADAPTED, FITTED, second, "Adaptation"),
    ):
        old, new = found[before][camera], found[stage][camera]
        did = "helped" if new > old + 1 else "hurt" if new < old - 1 else "changed little"
        words.append(f"{name} {did}: from {old:.1f} to {new:.1f} under {_plain(camera)}.")
    return " ".join(words)


def _confidences(outcome: _run.PipelineResult, scores: Scores) -> dict[str, tuple[Tensor, Tensor]]:
    camera = list(scores.rows)[-1]
    said, labels = scores.logits[ADAPTED, camera], scores.rows[camera].labels
    after = said if outcome.result is None else outcome.result.apply(said)
    return {"before": (said, labels), "after": (after, labels)}


def _bins(logits: Tensor, labels: Tensor) -> list[Any]:
    from tacit.report import plots

    found = calibrate.reliability(logits=logits, labels=labels)
    parts = zip(found.confidence, found.accuracy, found.counts, strict=True)
    return [plots.Bin(confidence, accuracy, weight) for confidence, accuracy, weight in parts if weight]


def _facts(outcome: _run.PipelineResult, scores: Scores) -> dict[str, Any]:
    errors = {name: calibrate.ece(logits=s, labels=y) for name, (s, y) in _confidences(outcome, scores).items()}
    return {"accuracy": scores.table(), "calibration_error": errors}
