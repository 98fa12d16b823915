"""What was spent, what is left, and what it all amounts to for one person."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from tacit.privacy._budget import Guarantee, Neighbours, Unit, check_delta, epsilon_of, mu_of_pure
from tacit.privacy._filters import CHOSEN, Mode, from_units, to_units
from tacit.privacy._storage import LedgerError
from tacit.privacy._subject import Subject

_MOST_SETS = 1000
# Printable to Python and shown as nothing, or as a space: joiners, fillers, variation selectors, the blank of Braille.
_UNSEEN = {0x34F, 0x115F, 0x1160, 0x17B4, 0x17B5, *range(0x180B, 0x1810), 0x2800, 0x3164, 0xFFA0}
_UNSEEN |= {*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0)}
MEMBERSHIP = "under replace-one that holds only if which of them a unit is in does not depend on the replaced values"
CAP = "the cap: it holds also where charges, or a stop, were chosen by earlier releases"


@dataclass(frozen=True, kw_only=True)
class Remaining:
    """The largest single release that still fits: one Gaussian of ``mu``, that is noise ``noise_multiplier`` times the
    clip, which would by itself be ``epsilon`` at the subject's delta. In pure mode only ``epsilon`` is set.

    Args:
        epsilon: What the largest affordable release would cost by itself.
        mu: Its Gaussian parameter.
        noise_multiplier: Its noise relative to the clip.
        planned: Entries of a plan not charged yet.
    """

    epsilon: float
    mu: float | None = None
    noise_multiplier: float | None = None
    planned: int | None = None  # entries of a plan not charged yet

    def __str__(self) -> str:
        if self.planned is not None:
            return "1 entry of the plan" if self.planned == 1 else f"{self.planned} entries of the plan"
        if self.mu is None:
            return f"epsilon {self.epsilon:.6g}"
        if self.mu == 0:
            return "nothing"
        return (
            f"one Gaussian release of noise multiplier {self.noise_multiplier:.6g} (epsilon {self.epsilon:.6g} alone)"
        )


class BudgetExceeded(LedgerError):
    """The subject cannot afford this; nothing was charged. ``remaining`` is what it can still afford.

    Args:
        message: The sentence.
        remaining: What still fits.
    """

    def __init__(self, message: str, remaining: Remaining | None = None) -> None:
        super().__init__(message)
        self.remaining = remaining


def check_name(name: str) -> None:
    """Refuse a subject's name that cannot be shown."""
    if not name or len(name) > 200 or not name.isprintable():
        raise ValueError("A subject has a printable name of at most 200 characters.")


def check_new_name(name: str) -> None:
    """Refuse a name that is shown like another one: the two would have a budget each.

    That is so of accents that are characters of their own (as some file systems write them), of spaces at the ends or
    two in a row (which a page shows as one), and of characters that are not shown at all and still count as printable.
    """
    if name != " ".join(unicodedata.normalize("NFC", name).split()) or any(ord(letter) in _UNSEEN for letter in name):
        raise ValueError(
            "A subject's name has single spaces and none at its ends, its accents are part of their letters (the form "
            "NFC of Unicode), and no character is invisible: otherwise two subjects would look the same, with a budget "
            "each."
        )


def check_declared(subject: Subject) -> None:
    """Refuse a name that cannot be shown, and a plan that costs more than the budget."""
    check_name(subject.name)
    if subject.terms.mode is Mode.PLAN and subject.terms.private:
        budget, planned = subject.terms.budget, subject.planned_guarantee()
        if planned.epsilon > budget.epsilon * (1 + 1e-12):
            raise BudgetExceeded(f"The plan of {subject.name} costs epsilon {planned.epsilon:.6g}, above {budget}.")


def remaining(subject: Subject) -> Remaining:
    """The largest single Gaussian release that the subject can still afford."""
    terms = subject.terms
    if terms.mode is Mode.PLAN:
        return Remaining(epsilon=0.0, planned=subject.planned)
    left = max(0.0, terms.cap - from_units(subject.spent)) if terms.private else math.inf
    if left < 1e-6 * terms.cap and terms.private:  # crumbs of tolerances: a release of them is a thousandth
        left = 0.0
    if terms.mode is Mode.PURE:
        return Remaining(epsilon=left)
    mu = math.sqrt(left if terms.mode is Mode.GAUSSIAN else 2 * left / (terms.order or 2))
    sigma = terms.neighbours.factor / mu if mu > 0 else math.inf
    return Remaining(epsilon=epsilon_of(mu, terms.budget.delta), mu=mu, noise_multiplier=sigma)


