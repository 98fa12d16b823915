"""The search stage: trials are written down as they end, so that a killed search goes on behind the last of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import nn

from tacit import _checkpoints as checkpoints
from tacit import tune
from tacit._refusals import Refusal, attempt
from tacit.models import select, with_head
from tacit.pipeline._folder import Folder
from tacit.pipeline._optimizers import optimizer_of
from tacit.pipeline._plan import search_plan
from tacit.pipeline._schema import Finetune, Tune
from tacit.pipeline._schema_data import count_of
from tacit.pipeline._stages import Work
from tacit.privacy import Ledger

_UNREADABLE = "The data cannot be read. Nothing more was charged. Details may reveal rows: see curator=."
_TRIALS, _RESULT, _MODEL = "trials.json", "result.json", "model.safetensors"


@dataclass(frozen=True, kw_only=True)
class Search:
    """What a search came to: released values only."""

    model: nn.Module
    lr: float
    steps: int
    trials: list[dict[str, Any]]
    decisions: tuple[str, ...]


def run_tune(work: Work, settings: Tune, how: Finetune) -> Search:
    """Linear scaling over [data] and its final run.

    Formal guarantee: that of `tune.linear_scaling`. A trial leaves as its score, which is written down when the trial
    ends, and then its receipts are closed; of one that a kill interrupted nothing has left, and it starts anew on what
    was charged for it (`RunLedger`). The final run leaves as one file, written in one piece, with its model and all
    that a resumed run needs: once it is there, nothing is drawn on its charge again.
    """
    done = work.folder.read("tune", _RESULT) or _interrupted(work)
    outputs = count_of(getattr(work.recipe.data, "classes", 2))
    if done is not None:
        _mark(work).unlink(missing_ok=True)  # of a kill right at the end
        return _reloaded(work, how, outputs, done)
    part, rows = work.parts["tune"], work.loaded["data"]
    _check_data(work)
    size = work.size or len(rows.records)
    trainable = tune.Finetuning(
        work.model,
        rows.records,
        size=size,
        classes=outputs,
        delta=part.spend.delta,
        optimizer=partial(_optimizer, how),
        scheme=how.scheme,
        head=how.head,
        bias=how.bias,
        standardise=None,  # the pipeline's model stays one that plain timm or transformers loads
    )
    found = tune.linear_scaling(
        trainable,
        tune.Space(lr=settings.lr, steps=settings.steps),
        part.spend,
        ledger=work.ledger,
        subject=part.subjects[0],
        plan=search_plan(work.recipe, settings, part, size),
        unit=work.recipe.budget.unit,
        neighbours=work.recipe.budget.neighbours,
        runner=_Written(work.folder, work),
        draw_seed=settings.draw_seed,
        progress=work.progress,
    )
    if found.hyperparameters is None:
        raise tune.RunFailed("The search has no hyperparameters.")
    point = found.hyperparameters
    kept = {
        "lr": point.lr,
        "steps": point.steps,
        "trials": list((work.folder.read("tune", _TRIALS) or {}).values()),
        "decisions": list(found.decisions),
    }
    state = {name: value.detach().cpu().contiguous() for name, value in found.model.state_dict().items()}
    checkpoints.write(work.folder.stage("tune") / _MODEL, save(state, {_RESULT: json.dumps(kept)}))
    work.ledger.finish()
    work.folder.write("tune", _RESULT, kept)
    _mark(work).unlink(missing_ok=True)
    return Search(model=found.model, **_fields(kept))


def _interrupted(work: Work) -> dict[str, Any] | None:
    """The result of a search whose model was written when it was killed; it is written down now."""
    file = work.folder.stage("tune") / _MODEL
    if not file.exists():
        return None
    with safe_open(file, framework="pt") as opened:
        kept: dict[str, Any] = json.loads(opened.metadata()[_RESULT])
    work.ledger.finish_interrupted(work.parts["tune"].subjects[0])
    work.folder.write("tune", _RESULT, kept)
    return kept


def _mark(work: Work) -> Path:
    """The private file (0600, beside the ledger) that has the fingerprint of the data while the search runs."""
    return checkpoints.private_folder(work.ledger, None) / f"tacit-search-{work.folder.run}.data"


def _check_data(work: Work) -> None:
    """Refuse to resume on other data: trials of before would be compared with trials on something else."""
    file, found = _mark(work), attempt(work.loaded["data"].records.fingerprint, sentence=_UNREADABLE, curator=None)
    if not file.exists():
        checkpoints.write(file, found.encode(), 0o600)
    elif file.read_text("utf-8") != found:
        raise Refusal(
            "The data is not what it was when this search began: put it back to resume, or start a new run in another "
            "folder, with a ledger of its own."
        )


@dataclass(frozen=True)
class _Written:
    """Runs trials one after the other in this process, and not those that are written down."""

    folder: Folder
    work: Work

    def __call__(self, jobs: Sequence[Any], ledger: Ledger) -> Iterator[tuple[int, tune.Trial, str]]:
        for number, job in enumerate(jobs):
            known = self.folder.read("tune", _TRIALS) or {}
            settings, point = known.get(job.note), asdict(job.hyperparameters)
            if settings is not None and settings["point"] == point:
                yield number, _trial(job, settings), ""
                continue
            trial, wrong = job.run(ledger)
            known[job.note] = {"point": point, "score": trial.score, "receipt": trial.receipt}
            self.folder.write("tune", _TRIALS, known)
            self.work.ledger.finish()
            yield number, trial, wrong


def _trial(job: Any, settings: dict[str, Any]) -> tune.Trial:
    return tune.Trial(
        hyperparameters=job.hyperparameters,
        mu=job.mu,
        score=settings["score"],
        receipt=settings["receipt"],
        score_noise=1 / (job.mu_score * job.size),
    )


def _optimizer(how: Finetune, point: tune.Hyperparameters) -> Any:
    return optimizer_of(how, steps=point.steps, lr=point.lr)


def _reloaded(work: Work, how: Finetune, outputs: int, done: dict[str, Any]) -> Search:
    model = work.model if how.head == "keep" else with_head(work.model, outputs, bias=how.bias)
    select(model, how.scheme)
    model.load_state_dict(load_file(work.folder.stage("tune") / _MODEL))
    return Search(model=model.eval(), **_fields(done))


def _fields(kept: dict[str, Any]) -> dict[str, Any]:
    return kept | {"decisions": tuple(kept["decisions"])}
