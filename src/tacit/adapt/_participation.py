"""Who took part when: no unit in more than k steps, nor sooner than b steps after the last. Enforced, not believed."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tacit._files import write_atomically

_MARK = 64  # bytes
_UNNAMED = f"{1 << 63}\n"  # the line that says that somebody came without an id; it names no unit to earlier versions
_MOVED = (
    "The list of who took part is not where it was: another process has resumed this stream and moved it, or somebody "
    "has. Stop here, or resume the last checkpoint with private= naming its folder."
)


class Participation:
    """Counts the steps of each unit. Private: kept in memory, and in a 0600 file where the run is to survive a kill.

    The file gets one line per step, on disk before the step's release, so that a unit never takes part once more
    because a process died. Where an older process still writes there, what counts is the order of the lines: a unit
    is admitted by what stands before the own line. Where a newer one has moved the file, the older one admits nobody.

    Attributes:
        unnamed: Whether anybody came without an id. A checkpoint does not know of those that came after it.
    """

    def __init__(self, contributions: int, separation: int) -> None:
        self._contributions = contributions
        self._separation = separation
        self._path: Path | None = None
        self._mark = b""  # how the file begins: each that is made has a first line of its own
        self._read = 0  # bytes of the file that were taken in
        self._seen: dict[int, tuple[int, int]] = {}  # unit -> (steps it took part in, the last of them)
        self.unnamed = False

    def admit(self, units: Tensor, step: int) -> Tensor:
        """Which rows may take part at this step (all rows of a unit or none); notes who does.

        A step that is tried again counts once: only a step that released nothing keeps its number.
        """
        wanted = {unit for unit in units.tolist() if self._may(unit, step)}
        allowed = wanted
        if self._path is not None and wanted:
            own = _line(step, wanted)
            self._append(self._path, own)
            allowed = set()
            for line in self._new_lines(self._path):
                if line == own:
                    allowed = {unit for unit in wanted if self._may(unit, step)}
                self._note(line)
        else:
            self._note(_line(step, wanted))
        return torch.tensor([unit in allowed for unit in units.tolist()], dtype=torch.bool)

    def admit_unnamed(self) -> None:
        """Rows without ids take part: noted before their release, so that nothing says that every row had one."""
        if self._path is None:
            self.unnamed = True
        elif not self.unnamed:
            self._append(self._path, _UNNAMED)
            for line in self._new_lines(self._path):
                self._note(line)
            if not self.unnamed:
                raise OSError(f"The end of {self._path} is damaged: that rows come without ids must be noted there.")

    def resume(self, path: Path) -> None:
        """Take over what an earlier process noted, and go on noting there."""
        if not path.exists():
            write_atomically(path, _first_line(), 0o600)
        found = path.read_bytes()
        self._path, self._mark, self._read = path, found[:_MARK], 0
        self._seen.clear()
        self.unnamed = False
        if not found.endswith(b"\n"):  # cut off by a kill, hence before its release
            self._append(path, "\n")
        for line in self._new_lines(path):
            self._note(line)

    @property
    def anyone(self) -> bool:
        """Whether anybody was noted."""
        return bool(self._seen)

    def keep_at(self, path: Path) -> None:
        """From now on note every step in a file as well, beginning with those so far."""
        if self._path == path:
            return
        for line in [] if self._path is None else self._new_lines(self._path):  # of an older process, until now
            self._note(line)
        past = [_line(last - i, [unit]) for unit, (times, last) in self._seen.items() for i in reversed(range(times))]
        content = "".join([_first_line(), *([_UNNAMED] if self.unnamed else []), *past]).encode()
        write_atomically(path, content, 0o600)  # half of it would let the others take part once more
        before, self._path = self._path, path
        self._mark, self._read = content[:_MARK], len(content)
        if before is not None and before.exists() and not before.samefile(path):
            before.unlink()  # whoever resumes by it would not know who comes from now on

    def _may(self, unit: int, step: int) -> bool:
        times, last = self._seen.get(unit, (0, -1))
        if times and step == last:
            return True
        return times < self._contributions and (times == 0 or step - last >= self._separation)

    def _note(self, line: str) -> None:
        try:
            step, *units = (int(word) for word in line.split() or ("0",))
        except ValueError:
            raise ValueError(f"The file {self._path}, which tells who took part, is damaged.") from None
        self.unnamed = self.unnamed or line == _UNNAMED
        for unit in units:
            times, last = self._seen.get(unit, (0, -1))
            if times == 0 or last != step:
                self._seen[unit] = (times + 1, max(last, step))

    def _append(self, path: Path, text: str) -> None:
        try:
            file = os.open(path, os.O_RDWR | os.O_APPEND)
        except FileNotFoundError:
            raise OSError(_MOVED) from None
        try:
            if os.read(file, len(self._mark)) != self._mark:
                raise OSError(_MOVED)
            if os.write(file, text.encode()) < len(text):
                raise OSError(f"There is no room left in {path}: who takes part must be noted before the step.")
            os.fsync(file)
        finally:
            os.close(file)

    def _new_lines(self, path: Path) -> list[str]:
        with path.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        complete = new[: new.rfind(b"\n") + 1]
        self._read += len(complete)
        return complete.decode().splitlines(keepends=True)


def numbered(ids: Any, rows: int) -> Tensor:
    """One integer per row: integers as they are, strings by a hash of 63 bits.

    Two strings with the same hash would be one unit: both would be protected together, and nothing is lost but a step.
    """
    try:
        if not isinstance(ids, Tensor | str) and len(ids) and all(isinstance(each, str) for each in ids):
            raw = [each.encode("utf-8", "surrogatepass") for each in ids]  # any string: none stops a stream
            ids = [int.from_bytes(blake2b(each, digest_size=8).digest(), "big") >> 1 for each in raw]
        labels = torch.as_tensor(ids).cpu()
    except (TypeError, ValueError, RuntimeError):
        labels = torch.empty(0)
    if labels.shape != (rows,) or labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"unit_ids are one integer or string per row: {rows} of them, in one dimension.")
    return labels.long()


def _first_line() -> str:
    """A line that names nobody and is in no other file."""
    return _line(secrets.randbits(62), [])


def _line(step: int, units: Iterable[int]) -> str:
    return " ".join(str(word) for word in (step, *sorted(units))) + "\n"
