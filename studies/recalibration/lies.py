"""Sources that lie: what they make of their answers. They know the question, their noise and each other."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from tacit.calibrate import Ask

Kind = Literal["extreme", "hidden", "flipped", "colluding", "small"]
WORDS: dict[str, str] = {
    "extreme": "the largest answer that is not refused",
    "hidden": "so far from the truth that it is just not taken for a lie",
    "flipped": "the opposite of the truth",
    "colluding": "all of them two standard deviations of the noise off, in the same direction",
    "small": "the same, one standard deviation off",
}


@dataclass(frozen=True)
class Lie:
    """``percent`` of the sources (at least one) lie in one way."""

    kind: Kind
    percent: float

    @classmethod
    def of(cls, text: str) -> Lie:
        kind, _, percent = text.rpartition("-")
        if kind not in get_args(Kind):
            raise ValueError(f"sources lie as one of {', '.join(get_args(Kind))}, such as extreme-5; not as {text!r}")
        return cls(kind, float(percent))  # type: ignore[arg-type]

    def tamper(self, size: int) -> Callable[[Tensor, Ask, float], Tensor]:
        """The function that changes the answers (trials x sources x values) of sources with ``size`` samples each."""

        def tampered(answers: Tensor, asked: Ask, scale: float) -> Tensor:
            liars = max(1, round(self.percent / 100 * answers.shape[1]))
            changed = answers.clone()
            part = changed[:, :liars]
            largest = max(abs(asked.statistic.low), asked.statistic.high)
            if self.kind == "extreme":
                part[:] = 2 * largest * (size + 1) + 27 * scale
            elif self.kind == "hidden":
                part.add_(0.2 * largest * size + 6 * math.sqrt(0.2 * size) + 20 * scale)
            elif self.kind == "flipped":
                part.neg_()
            else:
                part.add_((2 if self.kind == "colluding" else 1) * math.sqrt(2) * scale)
            return changed

        return tampered
