"""Who takes part in a step: Poisson-subsampled, a sample of fixed size or a bin, as charged, or by a fixed plan."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from tacit.privacy import Receipt, events, sampling
from tacit.privacy.events import DpEvent, check_count

_HASH_KEY = b"tacit: which batch an id belongs to"


class Sampler(Protocol):
    """How often units take part, the public number that sums are divided by, and who it is in a step."""

    def rate(self, size: int) -> float:
        """With which probability a unit is drawn for a step; 1: no chance is involved."""

    def expected(self, size: int) -> float:
        """How many units a step has, on average."""

    def participations(self, steps: int) -> tuple[int, int]:
        """The most steps that one unit takes part in, and the least distance between two of them."""

    def draw(self, receipt: Receipt, step: int, people: int, *, ahead: int = 0) -> Tensor:
        """The units, of 0 to `people` - 1, that take part in a step, in ascending order.

        `ahead`: the step is that many after the one whose release is the receipt's next.
        """

    def event(self, size: int, release: DpEvent, steps: int = 1) -> DpEvent:
        """`steps` steps of `size` units, each of which draws and then makes this release."""


class _Independent(Sampler):
    """Each unit takes part or not whoever else does: Poisson subsampling, or none."""

    def event(self, size: int, release: DpEvent, steps: int = 1) -> DpEvent:
        return events.poisson(self.rate(size), release, steps)


@dataclass(frozen=True)
class _Subsampled(Sampler):
    """A subset of `batch_size` units, exactly or on average, that the receipt draws anew in every step."""

    batch_size: int

    def __post_init__(self) -> None:
        check_count(self.batch_size, "A batch")

    def rate(self, size: int) -> float:
        return min(1.0, self.batch_size / size)

    def expected(self, size: int) -> float:
        return min(float(self.batch_size), float(size))

    def participations(self, steps: int) -> tuple[int, int]:
        return steps, 1

    def draw(self, receipt: Receipt, step: int, people: int, *, ahead: int = 0) -> Tensor:
        del step
        return sampling.draw(receipt, people, ahead=ahead)


@dataclass(frozen=True)
class Poisson(_Subsampled):
    """Poisson subsampling: every unit, independently, with probability `batch_size` / size.

    Batches vary in size and may be empty.

    Args:
        batch_size: The expected batch size.
    """

    def event(self, size: int, release: DpEvent, steps: int = 1) -> DpEvent:
        return events.poisson(self.rate(size), release, steps)


@dataclass(frozen=True)
class FixedSize(_Subsampled):
    """Exactly `batch_size` units, every set of them as likely: a sample without replacement, anew in every step.

    Batches never vary in size, which static shapes and memory like. It is bounded under replace-one alone, where who
    comes in a unit's place may be as far from it as a unit can be: it asks for more noise than Poisson subsampling.

    Formal guarantee: see `privacy.sampling.draw`; the number of units is the one that was charged, or nothing is drawn.

    Args:
        batch_size: The batch size.
    """

    def event(self, size: int, release: DpEvent, steps: int = 1) -> DpEvent:
        return events.without_replacement(min(self.batch_size, size), size, release, steps)


@dataclass(frozen=True)
class BallsInBins(_Subsampled):
    """Balls-in-bins sampling: every unit is in one batch of each epoch, thrown there at random before the epoch.

    An epoch has ceil(size / `batch_size`) steps, size being the declared one; batches vary in size and may be empty.
    The last epoch may be cut short.

    Formal guarantee: see `privacy.sampling.draw`; every unit is thrown by itself, whoever else is there. Accounted by
    PLD under add-remove and zero-out (docs/proofs.md, lemma 13b). Thrown once, a unit is in the same steps of all
    epochs; thrown anew, epochs compose, which costs less.

    Args:
        batch_size: The expected batch size.
        anew: Throw anew in every epoch (random allocation), not once and for all epochs.
    """

    anew: bool = False

    def bins(self, size: int) -> int:
        """How many steps an epoch has."""
        return -(-size // self.batch_size)

    def rate(self, size: int) -> float:
        return 1 / self.bins(size)

    def expected(self, size: int) -> float:
        return size / self.bins(size)

    def event(self, size: int, release: DpEvent, steps: int = 1) -> DpEvent:
        noise, bins = events.gaussian_noise(release), self.bins(size)
        if noise is None:
            raise ValueError("Balls-in-bins sampling is accounted for Gaussian noise only.")
        if not self.anew:
            return events.balls_in_bins(noise, bins=bins, steps=steps)
        epochs, rest = divmod(steps, bins)
        whole = [events.repeat(events.balls_in_bins(noise, bins=bins, steps=bins), epochs)] if epochs else []
        parts = whole + ([events.balls_in_bins(noise, bins=bins, steps=rest)] if rest else [])
        return parts[0] if len(parts) == 1 else events.compose(parts)


@dataclass(frozen=True)
class Everyone(_Independent):
    """No subsampling: all units, in every step."""

    def rate(self, size: int) -> float:
        del size
        return 1.0

    def expected(self, size: int) -> float:
        return float(size)

    def participations(self, steps: int) -> tuple[int, int]:
        return steps, 1

    def draw(self, receipt: Receipt, step: int, people: int, *, ahead: int = 0) -> Tensor:
        del step
        return sampling.draw(receipt, people, ahead=ahead)


@dataclass(frozen=True)
class Passes(_Independent):
    """Every unit once in each of `passes` passes of `batches` steps, in the same batch every time.

    The batch of a unit with an id of its own is a public keyed hash of that id modulo `batches`: batches are about
    equally large. A unit that has none is known by its place i, and is in batch i mod `batches`.

    Formal guarantee: a unit's own id (or place) alone decides its steps, `passes` of them, exactly `batches` apart.
    So no unit's steps depend on who else is there: with ids, one unit more or less changes the sums of its own steps
    and no other; with places, that holds as long as places stay, as they do where a unit is replaced or blanked.

    Args:
        batches: Batches per pass.
        passes: Participations of each unit.
        batch_of_unit: The batch of each unit; None: by place.
    """

    batches: int
    passes: int = 1
    batch_of_unit: Tensor | None = field(
        default=None, repr=False, compare=False
    )  # the batch of each unit; None: by place

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
        return replace(self, batch_of_unit=None if ids is None else batch_of(ids, self.batches))

    def draw(self, receipt: Receipt, step: int, people: int, *, ahead: int = 0) -> Tensor:
        del receipt, ahead
        if self.batch_of_unit is None:
            return torch.arange(step % self.batches, people, self.batches)
        if len(self.batch_of_unit) != people:
            raise ValueError(f"These passes are over {len(self.batch_of_unit)} units, not {people}.")
        return torch.nonzero(self.batch_of_unit == step % self.batches).flatten()


@dataclass(frozen=True)
class CyclicPoisson(_Independent):
    """Poisson subsampling of one group of units after the other: in step t, of the group t mod `bands`.

    The group of a unit with an id of its own is a public keyed hash of that id, as in `Passes`; one that has none is
    known by its place. Within its group every unit is drawn independently, with probability `batch_size` * `bands` /
    size, so that a batch has `batch_size` units on average.

    Formal guarantee: a unit's own id (or place) decides its group and nothing else decides whether it is drawn: two
    draws of one unit are at least `bands` steps apart. The rate is that of the receipt.

    Args:
        batch_size: The expected batch size.
        bands: The number of groups.
        group_of_unit: The group of each unit; None: by place.
    """

    batch_size: int
    bands: int
    group_of_unit: Tensor | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_count(self.batch_size, "A batch")
        check_count(self.bands, "bands")

    def rate(self, size: int) -> float:
        if self.batch_size * self.bands > size:
            raise ValueError(
                f"{self.bands} groups of {size:,} units have fewer than {self.batch_size:,} each: give fewer bands (at "
                f"most {size // self.batch_size}) or a smaller batch_size."
            )
        return self.batch_size * self.bands / size

    def expected(self, size: int) -> float:
        del size
        return float(self.batch_size)

    def participations(self, steps: int) -> tuple[int, int]:
        return -(-steps // self.bands), self.bands

    def over(self, ids: Sequence[int] | Sequence[str] | None) -> CyclicPoisson:
        """The same groups over units with these ids."""
        return replace(self, group_of_unit=None if ids is None else batch_of(ids, self.bands))

    def draw(self, receipt: Receipt, step: int, people: int, *, ahead: int = 0) -> Tensor:
        drawn = sampling.draw(receipt, people, ahead=ahead)
        if self.group_of_unit is None:
            return drawn[drawn % self.bands == step % self.bands]
        if len(self.group_of_unit) != people:
            raise ValueError(f"These groups are of {len(self.group_of_unit)} units, not {people}.")
        return drawn[self.group_of_unit[drawn] == step % self.bands]


def batch_of(ids: Sequence[int] | Sequence[str], batches: int) -> Tensor:
    """Which batch each id belongs to: a hash of that id alone, under a key that everybody knows."""

    def place(name: int | str) -> int:
        kind = "i" if isinstance(name, int) else "s"
        found = hashlib.blake2b(f"{kind}{name}".encode(), digest_size=8, key=_HASH_KEY).digest()
        return int.from_bytes(found, "big") % batches

    return torch.tensor([place(name) for name in ids], dtype=torch.long)
