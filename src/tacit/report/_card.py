"""The privacy card: what a run promises and on what that rests, on one page that an auditor can read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tacit import __version__
from tacit.privacy import MEMBERSHIP, Neighbours, right_guesses
from tacit.report._ledger import Book, alike, heads, number, overall, overview
from tacit.report._tables import Table, escaped

CARD, FACTS, REPORT = "privacy-card.md", "run.json", "report.html"
FEW = 3  # ledgers that are shown in full; more of them are summed up

# What no run covers, whatever it does: on every card.
NEVER_COVERED = (
    "Floating point: releases lie on a public grid and their rounding is paid for; that the noise itself is made of "
    "floats is an assumption (docs/proofs.md, section 10).",
    "How long a step takes and how much memory it needs: recipients must not be able to time single steps.",
    "Settings (clip, learning rate, architecture) that were chosen by looking at the private data without a charge.",
)


def card(
    *,
    title: str,
    ledgers: Sequence[Book],
    assumptions: Sequence[str] = (),
    not_covered: Sequence[str] = (),
    own: str = "",
    version: str = __version__,
) -> str:
    """The card as markdown; ``own`` is the guarantee of the result itself, if it is not that of the whole ledger."""
    parts = [f"# Privacy card: {escaped(title)}\n"]
    warnings = sorted({warning for book in ledgers for warning in book.warnings})
    parts += [f"> **{escaped(warning)}**\n>" for warning in warnings]
    parts.append("## In plain words\n\n" + _plain(ledgers))
    parts.append(
        f"## The formal statement\n\n> {escaped(overall(ledgers) if len(ledgers) != 1 else ledgers[0].sentence)}\n"
    )
    if own:
        parts.append(f"Of this result alone: {escaped(own)}\n")
    if len(ledgers) == 1:
        parts.append(_facts(ledgers[0], version).markdown())
    else:
        if ledgers:
            parts.append("## Ledgers\n\n" + _untitled(overview(ledgers)).markdown())
        parts.append(f"Version: tacit {escaped(version)}.\n")
    if heads(ledgers):
        parts.append("Chain heads:\n\n" + _bullets(heads(ledgers)))
    charged = [book for book in ledgers if book.kept]
    if charged or not ledgers:
        parts.append("## What was charged\n")
    for book in alike(charged):
        if len(ledgers) > 1:
            parts.append(f"### {escaped(book.name)}\n")
        parts.append(_untitled(book.table()).markdown() if book.charges else "Nothing.\n")
    if not ledgers:
        parts.append("Nothing.\n")
    parts.append("## What is assumed\n\n" + _bullets(_assumed(ledgers, assumptions)))
    parts.append("## What is not covered\n\n" + _bullets([*not_covered, *(NEVER_COVERED if ledgers else ())]))
    if any(book.durable for book in ledgers):
        parts.append("## How to check\n\n" + _checks(ledgers))
    return "\n".join(parts)


def weakest(ledgers: Sequence[Book]) -> Book:
    """The ledger that promises least: what is said about a run in plain words is said about it."""
    return max(ledgers, key=lambda book: (not book.private, right_guesses(book.epsilon, book.delta, book.mu)))


def _plain(ledgers: Sequence[Book]) -> str:
    if not ledgers:
        return "- **Who is protected:** No one: no ledger was kept. That is right only if all the data were public.\n"
    said = [f"- **{name}:** {escaped(text)}\n" for name, text in weakest(ledgers).plain_words.lines]
    several = f"This is the weakest of {len(ledgers)} ledgers, {escaped(weakest(ledgers).name)}.\n\n"
    return (several if len(ledgers) > 1 else "") + "".join(said)


def _facts(book: Book, version: str) -> Table:
    budgets = {f"{a.budget:g} at δ = {a.delta:g}" for a in book.accounts if math.isfinite(a.budget) or book.kept}
    rows = [
        ("protects", _each(book, [f"one {account.unit}" for account in book.accounts])),
        ("relation", _each(book, [_relation(a.relation) for a in book.accounts if a.relation])),
        ("epsilon", number(book.epsilon)),
        ("delta", f"{book.delta:g}"),
        ("budget", ", ".join(sorted(budgets)) or ("none was declared" if book.kept else "")),
        ("composition", _each(book, [account.mode for account in book.accounts])),
        ("if charges were chosen by earlier releases", _promised(book) if book.kept else ""),
        ("disjoint", _disjoint(book)),
        ("noise", "seeded: not private" if book.seeded else "keyed by the operating system" if book.kept else ""),
        ("ledger", _ledger(book)),
        ("version", f"tacit {version}"),
    ]
    return Table("", ("", ""), [row for row in rows if row[1]])


def _promised(book: Book) -> str:
    return f"epsilon {number(book.promised)}, delta {book.delta:g}"


def _ledger(book: Book) -> str:
    if not book.kept:
        return "kept by whoever charged; its charges are not on this card"
    return "durable" if book.durable else "not durable: in memory, gone with the process"


def _relation(name: str) -> str:
    return f"{name}: one unit {Neighbours(name).sentence}"


def _each(book: Book, texts: Sequence[str]) -> str:
    """What all subjects share, or each by its name."""
    if len(set(texts)) <= 1:
        return next(iter(texts), "")
    return "; ".join(f"{account.name}: {text}" for account, text in zip(book.accounts, texts, strict=True))


def _disjoint(book: Book) -> str:
    pairs = [f"{account.name} and {other}" for account in book.accounts for other in account.disjoint_from]
    replaced = {account.name for account in book.accounts if Neighbours(account.relation) is Neighbours.REPLACE_ONE}
    moved = any({account.name, *account.disjoint_from} & replaced for account in book.accounts if account.disjoint_from)
    note = f" ({MEMBERSHIP})" if moved else ""
    return f"declared disjoint: {', '.join(pairs)}{note}" if pairs else ""


def _assumed(ledgers: Sequence[Book], assumptions: Sequence[str]) -> list[str]:
    disjoint = [text for text in map(_disjoint, ledgers) if text]
    return [*assumptions, *(f"Subjects {text}." for text in dict.fromkeys(disjoint))]


def _bullets(lines: Sequence[str]) -> str:
    return "".join(f"- {escaped(line)}\n" for line in lines) or "Nothing was stated.\n"


def _checks(ledgers: Sequence[Book]) -> str:
    known = [book.head for book in ledgers if book.durable]
    commands = [f"tacit ledger verify LEDGER --head {head}" for head in (known if len(known) <= FEW else ["HEAD"])]
    return (
        "Keep this card away from the ledger. Whether the ledger still holds everything above, and was not edited:\n\n"
        "```sh\n" + "\n".join(commands) + "\n```\n"
    )


def _untitled(table: Table) -> Table:
    return replace(table, title="")
