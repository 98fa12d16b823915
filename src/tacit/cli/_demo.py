"""`tacit demo`: a whole pipeline on images and a model that are in the package."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tacit.cli._output import AsJson, console, print_json


def demo(
    out: Annotated[Path, typer.Option(help="Where the results go; those of an earlier demo are replaced.")] = Path(
        "runs/demo"
    ),
    as_json: AsJson = False,
) -> None:
    """Fine-tune a public model on private images, adapt it to a shift and recalibrate it, under one budget.

    Ends with one page. Needs no download.
    """
    from tacit import pipeline  # here, because torch and matplotlib take their time to load
    from tacit.report import Table

    try:
        facts = pipeline.demo(out)
    except KeyboardInterrupt:
        typer.echo(f"Stopped: no report was written to {out}. The next demo starts from nothing.", err=True)
        raise typer.Exit(130) from None
    if as_json:
        print_json(facts)
        return
    found, screen = facts["facts"], console()
    accuracy = found["accuracy"]
    cameras = list(next(iter(accuracy.values())))
    rows = [[stage, *(f"{values[camera]:.1f}" for camera in cameras)] for stage, values in accuracy.items()]
    heads = ["", *(camera.replace("_", " ") for camera in cameras)]
    screen.print(Table("Accuracy in percent, on images declared public", heads, rows).rich())
    errors = found["calibration_error"]
    screen.print(f"Calibration error: {100 * errors['before']:.1f}% before, {100 * errors['after']:.1f}% after.\n")
    stages = [[line["stage"], line["what"], f"{line['epsilon']:.3g}"] for line in found["plan"]["stages"]]
    screen.print(Table("What each stage may spend by itself", ["stage", "on", "ε"], stages).rich())
    screen.print(facts["privacy"]["sentence"], markup=False)
    typer.echo(f"The page is {out / 'report.html'}; it says what each picture shows.")
