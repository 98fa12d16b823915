"""Checks that need no confidence: what must hold exactly, or up to a chance far below one in a million."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from dp_accounting import NeighboringRelation, dp_event
from dp_accounting.pld import PLDAccountant
from scipy import stats
from torch import Tensor

from tacit.audit._exact import sampled_epsilon
from tacit.audit._loops import odd_rows, sums_of_fit, sums_of_own_loop, sums_of_tent
from tacit.audit._mechanism import Array
from tacit.audit._releases import Sum, paid
from tacit.privacy import Budget, Ledger, LedgerError, Neighbours, accounting, events, mechanisms, sampling

_BITS = {torch.float64: 53, torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}
_SIZE, _NOISE = 2**21, 20.0
_BUDGET = Budget(50.0, 1e-5)  # of the fuzzer
_CHANCE = 1e-9  # of a false alarm, per test


@dataclass(frozen=True)
class Check:
    """One thing that was checked."""

    name: str
    holds: bool
    detail: str


# Low-order bits ---------------------------------------------------------------------------------------------------


def seems_present(released: Tensor, value: float) -> bool:
    """Whether all outputs that are small beside ``value`` are multiples of the last bit of a number that large.

    Where ``value`` was added to the noise, an output near zero comes from noise near -``value``, and keeps the coarse
    last bit of that; without it, small numbers have small last bits (Mironov, 2012).
    """
    near = released[released.abs() < value / 2].double()
    unit = 2.0 ** (math.floor(math.log2(value)) - _BITS[released.dtype])
    return bool((near / unit == (near / unit).round()).all())


def low_bits(dtype: torch.dtype, add: Callable[[Tensor], Tensor] | None = None) -> Check:
    """Do the low-order bits tell whether a unit of two million equal coordinates (norm 1) is in the sum?"""
    value = 2.0**-10.5

    def release(sums: Tensor) -> Tensor:
        with paid(events.gaussian(_NOISE)) as receipt:
            return mechanisms.gaussian(Sum.of(sums), receipt)["w"]

    answer = add or release
    there, gone = (seems_present(answer(torch.full((_SIZE,), size, dtype=dtype)), value) for size in (value, 0.0))
    return Check(f"low-order bits, {str(dtype).removeprefix('torch.')}", there == gone, f"with {there}, without {gone}")


# Sums ---------------------------------------------------------------------------------------------------------------


def stability(
    sums: Callable[[object], Mapping[str, Tensor]], rows: Mapping[str, object], bound: float, *, name: str = "sums"
) -> Check:
    """Whether no row moves a sum by more than ``bound``, compared with a blank one, and no two by more than twice that.

    ``sums(row)`` is the sum before the noise with this row in one place, ``sums(None)`` with a blank one.
    """
    blank, worst, found = sums(None), 0.0, ""
    for kind, row in rows.items():
        far = _apart(sums(row), blank)
        if not far <= worst:
            worst, found = far, kind
    return Check(f"stability of {name}", worst <= bound * (1 + 1e-9), f"{worst / bound:.12g} of the bound ({found})")


def _apart(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    return math.sqrt(math.fsum(float((one[n].double() - other[n].double()).square().sum()) for n in one))


def loops(names: tuple[str, ...] = ("DPSGD", "AdpClip", "GEP", "DPZO")) -> list[Check]:
    """No odd row moves the sum of a real loop by more than its bound: `fit` with each query, `make_private`, Tent."""
    rows = odd_rows()
    found = [stability(sums, rows, bound, name=f"fit, {n}") for n, (sums, bound) in sums_of_fit(names).items()]
    others = {"make_private": sums_of_own_loop(), "Tent": sums_of_tent()}
    return [*found, *(stability(sums, rows, bound, name=name) for name, (sums, bound) in others.items())]


# Events -------------------------------------------------------------------------------------------------------------


def event_fuzzer(rounds: int = 200, seed: int = 0) -> Check:
    """Events with numbers of any kind: each is refused, or costs at least nothing, and the ledger verifies after it."""
    chance, charged, refused = random.Random(seed), 0, 0
    with Ledger("sqlite://") as ledger:
        for mode, budget in (
            ("gaussian", Budget(50.0, 1e-5)),
            ("renyi", Budget(50.0, 1e-5)),
            ("pure", Budget(50.0, 0)),
        ):
            ledger.subject(mode, budget, mode=mode, neighbours="zero-out")
        for _ in range(rounds):
            name = chance.choice(["gaussian", "renyi", "pure"])
            before = ledger.spent(name).epsilon
            try:
                ledger.charge(name, _event(chance, 2), stage="audit")
                charged += 1
            except (ValueError, TypeError, LedgerError, accounting.UnsupportedEvent):
                refused += 1
            after = ledger.spent(name).epsilon
            if not after >= before:
                return Check("event fuzzer", False, f"spent fell from {before:g} to {after:g}")
            ledger.verify()
    return Check("event fuzzer", charged > 0 and refused > 0, f"{charged} charged, {refused} refused, chain verified")


def _event(chance: random.Random, depth: int) -> events.DpEvent:
    number: Any = chance.choice([1.0, 2.5, 1e3, 30.0, 0.0, -1.0, math.inf, math.nan, 1e-9, 1e300, "2", None])
    count: Any = chance.choice([1, 2, 5, 0, -3, 2.5, True, 10**6])
    kinds: list[Callable[[], events.DpEvent]] = [
        lambda: dp_event.GaussianDpEvent(number),
        lambda: dp_event.LaplaceDpEvent(number),
        lambda: events.StreamDpEvent(number, count, chance.choice(["independent", "banded:3", "nothing"]), 2, 3),
        lambda: events.NoisyMaxDpEvent(number),
        lambda: dp_event.RandomizedResponseDpEvent(number, count),
        lambda: dp_event.DiscreteLaplaceDpEvent(number, count),
        lambda: dp_event.ZCDpEvent(number, 0.0),
        lambda: dp_event.NoOpDpEvent(),
    ]
    if depth:
        kinds += [
            lambda: dp_event.SelfComposedDpEvent(_event(chance, depth - 1), count),
            lambda: dp_event.ComposedDpEvent([_event(chance, depth - 1) for _ in range(2)]),
            lambda: dp_event.PoissonSampledDpEvent(chance.choice([0.1, 1.5, -0.2, 0.0]), _event(chance, depth - 1)),
        ]
    return chance.choice(kinds)()


# Prices -------------------------------------------------------------------------------------------------------------


def prices(deltas: tuple[float, ...] = (1e-2, 1e-5, 1e-9, 1e-12)) -> Check:
    """Poisson-subsampled prices against extended precision: never below the truth, and above it by 1% at most."""
    worst, least, where = 0.0, math.inf, ""
    for rate, noise in ((0.5, 0.5), (0.1, 0.7), (0.01, 1.0), (0.3, 2.0)):
        for delta in deltas:
            exact = sampled_epsilon(rate, noise, delta)
            event = events.poisson(rate, events.gaussian(noise))
            claimed = accounting.guarantee(event, delta=delta, neighbours=Neighbours.ADD_REMOVE).epsilon
            if exact < 1e-3:
                continue
            least = min(least, claimed / exact)
            if claimed / exact > worst:
                worst, where = claimed / exact, f"rate {rate:g}, noise {noise:g}, delta {delta:g}"
    return Check(
        "PLD against extended precision", least >= 1 - 1e-9 and worst <= 1.01, f"{least:.9f} to {worst:.6f} ({where})"
    )


def prices_of_mixtures(rounds: int = 12, seed: int = 0) -> Check:
    """Random plans against dp-accounting's own PLD: mixtures, Poisson draws, under replace-one a stream as well."""
    chance, worst, where = random.Random(seed), 0.0, ""
    for _ in range(rounds):
        relation = chance.choice([Neighbours.ADD_REMOVE, Neighbours.REPLACE_ONE])
        rate, noise, steps = chance.choice([0.05, 0.3]), chance.uniform(0.8, 4.0), chance.randint(1, 20)
        sampled = events.poisson(rate, events.gaussian(noise), steps)
        other, more = chance.uniform(2.0, 9.0), chance.uniform(2.0, 9.0)
        parts = [sampled, events.gaussian(other), events.laplace(more)]
        stream = chance.uniform(2.0, 9.0)  # its noise is relative to what a unit may do to all of it: one Gaussian
        times, strategy = chance.randint(1, 3), chance.choice(["independent", "banded:3", "buffered"])
        if relation is Neighbours.REPLACE_ONE:
            parts.append(events.stream(stream, 12, strategy=strategy, contributions=times, separation=4))
        plan = events.compose(parts)
        theirs = PLDAccountant(
            NeighboringRelation.REPLACE_ONE
            if relation is Neighbours.REPLACE_ONE
            else NeighboringRelation.ADD_OR_REMOVE_ONE
        )
        theirs.compose(sampled)
        plain = PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE)
        plain.compose(dp_event.GaussianDpEvent(other / relation.factor))
        plain.compose(dp_event.LaplaceDpEvent(more / relation.factor))
        if relation is Neighbours.REPLACE_ONE:
            plain.compose(dp_event.GaussianDpEvent(stream / relation.factor))
        expected = float(theirs._pld.compose(plain._pld).get_epsilon_for_delta(1e-5))
        found = accounting.guarantee(plan, delta=1e-5, neighbours=relation).epsilon
        off = abs(found / expected - 1)
        if off > worst:
            worst, where = off, f"{relation}, rate {rate:g}, noise {noise:.3g}, {steps} steps"
    return Check("PLD against dp-accounting", worst < 5e-3, f"apart by {worst:.2g} at most ({where})")


