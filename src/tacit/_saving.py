"""What `save` of every result writes: plain weights, and the promise that was made for them beside these."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import nn

from tacit import __version__
from tacit._folders import replaced
from tacit._json import to_plain
from tacit.models import RESULT_FILES, WeightFormat, save_weights


def save_result(
    folder: str | Path,
    model: nn.Module,
    result: Any,
    *,
    stage: str,
    format: WeightFormat = "plain",
    tokenizer: Any = None,
    title: str | None = None,
    receipt: str | None = None,
    files: Mapping[str, str] | None = None,
) -> Path:
    """Write weights (see `models.save_weights`), `privacy-card.md` and `guarantee.json` to a folder.

    The weights are a release that was paid for, the rest is what `result` says of itself (see `report.card`); nothing
    private is read. Every file is there as a whole or not at all.
    """
    from tacit.report import card, tell

    about = tell(result, title or f"{type(model).__name__}, {stage}")
    out = Path(folder)
    with replaced(out, (*RESULT_FILES, "calibration.json")) as part:
        written = [file.relative_to(part) for file in save_weights(model, part, format=format, tokenizer=tokenizer)]
        for name, text in (files or {}).items():
            (part / name).write_text(text, "utf-8")
        promise = getattr(result, "guarantee", None)
        weights = part / written[0]
        facts = {
            "title": about.title,
            "tacit": __version__,
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "stage": stage,
            "private": bool(about.ledgers) and all(book.private for book in about.ledgers),
            "guarantee": None if promise is None else promise.to_json(),
            "sentence": "No promise was made." if promise is None else str(promise),
            "receipt": receipt,
            "head": next((book.head for book in about.ledgers if book.kept), None),
            "assumptions": list(about.assumptions),
            "weights": {"file": str(written[0]), "format": format, "sha256": _sha256(weights)},
            "ledgers": [book.facts() for book in about.ledgers],
        }
        (part / "guarantee.json").write_text(json.dumps(to_plain(facts), indent=2, ensure_ascii=False) + "\n", "utf-8")
        (part / "privacy-card.md").write_text(card(result, title=about.title), "utf-8")
    return out


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
