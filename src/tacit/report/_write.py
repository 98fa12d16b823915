"""What a run leaves in its folder: ``report.html``, ``privacy-card.md`` and ``run.json``, each whole or not at all."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tacit import __version__
from tacit._files import replacing
from tacit._json import to_plain as plain
from tacit.privacy import Ledger, right_guesses
from tacit.report._attacked import attacked_section, attacked_text
from tacit.report._card import CARD, FACTS, FEW, NEVER_COVERED, REPORT, card, weakest
from tacit.report._ledger import Book, alike, heads, number, overall, overview
from tacit.report._page import Banner, Picture, Section, page

if TYPE_CHECKING:
    from tacit.audit import Finding


def prepare(out: Path) -> None:
    """Make the folder of a run and see that it can be written."""
    try:
        if out.exists() and not out.is_dir():
            raise NotADirectoryError
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except (NotADirectoryError, FileExistsError):
        raise OSError(f"The report cannot go to {out}: a file is in the way. Give another folder.") from None
    except OSError as error:
        raise OSError(f"The report cannot go to {out}: {_reason(error)}.") from error


def write_run(
    out: Path,
    *,
    title: str,
    sections: Sequence[Section],
    ledgers: Sequence[Ledger | Book] = (),
    facts: Mapping[str, Any] | None = None,
    assumptions: Sequence[str] = (),
    not_covered: Sequence[str] = (),
    lead: str = "",
    about: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write the three files and return what ``run.json`` says; ``about`` is added to it at the top."""
    files, found = run_files(
        title=title,
        sections=sections,
        ledgers=ledgers,
        facts=facts,
        assumptions=assumptions,
        not_covered=not_covered,
        lead=lead,
        about=about,
    )
    write_files(out, files)
    return found


def run_files(
    *,
    title: str,
    sections: Sequence[Section] = (),
    ledgers: Sequence[Ledger | Book] = (),
    facts: Mapping[str, Any] | None = None,
    assumptions: Sequence[str] = (),
    not_covered: Sequence[str] = (),
    lead: str = "",
    about: Mapping[str, Any] | None = None,
    attacked: Sequence[Finding] = (),
) -> tuple[dict[str, str], dict[str, Any]]:
    """The text of the three files by their names, and what ``run.json`` says; ``attacked``: what an audit found."""
    numbers = [f" {number}" for number in range(1, len(ledgers) + 1)] if len(ledgers) > 1 else [""]
    books = [Book.of(ledger, f"ledger{number}") for ledger, number in zip(ledgers, numbers, strict=False)]
    now = datetime.now(UTC).isoformat(timespec="seconds")
    found: dict[str, Any] = {
        "title": title,
        "tacit": __version__,
        "written": now,
        **(about or {}),
        "facts": dict(facts or {}),
        "privacy": _privacy(books, assumptions, not_covered),
    }
    tried = [attacked_section(attacked)] if attacked else []
    if attacked:
        found["audit"] = [finding.to_json() for finding in attacked]
    text = page(
        title,
        [*sections, *_ledger_sections(books), *tried, _fine_print(assumptions, not_covered, bool(books))],
        lead=lead,
        banner=_banner(books),
        footer=f"tacit {__version__}, {now.replace('T', ' ').removesuffix('+00:00')} UTC. "
        f"The facts of this page are in {FACTS}, its promise in {CARD}.",
    )
    promise = card(title=title, ledgers=books, assumptions=assumptions, not_covered=not_covered)
    promise += attacked_text(attacked) if attacked else ""
    written = json.dumps(plain(found), indent=2, ensure_ascii=False) + "\n"
    return {REPORT: text, CARD: promise, FACTS: written}, found


def write_pictures(out: Path, sections: Sequence[Section]) -> list[Path]:
    """Every figure of the report as a file of its own, for slides and papers: picture-1.png, picture-2.png, ..."""
    from tacit.report.theme import png

    figures = [figure for section in sections for figure in section.figures]
    paths = []
    for place, figure in enumerate(figures, 1):
        paths.append(out / f"picture-{place}.png")
        paths[-1].write_bytes(png(figure.figure if isinstance(figure, Picture) else figure))
    return paths


def write_files(out: Path, files: Mapping[str, str]) -> None:
    """Write files of a folder so that each is there as a whole, the old or the new one, whatever happens."""
    prepare(out)
    try:
        with ExitStack() as written:  # none takes its place before all are written
            for name, text in files.items():
                written.enter_context(replacing(out / name)).write_text(text, "utf-8")
    except OSError as error:
        raise OSError(
            f"The report cannot be written to {out}: {_reason(error)}. No file is left half-written."
        ) from error


def _privacy(books: Sequence[Book], assumptions: Sequence[str], not_covered: Sequence[str]) -> dict[str, Any]:
    one = books[0] if len(books) == 1 else None
    return {
        "sentence": overall(books),
        "private": bool(books) and all(book.private for book in books),
        "epsilon": one.epsilon if one else None,
        "delta": one.delta if one else None,
        "right_of_100": right_guesses(one.epsilon, one.delta, one.mu) if one and one.private else None,
        "durable": bool(books) and all(book.durable for book in books),
        "assumptions": list(assumptions),
        "not_covered": [*not_covered, *(NEVER_COVERED if books else ())],
        "ledgers": [book.facts() for book in books],
    }


def _banner(books: Sequence[Book]) -> Banner:
    warnings = tuple(dict.fromkeys(warning for book in books for warning in book.warnings))
    if not books:
        return Banner("No promise", overall(books), ("not private",))
    plain, name = weakest(books).plain_words.lines, weakest(books).name
    if len(books) == 1:
        return Banner(books[0].promise, books[0].sentence, warnings, plain)
    plain = [(f"{plain[0][0]} (the weakest, {name})", plain[0][1]), *plain[1:]]
    most = number(max(b.epsilon for b in books))
    return Banner(f"{len(books)} ledgers, ε up to {most}", overall(books), warnings, plain)


def _ledger_sections(books: Sequence[Book]) -> list[Section]:
    books = [book for book in books if book.kept]
    if not books:
        return []
    text = "Equal charges are one row, and each total includes the rows of its subject above."
    if heads(books):
        text += "\n\nChain heads:\n\n" + "\n".join(f"- {head}" for head in heads(books))
    distinct = alike(books)
    many = max(len(distinct), len(heads(books))) > FEW
    charged = Section("What was charged", text, [book.table() for book in distinct], folded=many)
    return [Section("Ledgers", tables=[overview(books)]), charged] if len(books) > 1 else [charged]


def _fine_print(assumptions: Sequence[str], not_covered: Sequence[str], promised: bool) -> Section:
    open_ends = [*not_covered, *(NEVER_COVERED if promised else ())]
    parts = [
        ("Assumed:", assumptions),
        ("Not covered:", open_ends),
    ]
    text = "\n\n".join(f"{head}\n\n" + "\n".join(f"- {line}" for line in lines) for head, lines in parts if lines)
    return Section("What this rests on", text or "Nothing was stated.")


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).rstrip(".")
