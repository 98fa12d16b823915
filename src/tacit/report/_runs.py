"""A run from its start to its files: the folder is tried first, progress is shown, a report is written at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from tacit._json import to_plain
from tacit.progress import Bar
from tacit.recipes import Progress
from tacit.report import _write as write
from tacit.report._card import CARD, REPORT
from tacit.report._ledger import Book, overview
from tacit.report._write import Findings


def carry_out(
    out: Path, work: Callable[[Progress], Findings], about: Mapping[str, Any]
) -> tuple[Findings, dict[str, Any]]:
    """Do the work and write its report; returns what was found and what ``run.json`` says.

    Args:
        out: The folder of the run; it is made, and tried, before the work starts.
        work: Does everything, with a function to call about its progress.
        about: Added to ``run.json`` at the top.

    Raises:
        OSError: The folder cannot be written. Whatever goes wrong, a folder that was made for nothing is taken away.
    """
    made = write.prepare(out)
    try:
        with Bar() as progress:
            findings = work(progress)
            facts = write.write_run(
                out,
                title=findings.title,
                lead=findings.lead,
                sections=findings.sections,
                ledgers=findings.ledgers,
                facts=findings.facts,
                assumptions=findings.assumptions,
                not_covered=findings.not_covered,
                about=about,
            )
            write.write_pictures(out, findings.sections)
    except BaseException:
        write.discard(made)
        raise
    return findings, to_plain(facts)


def show(findings: Findings, facts: Mapping[str, Any], out: Path) -> None:
    """Print the summary of a run, what its ledgers say, and where its report is."""
    screen = Console(highlight=False)
    for table in findings.summary:
        screen.print(table.rich())
    if findings.ledgers:
        screen.print(overview([Book.of(ledger) for ledger in findings.ledgers]).rich())
    screen.print(facts["privacy"]["sentence"], markup=False)
    print(f"The report is {out / REPORT}, its privacy card {out / CARD}.")  # never wrapped
