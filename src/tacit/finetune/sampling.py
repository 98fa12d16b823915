"""Who takes part in a step: drawn by chance at the rate that was charged, or by a fixed plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tacit.privacy import Receipt, sampling
from tacit.privacy.events import check_count


class Sampler(Protocol):
    """How often units take part, the public number that sums are divided by, and who it is in a step."""

    def rate(self, size: int) -> float:
        """With which probability a unit is drawn for a step; 1: no chance is involved."""

    def expected(self, size: int) -> float:
        """How many units a step has, on average."""

    def participations(self, steps: int) -> tuple[int, int]:
        """The most steps that one unit takes part in, and the least distance between two of them."""

    def draw(self, receipt: Receipt, step: int, people: int) -> Tensor:
        """The units, of 0 to `people` - 1, that take part in a step, in ascending order."""


@dataclass(frozen=True)
class Poisson:
    """Every unit, independently, with probability `batch` / size: batches vary in size and may be empty."""

    batch: int

    def __post_init__(self) -> None:
        check_count(self.batch, "A batch")

    def rate(self, size: int) -> float:
        return min(1.0, self.batch / size)

    def expected(self, size: int) -> float:
        return min(float(self.batch), float(size))

    def participations(self, steps: int) -> tuple[int, int]:
        return steps, 1

    def draw(self, receipt: Receipt, step: int, people: int) -> Tensor:
        del step
        return sampling.draw(receipt, people)


@dataclass(frozen=True)
class Everyone:
    """All units, in every step."""

    def rate(self, size: int) -> float:
        del size
        return 1.0

    def expected(self, size: int) -> float:
        return float(size)

    def participations(self, steps: int) -> tuple[int, int]:
        return steps, 1

    def draw(self, receipt: Receipt, step: int, people: int) -> Tensor:
        del step
        return sampling.draw(receipt, people)


@dataclass(frozen=True)
class Passes:
    """Everybody once in each of `passes` passes of `batches` steps: the unit in place i is in batch i mod `batches`.

    Formal guarantee: a unit's place alone decides its steps, `passes` of them, exactly `batches` apart. So who takes
    part does not depend on who else is there as long as places stay: a unit that is replaced or blanked keeps its own.
    """

    batches: int
    passes: int = 1

    def __post_init__(self) -> None:
        check_count(self.batches, "batches")
        check_count(self.passes, "passes")

    @property
    def steps(self) -> int:
        return self.batches * self.passes

    def rate(self, size: int) -> float:
        del size
        return 1.0

    def expected(self, size: int) -> float:
        return size / self.batches

    def participations(self, steps: int) -> tuple[int, int]:
        if steps > self.steps:
            raise ValueError(f"{self.passes} passes of {self.batches} batches are {self.steps} steps, not {steps}.")
        return self.passes, self.batches

    def draw(self, receipt: Receipt, step: int, people: int) -> Tensor:
        del receipt
        return torch.arange(step % self.batches, people, self.batches)
