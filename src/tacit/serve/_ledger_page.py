"""The page of a ledger's service: budgets, how they burn down, the last entries, whether the chain holds, the card.

It is made on the server, without scripts, so that it is read on a phone, from the keyboard and by a screen reader. A
browser asks for the token as the password of HTTP's basic authentication; any user name will do.
"""

from __future__ import annotations

import math
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.security import HTTPBasic, HTTPBasicCredentials
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, PlainTextResponse

from tacit.privacy import Entry, Ledger, LedgerDamaged, Mode, Subject, from_units, ledger_of
from tacit.report import Cell, Column, Picture, Section, Table, card, describe_event, describe_settlement, run_files
from tacit.serve._limits import in_turn
from tacit.serve._scope import ScopedBook

_LAST = 50  # entries that the page lists
_POINTS = 300  # of a curve
_UNITS = [(86400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds")]
_basic = HTTPBasic(auto_error=False, description="Any name, and a token as the password.")
router = APIRouter(include_in_schema=False)


def _reader(request: Request, shown: Annotated[HTTPBasicCredentials | None, Depends(_basic)]) -> Ledger:
    from tacit.serve._ledger_app import token_of

    try:
        token = token_of(request, shown.password if shown else None)
    except HTTPException as error:
        if error.status_code == 401:
            error.headers = {"WWW-Authenticate": 'Basic realm="tacit ledger (token as password)", charset="UTF-8"'}
        raise
    return ledger_of(ScopedBook(request.app.state.book, token, request.app.state.tokens))


Reader = Annotated[Ledger, Depends(_reader)]


@router.get("/", response_class=HTMLResponse, dependencies=[Depends(in_turn)])
def page(ledger: Reader) -> str:
    """The ledger at a glance."""
    return ledger_page(ledger)


@router.get("/card", response_class=PlainTextResponse, dependencies=[Depends(in_turn)])
def privacy_card(ledger: Reader) -> str:
    """The privacy card, as markdown."""
    return card(ledger, title="the ledger of this service")


def ledger_page(ledger: Ledger) -> str:
    """The page, as HTML."""
    try:
        held = f"All {ledger.verify():,} entries and totals hold. Head: {ledger.head}"
    except LedgerDamaged as error:
        text = f"{error}\n\nCharge nothing until this is explained. A backup and the heads on receipts and cards help."
        return run_files(title="The ledger was changed", lead=text)[0]["report.html"]
    subjects, entries = ledger.subjects(), ledger.entries()
    sections = [Section("Budgets", tables=[_budgets(ledger, subjects)])]
    figures = [found for each in subjects if (found := _burn_down(each, entries)) is not None]
    if figures:
        sections.append(Section("What is left", figures=figures))
    sections.append(Section("Last entries", tables=[_entries(entries)]))
    sections.append(Section("Is it what was written?", held))
    lead = "The subjects of this ledger, what was spent on each, and what is left.\n\nThe privacy card is at /card."
    return run_files(title="Privacy ledger", lead=lead, sections=sections, ledgers=[ledger])[0]["report.html"]


def _budgets(ledger: Ledger, subjects: list[Subject]) -> Table:
    rows: list[list[Cell]] = [
        [
            each.name,
            str(each.terms.unit),
            ledger.spent(each).epsilon,
            each.terms.budget.epsilon,
            f"{each.terms.budget.delta:g}",
            str(ledger.remaining(each)),
            each.charges,
        ]
        for each in subjects
    ]
    number = Column("spent ε", _rounded), Column("of ε", _rounded)
    return Table("", ["subject", "unit", *number, "δ", "what still fits", "charges"], rows)


def _rounded(value: float) -> str:
    return "∞" if math.isinf(value) else f"{value:.4g}"


def _burn_down(subject: Subject, entries: list[Entry]) -> Picture | None:
    """How the budget of a subject went down over time; None where there is nothing to draw."""
    terms = subject.terms
    if terms.mode is Mode.PLAN or not terms.private:
        return None
    spent, points = 0, []
    for entry in entries:
        if entry.subject != subject.name or entry.kind not in ("charge", "settle"):
            continue
        change = entry.body["cost"] if entry.kind == "charge" else -entry.body["refund"]
        spent += change or 0
        points.append((datetime.fromisoformat(entry.body["time"]), spent))
    if len(points) < 2:
        return None
    from tacit.report import plots

    kept = [*points[:: max(1, len(points) // _POINTS)], points[-1]]
    first, last = kept[0][0], kept[-1][0]
    seconds, unit = next(
        (length, name) for length, name in _UNITS if (last - first).total_seconds() > 3 * length or length == 1
    )
    x, y = [0.0], [terms.budget.epsilon]
    for when, units in kept:  # a staircase: nothing is spent between two charges
        now = (when - first).total_seconds() / seconds
        x += [now, now]
        y += [y[-1], max(0.0, terms.budget.epsilon - terms.guarantee(from_units(units)).epsilon)]
    line = {"left": plots.Curve(x, y)}
    figure = plots.curve(line, x_label=f"{unit} since {first:%Y-%m-%d %H:%M} UTC", y_label="ε left", title=subject.name)
    caption = (
        f"{subject.name}: of ε = {terms.budget.epsilon:g} at δ = {terms.budget.delta:g}, {y[-1]:.3g} was left after "
        f"{subject.charges:,} charges."
    )
    return Picture(figure, caption)


def _entries(entries: list[Entry]) -> Table:
    rows: list[list[Cell]] = []
    charged = {entry.receipt: entry.body for entry in entries if entry.kind == "charge"}
    for entry in reversed(entries[-_LAST:]):
        body = entry.body
        what = describe_event(body["event"]) if "event" in body else ""
        if entry.kind == "settle":
            what = describe_settlement(body, charged.get(entry.receipt))
        when = str(body.get("time", ""))[:16].replace("T", " ")
        rows.append([entry.seq, when, entry.kind, entry.subject, str(body.get("stage", "")), what])
    return Table("", ["entry", "time (UTC)", "kind", "subject", "stage", "what"], rows)
