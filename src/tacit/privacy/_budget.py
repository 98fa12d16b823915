"""What may be spent and what was promised, and the closed forms between epsilon, delta and mu.

A Gaussian release whose mean moves by at most ``mu`` standard deviations between neighbours satisfies

    delta(epsilon; mu) = Phi(-epsilon/mu + mu/2) - e^epsilon Phi(-epsilon/mu - mu/2)

and nothing better (Balle & Wang 2018, theorem 8; Dong, Roth & Su 2022, corollary 2.13). The three conversions below
are that equation, solved for each of its letters.
"""

from __future__ import annotations

import html
import math
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, ClassVar

import numpy as np
from scipy.optimize import brentq
from scipy.special import erfcx, erfinv, ndtr, ndtri

from tacit._json import to_plain
from tacit.privacy._plain_words import PlainWords, plain_words

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(20)


class Neighbours(StrEnum):
    """The neighbouring relation (adjacency): which pairs of data sets must be hard to tell apart.

    ``ADD_REMOVE``: one unit is present or absent. ``REPLACE_ONE``: one unit is replaced by any other. ``ZERO_OUT``: one
    unit's row is replaced by an empty one, all other places unchanged.

    Examples:
        >>> from tacit.privacy import Neighbours
        >>> Neighbours("replace-one").factor
        2
    """

    ADD_REMOVE = "add-remove"
    REPLACE_ONE = "replace-one"
    ZERO_OUT = "zero-out"

    @property
    def factor(self) -> int:
        """How far a sum of contributions of norm at most 1 moves between neighbours."""
        return 2 if self is Neighbours.REPLACE_ONE else 1

    @property
    def sentence(self) -> str:
        return {
            Neighbours.ADD_REMOVE: "is added or removed",
            Neighbours.REPLACE_ONE: "is replaced by any other",
            Neighbours.ZERO_OUT: "is replaced by nothing",
        }[self]

    @classmethod
    def _missing_(cls, value: object) -> Neighbours:
        known = ", ".join(member.value for member in cls)
        raise ValueError(f"Unknown neighbour relation {value!r}: choose one of {known}.")


class Unit(str):
    """The privacy unit, that is, what one "person" is: a sample, a video, a patient, a user, or any other short noun.

    Raises:
        ValueError: The name is empty, longer than 40 characters or not printable.

    Examples:
        >>> from tacit.privacy import Unit
        >>> Unit("patient") == Unit.PATIENT
        True
    """

    SAMPLE: ClassVar[Unit]
    VIDEO: ClassVar[Unit]
    PATIENT: ClassVar[Unit]
    USER: ClassVar[Unit]

    def __new__(cls, name: str) -> Unit:
        if not isinstance(name, str) or not name.strip() or len(name) > 40 or not name.isprintable():
            raise ValueError("A privacy unit is a short noun such as 'sample', 'video', 'patient' or 'user'.")
        return super().__new__(cls, name)


Unit.SAMPLE, Unit.VIDEO, Unit.PATIENT, Unit.USER = map(Unit, ("sample", "video", "patient", "user"))