# Draws --------------------------------------------------------------------------------------------------------------


def draws(
    rate: float = 0.1,
    people: int = 2000,
    steps: int = 400,
    draw: Callable[[object, int], Tensor] | None = None,
) -> Check:
    """The receipt's draws: unbiased, alike for all units, independent between steps and between neighbouring units."""
    event = events.poisson(rate, events.gaussian(1.0), steps)
    table = np.zeros((steps, people), dtype=np.float64)
    with paid(event) as receipt:
        for step in range(steps):
            table[step, (draw or sampling.draw)(receipt, people).numpy()] = 1.0
            mechanisms.gaussian(Sum.of(torch.zeros(1, dtype=torch.float64)), receipt)
    return judge_draws(table, rate)


def judge_draws(table: Array, rate: float) -> Check:
    """A table of who was drawn (steps x units) against independent coins of this rate."""
    steps, people = table.shape
    variance, number = rate * (1 - rate), table.size
    centred = table - rate
    sizes = table.sum(1)
    tests = {
        "bias": centred.sum() / math.sqrt(number * variance),
        "between steps": (centred[1:] * centred[:-1]).sum() / (math.sqrt((steps - 1) * people) * variance),
        "between units": (centred[:, 1:] * centred[:, :-1]).sum() / (math.sqrt(steps * (people - 1)) * variance),
        "sizes": _spread(sizes, people * variance, steps),
        "unequal units": _spread(table.sum(0), steps * variance, people),
    }
    limit = float(stats.norm.isf(_CHANCE / 2 / len(tests)))
    worst = max(tests, key=lambda name: abs(tests[name]))
    return Check("Poisson draws", bool(abs(tests[worst]) < limit), f"largest deviation {tests[worst]:+.2f} ({worst})")


