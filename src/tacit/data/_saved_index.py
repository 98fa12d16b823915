"""What was found out about video files, kept in a file: the next start looks at names, sizes and times alone.

The file is as private as the videos (it holds their names and lengths), so only its owner can read it. An entry counts
as long as the file has the size and the times that it had then; otherwise the file is looked at again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tacit._files import write_atomically
from tacit._refusals import Refusal
from tacit.data._cache import digest
from tacit.data._file_state import State, state_of
from tacit.data._video_index import Numbers, Unreadable, Video, probe

FORMAT = 1


class SavedIndex:
    """Videos by the path of their file. Without a path of its own it keeps them in memory.

    Args:
        path: The file that it is kept in; None: nowhere.

    Raises:
        Refusal: The file is there and is no such index.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path)
        self._entries: dict[str, dict[str, Any]] = {}
        self._new = False
        if self.path is not None and self.path.exists():
            try:
                found = json.loads(self.path.read_text("utf-8"))
                self._entries = dict(found["videos"]) if found["format"] == FORMAT else {}
            except (ValueError, KeyError, TypeError):
                raise Refusal(f"{self.path} is no index of videos: delete it, or name another file.") from None

    def video(self, file: Path) -> Video:
        """What is known of a file, or what is found now; `Unreadable` as in `probe`."""
        entry = self._entry(file)
        if entry is not None and "video" in entry:
            return _unpacked(file, State(*entry["state"]), entry["video"])
        if entry is not None and "why" in entry:
            raise Unreadable(f"{file} {entry['why']}")
        try:
            found = probe(file)
        except Unreadable as error:
            if file.is_file():
                self._put(file, state_of(file), {"why": str(error).removeprefix(f"{file} ")})
            raise
        self._put(file, found.state, {"video": _packed(found)})
        return found

    def digest(self, file: Path) -> str:
        """SHA-256 of the content: read once for each state of the file, if the index is kept in a file.

        Raises:
            OSError: It cannot be read.
        """
        if self.path is None:
            return digest(file)
        entry = self._entry(file)
        if entry is not None and "digest" in entry:
            known: str = entry["digest"]
            return known
        before = state_of(file)
        found = digest(file)
        if state_of(file) == before:  # it did not change while it was read
            self._put(file, before, (entry or {}) | {"digest": found})
        return found

    def save(self) -> None:
        """Write what is new; nothing if nothing is, or if there is no path."""
        if self.path is not None and self._new:
            stored = json.dumps({"format": FORMAT, "videos": self._entries}, separators=(",", ":"))
            write_atomically(self.path, stored, 0o600)
            self._new = False

    def _entry(self, file: Path) -> dict[str, Any] | None:
        entry = self._entries.get(str(file.resolve()))
        return entry if entry is not None and tuple(entry["state"]) == tuple(state_of(file)) else None

    def _put(self, file: Path, state: State, facts: dict[str, Any]) -> None:
        if self.path is not None:
            self._entries[str(file.resolve())] = {"state": list(state)} | facts
            self._new = True


def _packed(video: Video) -> dict[str, Any]:
    stored = {name: getattr(video, name) for name in ("frames", "height", "width", "turn", "rate", "tick", "stamped")}
    arrays = {name: _runs(getattr(video, name)) for name in ("times", "keys", "seeks")}
    return stored | arrays


def _unpacked(file: Path, state: State, stored: dict[str, Any]) -> Video:
    arrays = {name: _numbers(stored[name]) for name in ("times", "keys", "seeks")}
    return Video(file=file, state=state, **(stored | arrays))


def _runs(numbers: Numbers | None) -> list[int] | None:
    """The first number, then each difference with how often it comes in a row: most frames are equally far apart."""
    if numbers is None:
        return None
    steps = np.diff(numbers)
    if not len(steps):
        return [int(numbers[0])]
    starts = np.concatenate([[0], np.flatnonzero(np.diff(steps)) + 1])
    counts = np.diff(np.concatenate([starts, [len(steps)]]))
    return [int(numbers[0]), *np.stack([steps[starts], counts], 1).ravel().tolist()]


def _numbers(runs: list[int] | None) -> Numbers | None:
    if runs is None:
        return None
    steps = np.repeat(np.array(runs[1::2], np.int64), np.array(runs[2::2], np.int64))
    return np.concatenate([[0], np.cumsum(steps)]).astype(np.int64) + runs[0]