@dataclass(frozen=True)
class Budget:
    """A privacy budget: the (epsilon, delta) that may be spent.

    ``delta=0`` is pure epsilon; ``epsilon=inf`` is no privacy at all, and is labelled so everywhere.

    Args:
        epsilon: Positive, or ``inf``.
        delta: Between 0 and 1; 0 admits pure-epsilon mechanisms (Laplace) only.

    Raises:
        ValueError: A value is out of range.

    Examples:
        >>> from tacit.privacy import Budget
        >>> round(Budget(epsilon=1.0, delta=1e-6).mu, 3)  # the largest Gaussian release that it pays for
        0.237
    """

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        check_epsilon(self.epsilon)
        check_delta(self.delta)
        for name in ("epsilon", "delta"):
            if not isinstance(getattr(self, name), int | float):  # in 16 or 32 bits mu would be rounded, also up
                object.__setattr__(self, name, float(getattr(self, name)))

    @property
    def pure(self) -> bool:
        return self.delta == 0

    @property
    def private(self) -> bool:
        return math.isfinite(self.epsilon)

    @property
    def mu(self) -> float:
        """The largest Gaussian release (in mu) that this budget pays for."""
        return mu_of(self.epsilon, self.delta)

    def __str__(self) -> str:
        return f"epsilon {self.epsilon:g}, delta {self.delta:g}" + ("" if self.private else " (not private)")


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """A differential privacy guarantee: outputs on neighbouring data sets are (epsilon, delta)-indistinguishable.

    ``str(guarantee)`` is a plain sentence for an auditor.

    Args:
        epsilon: The upper bound, the number to report.
        delta: The failure probability at which epsilon holds.
        mu: The parameter of Gaussian differential privacy, where the whole release is exactly as hard to tell apart as
            N(0, 1) and N(mu, 1).
        neighbours: The neighbouring relation; None if several subjects with different relations were composed.
        unit: What one unit is.
        lower: A lower bound on the epsilon of the composed mechanism, where the accountant gives one.
        estimate: Its estimate, where the accountant gives one.
        accountant: Which accountant composed it: "exact", "pld", "rdp", "gdp".
        notes: How the number came about: the accountant, a fall-back and its reason, the composition mode.
        seeded: The noise was reproducible, so that nothing is private.

    Examples:
        >>> from tacit.privacy import events, guarantee
        >>> promise = guarantee(events.gaussian(4.0), delta=1e-6)
        >>> round(promise.epsilon, 3), promise.mu
        (1.061, 0.25)
    """

    epsilon: float
    delta: float
    mu: float | None = None
    neighbours: Neighbours | None = Neighbours.ADD_REMOVE  # None: each data set under its own relation
    unit: Unit | str = Unit.SAMPLE
    lower: float | None = None
    estimate: float | None = None
    accountant: str = "exact"
    notes: tuple[str, ...] = ()
    seeded: bool = False

    @property
    def upper(self) -> float:
        return self.epsilon

    @property
    def private(self) -> bool:
        return math.isfinite(self.epsilon) and self.delta < 1 and not self.seeded

    def group(self, size: int) -> Guarantee:
        """The guarantee for ``size`` units that stand or fall together.

        Formal guarantee: mu-GDP becomes (size mu)-GDP (Dong et al. 2022, theorem 2.14); otherwise (epsilon, delta)
        becomes (k epsilon, delta (e^(k epsilon) - 1)/(e^epsilon - 1)), the chain of k neighbours.

        Args:
            size: The number of units, at least 1.

        Returns:
            The weaker guarantee that holds for the whole group.
        """
        if size < 1:
            raise ValueError("A group has at least one unit.")
        if self.mu is not None:
            mu = self.mu * size
            return replace(self, mu=mu, epsilon=epsilon_of(mu, self.delta), lower=None, estimate=None)
        epsilon, delta = self.epsilon * size, self.delta
        if delta > 0:
            growth = math.fsum(_exp(self.epsilon * i) for i in range(size))
            delta = min(1.0, delta * growth)
        return replace(self, epsilon=epsilon, delta=delta, lower=None, estimate=None)

    def under(self, neighbours: Neighbours) -> Guarantee:
        """This guarantee restated under another relation: replacing a unit is removing one and adding one.

        Args:
            neighbours: The relation to restate the guarantee under.

        Returns:
            The guarantee under that relation.

        Raises:
            ValueError: It cannot be derived from this guarantee alone.
        """
        if neighbours is self.neighbours:
            return self
        if neighbours is Neighbours.REPLACE_ONE and self.neighbours is not None:
            return replace(self.group(2), neighbours=neighbours)
        raise ValueError(f"A {self.neighbours} guarantee says nothing about {neighbours}: account under that relation.")

    @property
    def plain_words(self) -> PlainWords:
        """Who is protected, from what and how strongly, for people who do not know what epsilon is."""
        return plain_words(
            epsilon=self.epsilon,
            delta=self.delta,
            mu=self.mu,
            unit=str(self.unit),
            relation=None if self.neighbours is None else self.neighbours.value,
            private=self.private,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data; an infinite number is the string "inf", for JSON has none."""
        facts = asdict(self) | {"unit": str(self.unit), "notes": list(self.notes), "private": self.private}
        facts["neighbours"] = None if self.neighbours is None else self.neighbours.value
        return dict(to_plain(facts))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Guarantee:
        """The guarantee that ``to_json`` wrote.

        Args:
            data: What ``to_json`` returned.

        Returns:
            The same guarantee.
        """
        facts = {key: value for key, value in data.items() if key != "private"}
        for key in ("epsilon", "delta", "mu", "lower", "estimate"):
            facts[key] = None if facts[key] is None else float(facts[key])
        relation = facts["neighbours"]
        facts |= {"notes": tuple(facts["notes"]), "unit": Unit(facts["unit"])}
        return cls(**facts | {"neighbours": None if relation is None else Neighbours(relation)})

    def _repr_html_(self) -> str:
        return f"{self.plain_words.html()}<p><small>{html.escape(str(self))}</small></p>"

    def __str__(self) -> str:
        if self.seeded:
            return "seeded: not private. " + str(replace(self, seeded=False))
        if not self.private:
            return f"not private: epsilon = {self.epsilon:g}, delta = {self.delta:g}; nothing is promised to anyone."
        relation = "data sets differ by one unit, each under its own relation"
        if self.neighbours is not None:
            relation = f"one {self.unit} {self.neighbours.sentence}"
        how = [f"mu = {round_up(self.mu)}"] if self.mu is not None else []
        how += [f"accountant: {self.accountant}", *self.notes]
        bound, delta = round_up(self.epsilon), round_up(self.delta, 6)
        extra = f", plus a probability of {delta}" if self.delta else ""
        return (
            f"({bound}, {delta})-differential privacy: when {relation}, no set of outcomes becomes more than "
            f"e^{bound} times as likely{extra}. " + "; ".join(how) + "."
        )


def round_up(value: float, digits: int = 4) -> str:
    """A number for people, to ``digits`` significant digits and never below the truth (beyond its last bits)."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    unit = 10.0 ** (math.floor(math.log10(abs(value))) - digits + 1)
    nearest = f"{value:.{digits}g}"
    return nearest if float(nearest) >= value * (1 - 1e-12) else f"{float(nearest) + unit:.{digits}g}"


def check_epsilon(epsilon: float) -> None:
    if not epsilon > 0:
        raise ValueError(f"Epsilon must be above 0 (inf: not private); got {epsilon:g}.")


def check_delta(delta: float) -> None:
    if not 0 <= delta < 1:
        raise ValueError(f"Delta must be at least 0 and below 1; got {delta:g}.")


def log_delta_of(epsilon: float, mu: float) -> float:
    """The natural logarithm of delta(epsilon; mu), accurate where delta itself would underflow.

    With a = mu/2 - epsilon/mu and b = a - mu the densities satisfy phi(a) = e^epsilon phi(b), so
    delta = e^(-a^2/2)/2 * (erfcx(-a/sqrt 2) - erfcx(-b/sqrt 2)): no huge factors and, for small mu, the
    difference is an integral of its derivative instead of a subtraction.
    """
    if mu == 0:
        return -math.inf
    if math.isinf(mu):
        return 0.0
    if math.isinf(epsilon):
        return -math.inf
    a = mu / 2 - epsilon / mu
    x, width = -a / math.sqrt(2), mu / math.sqrt(2)
    if width < 1:
        middle = x + width * (1 + _NODES) / 2
        gap = width / 2 * float(_WEIGHTS @ _minus_erfcx_slope(middle))
    elif a < 0:
        gap = float(erfcx(x) - erfcx(x + width))
    else:
        return math.log(float(ndtr(a)) - math.exp(-a * a / 2) * float(erfcx(x + width)) / 2)
    return -a * a / 2 + math.log(gap / 2) if gap > 0 else -math.inf


def delta_of(epsilon: float, mu: float) -> float:
    """The delta that a Gaussian release of ``mu`` has at ``epsilon``.

    Args:
        epsilon: At least 0.
        mu: The Gaussian parameter, sensitivity divided by the noise's standard deviation.

    Returns:
        delta(epsilon; mu) = Phi(-epsilon/mu + mu/2) - e^epsilon Phi(-epsilon/mu - mu/2), never rounded down.

    Examples:
        >>> from tacit.privacy import delta_of
        >>> round(delta_of(1.0, 1.0), 4)
        0.1269
    """
    return math.exp(log_delta_of(epsilon, mu))


def epsilon_of(mu: float, delta: float) -> float:
    """The smallest epsilon at which a Gaussian release of ``mu`` has at most ``delta``.

    Args:
        mu: The Gaussian parameter.
        delta: The allowed failure probability.

    Returns:
        The smallest epsilon, never rounded down.

    Examples:
        >>> from tacit.privacy import epsilon_of
        >>> round(epsilon_of(1.0, 1e-5), 3)
        4.377
    """
    check_delta(delta)
    if mu < 0:
        raise ValueError(f"mu must not be negative; got {mu:g}.")
    if mu == 0:
        return 0.0
    if mu > 1e100 or delta == 0:  # beyond it squares overflow
        return math.inf
    target = math.log(delta)
    if log_delta_of(0.0, mu) <= target:
        return 0.0
    above = mu * mu / 2 - mu * float(ndtri(delta))  # there Phi(a) alone is delta
    return float(brentq(lambda e: log_delta_of(e, mu) - target, 0.0, above * (1 + 1e-9), xtol=1e-300, rtol=1e-15))


def mu_of(epsilon: float, delta: float) -> float:
    """The largest Gaussian release that is (epsilon, delta)-private; 0 where delta is 0.

    Args:
        epsilon: The budget's epsilon.
        delta: The budget's delta.

    Returns:
        The largest mu such that every mu-GDP mechanism is (epsilon, delta)-private; 0 where delta is 0.

    Examples:
        >>> from tacit.privacy import mu_of
        >>> round(mu_of(1.0, 1e-6), 3)
        0.237
    """
    if not epsilon >= 0:
        raise ValueError(f"Epsilon must not be negative; got {epsilon:g}.")
    check_delta(delta)
    if math.isinf(epsilon):
        return math.inf
    if delta == 0:
        return 0.0
    target = math.log(delta)
    low = high = math.sqrt(2 * epsilon) + delta  # delta(epsilon; sqrt(2 epsilon)) is near 1/2
    while log_delta_of(epsilon, high) < target:
        high *= 2
    while log_delta_of(epsilon, low) > target:
        low /= 2
    if low == high:
        return low
    return float(brentq(lambda mu: log_delta_of(epsilon, mu) - target, low, high, xtol=1e-300, rtol=1e-15))


def mu_of_pure(epsilon: float) -> float:
    """The Gaussian release that dominates every pure-epsilon one: 2 Phi^-1(e^eps / (1 + e^eps))."""
    if math.isinf(epsilon):
        return math.inf
    if epsilon < 1:  # Phi(mu/2) - 1/2 = tanh(eps/2)/2 keeps the digits of a small epsilon
        return 2 * math.sqrt(2) * float(erfinv(math.tanh(epsilon / 2)))
    # Phi(-mu/2) = 1/(1 + e^eps), the far tail; Phi(-x) <= e^(-x^2/2)/2 where that underflows
    return -2 * float(ndtri(1 / (1 + math.exp(epsilon)))) if epsilon < 700 else 2 * math.sqrt(2 * epsilon)


def sampled_pure(rate: float, epsilon: float) -> float:
    """The epsilon of a pure-epsilon release from a Poisson draw: log(1 + rate (e^eps - 1))."""
    if epsilon < 30:
        return math.log1p(rate * math.expm1(epsilon))
    return float(np.logaddexp(math.log1p(-rate) if rate < 1 else -math.inf, math.log(rate) + epsilon))


def _minus_erfcx_slope(x: np.ndarray) -> np.ndarray:
    """-d erfcx(x)/dx = 2/sqrt(pi) - 2 x erfcx(x), by its asymptotic series where the two terms cancel."""
    with np.errstate(over="ignore", divide="ignore"):
        far = 1 / x**2
        series = far * (1 / 2 - far * (3 / 4 - far * (15 / 8 - far * 105 / 16)))
    return np.where(x > 50, 2 / math.sqrt(math.pi) * series, 2 / math.sqrt(math.pi) - 2 * x * erfcx(x))


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