def _spread(values: Array, variance: float, count: int) -> float:
    """The variance of sums of coins against theirs, as a normal deviate (Wilson and Hilferty's cube root)."""
    squares = float(((values - values.mean()) ** 2).sum() / variance)
    freedom = count - 1
    return float(((squares / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom)))


# Coordinates --------------------------------------------------------------------------------------------------------


def coordinates(size: int = 400_000, noise: float = 1.0) -> Check:
    """The noise of coordinates is normal, and uncorrelated between neighbours, halves and releases."""
    with paid(events.gaussian(noise, 2)) as receipt:
        first, second = (
            mechanisms.gaussian(Sum.of(torch.zeros(size, dtype=torch.float64)), receipt)["w"].numpy() / noise
            for _ in range(2)
        )
    half = size // 2
    pairs = {
        "neighbours": (first[1:], first[:-1]),
        "every other": (first[2:], first[:-2]),
        "halves": (first[:half], first[half : 2 * half]),
        "releases": (first, second),
        "squares": (first[1:] ** 2 - 1, first[:-1] ** 2 - 1),
    }
    scores = {
        n: float((a * b).sum() / math.sqrt((a**2).mean() * (b**2).mean() * len(a))) for n, (a, b) in pairs.items()
    }
    normal = float(stats.kstest(first, "norm").pvalue)
    limit = float(stats.norm.isf(_CHANCE / 2 / len(scores)))
    worst = max(scores, key=lambda name: abs(scores[name]))
    holds = abs(scores[worst]) < limit and normal > _CHANCE
    detail = f"largest deviation {scores[worst]:+.2f} ({worst}), normal p {normal:.2g}"
    return Check("independent coordinates", holds, detail)


def all_checks() -> list[Check]:
    """Every check of this module that needs nothing but the package."""
    found = [low_bits(dtype) for dtype in _BITS]
    return [*found, *loops(), event_fuzzer(), prices(), prices_of_mixtures(), draws(), coordinates()]
