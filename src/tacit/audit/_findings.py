"""What is claimed, what an attack found, and the two side by side."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tacit.audit._bounds import epsilon_lower, mu_lower
from tacit.privacy import Guarantee, Neighbours, UnsupportedEvent, accounting, events

Measure = Literal["mu", "epsilon"]
CONFIDENCE = 1 - 1e-9  # of one finding; a hundred of them raise a false alarm with a probability below 1e-7


class PromiseBroken(Exception):
    """An attack found more than was claimed."""

    def __init__(self, findings: Iterable[Finding]) -> None:
        self.findings = [finding for finding in findings if not finding.holds]
        super().__init__("Claims that do not hold: " + "; ".join(map(str, self.findings)))


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What a mechanism promises: mu-GDP where ``mu`` is given, (epsilon, delta)-DP otherwise."""

    epsilon: float | None = None
    delta: float = 0.0
    mu: float | None = None
    note: str = ""

    def __post_init__(self) -> None:
        value = self.mu if self.mu is not None else self.epsilon
        if value is None or not value >= 0 or not 0 <= self.delta < 1:
            raise ValueError("A claim is a mu, or an epsilon with its delta: numbers that are not negative.")

    @classmethod
    def of(cls, promised: Any, *, neighbours: Neighbours | str = Neighbours.ADD_REMOVE, delta: float = 1e-5) -> Claim:
        """The claim of a guarantee or a budget, or of an event under a relation.

        A tree of unsampled Gaussians claims a mu, a pure release an epsilon at delta 0, everything else an epsilon at
        ``delta``: what ``accounting.guarantee`` says.
        """
        if isinstance(promised, Claim):
            return promised
        if isinstance(promised, events.DpEvent):
            relation = Neighbours(neighbours)
            with suppress(UnsupportedEvent):
                pure = accounting.guarantee(promised, delta=0.0, neighbours=relation)
                return cls(epsilon=pure.epsilon, note=str(relation))
            found = accounting.guarantee(promised, delta=delta, neighbours=relation)
            return cls(epsilon=found.epsilon, delta=delta, mu=found.mu, note=str(relation))
        mu = promised.mu if isinstance(promised, Guarantee) else None
        return cls(epsilon=promised.epsilon, delta=promised.delta, mu=mu)

    @property
    def measure(self) -> Measure:
        return "mu" if self.mu is not None else "epsilon"

    @property
    def value(self) -> float:
        return float(self.mu if self.mu is not None else self.epsilon or 0.0)

    def lower(self, false_positive: float, false_negative: float) -> float:
        """What error rates say about this claim's measure at least."""
        if self.mu is not None:
            return mu_lower(false_positive, false_negative)
        return epsilon_lower(false_positive, false_negative, self.delta)

    def __str__(self) -> str:
        if self.mu is not None:
            return f"mu {self.value:.4g}"
        return f"epsilon {self.value:.4g}" + (f" at delta {self.delta:g}" if self.delta else "")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One attack on one claim: ``measured`` is a lower bound with ``confidence``, ``claimed`` the upper bound."""

    name: str
    measure: Measure
    claimed: float
    measured: float
    delta: float = 0.0
    trials: int
    confidence: float
    seconds: float = 0.0
    note: str = ""

    @property
    def holds(self) -> bool:
        return not self.measured > self.claimed

    @property
    def tightness(self) -> float:
        """How much of the claim the attack found; above 1 the claim is wrong."""
        if self.claimed == 0:
            return math.inf if self.measured > 0 else 1.0
        return 0.0 if math.isinf(self.claimed) else self.measured / self.claimed

    def facts(self) -> dict[str, Any]:
        """The fields alone: `Finding(**facts)` is the finding again."""
        return asdict(self)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"holds": self.holds, "tightness": self.tightness}

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.measure} at least {self.measured:.4g} with confidence 1 - {1 - self.confidence:.0e} "
            f"after {self.trials:,} trials; claimed {self.claimed:.4g}"
        )


def markdown(findings: Sequence[Finding]) -> str:
    """The findings as a table of a page."""
    lines = [
        "| attacked | measure | claimed at most | found at least | tightness | trials | confidence |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for each in findings:
        measure = each.measure + (f" (delta {each.delta:g})" if each.measure == "epsilon" and each.delta else "")
        lines.append(
            f"| {each.name} | {measure} | {each.claimed:.4g} | {each.measured:.4g} | {100 * each.tightness:.0f}% "
            f"| {each.trials:,} | 1 - {1 - each.confidence:.0e} |"
        )
    return "\n".join(lines) + "\n"


def sentence(findings: Sequence[Finding]) -> str:
    """One line for a page or a card: what was attacked, and the most that was found of any claim."""
    if not findings:
        return "Not attacked."
    trials, worst = sum(each.trials for each in findings), max(findings, key=lambda each: each.tightness)
    broken = [each.name for each in findings if not each.holds]
    ending = f"BROKEN: {', '.join(broken)}." if broken else "No claim was contradicted."
    return (
        f"Attacked {len(findings)} kinds of release in {trials:,} trials: found at most {100 * worst.tightness:.0f}% "
        f"of what is claimed ({worst.name}: {worst.measure} at least {worst.measured:.3g} of {worst.claimed:.3g}). "
        + ending
    )
