"""`tacit run`: what a recipe describes. Those of the studies run from a checkout, with `python -m studies`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tacit import recipes

STUDIES = ("adapt", "finetune", "pretrain", "recalibration", "source-model", "tune")


def run(
    recipe: Annotated[Path, typer.Argument(help="A TOML file with a kind and its settings.", show_default=False)],
) -> None:
    """Say how a recipe is run: those of the studies run from a checkout, with `python -m studies run`."""
    kind = recipes.kind_of(recipe, STUDIES)
    raise recipes.RecipeError(
        f"{recipe} describes a study (kind = {kind!r}): studies are no part of the package, run it from a checkout of "
        f"the repository with `python -m studies run {recipe}`."
    )
