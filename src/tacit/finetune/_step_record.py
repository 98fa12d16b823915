"""What each step of a run was computed from, in a few numbers, so that a replay of something else is noticed.

A replayed step has the noise that it had. If its sum is another one (the loss, a schedule or the loop around it has
changed, which no fingerprint shows), the difference of the two releases has no noise at all.
"""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from tacit.privacy import BoundedSum

_NUMBERS, _PERIOD = 8, 8191  # of a sketch; and after how many coordinates its directions come again
_CPU, _OTHER = 1e-5, 1e-2  # of bound * sqrt(units): what replays differ by, by another order of additions
CHANGED = (
    "This step was computed before, of other sums: the loss, the schedule, the optimizer or the loop has changed since "
    "the run was interrupted. Its noise is the same, so the two together would give the rows away. Nothing of it was "
    "released: run the program as it was to go on, or start a new run with another path."
)


class StepRecord:
    """A private file (0600) with a sketch of each step's sum, written before the step is released.

    Formal guarantee: a step whose sum differs from the one that was recorded for it, by more than what another order of
    additions explains, is refused before it is released. A kill of the process loses no line; the failure of the
    machine may lose the last ones, and then those steps are not compared. The sketch is as private as the sum.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[int, list[float]] | None = None

    def check(self, step: int, total: BoundedSum, units: float) -> None:
        """Compare a step with what was recorded of it, or record it.

        Args:
            step: Its number.
            total: Its sum, before the noise.
            units: The expected number of units in it.

        Raises:
            RuntimeError: It was another sum before.
        """
        if self._known is None:
            self._known = self._read()
        made = sketch(total)
        before = self._known.get(step)
        if before is None:
            self._append(step, made)
            self._known[step] = made
            return
        on_cpu = all(value.device.type == "cpu" for value in total.sum.values())
        slack = (_CPU if on_cpu else _OTHER) * math.hypot(*total.bounds.values()) * math.sqrt(max(1.0, units))
        if len(before) != len(made) or not all(abs(a - b) <= slack for a, b in zip(before, made, strict=True)):
            raise RuntimeError(CHANGED)

    def remove(self) -> None:
        """Forget all steps."""
        self.path.unlink(missing_ok=True)
        self._known = None

    def _append(self, step: int, made: list[float]) -> None:
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(file, f"\n{json.dumps([step, made])}\n".encode())  # on a line of its own, whatever a kill has cut
        finally:
            os.close(file)

    def _read(self) -> dict[int, list[float]]:
        if not self.path.exists():
            return {}
        found: dict[int, list[float]] = {}
        for line in self.path.read_text().splitlines():
            with suppress(ValueError):  # what a kill has cut: that step was not released
                step, made = json.loads(line)
                found.setdefault(step, made)
        return found


def sketch(total: BoundedSum) -> list[float]:
    """A few scalar products of a sum with fixed directions: sums that agree in all of them are taken to be the same."""
    directions, found = _directions(), torch.zeros(_NUMBERS, dtype=torch.float64)
    for place, name in enumerate(sorted(total.sum)):
        flat = total.sum[name].detach().cpu().double().flatten()
        whole = len(flat) // _PERIOD * _PERIOD
        folded = torch.zeros(_PERIOD, dtype=torch.float64)
        folded += flat[:whole].view(-1, _PERIOD).sum(0)
        folded[: len(flat) - whole] += flat[whole:]
        found += (folded @ directions) * (1 + place % 7 / 7)
    return [float(value) for value in found]


@lru_cache(maxsize=1)
def _directions() -> Tensor:
    return torch.randn(_PERIOD, _NUMBERS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
