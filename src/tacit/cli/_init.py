"""`tacit init`: a commented starter recipe for one's own data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tacit.cli._output import AsJson, print_json


def init(
    kind: Annotated[str, typer.Argument(help="What the data are: images, video, text or outputs.")],
    path: Annotated[Path, typer.Argument(help="Where the recipe goes; a file that is there is left alone.")] = Path(
        "pipeline.toml"
    ),
    as_json: AsJson = False,
) -> None:
    """Write a starter recipe: edit its paths and columns, then `tacit run` it."""
    from tacit import pipeline

    written = pipeline.write_starter(kind, path)
    if as_json:
        print_json({"recipe": str(written), "kind": kind})
    else:
        typer.echo(f"{written} is there: edit it, then `tacit run {written} --plan` and `tacit run {written}`.")
