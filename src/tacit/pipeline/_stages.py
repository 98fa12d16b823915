"""The stages of a run: each is one call of the package's own functions, and goes on where a kill has left it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tacit import calibrate, finetune, pretrain
from tacit.models import head_of, with_head
from tacit.pipeline import _data
from tacit.pipeline._budget import Part
from tacit.pipeline._data import Loaded
from tacit.pipeline._folder import Folder
from tacit.pipeline._ledger import RunLedger
from tacit.pipeline._models import Built
from tacit.pipeline._optimizers import optimizer_of
from tacit.pipeline._schema import Calibrate, Finetune, Pipeline, Pretrain
from tacit.pipeline._schema_data import Outputs, count_of
from tacit.recipes import Progress

_CHUNK = 64  # rows that a model is shown at a time


@dataclass(kw_only=True)
class Work:
    """What the stages share: the model goes from one to the next."""

    recipe: Pipeline
    folder: Folder
    ledger: RunLedger
    parts: dict[str, Part]
    built: Built
    model: nn.Module
    loaded: dict[str, Loaded] = field(default_factory=dict)
    progress: Progress | bool = False

    @property
    def size(self) -> int | None:
        """The public number of units of [data]; elsewhere than under add-remove it is what there is."""
        return self.recipe.budget.size


def run_pretrain(work: Work, settings: Pretrain) -> nn.Module:
    """Public training, resumed from its checkpoint."""
    rows = work.loaded["pretrain"]
    classes = count_of(settings.data.classes)
    if head_of(work.model)[1].out_features != classes:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            work.model = with_head(work.model, classes, zero=False)
    return pretrain.fit(
        work.model,
        rows.records,
        public=settings.public,
        method=settings.method,
        radius=settings.radius,
        perturb_batch=settings.perturb_batch,
        perturb_lr=settings.perturb_lr,
        epochs=settings.epochs,
        steps=settings.steps,
        batch_size=settings.batch_size,
        rule=settings.rule,
        lr=settings.lr,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        decay=settings.decay,
        seed=settings.seed,
        checkpoint=work.folder.stage("pretrain") / "checkpoint.safetensors",
        every=settings.every,
        progress=work.progress,
    )


def run_finetune(work: Work, settings: Finetune) -> finetune.Fitted:
    """Private fine-tuning, resumed from its checkpoint: lost steps are replayed with the same noise."""
    part, rows, optimizer = work.parts["finetune"], work.loaded["data"], optimizer_of(settings)
    tracked = settings.track_loss
    if tracked is None:
        tracked = finetune.TrackLoss.fits(optimizer, work.model.parameters())
    return finetune.fit(
        work.model,
        rows.records,
        optimizer=optimizer,
        epsilon=part.spend.epsilon,
        delta=part.spend.delta,
        scheme=settings.scheme,
        size=work.size,
        neighbours=work.recipe.budget.neighbours,
        classes=_classes(work),
        head=settings.head,
        bias=settings.bias,
        ledger=work.ledger,
        subject=part.subjects[0],
        evaluate=evaluation(work),
        track_loss=tracked,
        checkpoint=work.folder.stage("finetune") / "checkpoint.safetensors",
        every=settings.every,
        microbatch=settings.microbatch,
        progress=work.progress,
    )


def evaluation(work: Work) -> finetune.Evaluation | None:
    """Public data on which the fine-tuned model is scored exactly."""
    rows = work.loaded.get("evaluate")
    return None if rows is None else finetune.Evaluation(data=rows.records, public=True)


def _classes(work: Work) -> int:
    return count_of(getattr(work.recipe.data, "classes", 2))


def run_calibrate(work: Work, settings: Calibrate) -> calibrate.Result:
    """Recalibration; answers that were given before a kill are not asked, or charged, again."""
    part = work.parts["calibrate"]
    for subject in part.subjects:
        calibrate.reopen(work.ledger, subject)
    sources = sources_of(work, settings, part)
    result = calibrator_of(settings, part).run(sources, run_id=f"run-{work.folder.run}")
    work.folder.write("calibrate", "result.json", result.to_json())
    return result


def calibrator_of(settings: Calibrate, part: Part) -> calibrate.Calibrator:
    """Who asks."""
    ends = {} if settings.method == "histogram" else {"low": settings.low, "high": settings.high}
    method = calibrate.METHODS[settings.method](**ends)
    return calibrate.Calibrator(budget=part.spend, method=method, cautious=settings.cautious)


def sources_of(work: Work, settings: Calibrate, part: Part) -> list[calibrate.Source]:
    """One source for each name, each a subject of the run's ledger."""
    found = []
    for place, (name, subject) in enumerate(zip(settings.sources, part.subjects, strict=True)):
        budget = work.recipe.budget
        how: dict[str, Any] = {
            "budget": part.budget,
            "ledger": work.ledger,
            "subject": subject,
            "unit": budget.unit,
            "neighbours": budget.neighbours,
            "size": None if settings.sizes is None else settings.sizes[place],
        }
        if isinstance(settings.data, Outputs):
            outputs, labels, ids = _data.load_outputs(work.recipe, settings.data, name)
            made = calibrate.Source(name, labels=labels, unit_ids=ids, **{settings.data.form: outputs}, **how)
        else:
            rows = work.loaded["calibrate"]
            places = [number for number, source in enumerate(rows.sources or []) if source == name]
            ids = None if rows.owners is None else [rows.owners[number] for number in places]
            batches = _data.in_batches(rows, places, _CHUNK)
            made = calibrate.Source.from_model(name, _data.OneTensor(work.model, rows), batches, unit_ids=ids, **how)
        found.append(made)
    return found
