"""`tacit card`: what a run promised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from tacit.cli._output import AsJson, console, print_json


def card(
    run_dir: Annotated[Path, typer.Argument(help="The folder that a run wrote.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """The privacy card of a run: what it promises, to whom, and on what that rests."""
    from tacit.report import FACTS, read

    if as_json:
        text = read(run_dir, FACTS)
        try:
            facts = json.loads(text)
        except json.JSONDecodeError:
            raise ValueError(f"{run_dir / FACTS} is damaged: it is not JSON.") from None
        print_json(facts)
        return
    text = read(run_dir)
    screen = console()
    if screen.is_terminal:
        from rich.markdown import Markdown

        screen.print(Markdown(text))
    else:
        typer.echo(text, nl=False)
