"""`tacit demo`: a deployed model meets shifted images and adapts, privately and not, on real data, in minutes."""

from __future__ import annotations

import shutil
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated

import typer

from tacit.cli.output import AsJson
from tacit.cli.run import run


def demo(
    out: Annotated[Path, typer.Option(help="Where the report goes.")] = Path("runs/demo"),
    as_json: AsJson = False,
) -> None:
    """Watch a model adapt to fifteen shifts: not at all, as published, clipped, and privately. Needs no download."""
    for kept in ("cells", "ledgers"):  # of an earlier demo: each starts from nothing, with fresh noise
        shutil.rmtree(out / kept, ignore_errors=True)
    with as_file(files("tacit.cli").joinpath("demo.toml")) as recipe:
        run(recipe, out, as_json)
