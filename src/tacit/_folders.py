"""Folders of results: every file whole or not at all, and nothing of an earlier result left beside a new one."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replaced(folder: Path, stale: Sequence[str] = ()) -> Iterator[Path]:
    """A folder to write to. When all is written its files take their places in `folder`.

    Args:
        folder: Made if there is none.
        stale: Patterns of files of an earlier result, which are taken away unless they are written again.

    Raises:
        ValueError: `folder` is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: give the name of a folder for the result.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = folder.parent / f".{folder.name}.{uuid.uuid4().hex}.part"
    part.mkdir()
    try:
        yield part
        for file in part.rglob("*"):  # safetensors writes files that only their owner can read
            if file.is_file():
                file.chmod(part.stat().st_mode & 0o666)
        if not folder.exists():
            part.rename(folder)
            return
        written = {file.relative_to(part) for file in part.rglob("*") if file.is_file()}
        for file in written:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (part / file).replace(folder / file)
        for old in {file for pattern in stale for file in folder.glob(pattern)}:
            if old.relative_to(folder) not in written:
                old.unlink(missing_ok=True)
    finally:
        shutil.rmtree(part, ignore_errors=True)
