"""What every command prints with: tables for people, one JSON value for machines."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any

import typer
from rich.console import Console

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def console() -> Console:
    return Console(highlight=False)


def print_json(value: Any) -> None:
    """One JSON value; an infinite number is the string "inf", for JSON has none."""
    typer.echo(json.dumps(_plain(value), indent=2))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
