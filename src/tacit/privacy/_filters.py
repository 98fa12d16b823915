"""How a subject's charges add up: four ways to compose, each with its cap.

Formal guarantee. A ledger lets later charges depend on what earlier ones released, so a running total is only valid
if it is a privacy *filter*: a quantity fixed in advance that the sum must not pass.

- ``gaussian``: the sum of mu^2 up to mu(epsilon, delta)^2 is a filter for Gaussian releases, exact and at no extra cost
  (Smith & Thakurta 2022; Koskela et al. 2023). A pure-epsilon release enters by the mu that dominates it.
- ``renyi``: the sum of Renyi divergences at one order fixed beforehand is a filter (Feldman & Zrnic 2021). It takes
  Poisson-sampled training that may stop early.
- ``plan``: the whole list of releases is declared first and composed by PLD, the tightest. Charges take entries off the
  list, in any order (the convolution of what is left does not depend on it), and unused ones are never refunded.
- ``pure``: delta is 0 and epsilons add up.

Costs are kept as integers of 2^-96, rounded up, so that ten thousand charges do not drift. A cap is held to one part in
10^12, the accuracy of the conversions themselves, so that a budget divided into n equal parts pays for n parts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import lru_cache

from tacit.privacy import accounting
from tacit.privacy._budget import Budget, Guarantee, Neighbours, Unit, epsilon_of, mu_of_pure
from tacit.privacy.events import DpEvent, is_sampled, leaves

# A filter promises its cap; what was spent so far is only a promise of its own if it was fixed in advance.
CHOSEN = "if charges were chosen by earlier releases,"
_UNITS = 2**96
_TOLERANCE = Fraction(1, 10**12)
_ROUNDING = 1e-12


class Mode(StrEnum):
    """How a subject composes; the guarantee names it."""

    GAUSSIAN = "gaussian"
    RENYI = "renyi"
    PLAN = "plan"
    PURE = "pure"

    @classmethod
    def _missing_(cls, value: object) -> Mode:
        raise ValueError(f"Unknown composition mode {value!r}: choose one of {', '.join(mode.value for mode in cls)}.")


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a subject declared once and for all."""

    budget: Budget
    unit: Unit
    neighbours: Neighbours
    mode: Mode
    order: float | None = None  # of the Renyi divergence

    def __post_init__(self) -> None:
        if (self.mode is Mode.PURE) != self.budget.pure:
            raise ValueError(
                "Pure epsilon (delta 0) and the pure mode go together: Gaussian noise needs a delta above 0."
            )
        if (self.mode is Mode.RENYI) != (self.order is not None):
            raise ValueError("The renyi mode, and only it, needs an order.")
        if self.order is not None and not self.order > 1:
            raise ValueError(f"A Renyi order is above 1; got {self.order:g}.")
        if self.private and self.mode is Mode.RENYI and self.cap <= 0:
            raise ValueError(f"Order {self.order:g} cannot serve {self.budget}: choose a higher one.")

    @property
    def private(self) -> bool:
        return self.budget.private

    @property
    def cap(self) -> float:
        """What the filter must not pass."""
        return _cap(self.mode, self.budget, self.order)

    def cost(self, event: DpEvent) -> float:
        """What an event adds to the filter; infinite for one without noise. Refused if this mode cannot take it.

        It is a number and at least 0: an event that a formula would price below, or beyond floating point, is refused.
        """
        try:
            found = self._cost(event)
        except ArithmeticError:
            raise accounting.UnsupportedEvent(
                "The price of this event is beyond floating point: its noise is too small or too large."
            ) from None
        if not found >= -_ROUNDING:
            raise accounting.UnsupportedEvent(f"The price of this event came out as {found:g}: no release costs that.")
        return max(0.0, found)  # a divergence that rounding has put just below 0

    def _cost(self, event: DpEvent) -> float:
        match self.mode:
            case Mode.GAUSSIAN:
                if is_sampled(event):
                    raise accounting.UnsupportedEvent(
                        "A sampled release is not a Gaussian one: give the subject the renyi or the plan mode."
                    )
                terms = accounting.take_apart(event, self.neighbours)
                pure = math.fsum(n * mu_of_pure(accounting.pure_of(e)) ** 2 for e, n in terms.others.items())
                return terms.mu**2 + pure
            case Mode.RENYI:
                return accounting.renyi(event, self.neighbours, [_known(self.order)])[0]
            case Mode.PURE:
                return accounting.pure_epsilon(event, self.neighbours)
        accounting.take_apart(event, self.neighbours)
        return 0.0

    def guarantee(self, spent: float, delta: float | None = None, *, seeded: bool = False) -> Guarantee:
        """What a filter that stands at ``spent`` promises (modes with a filter)."""
        budget = self.budget
        delta = budget.delta if delta is None else delta
        mu = None
        if self.mode is Mode.GAUSSIAN:
            mu = math.sqrt(spent)
            epsilon = epsilon_of(mu, delta)
        elif self.mode is Mode.RENYI:
            epsilon = accounting.epsilon_of_renyi(_known(self.order), spent, delta) if spent > 0 else 0.0
        else:
            epsilon = spent
        if delta == self.budget.delta and spent <= self.cap * (1 + 2e-12):
            epsilon = min(epsilon, self.budget.epsilon)
        return Guarantee(
            epsilon=epsilon,
            delta=delta,
            mu=mu,
            neighbours=self.neighbours,
            unit=self.unit,
            accountant={"gaussian": "sum of mu^2", "renyi": f"RDP at order {self.order:g}" if self.order else ""}.get(
                self.mode, "sum of pure epsilons"
            ),
            notes=(
                f"mode {self.mode}, spent so far: {CHOSEN} the budget ({budget.epsilon:g}, {budget.delta:g}) holds",
            ),
            seeded=seeded,
        )


@lru_cache
def _cap(mode: Mode, budget: Budget, order: float | None) -> float:
    if not budget.private:
        return math.inf
    match mode:
        case Mode.GAUSSIAN:
            return budget.mu**2
        case Mode.RENYI:
            return accounting.renyi_of_epsilon(_known(order), budget)
    return budget.epsilon


def _known(order: float | None) -> float:
    if order is None:
        raise ValueError("The renyi mode, and only it, needs an order.")
    return order


def to_units(cost: float) -> int | None:
    """A cost as an exact integer, rounded up; None stands for infinite."""
    return None if math.isinf(cost) else math.ceil(Fraction(cost) * _UNITS)


def from_units(units: int | None) -> float:
    return math.inf if units is None else float(Fraction(units, _UNITS))


def fits(spent: int | None, cost: int | None, cap: float) -> bool:
    """Whether a cost still fits under the cap."""
    if math.isinf(cap):
        return True
    if spent is None or cost is None:
        return False
    return spent + cost <= Fraction(cap) * (1 + _TOLERANCE) * _UNITS


def count(event: DpEvent) -> int:
    """The single releases of a tree."""
    return sum(times for _, times in leaves(event))
