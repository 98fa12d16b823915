"""`tacit calibrate`: outputs on disk, partitioned among sources, recalibrated privately, and evaluated."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from tacit.cli._calibrate_service import serve
from tacit.cli._output import AsJson, console, print_json

if TYPE_CHECKING:
    from tacit.calibrate import Calibrator, Method, Partition, Result

METHOD = "signed-gap"
app = typer.Typer(invoke_without_command=True)
app.command("serve")(serve)


@app.callback()
def calibrate(
    context: typer.Context,
    epsilon: Annotated[float | None, typer.Option(help="What each source may spend in all.")] = None,
    sources: Annotated[int | None, typer.Option(help="How many sources there are.")] = None,
    samples: Annotated[
        int | None, typer.Option(help="How many samples each of them gets; no sample goes to two.")
    ] = None,
    source_column: Annotated[
        str | None, typer.Option(help="Or the array or column that says at which source each row is.")
    ] = None,
    logits: Annotated[Path | None, typer.Option(help="Logits: .npz, .npy, .safetensors or .csv.")] = None,
    probs: Annotated[Path | None, typer.Option(help="Or probabilities: each row sums to 1.")] = None,
    labels: Annotated[Path | None, typer.Option(help="Labels, if they are in a file of their own.")] = None,
    key: Annotated[str | None, typer.Option(help="The name of the outputs in their file.")] = None,
    labels_key: Annotated[str | None, typer.Option(help="The name of the labels in their file.")] = None,
    delta: Annotated[float, typer.Option(help="With epsilon; 0 is pure epsilon.")] = 0.0,
    noise: Annotated[str | None, typer.Option(help="laplace (delta 0) or gaussian (delta above 0).")] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="signed-gap, gap-curve, platt, acc-t, nll-t, ece-t, histogram, one-source, nothing.",
            show_default=METHOD,
        ),
    ] = None,
    iterations: Annotated[int | None, typer.Option(help="K of a golden-section search: it asks K + 1 times.")] = None,
    bins: Annotated[int | None, typer.Option(help="Bins of gap-curve, ece-t and histogram.")] = None,
    low: Annotated[float | None, typer.Option(help="The lowest temperature searched.")] = None,
    high: Annotated[float | None, typer.Option(help="The highest temperature searched.")] = None,
    neighbours: Annotated[str, typer.Option(help="add-remove or replace-one.")] = "add-remove",
    unit: Annotated[
        str | None, typer.Option(help="Whom it protects: patient, user, with --unit-ids.", show_default="sample")
    ] = None,
    unit_ids: Annotated[
        str | None, typer.Option(help="The array or column of the outputs' file that says whose each row is.")
    ] = None,
    trust: Annotated[
        str, typer.Option(help="local, or secure-aggregation: one noise for all sources, and totals alone are seen.")
    ] = "local",
    colluding: Annotated[
        float | None,
        typer.Option(help="With secure aggregation: the share of sources that may collude.", show_default="0.5"),
    ] = None,
    cautious: Annotated[
        bool | None,
        typer.Option(help="Keep T = 1 where the budget is too small; by default unless a method is named."),
    ] = None,
    ledgers: Annotated[Path | None, typer.Option(help="A folder for the sources' ledgers; in memory without.")] = None,
    run_id: Annotated[str | None, typer.Option(help="A name under which an interrupted run goes on.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="A folder for the calibrated probabilities, the calibration and its card.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the split, never of the noise.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Recalibrate a classifier whose outputs are on disk, as if its samples were those of many private sources.

    The samples that no source gets are declared public: the calibration error is measured on them, exactly.
    """
    if context.invoked_subcommand is not None:
        return
    from tacit.calibrate import TRUSTS, CalibrationError, Calibrator, partition, read_outputs, read_unit_ids
    from tacit.privacy import Budget

    if epsilon is None:
        raise ValueError("Give --epsilon: what each source may spend in all.")
    budget = Budget(epsilon, delta)
    kind = _noise(noise, budget.pure)
    chosen = _method(method or METHOD, {"iterations": iterations, "bins": bins, "low": low, "high": high})
    if source_column is None and (sources is None or samples is None):
        raise ValueError("Give --sources and --samples, or --source-column if the rows say at which source they are.")
    if source_column is not None and sources is not None:
        raise ValueError("The sources are those of --source-column: leave --sources out.")
    if trust not in TRUSTS or (trust == "local" and colluding is not None):
        raise ValueError("--trust is local or secure-aggregation, and --colluding is for secure aggregation.")
    if run_id is not None and ledgers is None:
        raise ValueError("--run-id resumes from answers that are kept in ledgers, and there are none: give --ledgers.")
    path = logits or probs
    if path is None or (logits is not None and probs is not None):
        raise ValueError("Give the classifier's outputs as --logits FILE or as --probs FILE: one of the two.")
    form: Any = "probs" if logits is None else "logits"
    named = {"unit_ids": unit_ids, "source": source_column}
    outputs, classes = read_outputs(path, form, key=key, labels=labels, labels_key=labels_key, **named)
    whose, where = (None if name is None else read_unit_ids(path, name) for name in named.values())
    calibrator = Calibrator(
        budget=budget,
        method=chosen,
        noise=kind,
        cautious=method is None if cautious is None else cautious,
        trust=trust,
    )
    try:
        split = partition(
            **{form: outputs},
            labels=classes,
            sources=sources,
            samples=samples,
            source_ids=where,
            budget=budget,
            noise=kind,
            neighbours=neighbours,
            unit=unit,
            unit_ids=whose,
            ledgers=ledgers,
            seed=seed,
            trust=trust,
            colluding=0.5 if colluding is None else colluding,
        )
        split.check_accuracy()
        result = calibrator.run(split.sources, run_id=run_id)
    except (CalibrationError, ValueError) as error:
        raise ValueError(_as_options(str(error))) from None
    if out is not None:
        _write(out, result, {form: outputs})
    facts = _facts(calibrator, split, result, samples)
    if as_json:
        print_json(facts)
    else:
        _show(facts, result)


