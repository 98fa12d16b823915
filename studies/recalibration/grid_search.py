"""Grid search: the same questions as golden section, but all at temperatures fixed beforehand. For comparison only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from tacit.calibrate import ECET, NLLT, AccT, Ask, Method, Outcome, Search, Setting

_GOALS: dict[str, AccT | NLLT | ECET] = {"gap": AccT(), "nll": NLLT(), "ece": ECET()}


@dataclass(frozen=True, kw_only=True)
class GridSearch(Method):
    """``iterations`` + 1 evenly spaced temperatures are asked for, and the best is taken (paper, appendix D.1)."""

    name: ClassVar[str] = "grid"
    goal: Literal["gap", "nll", "ece"] = "gap"
    iterations: int = 5
    low: float = 0.5
    high: float = 3.0

    def queries(self, setting: Setting) -> int:  # noqa: ARG002
        return self.iterations + 1

    def search(self, setting: Setting, trials: int = 1) -> Search:  # noqa: ARG002
        method = _GOALS[self.goal]
        points = self.iterations + 1
        width = (self.high - self.low) / points
        grid = self.low + width * (torch.arange(points, dtype=torch.float64) + 0.5)
        values = []
        for temperature in grid:
            totals = yield Ask(statistic=method.statistic, temperatures=temperature.expand(trials))
            values.append(method.objective(totals[-1]))
        return Outcome(temperature=grid[torch.stack(values, dim=1).argmin(dim=1)])
