"""What a run leaves in its folder: the model as plain weights, the page, the privacy card and the facts as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from matplotlib.figure import Figure

from tacit import recipes
from tacit.finetune import LossChange
from tacit.models import adapters_of, save_weights
from tacit.pipeline._run import PipelineResult
from tacit.report import Cell, Column, Section, Table, plots, write_run

MODEL = "model"


def write(
    outcome: PipelineResult, *, before: Sequence[Section] = (), more: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Write everything; returns what `run.json` says.

    Args:
        outcome: What `run` returned.
        before: Sections of one's own, above the others.
        more: Facts of one's own. Both are shown as they are: give nothing of private rows.
    """
    recipe, out = outcome.recipe, outcome.out
    title = recipe.title or "A private pipeline"
    if recipe.model is not None:
        _save(outcome, title)
    return write_run(
        out,
        title=title,
        lead="Each stage was charged to one ledger before it looked at private data; the total is for somebody who is "
        "in all of the data.",
        sections=[*before, *sections(outcome)],
        ledgers=[outcome.ledger],
        facts=facts(outcome) | dict(more or {}),
        assumptions=assumptions(outcome),
        not_covered=not_covered(outcome),
        about={"kind": "pipeline", "recipe": recipes.plain(recipe), "fingerprint": recipes.fingerprint(recipe)},
    )


def _save(outcome: PipelineResult, title: str) -> None:
    """The model as the last stage left it, by that stage's own function; the temperature is folded into its head."""
    folder = outcome.out / MODEL
    form: Literal["plain", "state_dict"] = "state_dict" if adapters_of(outcome.model) else "plain"
    fitted, adapter, result = outcome.fitted, outcome.adapter, outcome.result
    if result is not None:
        calibrated = result.wrap(outcome.model)
        try:
            calibrated.save(folder, merge=result.only_temperature, inputs=outcome.blank, title=title)
        except ValueError:  # of a model whose logits are not its head's output: the temperature goes beside it
            calibrated.save(folder, merge=False, title=title)
        if outcome.tokenizer is not None:
            outcome.tokenizer.save_pretrained(folder)
    elif adapter is not None:
        adapter.save_model(folder, format=form, title=title)
    elif fitted is not None:
        fitted.save(folder, format=form, tokenizer=outcome.tokenizer, title=title)
    else:
        save_weights(outcome.model, folder, format=form, tokenizer=outcome.tokenizer)


def plan_table(outcome: PipelineResult) -> Table:
    """What each stage was allowed to spend."""
    rows: list[list[Cell]] = [
        [line.stage, line.data, line.what, line.epsilon, line.share] for line in outcome.plan.lines
    ]
    columns = ("stage", "data", "what is released", Column("ε alone", ".4g"), Column("share", ".1%"))
    note = f"Composed: ε = {outcome.plan.total.epsilon:.4g} at δ = {outcome.plan.total.delta:g}."
    return Table("The plan", columns, rows, note=note)


def sections(outcome: PipelineResult) -> list[Section]:
    """One section per stage."""
    found = [Section("The budget", tables=[plan_table(outcome)])]
    fitted, tuned, adapter, result = outcome.fitted, outcome.tuned, outcome.adapter, outcome.result
    if outcome.recipe.pretrain is not None:
        found.append(Section("Pretraining", "On data declared public: nothing was charged."))
    if tuned is not None:
        rows: list[list[Cell]] = [[t["point"]["lr"], t["point"]["steps"], t["score"]] for t in tuned.trials]
        table = Table("Trials", (Column("lr", ".4g"), "steps", Column("released score", ".3f")), rows)
        text = f"The final run took lr {tuned.lr:.4g} and {tuned.steps} steps. " + " ".join(tuned.decisions)
        found.append(Section("Search and fine-tuning", text, tables=[table]))
    if fitted is not None:
        text = f"{fitted.trained:,} parameters were trained ({fitted.scheme}) in {fitted.steps} steps, with noise "
        text += f"{fitted.noise_multiplier:.4g} times the clip."
        scores = fitted.scores
        tables = []
        if scores:
            cells: list[list[Cell]] = [[name, value] for name, value in scores.items()]
            tables = [Table("On data declared public, in percent", ("measure", Column("score", ".1f")), cells)]
        curves = [_loss_curve(fitted.loss_curve)] if len(fitted.loss_curve) > 1 else []
        if curves:
            last = fitted.loss_curve[-1]
            text += (
                f" The training loss has changed by {last.change:+.3g} ± {last.noise:.2g}, as the released gradients "
            )
            text += "tell: an estimate that costs nothing."
        found.append(Section("Fine-tuning", text, tables=tables, figures=curves))
    if adapter is not None:
        numbers = sum(p.numel() for p in adapter.parameters.values())
        text = f"{adapter.method.name} adapted {numbers:,} numbers along a stream; all of it is one charge."
        found.append(Section("Adaptation", text))
    if result is not None:
        found.append(Section("Recalibration", str(result)))
    if outcome.findings:
        found.append(_audited(outcome))
    return found


