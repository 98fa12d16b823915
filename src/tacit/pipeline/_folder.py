"""The folder of a run: which run it holds, one process at a time, and a folder for each stage."""

from __future__ import annotations

import fcntl
import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tacit import _checkpoints as checkpoints
from tacit import recipes
from tacit.pipeline._schema import Pipeline

_STATE = "run.json"


@dataclass(frozen=True, kw_only=True)
class Folder:
    """Where a run keeps what it needs to resume; all of it was released, and may be shared."""

    out: Path
    run: str  # a name for the run, in the notes of its charges
    new: bool

    def stage(self, name: str) -> Path:
        folder = self.out / "stages" / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def read(self, name: str, file: str) -> Any:
        """What a stage wrote down, or None."""
        path = self.stage(name) / file
        return json.loads(path.read_text("utf-8")) if path.exists() else None

    def write(self, name: str, file: str, value: Any) -> None:
        checkpoints.write(self.stage(name) / file, json.dumps(value, indent=1).encode())


@contextmanager
def opened(recipe: Pipeline, out: Path) -> Iterator[Folder]:
    """The folder of this recipe's run, for one process; an interrupted run of the same recipe goes on.

    Raises:
        ValueError: The folder holds a run of another recipe, or another process is at work in it.
        OSError: It cannot be written.
    """
    stages = out / "stages"
    try:
        stages.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise OSError(f"The results cannot go to {out}: a file is in the way. Give another folder.") from None
    with (stages / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"Another process is at work in {out}: wait for it, or give another folder.") from None
        name = recipes.fingerprint(recipe)
        state = stages / _STATE
        known = json.loads(state.read_text("utf-8")) if state.exists() else None
        if known is None:
            known = {"run": secrets.token_hex(4), "recipe": name}
            checkpoints.write(state, json.dumps(known).encode())
            yield Folder(out=out, run=known["run"], new=True)
            return
        if known["recipe"] != name and not _begun(stages):
            known["recipe"] = name  # the earlier recipe was refused: nothing of it was kept
            checkpoints.write(state, json.dumps(known).encode())
        if known["recipe"] != name:
            raise ValueError(
                f"{out} holds a run of another recipe (or of this one before it was changed): put the recipe back to "
                "go on with it, or give another folder with --out."
            )
        yield Folder(out=out, run=known["run"], new=False)


def _begun(stages: Path) -> bool:
    """Whether any stage has written anything.

    If none has, whatever may have been charged for this run stays charged: its id is the same, and the ledger refuses
    what its budget does not pay for.
    """
    return any(file.is_file() for folder in stages.iterdir() if folder.is_dir() for file in folder.iterdir())
