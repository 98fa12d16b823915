"""The line of r against epsilon: fitted to the winners of the sweeps, kept, and read at any later target."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tacit._files import write_atomically
from tacit.privacy import mu_of
from tacit.tune._space import Hyperparameters, Space, Way

Axis = Literal["epsilon", "mu"]
_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Line:
    """r as a polynomial of epsilon (or mu), and the box that it stays in.

    Made of released scores and public numbers alone, so it may be kept, shared and read as often as one likes: what a
    later run costs is that run.

    Args:
        space: The box of hyperparameters, fixed before anything is searched.
        delta: At which epsilon is meant.
        points: (epsilon, r) of each sweep's winner.
        coefficients: The highest power first.
        axis: Whether r is a polynomial of epsilon or of mu.
        way: How r becomes hyperparameters (`Space.decompose`).
        decision: What was decided, in words.
    """

    space: Space
    delta: float
    points: tuple[tuple[float, float], ...]  # (epsilon, r) of each sweep's winner
    coefficients: tuple[float, ...]  # the highest power first
    axis: Axis = "epsilon"
    way: Way = "balanced"
    decision: str = ""  # in words

    def r(self, epsilon: float) -> float:
        """The r that the line has at `epsilon`, kept in the box."""
        return self.space.clamp(float(np.polyval(self.coefficients, self._place(epsilon))))

    def at(self, epsilon: float) -> Hyperparameters:
        """The hyperparameters for a run of `epsilon` (at the line's delta)."""
        return self.space.decompose(self.r(epsilon), self.way)

    def said(self, epsilon: float) -> list[str]:
        """What was decided on the way to `at(epsilon)`, in sentences."""
        found = [self.decision] if self.decision else []
        exact, (low, high) = float(np.polyval(self.coefficients, self._place(epsilon))), self.space.ends
        if not low <= exact <= high:
            side = "below" if exact < low else "above"
            found.append(
                f"The line has r = {exact:.4g} at epsilon {epsilon:.4g}, {side} the box: {self.r(epsilon):.4g}."
            )
        return found

    def save(self, path: str | Path) -> None:
        """Write the line as JSON; whole or not at all."""
        write_atomically(path, json.dumps({"format": _FORMAT} | asdict(self), indent=1))

    @classmethod
    def load(cls, path: str | Path) -> Line:
        """A line that `save` wrote."""
        try:
            stored = json.loads(Path(path).read_text())
            if stored.pop("format") != _FORMAT:
                raise ValueError("another format")
            box: dict[str, Any] = {name: ends and tuple(ends) for name, ends in stored.pop("space").items()}
            points = tuple(tuple(point) for point in stored.pop("points"))
            return cls(space=Space(**box), points=points, coefficients=tuple(stored.pop("coefficients")), **stored)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ValueError(f"{path} holds no line of this version of tacit.") from None

    def _place(self, epsilon: float) -> float:
        return epsilon if self.axis == "epsilon" else mu_of(epsilon, self.delta)


def fit_line(
    points: Sequence[tuple[float, float]],
    *,
    space: Space,
    delta: float,
    degree: int = 1,
    axis: Axis = "epsilon",
    way: Way = "balanced",
    best: tuple[float, float] | None = None,
) -> Line:
    """Least squares through the winners, (epsilon, r) of each sweep; the exact polynomial through degree + 1 of them.

    What cannot be a rising line is decided, and said:

    - no sweep has a winner: r is the middle of the box (on a logarithmic scale), at every epsilon;
    - fewer winners than the degree needs: a lower degree; of one winner r is in proportion to epsilon;
    - a line that falls, which the method gives no reason for: r is in proportion to epsilon, through `best`, the trial
      with the highest score of all (by default the last sweep's winner).

    Args:
        points: (epsilon, r) of each sweep's winner.
        space: The box of hyperparameters, fixed before anything is searched.
        delta: At which epsilon is meant.
        degree: Of the polynomial.
        axis: "epsilon" or "mu".
        way: How r becomes hyperparameters (`Space.decompose`).
        best: (epsilon, r) of the trial with the highest score.

    Returns:
        The line.
    """
    if degree < 1:
        raise ValueError(f"The degree is at least 1; got {degree}.")
    found = sorted(points)
    made = Line(space=space, delta=delta, points=tuple(found), coefficients=(), axis=axis, way=way)

    def line(coefficients: Sequence[float], decision: str = "") -> Line:
        return Line(
            space=space,
            delta=delta,
            points=made.points,
            coefficients=tuple(float(c) for c in coefficients),
            axis=axis,
            way=way,
            decision=decision,
        )

    if not found:
        return line([space.at(0.5)], "No trial gave a score: r is the middle of the box.")
    places, rs = [made._place(epsilon) for epsilon, _ in found], [r for _, r in found]
    epsilon, r = best or found[-1]
    proportional = [r / made._place(epsilon), 0.0]
    if len(found) == 1:
        return line(proportional, "One sweep alone gave a score: r is in proportion to epsilon.")
    lowered = min(degree, len(found) - 1)
    note = "" if lowered == degree else f"Only {len(found)} sweeps gave a score: the line has degree {lowered}."
    slope = float(np.polyfit(places, rs, 1)[0])
    if slope < 0 and not math.isclose(min(rs), max(rs)):
        return line(
            proportional,
            f"r fell from {rs[0]:.4g} to {rs[-1]:.4g} as epsilon rose, where the method expects a rising line; whether "
            "that is noise or the task, these trials do not say. r is in proportion to epsilon, as in the trial with "
            f"the highest score ({r:.4g} at epsilon {epsilon:.4g}).",
        )
    if math.isclose(min(rs), max(rs)):
        return line([rs[0]], "The sweeps have the same winner: r stays as it is.")
    return line(np.polyfit(places, rs, lowered).tolist(), note)
