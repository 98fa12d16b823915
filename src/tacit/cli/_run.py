"""`tacit run`: a pipeline on one's own private data. Recipes of the studies run from a checkout."""

from __future__ import annotations

import tomllib
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tacit import CuratorEvent, ErrorEvent, recipes
from tacit._files import write_atomically
from tacit._refusals import Refusal
from tacit.cli._output import AsJson, console, print_json

STUDIES = ("adapt", "finetune", "pretrain", "recalibration", "source-model", "tune")


def run(
    recipe: Annotated[Path, typer.Argument(help="A TOML file; `tacit init` writes one.", show_default=False)],
    plan: Annotated[bool, typer.Option("--plan", help="Say what each stage will charge, and stop.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="The folder of the results.", show_default="runs/NAME beside the recipe")
    ] = None,
    details: Annotated[
        Path | None,
        typer.Option(
            help="If the data cannot be read, why: a file for you alone, since it may name rows.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a pipeline, or resume it after a kill. Nothing is charged before everything was tried on synthetic rows."""
    _refuse_study(recipe)
    from tacit import pipeline  # here, because torch takes its time to load

    settings = pipeline.read(recipe)
    if plan:
        found = pipeline.plan(settings)
        if as_json:
            print_json(found.to_json())
        else:
            typer.echo(str(found))
        return
    folder = out or recipe.parent / "runs" / recipe.stem
    try:
        outcome = pipeline.run(settings, folder, progress=True, curator=partial(_keep, details))
        facts = pipeline.write_report(outcome)
    except Refusal as error:
        where = f"see {details}" if details is not None else "see it with --details FILE"
        raise Refusal(str(error).replace("see curator=", where)) from None
    except KeyboardInterrupt:
        typer.echo(f"Stopped: run the same command again to resume {folder}.", err=True)
        raise typer.Exit(130) from None
    if as_json:
        print_json(facts)
        return
    if outcome.shape:
        typer.echo(f"Images: {outcome.shape}.")
    screen = console()
    screen.print(pipeline.plan_table(outcome).rich())
    screen.print(facts["privacy"]["sentence"], markup=False)
    typer.echo(f"The results are in {folder}: model/, report.html, privacy-card.md, run.json.")


def _keep(file: Path | None, event: CuratorEvent) -> None:
    """Write what went wrong with private rows where only the owner reads it, if a file is given."""
    if file is not None and isinstance(event, ErrorEvent):
        write_atomically(file, event.details, 0o600)


def _refuse_study(recipe: Path) -> None:
    """Say where a recipe of the studies runs: it has a kind at its top."""
    try:
        top = tomllib.loads(recipe.read_text("utf-8"))
    except (OSError, ValueError):
        return  # which the reader of pipelines explains
    if "kind" in top:
        kind = recipes.kind_of(recipe, STUDIES)
        raise recipes.RecipeError(
            f"{recipe} describes a study (kind = {kind!r}): studies are no part of the package, run it from a checkout "
            f"of the repository with `python -m studies run {recipe}`."
        )