def _write(folder: Path, result: Result, outputs: dict[str, Any]) -> None:
    """Calibrated probabilities of every row, the calibration, and the card of what its sources promised."""
    import json

    import numpy as np
    import torch

    from tacit._files import replacing, write_atomically
    from tacit.calibrate import calibrated_probs
    from tacit.report import card

    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "calibrated.npz", mode=0o600) as file:  # of the sources' rows, too: for the owner alone
        np.savez(file, probs=calibrated_probs(result, **{k: torch.as_tensor(v) for k, v in outputs.items()}).numpy())
    write_atomically(folder / "calibration.json", json.dumps(result.to_json(), indent=2) + "\n")
    write_atomically(folder / "privacy-card.md", str(card(result)))


def _as_options(text: str) -> str:
    """An error's words with the names that the command line has."""
    names = {"probs=": "--probs", "logits=": "--logits", "unit=": "--unit ", "give unit_ids": "give --unit-ids"}
    for argument, option in names.items():
        text = text.replace(argument, option)
    return text


def _noise(noise: str | None, pure: bool) -> Any:
    if noise not in (None, "laplace", "gaussian"):
        raise ValueError(f"The noise is laplace or gaussian; got {noise!r}.")
    if noise == "laplace" and not pure:
        raise ValueError("Laplace noise gives pure epsilon: leave --delta out, or take gaussian noise.")
    if noise == "gaussian" and pure:
        raise ValueError("Gaussian noise needs a --delta above 0; pure epsilon takes laplace noise.")
    return noise or ("laplace" if pure else "gaussian")


