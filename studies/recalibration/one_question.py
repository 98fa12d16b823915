"""The gap curve with the whole budget in one question."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tacit.calibrate import GapCurve


@dataclass(frozen=True, kw_only=True)
class OneQuestion(GapCurve):
    """``GapCurve(steps=1)`` under a name of its own, so that a recipe can have both."""

    name: ClassVar[str] = "one-question"
    steps: int | None = 1
