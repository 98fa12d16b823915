"""What attacks found of the promises of a page or a card (see `tacit.audit`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tacit.report._page import Section
from tacit.report._tables import Table

if TYPE_CHECKING:
    from tacit.audit import Finding

TITLE = "How it was attacked"
_HEADS = ("attacked", "measure", "claimed at most", "found at least", "of the claim", "trials", "confidence")


def attacked_table(findings: Sequence[Finding]) -> Table:
    """Claims beside the lower bounds that attacks found."""
    rows = [
        (
            each.name,
            each.measure + (f" at delta {each.delta:g}" if each.delta else ""),
            f"{each.claimed:.4g}",
            f"{each.measured:.4g}" + ("" if each.holds else " BROKEN"),
            f"{100 * each.tightness:.0f}%",
            f"{each.trials:,}",
            f"1 - {1 - each.confidence:.0e}",
        )
        for each in findings
    ]
    return Table(TITLE, _HEADS, rows)


def attacked_section(findings: Sequence[Finding]) -> Section:
    """The part of a page that says what was attacked and what was found."""
    from tacit.audit import sentence  # here, because it loads every stage, and stages are saved with a report

    return Section(TITLE, sentence(findings), tables=[attacked_table(findings)])


def attacked_text(findings: Sequence[Finding]) -> str:
    """The same for a card."""
    from tacit.audit import sentence

    table = replace(attacked_table(findings), title="").markdown()
    return f"\n## {TITLE}\n\n{sentence(findings)}\n\n{table}"
