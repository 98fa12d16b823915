"""Who took part when: nobody in more than k steps, nor sooner than b steps after the last. Enforced, not believed."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor


class Attendance:
    """Counts the steps of each unit. Private: kept in memory, and in a 0600 file where the run is to survive a kill.

    The file gets one line per step, on disk before the step's release, so that a unit never takes part once more
    because a process died.
    """

    def __init__(self, contributions: int, separation: int, path: Path | None = None) -> None:
        self._contributions = contributions
        self._separation = separation
        self._path = path
        self._seen: dict[int, tuple[int, int]] = {}  # unit -> (steps it took part in, the last of them)

    def admit(self, units: Tensor, step: int) -> Tensor:
        """Which rows may take part at this step (all rows of a unit or none); notes who does."""
        allowed = {unit for unit in set(units.tolist()) if self._may(unit, step)}
        if self._path is not None and allowed:
            self._write(step, allowed)
        for unit in allowed:
            self._seen[unit] = (self._seen.get(unit, (0, 0))[0] + 1, step)
        return torch.tensor([int(unit) in allowed for unit in units], dtype=torch.bool)

    def read(self, path: Path) -> None:
        """Take over what an earlier process noted, and go on noting there."""
        self._path = path
        self._seen.clear()
        if not path.exists():
            return
        for line in path.read_text().splitlines():
            step, *units = (int(word) for word in line.split())
            for unit in units:
                self._seen[unit] = (self._seen.get(unit, (0, 0))[0] + 1, step)

    def keep_at(self, path: Path) -> None:
        """From now on note every step in a file as well, beginning with those so far."""
        if self._path is None:
            self._path = path
            for unit, (times, last) in self._seen.items():
                for _ in range(times):
                    self._write(last, {unit})

    def _may(self, unit: int, step: int) -> bool:
        times, last = self._seen.get(unit, (0, 0))
        return times < self._contributions and (times == 0 or step - last >= self._separation)

    def _write(self, step: int, units: set[int]) -> None:
        line = " ".join(str(word) for word in (step, *sorted(units))) + "\n"
        if self._path is None:
            return
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(file, line.encode())
            os.fsync(file)
        finally:
            os.close(file)
