"""`tacit card`: what a ledger, a run, a checkpoint or a saved result promises."""

from __future__ import annotations

from typing import Annotated

import typer

from tacit.cli._output import AsJson, console, print_json


def card(
    what: Annotated[
        str,
        typer.Argument(
            help="A ledger (file or URL), the folder of a run or of a saved result, or a checkpoint.",
            show_default=False,
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """The privacy card: who is protected, from what, how strongly, and on what that rests."""
    from tacit.report import card as card_of
    from tacit.report import card_facts  # slow to load

    if as_json:
        print_json(card_facts(what))
        return
    text = card_of(what)
    screen = console()
    if screen.is_terminal:
        from rich.markdown import Markdown

        screen.print(Markdown(text))
    else:
        typer.echo(text, nl=False)