def spent(subject: Subject, *, cap: bool = False) -> Guarantee:
    """What one subject's charges amount to at its delta; with ``cap``, what its filter promises on every path."""
    if cap:
        return _on_every_path(spent(promised(subject)))
    if subject.terms.mode is Mode.PLAN:
        return subject.planned_guarantee(taken_only=True)
    found = subject.terms.guarantee(from_units(subject.spent), seeded=subject.seeded)
    return replace(found, notes=(*found.notes, *_repriced([subject])))


def promised(subject: Subject) -> Subject:
    """The subject as if its whole budget were spent: what its filter promises, whatever the charges depended on."""
    if subject.terms.mode is Mode.PLAN:
        return replace(subject, taken=tuple(times for _, times in subject.plan))
    cap = to_units(subject.terms.cap)
    if subject.repriced and (subject.spent is None or (cap is not None and subject.spent > cap)):
        return subject  # earlier versions charged too little: the cap was passed
    return replace(subject, spent=cap)


def _repriced(subjects: Sequence[Subject]) -> list[str]:
    """What was charged too low by an earlier version, and counts at today's price."""
    return [
        f"{s.repriced} charge(s) on {s.name} were priced too low by an earlier version and count at today's price"
        for s in subjects
        if s.repriced
    ]


def _on_every_path(guarantee: Guarantee) -> Guarantee:
    """The same number, said as what it is once the whole budget counts as spent."""
    notes = tuple(f"{note.split(', spent so far:')[0]}, {CAP}" if CHOSEN in note else note for note in guarantee.notes)
    return replace(guarantee, notes=notes)


def total(subjects: Sequence[Subject], delta: float | None, *, cap: bool = False) -> Guarantee:
    """The worst over everyone: whoever may be in several subjects pays for all of them.

    Formal guarantee: a person can only be in subjects no two of which are declared disjoint, so the total is the worst
    over the maximal such sets (parallel composition). Within a set all Gaussian and pure subjects are one mu, Renyi
    subjects of one order one divergence; what cannot be merged is added up with delta shared equally. Where there are
    more than ``_MOST_SETS`` such sets, everything is composed with everything, which is never less.

    Charges to several subjects may be interleaved and each may depend on what all the others released: that is
    concurrent composition of interactive mechanisms. It costs no more than composing them one after the other (Vadhan &
    Zhang 2023, for f-DP), with filters as well (Haney et al. 2023: (epsilon, delta), f-DP and Renyi divergences of a
    fixed order).

    Each subject protects a unit of its own under a relation of its own; where these differ the guarantee lists them,
    for one person may be one patient and many samples. Under replace-one two subjects are disjoint only if which of
    them a unit is in does not depend on the values that are replaced; the guarantee states it where that was used.

    With ``cap`` every subject counts with its whole budget: what holds whatever was charged or stopped because of
    earlier releases.
    """
    if cap:
        return _on_every_path(total([promised(s) for s in subjects], delta))
    deltas = [s.terms.budget.delta for s in subjects if not s.terms.budget.pure]
    if delta is None:
        delta = min(deltas, default=0.0)
    check_delta(delta)
    if delta == 0 and deltas:
        raise ValueError("Only pure subjects have a total at delta 0: give a delta above it.")
    groups = list(islice(overlapping(subjects), _MOST_SETS + 1))
    if len(groups) > _MOST_SETS:
        groups = [list(subjects)]
    found = [_composed(group, delta) for group in groups]
    nothing = Guarantee(epsilon=0.0, delta=delta, accountant="nothing was charged")
    worst = max(found, key=lambda guarantee: guarantee.epsilon, default=nothing)
    relations, units = {s.terms.neighbours for s in subjects}, sorted({str(s.terms.unit) for s in subjects})
    if len(relations) > 1:
        worst = replace(worst, neighbours=None)
    if len(units) > 1:
        worst = replace(worst, unit=_either(units))
    return replace(worst, notes=(*worst.notes, *_assumed(subjects)), seeded=any(s.seeded for s in subjects))


