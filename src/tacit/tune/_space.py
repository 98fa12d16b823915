"""What is searched: a box of hyperparameters, and the one number that they are folded into."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Literal

from tacit._deprecation import renamed_fields

Way = Literal["balanced", "steps", "sampled"]
_WHOLE = ("steps", "batch_size")
_TRIES = 10_000  # of "sampled", before the nearest is taken
_CLOSE = 0.05  # how close to r a sampled product must be


@renamed_fields(batch="batch_size")
@dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """One point of the search space. `batch_size` and `clip` are None where they are not searched.

    Args:
        lr: The learning rate.
        steps: The number of steps.
        batch_size: The expected batch size.
        clip: The clip.
    """

    lr: float
    steps: int
    batch_size: int | None = None
    clip: float | None = None

    @property
    def r(self) -> float:
        """The total step size: lr * steps, times clip where that is searched (paper 3, A.4).

        The batch size is no factor: lr acts on the mean, so that a larger batch makes no longer steps. (The paper's lr
        acts on the sum, and its r has the batch size in it: the same number.)
        """
        return self.lr * self.steps * (1.0 if self.clip is None else self.clip)

    def __str__(self) -> str:
        said = [f"lr {self.lr:.4g}", f"{self.steps} steps"]
        said += [f"batch {self.batch_size}"] if self.batch_size is not None else []
        said += [f"clip {self.clip:.4g}"] if self.clip is not None else []
        return ", ".join(said)


@renamed_fields(batch="batch_size")
@dataclass(frozen=True, kw_only=True)
class Space:
    """The search space: from the smallest to the largest value of each hyperparameter; equal ends fix one.

    Args:
        lr: The range of the learning rate.
        steps: The range of the number of steps.
        batch_size: The range of the expected batch size, if it is searched.
        clip: The range of the clip, if it is searched.

    Raises:
        ValueError: An invalid range.

    Examples:
        >>> from tacit.tune import Space
        >>> space = Space(lr=(0.01, 1.0), steps=(10, 100))
        >>> point = space.decompose(10.0)  # the total step size r = lr * steps
        >>> point.steps, round(point.lr, 3)
        (46, 0.217)
    """

    lr: tuple[float, float]
    steps: tuple[int, int]
    batch_size: tuple[int, int] | None = None
    clip: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        for name, (low, high) in self.ranges.items():
            if not (0 < low <= high < math.inf):
                raise ValueError(
                    f"The range of {name} goes from a number above 0 up to a larger one; got {low}, {high}."
                )
            if name in _WHOLE and not (isinstance(low, int) and isinstance(high, int)):
                raise ValueError(f"The range of {name} is of whole numbers; got {low}, {high}.")

    @property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """The ranges that there are, by name."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: ends for name, ends in found.items() if ends is not None}

    @property
    def ends(self) -> tuple[float, float]:
        """The smallest and the largest r."""
        ranges = [ends for name, ends in self.ranges.items() if name != "batch_size"]
        return math.prod(low for low, _ in ranges), math.prod(high for _, high in ranges)

    def nearest(self, point: Hyperparameters) -> Hyperparameters:
        """The point of the box that is nearest: every value kept in its range; where steps had to change, the learning
        rate makes up for it if its range allows.
        """
        steps = min(max(point.steps, self.steps[0]), self.steps[1])
        values = {"lr": point.lr * point.steps / steps, "steps": float(steps)}
        for name in ("batch_size", "clip"):
            if name in self.ranges:
                value = getattr(point, name)
                values[name] = self.ranges[name][1] if value is None else value
        return self._point(values)

    def clamp(self, r: float) -> float:
        """The nearest r that the box has."""
        low, high = self.ends
        return min(max(r, low), high)

    def at(self, share: float) -> float:
        """The r that lies so far (0 to 1) between the ends, on a logarithmic scale."""
        low, high = self.ends
        return self.clamp(low * (high / low) ** share)

    def share(self, r: float) -> float:
        """How far between the ends r lies, 0 to 1; the inverse of `at`."""
        low, high = self.ends
        return math.log(self.clamp(r) / low) / math.log(high / low) if high > low else 0.0

    def draw(self, chance: random.Random) -> Hyperparameters:
        """A random point, each value log-uniform and independent of the others (the paper's third way)."""
        values = {name: low * (high / low) ** chance.random() for name, (low, high) in self.ranges.items()}
        return self._point(values)

    def grid(self, points: int) -> Iterator[Hyperparameters]:
        """All combinations of `points` values of each, evenly on a logarithmic scale; whole ones once each."""
        if points < 1:
            raise ValueError(f"A grid has at least one point a side; got {points}.")
        yield from dict.fromkeys(self._point(values) for values in _product(self.ranges, points))

    def decompose(self, r: float, way: Way = "balanced", chance: random.Random | None = None) -> Hyperparameters:
        """Values inside the box whose product is r (or, outside, the nearest r that the box has).

        - "balanced": every value lies equally far between its ends, on a logarithmic scale; nothing is drawn.
        - "steps": the number of steps is drawn, the learning rate is what is left (the paper's second way).
        - "sampled": all values are drawn until their product is within 5% of r (the paper's first way); if none of
          10,000 is, the nearest.

        Whole numbers are rounded, and the learning rate makes up for it where its range allows. A batch size is no part
        of r: it is the largest, at which a released mean has the least noise ("sampled" draws it).
        """
        if not r > 0:
            raise ValueError(f"r is a total step size, above 0; got {r:g}.")
        r, chance = self.clamp(r), chance or random.Random()
        if way == "sampled":
            return self._sampled(r, chance)
        share = self.share(r)
        shares = {name: 1.0 if name == "batch_size" else share for name in self.ranges}
        point = self._point({name: a * (b / a) ** shares[name] for name, (a, b) in self.ranges.items()})
        if way == "steps":
            point = replace(point, steps=self._drawn_steps(r, point, chance))
        return self._solved(r, point)

    def _drawn_steps(self, r: float, point: Hyperparameters, chance: random.Random) -> int:
        first, last = self._steps_for(r, point)
        drawn: int = round(first * (last / first) ** chance.random())
        return min(last, max(first, drawn))

    def _steps_for(self, r: float, point: Hyperparameters) -> tuple[int, int]:
        """The numbers of steps with which the learning rate stays in its range; the nearest one if there is none."""
        rest = replace(point, lr=1.0, steps=1).r
        first, last = self.steps
        needed, most = math.ceil(r / (rest * self.lr[1]) - 1e-9), math.floor(r / (rest * self.lr[0]) + 1e-9)
        if needed > most:
            needed = most = round(r / (rest * math.sqrt(self.lr[0] * self.lr[1])))
        return min(max(needed, first), last), max(min(most, last), first)

    def _solved(self, r: float, point: Hyperparameters) -> Hyperparameters:
        """The point with other steps, if need be, and the learning rate that makes its product r."""
        first, last = self._steps_for(r, point)
        point = replace(point, steps=min(max(point.steps, first), last))
        return replace(point, lr=_within(r / replace(point, lr=1.0).r, self.lr))

    def _sampled(self, r: float, chance: random.Random) -> Hyperparameters:
        best, distance = self._point({name: low for name, (low, _) in self.ranges.items()}), math.inf
        for _ in range(_TRIES):
            point = self.draw(chance)
            off = abs(math.log(point.r / r))
            if off < distance:
                best, distance = point, off
            if distance <= math.log1p(_CLOSE):
                break
        return best

    def _point(self, values: dict[str, float]) -> Hyperparameters:
        kept = {name: _within(value, self.ranges[name]) for name, value in values.items()}
        whole = {name: round(value) for name, value in kept.items() if name in _WHOLE}
        return Hyperparameters(**(kept | whole))  # type: ignore[arg-type]


def _within(value: float, ends: tuple[float, float]) -> float:
    return min(max(value, ends[0]), ends[1])


def _product(ranges: dict[str, tuple[float, float]], points: int) -> Iterator[dict[str, float]]:
    if not ranges:
        yield {}
        return
    (name, (low, high)), *rest = ranges.items()
    shares = [place / max(points - 1, 1) for place in range(points)] if high > low else [0.0]
    for others in _product(dict(rest), points):
        for share in shares:
            yield {name: low * (high / low) ** share} | others
