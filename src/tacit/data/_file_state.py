"""Whether a file is still what it was: a step that is replayed on other bytes would put the same noise on two sums."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Changed(OSError):
    """A file that is not what it was: gone, unreadable, or written to since it was first looked at."""


class Broken(ValueError):
    """Bytes that cannot be decoded, now or at any time: what is made of them is the same at every replay."""


class State(NamedTuple):
    """Bytes, and when content and entry were last changed, in nanoseconds."""

    size: int
    modified: int
    changed: int


def state_of(file: Path) -> State:
    """Size and times of a file; `Changed` if it is not there."""
    try:
        found = file.stat()
    except OSError as error:
        raise Changed("A data file cannot be read any more.") from error
    return State(found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def check_state(file: Path, state: State) -> None:
    """Refuse a file that is not what it was."""
    if state_of(file) != state:
        raise Changed("A data file is not what it was when it was first looked at.")
