"""A ledger as a notebook shows it."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from tacit.privacy._budget import round_up

if TYPE_CHECKING:
    from tacit.privacy._ledger import Ledger

_HEADS = ("subject", "protects", "relation", "spent ε", "of ε", "δ", "charges")


def ledger_html(ledger: Ledger) -> str:
    """A row per subject, and the total over all of them."""
    rows = []
    for subject in ledger.subjects():
        terms, spent = subject.terms, ledger.spent(subject)
        used = round_up(spent.epsilon) + (" (seeded: not private)" if spent.seeded else "")
        budget = (f"{terms.budget.epsilon:g}", f"{terms.budget.delta:g}")
        cells = (subject.name, f"one {terms.unit}", terms.neighbours.value, used, *budget, str(subject.charges))
        rows.append("".join(f"<td>{html.escape(cell)}</td>" for cell in cells))
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    heads = "".join(f"<th>{head}</th>" for head in _HEADS)
    where = "" if ledger.durable else "<p>In memory (not durable): it stops no second run on the same people.</p>"
    total = html.escape(str(ledger.total()))
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table><p><small>{total}</small></p>{where}"
