"""A recipe from its first check to its page: what can be wrong is found before anything is charged."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tacit import audit, recipes
from tacit._curator import Curator, as_curator
from tacit._refusals import Refusal, attempt
from tacit.adapt import Adapter
from tacit.calibrate import Result
from tacit.finetune import Fitted
from tacit.models import select, with_head
from tacit.pipeline import _adapting, _data, _stages, _tuning
from tacit.pipeline._budget import split
from tacit.pipeline._folder import Folder, opened
from tacit.pipeline._ledger import RunLedger
from tacit.pipeline._models import Built, build
from tacit.pipeline._plan import PipelinePlan, plan
from tacit.pipeline._schema import Calibrate, Pipeline
from tacit.pipeline._schema_data import Embedded, Images, Outputs, Texts, count_of
from tacit.pipeline._stages import Work
from tacit.privacy import Guarantee, Ledger
from tacit.recipes import Progress

_UNREADABLE = "The data cannot be read. Nothing was charged. What went wrong may reveal rows: see curator=."


@dataclass(kw_only=True)
class PipelineResult:
    """What a run came to; everything here is public or was released."""

    recipe: Pipeline
    out: Path
    plan: PipelinePlan
    ledger: Ledger = field(repr=False)
    model: Any = field(repr=False, default=None)
    shape: str = ""  # how images are shown to the model
    fitted: Fitted | None = None
    tuned: Any = None
    adapter: Adapter | None = None
    batches: int = 0  # of the stream
    result: Result | None = None
    findings: list[audit.Finding | str] = field(default_factory=list)  # of the audit
    tokenizer: Any = field(repr=False, default=None)
    blank: Any = field(repr=False, default=None)  # synthetic rows that the model takes

    @property
    def total(self) -> Guarantee:
        """What was spent on somebody who is in all of the data."""
        return self.ledger.total(self.recipe.budget.delta)


def read(path: str | Path) -> Pipeline:
    """A recipe from a TOML file.

    Raises:
        RecipeError: The file cannot be read, or has an unknown key or value; the message names file and line.
    """
    recipe: Pipeline = recipes.read_as(path, Pipeline)
    object.__setattr__(recipe, "home", Path(path).resolve().parent)
    return recipe


def run(
    recipe: Pipeline,
    out: str | Path,
    *,
    progress: Progress | bool = False,
    curator: Curator | None = None,
    after: Callable[[str, torch.nn.Module], None] | None = None,
) -> PipelineResult:
    """Carry out a recipe; call it again after a kill, and it goes on.

    Args:
        recipe: What `read` returned.
        out: The folder of results and checkpoints.
        progress: True shows a bar.
        curator: Called with a `tacit.ErrorEvent` if private rows cannot be read.
        after: Called after each stage with its name and the model, which is released: to score it on public data.

    Returns:
        The model and what each stage came to, with the ledger that paid.

    Raises:
        ValueError, LedgerError: Something is wrong with the recipe, the data or the ledger; before the first charge,
            unless it is the machine's.

    Formal guarantee: the ledger's total over all data sets, at most the recipe's budget. Everything that can fail
    because of settings or data is tried before the first charge: the model is built, the data are read, and each stage
    runs on synthetic rows.
    """
    return carry_out(recipe, out, _load, progress=progress, curator=as_curator(curator, "pipeline.run"), after=after)


def carry_out(
    recipe: Pipeline,
    out: str | Path,
    load: Callable[[Pipeline, Built], dict[str, _data.Loaded]],
    *,
    progress: Progress | bool = False,
    curator: Curator | None = None,
    after: Callable[[str, torch.nn.Module], None] | None = None,
) -> PipelineResult:
    """`run` on the data that ``load`` gives, by the stage that asks for it; an audit brings data of its own."""
    made = plan(recipe)
    with opened(recipe, Path(out)) as folder:
        built = build(recipe) if recipe.model is not None else Built(model=torch.nn.Identity())
        parts = {part.stage: part for part in split(recipe)}
        loaded = attempt(load, recipe, built, sentence=_UNREADABLE, curator=curator)
        ledger = RunLedger(f"sqlite:///{recipe.path(recipe.budget.ledger)}", folder.run)
        _refuse_spent(ledger, folder, [name for part in parts.values() for name in part.subjects])
        work = Work(
            recipe=recipe,
            folder=folder,
            ledger=ledger,
            parts=parts,
            built=built,
            model=built.model,
            loaded=loaded,
            progress=progress,
        )
        rehearse(work)
        for part in parts.values():
            part.declare(ledger, recipe)
        outcome = PipelineResult(recipe=recipe, out=Path(out), plan=made, ledger=ledger, shape=str(built.shape or ""))
        outcome.tokenizer = built.tokenizer
        outcome.blank = next((rows.blank for rows in loaded.values() if rows.blank is not None), None)
        _stages_in_order(work, outcome, after)
        outcome.model = work.model
        return outcome


def _stages_in_order(work: Work, outcome: PipelineResult, after: Callable[[str, torch.nn.Module], None] | None) -> None:
    recipe = work.recipe
    tell = after or _nothing
    if recipe.pretrain is not None:
        work.model = _stages.run_pretrain(work, recipe.pretrain)
        tell("pretrain", work.model)
    if recipe.tune is not None and recipe.finetune is not None:
        outcome.tuned = _tuning.run_tune(work, recipe.tune, recipe.finetune)
        work.model = outcome.tuned.model
        tell("finetune", work.model)
    elif recipe.finetune is not None:
        outcome.fitted = _stages.run_finetune(work, recipe.finetune)
        work.model = outcome.fitted.model
        tell("finetune", work.model)
    if recipe.adapt is not None:
        outcome.adapter = _adapting.run_adapt(work, recipe.adapt)
        tell("adapt", work.model)
        outcome.batches = -(-len(work.loaded["adapt"]) // recipe.adapt.batch_size)
    if recipe.calibrate is not None:
        outcome.result = _stages.run_calibrate(work, recipe.calibrate)
    if recipe.audit is not None:
        outcome.findings = list(audit.ledger(work.ledger, trials=recipe.audit.trials))


def _nothing(stage: str, model: torch.nn.Module) -> None:
    """No-op: what is done after a stage by default."""
    del stage, model


def _load(recipe: Pipeline, built: Built) -> dict[str, _data.Loaded]:
    """All data of a recipe, by the stage that asks for it."""
    found: dict[str, _data.Loaded] = {}
    if recipe.pretrain is not None:
        found["pretrain"] = _data.load(recipe, recipe.pretrain.data, built, public=True)
    if recipe.finetune is not None and recipe.data is not None:
        shown = _data.Shown(rows_each=recipe.finetune.rows_each, augment=recipe.finetune.augment)
        found["data"] = _data.load(recipe, recipe.data, built, shown=shown)
        if recipe.finetune.evaluate is not None:
            found["evaluate"] = _data.load(recipe, recipe.finetune.evaluate, built, public=True)
    if recipe.adapt is not None:
        found["adapt"] = _data.load(recipe, recipe.adapt.data, built, labelled=False)
    if recipe.calibrate is not None and not isinstance(recipe.calibrate.data, Outputs):
        found["calibrate"] = _data.load(recipe, recipe.calibrate.data, built)
        _check_sources(recipe.calibrate, recipe.calibrate.data, found["calibrate"])
    elif recipe.calibrate is not None and isinstance(recipe.calibrate.data, Outputs):
        for source in recipe.calibrate.sources:
            _data.load_outputs(recipe, recipe.calibrate.data, source)
    return found


def _check_sources(settings: Calibrate, data: Images | Texts | Embedded, rows: _data.Loaded) -> None:
    """Every row is of a source that the recipe names, and no unit is in two of them: they count as disjoint."""
    if rows.sources is None:
        if isinstance(data, Embedded) or len(settings.sources) > 1:
            raise Refusal("[calibrate] has several sources: name the column that says whose each row is, data.source.")
        object.__setattr__(rows, "sources", [settings.sources[0]] * len(rows))
        return
    if set(rows.sources) != set(settings.sources):
        raise Refusal("The rows of [calibrate] are of other sources than calibrate.sources names: list them all.")
    if rows.owners is not None and len(set(zip(rows.owners, rows.sources, strict=True))) > len(set(rows.owners)):
        raise Refusal(
            "Some unit is in several sources of [calibrate], which count as disjoint: give it to one of them."
        )


def _refuse_spent(ledger: Ledger, folder: Folder, subjects: list[str]) -> None:
    """Refuse a ledger in which another run has charged these subjects: the budget is one."""
    known = {subject.name for subject in ledger.subjects()}
    for name in subjects:
        if name not in known:
            continue
        others = [e for e in ledger.entries(name) if e.kind == "charge" and f"[run {folder.run}]" not in e.body["note"]]
        if others:
            raise Refusal(
                f"Another run has charged the subject {name!r} of {ledger.url.removeprefix('sqlite:///')} already: one "
                "budget pays for one run. Resume that run (in its folder), or give other data a ledger of their own."
            )


def rehearse(work: Work) -> None:
    """The stages after the first on synthetic rows, with a copy of the model and ledgers in memory."""
    recipe = work.recipe
    if recipe.adapt is None and (recipe.calibrate is None or isinstance(recipe.calibrate.data, Outputs)):
        return
    model = deepcopy(work.model)
    if recipe.finetune is not None and recipe.data is not None:
        if recipe.finetune.head == "new":
            model = with_head(model, count_of(recipe.data.classes), bias=recipe.finetune.bias)
        select(model, recipe.finetune.scheme)
        model.eval()
    if recipe.adapt is not None:
        _adapting.rehearse(deepcopy(model), recipe, recipe.adapt, work.parts["adapt"], work.loaded["adapt"].blank)
    if recipe.calibrate is not None and not isinstance(recipe.calibrate.data, Outputs):
        rows = work.loaded["calibrate"]
        one = _data.OneTensor(model, rows)
        blank = torch.stack(list(rows.blank.values()), 1) if isinstance(rows.blank, dict) else rows.blank
        outputs, wanted = one(blank).shape[1], count_of(recipe.calibrate.data.classes)
        if outputs != wanted:
            raise Refusal(f"The model has {outputs} outputs, and [calibrate] says that there are {wanted} classes.")
