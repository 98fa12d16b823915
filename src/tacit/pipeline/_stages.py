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
from tacit.pipeline._schema import Calibrate, Finetune, Outputs, Pipeline, Pretrain, count_of
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


def run_pretrain(work: Work, told: Pretrain) -> nn.Module:
    """Public training, resumed from its checkpoint."""
    rows = work.loaded["pretrain"]
    classes = count_of(told.data.classes)
    if head_of(work.model)[1].out_features != classes:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(told.seed)
            work.model = with_head(work.model, classes, zero=False)
    return pretrain.fit(
        work.model,
        rows.records,
        public=told.public,
        method=told.method,
        radius=told.radius,
        perturb_batch=told.perturb_batch,
        perturb_lr=told.perturb_lr,
        epochs=told.epochs,
        steps=told.steps,
        batch=told.batch,
        rule=told.rule,
        lr=told.lr,
        momentum=told.momentum,
        weight_decay=told.weight_decay,
        decay=told.decay,
        seed=told.seed,
        checkpoint=work.folder.stage("pretrain") / "checkpoint.safetensors",
        every=told.every,
        progress=work.progress,
    )


def run_finetune(work: Work, told: Finetune) -> finetune.Fitted:
    """Private fine-tuning, resumed from its checkpoint: lost steps are replayed with the same noise."""
    part, rows = work.parts["finetune"], work.loaded["data"]
    return finetune.fit(
        work.model,
        rows.records,
        optimizer=optimizer_of(told),
        epsilon=part.spend.epsilon,
        delta=part.spend.delta,
        scheme=told.scheme,
        size=work.size,
        neighbours=work.recipe.budget.neighbours,
        classes=_classes(work),
        head=told.head,
        bias=told.bias,
        ledger=work.ledger,
        subject=part.subjects[0],
        evaluate=evaluation(work),
        checkpoint=work.folder.stage("finetune") / "checkpoint.safetensors",
        every=told.every,
        microbatch=told.microbatch,
        progress=work.progress,
    )


def evaluation(work: Work) -> finetune.Evaluation | None:
    """Public data on which the fine-tuned model is scored exactly."""
    rows = work.loaded.get("evaluate")
    return None if rows is None else finetune.Evaluation(data=rows.records, public=True)


def _classes(work: Work) -> int:
    return count_of(getattr(work.recipe.data, "classes", 2))


def run_calibrate(work: Work, told: Calibrate) -> calibrate.Result:
    """Recalibration; answers that were given before a kill are not asked, or charged, again."""
    part = work.parts["calibrate"]
    for subject in part.subjects:
        calibrate.reopen(work.ledger, subject)
    sources = sources_of(work, told, part)
    result = calibrator_of(told, part).run(sources, run_id=f"run-{work.folder.run}")
    work.folder.write("calibrate", "result.json", result.to_json())
    return result


def calibrator_of(told: Calibrate, part: Part) -> calibrate.Calibrator:
    """Who asks."""
    ends = {} if told.method == "histogram" else {"low": told.low, "high": told.high}
    method = calibrate.METHODS[told.method](**ends)
    return calibrate.Calibrator(budget=part.spend, method=method, cautious=told.cautious)


def sources_of(work: Work, told: Calibrate, part: Part) -> list[calibrate.Source]:
    """One source for each name, each a subject of the run's ledger."""
    found = []
    for place, (name, subject) in enumerate(zip(told.sources, part.subjects, strict=True)):
        budget = work.recipe.budget
        how: dict[str, Any] = {
            "budget": part.budget,
            "ledger": work.ledger,
            "subject": subject,
            "unit": budget.unit,
            "neighbours": budget.neighbours,
            "size": None if told.sizes is None else told.sizes[place],
        }
        if isinstance(told.data, Outputs):
            outputs, labels, ids = _data.load_outputs(work.recipe, told.data, name)
            made = calibrate.Source(name, labels=labels, unit_ids=ids, **{told.data.form: outputs}, **how)
        else:
            rows = work.loaded["calibrate"]
            places = [number for number, source in enumerate(rows.sources or []) if source == name]
            ids = None if rows.owners is None else [rows.owners[number] for number in places]
            batches = _data.in_batches(rows, places, _CHUNK)
            made = calibrate.Source.from_model(name, _data.OneTensor(work.model, rows), batches, unit_ids=ids, **how)
        found.append(made)
    return found