def _either(units: Sequence[str]) -> Unit:
    """The names of several units as one, or the bare word where they are too many for a name."""
    text = " or ".join(units)
    return Unit(text if len(text) <= 40 else "unit")


def _assumed(subjects: Sequence[Subject]) -> list[str]:
    """What a total over these subjects rests on, beyond what each of them promises."""
    found = []
    if len({s.terms.unit for s in subjects}) > 1:
        each = ", ".join(f"{s.name}: one {s.terms.unit}" for s in subjects)
        found.append(f"each subject protects a unit of its own ({each}), and the total is for one unit of each")
    replaced = {s.name for s in subjects if s.terms.neighbours is Neighbours.REPLACE_ONE}
    pairs = [f"{s.name} and {other}" for s in subjects for other in s.disjoint_from if {s.name, other} & replaced]
    if pairs:
        found.append(f"{', '.join(pairs)} count as disjoint: {MEMBERSHIP}")
    return found


def overlapping(subjects: Sequence[Subject]) -> Iterator[list[Subject]]:
    """The maximal sets of subjects that one person may all be in (Bron and Kerbosch)."""
    apart = {s.name: set(s.disjoint_from) for s in subjects}
    for name, others in list(apart.items()):
        for other in others:
            apart[other].add(name)
    meets = {name: set(apart) - others - {name} for name, others in apart.items()}
    by_name = {s.name: s for s in subjects}

    def grow(chosen: set[str], open_: set[str], done: set[str]) -> Iterator[set[str]]:
        if not open_ and not done:
            yield chosen
            return
        pivot = max(open_ | done, key=lambda name: len(meets[name] & open_))
        for name in sorted(open_ - meets[pivot]):
            yield from grow(chosen | {name}, open_ & meets[name], done & meets[name])
            open_, done = open_ - {name}, done | {name}

    for names in grow(set(), set(apart), set()) if subjects else ():
        yield [by_name[name] for name in sorted(names)]


def _composed(group: Sequence[Subject], delta: float) -> Guarantee:
    gaussian = [s for s in group if s.terms.mode is Mode.GAUSSIAN]
    pure = [s for s in group if s.terms.mode is Mode.PURE]
    orders = sorted({s.terms.order for s in group if s.terms.order is not None})
    plans = [s for s in group if s.terms.mode is Mode.PLAN]
    if len(group) == 1 and delta == group[0].terms.budget.delta:
        return spent(group[0])
    pure_sum = math.fsum(from_units(s.spent) for s in pure)
    parts: list[Callable[[float], float]] = []
    mu: float | None = None
    if gaussian:
        mu_squared = math.fsum(from_units(s.spent) for s in gaussian)
        mu = math.sqrt(mu_squared + math.fsum(mu_of_pure(from_units(s.spent)) ** 2 for s in pure))
        both, alone = mu, math.sqrt(mu_squared)
        parts.append(lambda d: min(epsilon_of(both, d), epsilon_of(alone, d) + pure_sum))
    elif pure:
        parts.append(lambda _: pure_sum)
    for order in orders:
        same = [s for s in group if s.terms.order == order]
        divergence = math.fsum(from_units(s.spent) for s in same)
        parts.append(lambda d, s=same[0], r=divergence: s.terms.guarantee(r, d).epsilon)  # type: ignore[misc]
    parts += [lambda d, s=s: s.planned_guarantee(d, taken_only=True).epsilon for s in plans]  # type: ignore[misc]
    share = delta / (len(parts) - (1 if pure and not gaussian else 0) or 1)
    relations = {s.terms.neighbours for s in group}
    units = sorted({str(s.terms.unit) for s in group})
    names = ", ".join(s.name for s in group)
    merged = len(parts) == 1 and mu is not None and not pure
    return Guarantee(
        epsilon=math.fsum(part(share) for part in parts),
        delta=delta,
        mu=mu if merged else None,
        neighbours=relations.pop() if len(relations) == 1 else None,
        unit=_either(units),
        accountant="sum of mu^2 over subjects" if merged else "composed over subjects",
        notes=(f"subjects {names}, spent so far: {CHOSEN} their budgets together hold", *_repriced(group)),
        seeded=any(s.seeded for s in group),
    )
