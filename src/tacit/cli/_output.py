"""What every command prints with: tables for people, one JSON value for machines."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console

from tacit._json import to_plain

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def console() -> Console:
    return Console(highlight=False)


def print_json(value: Any) -> None:
    """One JSON value; an infinite number is the string "inf", for JSON has none."""
    typer.echo(json.dumps(to_plain(value), indent=2))
