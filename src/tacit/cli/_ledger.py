"""`tacit ledger`: look at a ledger, check it, take it along."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from tacit.cli._output import AsJson, console, print_json

if TYPE_CHECKING:
    from tacit.privacy import Ledger

app = typer.Typer(help="Look at a ledger, check it, take it along.")
Url = Annotated[str, typer.Argument(help="A file, sqlite:///FILE or postgresql://USER@HOST/NAME.")]


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
    table = Table("subject", "unit", "relation", "mode", "budget", "spent", "left", "charges")
    for row in rows:
        seeded = " [red]seeded: not private[/red]" if row["seeded"] else ""
        budget = f"({row['budget_epsilon']:g}, {row['delta']:g})"
        spent = f"{round_up(row['spent_epsilon'])}{seeded}"
        shown = (row["subject"], row["unit"], row["neighbours"], row["mode"], budget, spent, row["remaining"])
        table.add_row(*(str(cell) for cell in shown), str(row["charges"]))
    out.print(table)
    out.print(_entries_table(entries[-last:] if last > 0 else []))
    out.print(f"[bold]Total over all subjects[/bold]: {total}")
    out.print(f"[bold]Head[/bold]: {head}", soft_wrap=True)


def _entries_table(entries: list[Any]) -> Table:
    table = Table("entry", "time", "kind", "subject", "stage", "what")
    for entry in entries:
        body = entry.body
        what = body.get("note") or _event_text(body.get("event"))
        if entry.kind == "settle":
            what = f"{body['used']} releases used, the rest returned"
        if body.get("seeded"):
            what += " (seeded: not private)"
        time = str(body.get("time", ""))[:19].replace("T", " ")
        table.add_row(str(entry.seq), time, entry.kind, entry.subject, str(body.get("stage", "")), what)
    return table


def _event_text(event: dict[str, Any] | None) -> str:
    if event is None:
        return ""
    facts = ", ".join(f"{key} {value:g}" for key, value in event.items() if isinstance(value, int | float))
    name = str(event["type"]).removesuffix("DpEvent")
    inner = _event_text(event.get("event")) if isinstance(event.get("event"), dict) else ""
    return " ".join(part for part in (name, facts, inner and f"of {inner}") if part)


@app.command()
def verify(
    url: Url,
    head: Annotated[str | None, typer.Option(help="A head from a receipt, a checkpoint or a card.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check every entry and total, and that a head is in the chain; exit code 1 if anything was changed."""
    with _open(url) as ledger:
        count, end = ledger.verify(head), ledger.head
    if as_json:
        print_json({"ok": True, "entries": count, "head": end})
        return
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
    text = _csv(rows) if as_csv else json.dumps(rows, indent=2) + "\n"
    if out is None:
        typer.echo(text, nl=False)
        return
    partial = out.with_name(out.name + ".part")
    partial.write_text(text)
    partial.replace(out)  # all of it or nothing


def _csv(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, ["seq", "kind", "subject", "receipt", "body", "hash"])
    writer.writeheader()
    writer.writerows({**row, "body": json.dumps(row["body"], sort_keys=True)} for row in rows)
    return text.getvalue()