def _loss_curve(changes: Sequence[LossChange]) -> Figure:
    """The estimated training loss, with twice its deviation as a band."""
    steps, values = [at.step for at in changes], [at.change for at in changes]
    band = [(at.change - 2 * at.noise, at.change + 2 * at.noise) for at in changes]
    line = plots.Curve(steps, values, low=[low for low, _ in band], high=[high for _, high in band])
    return plots.curve({"estimate": line}, x_label="steps", y_label="training loss, less that at the start")


def _audited(outcome: PipelineResult) -> Section:
    """What attacks found beside what was claimed."""
    findings = [each for each in outcome.findings if not isinstance(each, str)]
    rows: list[list[Cell]] = [[each.name, each.measure, each.claimed, each.measured, each.trials] for each in findings]
    columns = ("release", "measure", Column("claimed", ".4g"), Column("found, at least", ".4g"), Column("trials", ",d"))
    text = "Every kind of release was attacked on synthetic neighbouring inputs: what an attacker finds is a lower "
    text += "bound, and lies below the claim.\n\n" + "\n".join(
        f"- {each}" for each in outcome.findings if isinstance(each, str)
    )
    return Section("Audit", text, tables=[Table("Found and claimed", columns, rows)])


def facts(outcome: PipelineResult) -> dict[str, Any]:
    """Released values and settings, for `run.json`."""
    found: dict[str, Any] = {"plan": outcome.plan.to_json()}
    if outcome.shape:
        found["images"] = outcome.shape
    if outcome.fitted is not None:
        fitted = outcome.fitted
        found["finetune"] = {
            "scheme": fitted.scheme,
            "trained": fitted.trained,
            "steps": fitted.steps,
            "noise_multiplier": fitted.noise_multiplier,
            "scores": fitted.scores,
            "loss_curve": [[at.step, at.change, at.noise, at.most, at.most_noise] for at in fitted.loss_curve],
            "receipt": fitted.receipt,
        }
    if outcome.tuned is not None:
        tuned = outcome.tuned
        found["tune"] = {"lr": tuned.lr, "steps": tuned.steps, "trials": tuned.trials, "decisions": tuned.decisions}
    if outcome.adapter is not None:
        found["adapt"] = {"method": outcome.adapter.method.name, "batches": outcome.batches}
    if outcome.result is not None:
        found["calibrate"] = outcome.result.to_json()
    if outcome.findings:
        found["audit"] = [each if isinstance(each, str) else each.to_json() for each in outcome.findings]
    return found


def assumptions(outcome: PipelineResult) -> list[str]:
    """What the guarantee rests on."""
    budget = outcome.recipe.budget
    found = [f"one {budget.unit} per person: somebody with several has a guarantee for a group of that size"]
    if outcome.fitted is not None:
        found += outcome.fitted.assumptions
    if outcome.adapter is not None:
        found += outcome.adapter.assumptions
    if outcome.recipe.calibrate is not None:
        found.append(f"no {budget.unit} is in two sources of the recalibration: they count as disjoint")
    return list(dict.fromkeys(found))


def not_covered(outcome: PipelineResult) -> list[str]:
    """What the guarantee says nothing about."""
    found = []
    if outcome.recipe.pretrain is not None:
        found.append("the data of the pretraining, which is declared public")
    if outcome.recipe.finetune is not None and outcome.recipe.finetune.evaluate is not None:
        found.append("the evaluation data, which is declared public")
    if outcome.adapter is not None:
        found.append("the prediction for a person's own row of the stream, which depends on that row")
    return found
