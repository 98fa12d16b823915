"""Card and page of anything that carries a promise: a ledger, a result, a guarantee, or a file of one of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tacit import _checkpoints as checkpoints
from tacit.privacy import Guarantee, Ledger
from tacit.report._attacked import attacked_text
from tacit.report._card import CARD, FACTS, REPORT
from tacit.report._card import card as card_text
from tacit.report._ledger import Book
from tacit.report._write import run_files, write_files

if TYPE_CHECKING:
    from tacit.audit import Finding

GUARANTEE = "guarantee.json"
_SQLITE = b"SQLite format 3\0"


@dataclass(frozen=True, kw_only=True)
class About:
    """What there is to say about a thing: its ledgers, or its guarantee where no ledger is at hand."""

    title: str
    ledgers: Sequence[Book] = ()
    assumptions: Sequence[str] = ()
    not_covered: Sequence[str] = ()
    own: str = ""  # the guarantee of a result, where its ledger paid for more
    facts: Mapping[str, Any] = field(default_factory=dict)


def card(thing: Any, *, title: str | None = None, attacked: Sequence[Finding] = ()) -> str:
    """The privacy card of a thing, as markdown.

    Args:
        thing: A ledger (or its file or URL), a guarantee, a result with `guarantee` (of `finetune.fit`, an adapter, a
            calibration), the folder that a run or `save` wrote, or the checkpoint of a run.
        title: What stands above it.
        attacked: What an audit of it found (`tacit.audit.ledger`), as a section of its own.

    Returns:
        Who is protected from what and how strongly in plain words, the formal statement, what was charged, what is
        assumed and what is not covered.

    Raises:
        ValueError: The thing carries no promise, or its file is damaged.

    Example:
        >>> from tacit import report
        >>> from tacit.privacy import Guarantee
        >>> "Every patient" in report.card(Guarantee(epsilon=1.0, delta=1e-6, unit="patient"))
        True
    """
    folder = _folder(thing)
    if folder is not None and title is None:
        return _text(folder / CARD) + (attacked_text(attacked) if attacked else "")
    about = tell(thing, title)
    text = card_text(
        title=about.title,
        ledgers=about.ledgers,
        assumptions=about.assumptions,
        not_covered=about.not_covered,
        own=about.own,
    )
    return text + (attacked_text(attacked) if attacked else "")


def page(
    thing: Any, out: str | Path | None = None, *, title: str | None = None, attacked: Sequence[Finding] = ()
) -> str:
    """One self-contained page about a thing (see `card`), as HTML.

    Args:
        thing: As for `card`.
        out: A folder: the page is written there as `report.html`, with `privacy-card.md` and its facts as `run.json`.
        title: What stands above it.
        attacked: What an audit of it found, as a section of its own, on the card as well.

    Returns:
        The page.
    """
    about = tell(thing, title)
    files, _ = run_files(
        title=about.title,
        lead=f"Of this result alone: {about.own}" if about.own else "",
        ledgers=about.ledgers,
        facts=about.facts,
        assumptions=about.assumptions,
        not_covered=about.not_covered,
        attacked=attacked,
    )
    if out is not None:
        write_files(Path(out), files)
    return files[REPORT]


def card_facts(thing: Any) -> dict[str, Any]:
    """The card as plain data: what `guarantee.json` or `run.json` of a folder say, or the same for anything else."""
    folder = _folder(thing)
    if folder is not None:
        return read_json(folder / (GUARANTEE if (folder / GUARANTEE).exists() else FACTS))
    about = tell(thing)
    _, facts = run_files(
        title=about.title,
        ledgers=about.ledgers,
        facts=about.facts,
        assumptions=about.assumptions,
        not_covered=about.not_covered,
    )
    return facts


def tell(thing: Any, title: str | None = None) -> About:
    """What there is to say about a thing."""
    if isinstance(thing, Ledger | Book):
        return About(title=title or "a ledger", ledgers=[Book.of(thing)])
    if isinstance(thing, Guarantee):
        return About(title=title or "a guarantee", ledgers=[Book.of_guarantee(thing)])
    if isinstance(thing, str | Path):
        return _tell_file(thing, title)
    result = getattr(thing, "result", thing)  # a calibrated model carries its calibration
    if hasattr(result, "confidences") and hasattr(result, "sources"):
        return _tell_calibration(result, title)
    if hasattr(thing, "guarantee") and isinstance(thing.guarantee, Guarantee | None):
        return _tell_result(thing, title)
    raise ValueError(
        f"A {type(thing).__name__} carries no promise: give a ledger, a guarantee, a result of a stage, or a file of "
        "one."
    )


def _tell_result(result: Any, title: str | None) -> About:
    ledger, promise = getattr(result, "ledger", None), result.guarantee
    books = [Book.of(ledger)] if ledger is not None else [Book.of_guarantee(promise)] if promise is not None else []
    same = promise is None or not books or not books[0].kept or str(promise) == books[0].sentence
    return About(
        title=title or f"a result of {type(result).__module__.split('.')[1]}",
        ledgers=books,
        own="" if same else str(promise),
        assumptions=getattr(result, "assumptions", ()),
        not_covered=getattr(result, "not_covered", ()),
        facts={"guarantee": None if promise is None else promise.to_json()},
    )


def _tell_calibration(result: Any, title: str | None) -> About:
    return About(
        title=title or "a calibration",
        ledgers=[Book.of_guarantee(result.guarantee, "each source")],
        assumptions=result.assumptions,
        not_covered=["what the classifier itself was trained on: it has a card of its own"],
        facts={"calibration": result.to_json()},
    )


def _tell_file(where: str | Path, title: str | None) -> About:
    name, path = str(where), Path(where)
    folder = _folder(where)
    if folder is not None:
        if (folder / GUARANTEE).exists():
            return _tell_saved(folder, title)
        facts = read_json(folder / FACTS)
        privacy = facts["privacy"]
        return About(
            title=title or facts["title"],
            ledgers=[Book.from_facts(one) for one in privacy["ledgers"]],
            assumptions=privacy["assumptions"],
            facts=facts["facts"],
        )
    if "://" not in name and path.is_file() and not path.read_bytes()[:16].startswith(_SQLITE):
        return _tell_checkpoint(path, title)
    with Ledger(name, create=False) as ledger:
        return About(title=title or f"the ledger {path.name}", ledgers=[Book.of(ledger)])


def _tell_saved(folder: Path, title: str | None) -> About:
    facts = read_json(folder / GUARANTEE)
    books = [Book.from_facts(one) for one in facts["ledgers"]]
    promise = facts["sentence"]
    own = "" if not books or not books[0].kept or promise == books[0].sentence else promise
    return About(title=title or facts["title"], ledgers=books, own=own, assumptions=facts["assumptions"], facts=facts)


def _tell_checkpoint(path: Path, title: str | None) -> About:
    facts = checkpoints.facts_of(path)
    if facts is None:
        raise ValueError(
            f"{path} is neither a ledger, nor a checkpoint of tacit, nor beside the {CARD} that saving writes."
        )
    promise = facts.get("guarantee")
    if promise is None:
        raise ValueError(
            f"The checkpoint {path} carries no guarantee: it is of a run that is not private or paid elsewhere."
        )
    said = [f"the ledger's head when this was paid for: {facts['head']}"] if facts.get("head") else []
    return About(
        title=title or f"the checkpoint {path.name}",
        ledgers=[Book.of_guarantee(Guarantee.from_json(promise), "checkpoint")],
        assumptions=[*facts.get("assumptions", ()), *said],
        facts=facts,
    )


def _folder(thing: Any) -> Path | None:
    """The folder that a run or `save` wrote, also if a file in it was named."""
    if not isinstance(thing, str | Path) or "://" in str(thing):
        return None
    path = Path(thing)
    if path.is_dir():
        if not (path / CARD).exists():
            raise ValueError(f"{path} holds no finished run and no saved result: there is no {CARD} in it.")
        return path
    if not path.exists():
        raise ValueError(f"There is no ledger, run, checkpoint or saved result at {path}.")
    beside = path.is_file() and path.suffix == ".safetensors" and (path.parent / GUARANTEE).exists()
    return path.parent if beside and checkpoints.facts_of(path) is None else None


def read_json(path: Path) -> dict[str, Any]:
    """The facts beside a card."""
    try:
        found: dict[str, Any] = json.loads(_text(path))
    except json.JSONDecodeError:
        raise ValueError(f"{path} is damaged: it is not JSON.") from None
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        raise ValueError(f"{path.parent} holds no finished run: there is no {path.name} in it.") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is damaged: it is not text.") from None
