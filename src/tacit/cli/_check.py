"""`tacit check MODEL`: is this model compatible, what would be trained, which rule serves it?"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from tacit.cli._output import AsJson, console, print_json


def check(
    model: Annotated[
        str, typer.Argument(help="timm:NAME, transformers:TYPE_OR_FOLDER, small:NAME or module:function.")
    ],
    scheme: Annotated[
        str,
        typer.Option(help="full, linear, norms, selective, bias, adapter, lora, last_block or first_last_block."),
    ] = "full",
    frozen: Annotated[bool, typer.Option("--frozen", help="With the statistics of BatchNorm frozen.")] = False,
    shape: Annotated[str | None, typer.Option("--input", help="The shape of one row, such as 3x224x224.")] = None,
    as_json: AsJson = False,
) -> None:
    """Is this model compatible, what would be trained, and which rule serves each layer."""
    from tacit import models

    loaded = models.load(model, shape=shape_of(shape))
    if frozen:
        models.freeze_statistics(loaded.model)
    try:
        found = models.check(loaded, scheme)
    except ValueError as error:
        live = "is live" in str(error) and not frozen
        raise ValueError(f"{model} is refused. {error}" + (" To check it so, give --frozen." if live else "")) from None
    if as_json:
        print_json(
            {
                "model": model,
                "compatible": True,
                "scheme": scheme,
                "parameters": found.parameters,
                "trainable": found.trainable,
                "rules": found.rules,
                "remarks": list(found.remarks),
            }
        )
        return
    out = console()
    out.print(f"[bold]{model}[/bold] is compatible.")
    out.print(f"Scheme {scheme}: {found.trainable:,} of {found.parameters:,} parameters would be trained.")
    table = Table("rule", "tensors", "parameters")
    for rule, (tensors, numbers) in found.by_rule().items():
        table.add_row(rule, f"{tensors:,}", f"{numbers:,}")
    out.print(table)
    for remark in found.remarks:
        out.print(f"Slower: {remark}")


def shape_of(text: str | None) -> tuple[int, ...] | None:
    """The shape that a text such as 3x224x224 says."""
    if text is None:
        return None
    parts = text.lower().split("x")
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"{text!r} is no shape: write it as 3x224x224.")
    return tuple(int(part) for part in parts)