def _method(name: str, options: dict[str, Any]) -> Method:
    from tacit.calibrate import METHODS
    from tacit.recipes import nearest

    if name not in METHODS:
        raise ValueError(f"There is no method {name!r}{nearest(name, METHODS, 'methods')}")
    given = {option: value for option, value in options.items() if value is not None}
    known = {field.name for field in fields(METHODS[name])}
    for option in given:
        if option not in known:
            raise ValueError(f"The method {name} has no option --{option}.")
    return METHODS[name](**given)


def _facts(calibrator: Calibrator, split: Partition, result: Result, samples: int | None) -> dict[str, Any]:
    """Everything here was released on receipts or is about samples declared public."""
    before, after = split.evaluate(result) or (None, None)
    spent = split.sources[0].spent
    return result.to_json() | {
        "ece_before": before,
        "ece_after": after,
        "samples": samples,
        "sizes_published": split.sources[0].size is not None,
        "evaluated_on": len(split.labels),
        "evaluated": "on the samples given to no source, declared public for this evaluation",
        "durable": split.sources[0].ledger.durable,
        "guarantee": str(spent) if result.queries else _nothing_spent(result),
        "assumptions": list(result.assumptions),
        "notes": [*result.notes, *_warning(calibrator, split, result)],
    }


def _nothing_spent(result: Result) -> str:
    return "Nothing was released." if result.private else "Found without noise: not private if shared."


def _warning(calibrator: Calibrator, split: Partition, result: Result) -> list[str]:
    """What a cautious run would have said before it spent anything."""
    if calibrator.cautious or not result.queries or not calibrator.budget.private:
        return []
    from tacit.calibrate import forecast

    plan = calibrator.plan([source.terms for source in split.sources], resume=True)
    if plan.setting.samples is None:
        return []
    expect = forecast(calibrator.method, plan.setting, expected=calibrator.expected)
    if expect.worth:
        return []
    return [
        "This budget is small for this much data: by the forecast, a calibration error of "
        f"{expect.before:.3f} would become {expect.after:.3f}, {expect.assumes}. With --cautious nothing would have "
        "been asked."
    ]


def _sizes(facts: dict[str, Any]) -> str:
    if facts["samples"] is None:
        return ""
    return f" with {'' if facts['sizes_published'] else 'at most '}{facts['samples']} samples each"


def _show(facts: dict[str, Any], result: Result) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    what = f"[bold]{result.temperature:.3f}[/bold]"
    if result.interval is not None:
        what += f" (between {result.interval[0]:.3f} and {result.interval[1]:.3f})"
    if result.confidences is None:
        table.add_row("temperature", what)
    else:
        table.add_row("confidences", " ".join(f"{value:.2f}" for value in result.confidences))
    if result.corrections is not None:
        bins = len(result.corrections)
        added = (f"{value:+.3f} at {(at + 0.5) / bins:.2g}" for at, value in enumerate(result.corrections))
        table.add_row("added to confidence", ", ".join(added))
    if result.platt is not None:
        table.add_row("logit of confidence", f"times {result.platt[1]:.3f}, plus {result.platt[0]:.3f}")
    if facts["ece_before"] is None:
        table.add_row("calibration error", "not measured: every sample is at a source, and none is public")
    else:
        errors = f"{facts['ece_before']:.4f} before, [bold]{facts['ece_after']:.4f}[/bold] after"
        table.add_row("calibration error", errors)
        table.add_row(
            "", f"on {facts['evaluated_on']:,} samples given to no source, declared public for this evaluation"
        )
    table.add_row("asked", f"{result.queries} times, of {result.sources} sources{_sizes(facts)}")
    table.add_row("each source promises", facts["guarantee"])
    if result.trust != "local" and result.queries:
        for assumed in result.assumptions[2:]:
            table.add_row("", f"Assumed: {assumed}.")
    if not facts["durable"] and result.queries:
        table.add_row("", "The ledgers were in memory: the next run does not know of this one (--ledgers FOLDER).")
    for note in facts["notes"]:
        table.add_row("note", note)
    console().print(table)
