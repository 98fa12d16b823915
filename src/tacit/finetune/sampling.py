"""Who takes part in a step. The draw itself is `privacy.sampling`'s, at the rate that was charged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tacit.privacy.events import check_count


class Sampler(Protocol):
    """At which rate units are drawn, and the public number that sums are divided by."""

    def rate(self, size: int) -> float: ...

    def expected(self, size: int) -> float: ...


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


@dataclass(frozen=True)
class Everyone:
    """All units, in every step."""

    def rate(self, size: int) -> float:
        del size
        return 1.0

    def expected(self, size: int) -> float:
        return float(size)
