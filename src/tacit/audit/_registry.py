"""Which audit attacks which release. A release that names none fails a test (`tests/audit/test_registry.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tacit.audit._findings import Finding


@dataclass(frozen=True)
class Effort:
    """How long an audit may take: a factor on the number of trials. ``FULL`` is what the page shows."""

    factor: float

    def trials(self, full: int, *, least: int = 400) -> int:
        return max(least, round(self.factor * full))


QUICK, FULL = Effort(0.02), Effort(1.0)
Attack = Callable[[Effort], Iterator[Finding]]


@dataclass(frozen=True)
class Audit:
    """An attack and the functions whose releases it attacks, by package and name."""

    name: str
    covers: tuple[str, ...]
    attack: Attack


REGISTRY: dict[str, Audit] = {}


def audits(name: str, *covers: str) -> Callable[[Attack], Attack]:
    """Register an attack on these functions: ``privacy.mechanisms.gaussian``, ``calibrate.Source.answer``."""

    def register(attack: Attack) -> Attack:
        if name in REGISTRY:
            raise ValueError(f"There is an audit called {name} already.")
        REGISTRY[name] = Audit(name, covers, attack)
        return attack

    return register


def covered() -> set[str]:
    """Every function that some audit attacks."""
    return {each for audit in REGISTRY.values() for each in audit.covers}
