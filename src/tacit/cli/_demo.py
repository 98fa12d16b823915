"""`tacit demo`: the quickest look, on images and a model that are in the package."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tacit.cli._output import AsJson, print_json

if TYPE_CHECKING:
    from tacit.recipes import Progress
    from tacit.report import Findings


def demo(
    out: Annotated[Path, typer.Option(help="Where the report goes.")] = Path("runs/demo"),
    as_json: AsJson = False,
) -> None:
    """Watch a model adapt to fifteen shifts: not at all, as published, clipped, and privately. Needs no download."""
    from tacit import recipes
    from tacit.cli import _demo_report as demo_report
    from tacit.cli import _demo_runs as demo_runs
    from tacit.report import carry_out, show

    settings, ledgers = demo_runs.Demo(), out / "ledgers"
    shutil.rmtree(ledgers, ignore_errors=True)  # of an earlier demo: each starts from nothing, with fresh noise

    about = {"kind": "demo", "recipe": recipes.plain(settings), "fingerprint": recipes.fingerprint(settings)}

    def work(progress: Progress) -> Findings:
        return demo_report.render(settings, demo_runs.outcomes(settings, ledgers, progress), ledgers)

    try:
        findings, facts = carry_out(out, work, about)
    except KeyboardInterrupt:
        typer.echo(f"Stopped: no report was written to {out}. What was charged to a ledger stays spent.", err=True)
        raise typer.Exit(130) from None
    if as_json:
        print_json(facts)
    else:
        show(findings, facts, out)
