"""The adaptation stage: one stream, one charge; after a kill it goes on behind the last lease."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import nn

from tacit import _checkpoints as checkpoints
from tacit import adapt
from tacit.pipeline._budget import Part
from tacit.pipeline._plan import form_of
from tacit.pipeline._schema import Adapt, Pipeline
from tacit.pipeline._stages import Work
from tacit.privacy import Ledger, ReceiptError, leases
from tacit.progress import shown

_CHECKPOINT, _MODEL, _DONE = "checkpoint.safetensors", "model.safetensors", "done.json"
MAKERS: dict[str, Any] = {
    "tent": adapt.Tent,
    "eata": adapt.EATA,
    "sar": adapt.SAR,
    "deyo": adapt.DeYO,
    "come": adapt.COME,
}


def run_adapt(work: Work, settings: Adapt) -> adapt.Adapter:
    """Show the stream to an adapter, batch after batch; `done.json` says that its end was reached.

    Formal guarantee: that of `adapt.Adapter`. The whole stream is charged before its first step, and a checkpoint is
    written before the first lease. After a kill what was leased counts as used: those batches contribute nothing more,
    and the stream goes on behind them in a new noise block.
    """
    file, rows = work.folder.stage("adapt") / _CHECKPOINT, work.loaded["adapt"]
    adapter = make(work.model, work.recipe, settings, work.parts["adapt"], work.ledger)
    if work.folder.read("adapt", _DONE) is not None:
        return _finished(work, adapter, file)
    if not _resumed(adapter, file):
        adapter.start(rows.blank)
        adapt.save_adapter(adapter, file)
    total = -(-len(rows) // settings.batch_size)
    with shown(work.progress) as report:
        for step, (inputs, owners) in enumerate(rows.batches(settings.batch_size)):
            if step < adapter.steps:
                continue  # of before the kill
            adapter(inputs, unit_ids=owners)
            if (step + 1) % settings.every == 0 or step + 1 == total:
                adapt.save_adapter(adapter, file)
            if report is not None:
                spent = work.parts["adapt"].spend.epsilon
                report(f"adapting, {settings.method}", step + 1, total, spent=(spent, spent))
    state = {name: value.detach().cpu().contiguous() for name, value in adapter.parameters.items()}
    checkpoints.write(work.folder.stage("adapt") / _MODEL, save(state))
    work.folder.write("adapt", _DONE, {"batches": total, "unit_ids": rows.owners is not None})
    adapt.close_adapter(adapter)
    return adapter


def _finished(work: Work, adapter: adapt.Adapter, file: Path) -> adapt.Adapter:
    """The adapter as it was when the stream ended."""
    if not leases.settled(work.ledger, _facts(file)["receipt"]):  # a kill came before that
        adapt.resume_adapter(adapter, file)
        adapt.close_adapter(adapter)
    with torch.no_grad():
        for name, value in load_file(work.folder.stage("adapt") / _MODEL).items():
            adapter.parameters[name].copy_(value)
    adapter.has_unit_ids = bool(work.folder.read("adapt", _DONE)["unit_ids"])
    return adapter


def make(model: nn.Module, recipe: Pipeline, settings: Adapt, part: Part, ledger: Ledger) -> adapt.Adapter:
    """The adapter of a recipe."""
    adapter: adapt.Adapter = MAKERS[settings.method](
        model,
        privacy=form_of(recipe, settings, part),
        batch_size=settings.batch_size,
        lr=settings.lr,
        momentum=settings.momentum,
        scheme=settings.scheme,
        ledger=ledger,
        subject=part.subjects[0],
        unit=recipe.budget.unit,
        lease=settings.every,
    )
    return adapter


def _resumed(adapter: adapt.Adapter, file: Path) -> bool:
    """Whether the adapter goes on from a checkpoint; one from before the first lease is no loss."""
    if not file.exists():
        return False
    try:
        adapt.resume_adapter(adapter, file)
    except ReceiptError:
        if _facts(file)["steps"]:
            raise
        return False
    return True


def _facts(file: Path) -> dict[str, Any]:
    """What a checkpoint says: which receipt paid, and how many batches it has behind it."""
    return checkpoints.unpack("adapter", 1, file)[1]


def rehearse(model: nn.Module, recipe: Pipeline, settings: Adapt, part: Part, blank: Any) -> None:
    """One batch of synthetic rows through the same adapter on a ledger in memory: what cannot work shows here."""
    ledger = Ledger("sqlite://")
    part.declare(ledger, recipe)
    adapter = make(model, recipe, settings, part, ledger)
    size = settings.batch_size

    def repeated(each: torch.Tensor) -> torch.Tensor:
        return each[torch.arange(size) % len(each)]

    rows = {name: repeated(each) for name, each in blank.items()} if isinstance(blank, Mapping) else repeated(blank)
    adapter(rows, unit_ids=list(range(size)) if recipe.budget.unit != "sample" else None)
