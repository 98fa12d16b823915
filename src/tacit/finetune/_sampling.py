"""Who takes part in a step: Poisson-subsampled at the rate that was charged, or by a fixed plan."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from tacit.privacy import Receipt, sampling
from tacit.privacy.events import check_count

_DEAL = b"tacit: which batch an id belongs to"


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
    """Poisson subsampling: every unit, independently, with probability `batch` / size. Batches vary in size and may be
    empty.

    Args:
        batch: The expected batch size.
    """

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
    """No subsampling: all units, in every step."""

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
    """Every unit once in each of `passes` passes of `batches` steps, in the same batch every time.

    The batch of a unit with an id of its own is a public keyed hash of that id modulo `batches`: batches are about
    equally large. A unit that has none is known by its place i, and is in batch i mod `batches`.

    Formal guarantee: a unit's own id (or place) alone decides its steps, `passes` of them, exactly `batches` apart.
    So nobody's steps depend on who else is there: with ids, one unit more or less changes the sums of its own steps and
    no other; with places, that holds as long as places stay, as they do where a unit is replaced or blanked.

    Args:
        batches: Batches per pass.
        passes: Participations of each unit.
        dealt: The batch of each unit; None: by place.
    """

    batches: int
    passes: int = 1
    dealt: Tensor | None = field(default=None, repr=False, compare=False)  # the batch of each unit; None: by place

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

    def over(self, ids: Sequence[int] | Sequence[str] | None) -> Passes:
        """The same passes over units with these ids."""
        return replace(self, dealt=None if ids is None else batch_of(ids, self.batches))

    def draw(self, receipt: Receipt, step: int, people: int) -> Tensor:
        del receipt
        if self.dealt is None:
            return torch.arange(step % self.batches, people, self.batches)
        if len(self.dealt) != people:
            raise ValueError(f"These passes are over {len(self.dealt)} units, not {people}.")
        return torch.nonzero(self.dealt == step % self.batches).flatten()


def batch_of(ids: Sequence[int] | Sequence[str], batches: int) -> Tensor:
    """Which batch each id belongs to: a hash of that id alone, under a key that everybody knows."""

    def place(name: int | str) -> int:
        kind = "i" if isinstance(name, int) else "s"
        found = hashlib.blake2b(f"{kind}{name}".encode(), digest_size=8, key=_DEAL).digest()
        return int.from_bytes(found, "big") % batches

    return torch.tensor([place(name) for name in ids], dtype=torch.long)
