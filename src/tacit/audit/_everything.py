"""All registered audits, one after the other; what is found is written down at once, so that a kill loses one audit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tacit
from tacit._files import write_atomically
from tacit.audit._findings import Finding
from tacit.audit._registry import REGISTRY, Effort


def everything(effort: Effort, *, keep: str | Path | None = None) -> Iterator[Finding]:
    """Run every registered audit.

    Args:
        effort: How many trials: `QUICK` or `FULL`.
        keep: A file in which the findings of each finished audit are kept. Called again with it, audits that are there
            are not run again, provided that the package's source and the effort are the same; otherwise it starts anew.

    Yields:
        The findings, in the order of the registry.
    """
    path = None if keep is None else Path(keep)
    known = _read(path, effort)
    for name, audit in REGISTRY.items():
        if name in known["audits"]:
            yield from (Finding(**each) for each in known["audits"][name])
            continue
        found = []
        for finding in audit.attack(effort):
            found.append(finding)
            yield finding
        known["audits"][name] = [each.facts() for each in found]
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(known, indent=1))


def _read(path: Path | None, effort: Effort) -> dict[str, Any]:
    new = {"source": _source(), "factor": effort.factor, "audits": {}}
    if path is None or not path.exists():
        return new
    try:
        known = json.loads(path.read_text("utf-8"))
        same = all(known[key] == new[key] for key in ("source", "factor"))
        return dict(known) if same and isinstance(known["audits"], dict) else new
    except (ValueError, KeyError, TypeError):
        return new


def _source() -> str:
    """A digest of the package's own files: findings about other source are findings about something else."""
    root, digest = Path(tacit.__file__).parent, hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()
