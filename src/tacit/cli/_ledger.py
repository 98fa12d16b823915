"""`tacit ledger`: look at a ledger, check it, take it along."""

from __future__ import annotations

import csv
import io
import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from tacit._files import write_atomically
from tacit._json import to_plain
from tacit.cli._ledger_service import serve, tokens
from tacit.cli._output import AsJson, console, print_json

if TYPE_CHECKING:
    from tacit.privacy import Ledger

app = typer.Typer(help="Look at a ledger, check it, take it along, serve it to a team.")
app.command()(serve)
app.add_typer(tokens, name="token")
_KINDS = {"subject": "declared, with its budget", "lease": "releases leased"}
Url = Annotated[str, typer.Argument(help="A file, sqlite:///FILE, postgresql://USER@HOST/NAME or https://….")]


def _open(url: str) -> Ledger:
    from tacit.privacy import Ledger

    return Ledger(url, create=False)


@app.command()
def show(
    url: Url,
    last: Annotated[int, typer.Option(help="How many of the last entries to show.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Subjects with what they spent and may still spend, the last entries, and the total over all."""
    with _open(url) as ledger:
        subjects, total, head = ledger.subjects(), ledger.total(), ledger.head
        rows: list[dict[str, Any]] = [
            {
                "subject": s.name,
                "unit": str(s.terms.unit),
                "neighbours": s.terms.neighbours.value,
                "mode": s.terms.mode.value,
                "budget_epsilon": s.terms.budget.epsilon,
                "delta": s.terms.budget.delta,
                "spent_epsilon": ledger.spent(s).epsilon,
                "remaining": str(ledger.remaining(s)),
                "left": _left(ledger.remaining(s)),
                "charges": s.charges,
                "disjoint_from": list(s.disjoint_from),
                "seeded": s.seeded,
            }
            for s in subjects
        ]
        entries = ledger.entries()
    if as_json:
        facts = {"epsilon": total.epsilon, "delta": total.delta, "private": total.private, "guarantee": str(total)}
        print_json({"subjects": rows, "total": facts, "entries": len(entries), "head": head})
        return
    from tacit.privacy import round_up

    out = console()
    table = _table("subject", "unit", "relation", "spent ε", "of ε", "δ", "left ε", "charges")
    for name in ("relation", "spent ε", "of ε", "δ"):
        next(column for column in table.columns if column.header == name).no_wrap = True
    for row in rows:
        name = escape(row["subject"]) + (" [red]seeded: not private[/red]" if row["seeded"] else "")
        budget = (f"{row['budget_epsilon']:g}", f"{row['delta']:g}")
        spent = round_up(row["spent_epsilon"])
        table.add_row(name, row["unit"], row["neighbours"], spent, *budget, row["left"], str(row["charges"]))
    out.print(table)
    out.print(_entries_table(entries, last))
    out.print(f"[bold]Total over all subjects[/bold]: {total}")
    out.print(f"[bold]Head[/bold]: {head}", soft_wrap=True)


def _table(*heads: str) -> Table:
    table = Table(*heads, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for column in table.columns:
        column.overflow = "fold"  # no name is cut
    return table


def _left(left: Any) -> str:
    """What may still be spent, short."""
    if left.planned is not None:
        return f"{left.planned} of the plan"
    return "0" if left.mu == 0 else f"{left.epsilon:.4g}"


def _entries_table(entries: list[Any], last: int) -> Table:
    from tacit.report import describe_event, describe_settlement

    table = _table("entry", "")
    charged = {entry.receipt: entry.body for entry in entries if entry.kind == "charge"}
    for entry in entries[-last:] if last > 0 else []:
        body = entry.body
        event = body.get("event")
        what = "; ".join(part for part in (describe_event(event) if event else "", body.get("note") or "") if part)
        if entry.kind == "settle":
            what = describe_settlement(body, charged.get(entry.receipt))
        if body.get("seeded"):
            what += " (seeded: not private)"
        time = str(body.get("time", ""))[:16].replace("T", " ")
        who = ", ".join(part for part in (entry.subject, str(body.get("stage", ""))) if part)
        first = "  ".join(part for part in (time, who) if part)
        table.add_row(
            str(entry.seq), f"[bold]{escape(first)}[/bold]\n{escape(what or _KINDS.get(entry.kind, entry.kind))}"
        )
    return table


@app.command()
def verify(
    url: Url,
    head: Annotated[str | None, typer.Option(help="A head from a receipt, a checkpoint or a card.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check every entry and total, and that a head is in the chain; exit code 1 if anything was changed."""
    from tacit.privacy import PricedTooLow

    with _open(url) as ledger, warnings.catch_warnings():
        warnings.simplefilter("ignore", PricedTooLow)  # they are listed below
        count, end, low = ledger.verify(head), ledger.head, ledger.underpriced()
    if as_json:
        low_prices = [{"entry": e.seq, "subject": e.subject, "recorded": e.recorded, "price": e.price} for e in low]
        print_json({"ok": True, "entries": count, "head": end, "priced_too_low": low_prices})
        return
    for each in low:
        console().print(f"{each}. Guarantees count the higher price.", soft_wrap=True)
    covers = "and the given head is one of them" if head else "(give --head to find a cut tail or an old copy put back)"
    console().print(f"{count} entries hold {covers}. Head: {end}", soft_wrap=True)


@app.command()
def export(
    url: Url,
    out: Annotated[Path | None, typer.Option(help="Write here instead of to the terminal.")] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="One line per entry instead of JSON.")] = False,
    as_json: AsJson = True,
) -> None:
    """Every entry, verified first, as JSON (or CSV)."""
    del as_json  # JSON is what it prints anyway
    with _open(url) as ledger:
        ledger.verify()
        rows = [
            {"seq": e.seq, "kind": e.kind, "subject": e.subject, "receipt": e.receipt, "body": e.body, "hash": e.hash}
            for e in ledger.entries()
        ]
    text = _csv(rows) if as_csv else json.dumps(to_plain(rows), indent=2) + "\n"
    if out is None:
        typer.echo(text, nl=False)
        return
    write_atomically(out, text)


def _csv(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, ["seq", "kind", "subject", "receipt", "body", "hash"])
    writer.writeheader()
    writer.writerows({**row, "body": json.dumps(row["body"], sort_keys=True)} for row in rows)
    return text.getvalue()
