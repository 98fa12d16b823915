"""From the start of a study to its files: the folder is tried first, then the work, then the report is written."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from tacit.privacy import Ledger
from tacit.progress import Bar
from tacit.recipes import Progress
from tacit.report import Book, Section, Table, overview, plain, write_pictures, write_run


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What there is to say about a run. ``facts`` go to ``run.json``, ``summary`` to the terminal."""

    title: str
    lead: str = ""
    sections: Sequence[Section] = ()
    summary: Sequence[Table] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    ledgers: Sequence[Ledger | Book] = ()
    assumptions: Sequence[str] = ()
    not_covered: Sequence[str] = ()


def carry_out(
    out: Path, work: Callable[[Progress], Findings], about: Mapping[str, Any]
) -> tuple[Findings, dict[str, Any]]:
    """Do the work and write its report; returns what was found and what ``run.json`` says.

    ``about`` is added to ``run.json`` at the top.
    """
    with _folder(out), Bar() as progress:
        findings = work(progress)
        facts = write_run(
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
        write_pictures(out, findings.sections)
    return findings, plain(facts)


def show(findings: Findings, facts: Mapping[str, Any], out: Path) -> None:
    """Print the summary of a run, what its ledgers say, and where its report is."""
    screen = Console(highlight=False)
    for table in findings.summary:
        screen.print(table.rich())
    if findings.ledgers:
        screen.print(overview([Book.of(ledger) for ledger in findings.ledgers]).rich())
    screen.print(facts["privacy"]["sentence"], markup=False)
    print(f"The report is {out / 'report.html'}, its privacy card {out / 'privacy-card.md'}.")  # never wrapped


@contextmanager
def _folder(out: Path) -> Iterator[None]:
    """The folder of a run, made and tried before the work starts; after an error, empty folders are removed again."""
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except (NotADirectoryError, FileExistsError):
        raise OSError(f"The report cannot go to {out}: a file is in the way. Give another folder.") from None
    except OSError as error:
        raise OSError(f"The report cannot go to {out}: {(error.strerror or str(error)).rstrip('.')}.") from error
    try:
        yield
    except BaseException:
        with suppress(OSError):
            for folder in made:
                folder.rmdir()
        raise
