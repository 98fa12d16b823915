"""The best of k candidates by noisy accuracy (paper 1, appendix B.5): models or settings that are there already."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import torch
from scipy.special import ndtr
from torch import Tensor

from tacit._context import IN_CONTEXT, PrivacyContext, takes_context
from tacit._curator import Curator
from tacit._refusals import Refusal, attempt
from tacit.privacy import Budget, Guarantee, Ledger, Mode, Neighbours, Unit, events, grid_sum, mechanisms
from tacit.privacy.accounting import noise_multiplier
from tacit.privacy.events import DpEvent
from tacit.tune._budget_split import check_budget
from tacit.tune._plan import SHAVE
from tacit.tune._search import unit_of
from tacit.tune._trials import GRID

Candidate = TypeVar("Candidate")
_FAILED = (
    "The score of a candidate cannot be computed. Nothing was charged. What went wrong may reveal rows: see "
    "curator=. Score unit by unit (tune.by_unit), and a unit that fails counts as zero."
)


@dataclass(frozen=True, kw_only=True)
class Selected(Generic[Candidate]):
    """Which candidate was chosen; everything here is public or was released.

    Args:
        candidate: The chosen one.
        index: Its place.
        scores: As released, with their noise; None if only the choice was.
        error: The standard deviation of a score's noise, as a share; for "winner" the scale of its noise.
        guarantee: Of all that the subject has spent.
    """

    candidate: Candidate = field(repr=False)
    index: int
    scores: tuple[float, ...] | None  # as released, with their noise; None: the choice alone was
    error: float  # the standard deviation of a score's noise, as a share; of "winner" the scale of its noise
    guarantee: Guarantee  # of all that the subject has spent


@takes_context
def noisy_selection(
    candidates: Sequence[Candidate],
    score: Callable[[Candidate], Tensor],
    budget: Budget,
    *,
    ledger: Ledger = IN_CONTEXT,
    subject: str = IN_CONTEXT,
    size: int,
    release: Literal["scores", "winner"] = "scores",
    precision: float | None = None,
    unit: Unit | str | None = None,
    neighbours: Neighbours | str = Neighbours.ADD_REMOVE,
    seed: int | None = None,
    curator: Curator | None = None,
    context: PrivacyContext | None = None,
) -> Selected[Candidate]:
    """Choose one of k candidates that are public or were paid for: what is paid here is the choice alone.

    Formal guarantee: unit, that of the score; neighbours as given. Each score is the sum over units of a number in [0,
    1] on a public grid, which one unit moves by at most 1. "scores": k Gaussian releases, together mu = sqrt(k)/sigma
    with sigma in units. "winner": permute-and-flip with exponential noise, pure epsilon = 2/scale, which does not
    depend on k; to a subject in the gaussian mode it is charged as the mu that dominates it. Number i of a score has to
    come from unit i alone (`by_unit` sees to it). All scores are computed before the charge and released after it, so
    no row decides an error after it. The candidates have to be independent of the units, or released under charges of
    their own.

    Args:
        candidates: Models, or anything that `score` takes.
        score: `score(candidate)`: one number in [0, 1] per private unit, higher is better. Write it with `by_unit`, and
            a unit whose number cannot be computed counts as zero. A function of your own that raises is refused before
            anything is charged; `curator` receives the reason.
        budget: What the choice may spend.
        ledger: Where everything is charged.
        subject: The data set's name in the ledger.
        size: The public number of units.
        release: "scores": all k noisy scores are released, and the highest is chosen. "winner": only the index is
            (report noisy max), at a noise that does not grow with k.
        precision: The standard deviation that is enough for scores, as a share (0.01: a point); the budget is what they
            may cost, and without it what they do.
        unit: That of the score, which states it (`score.unit`, as of `by_unit(..., unit="patient")`); otherwise a
            sample.
        neighbours: The neighbouring relation.
        seed: Reproducible noise: "seeded: not private".
        curator: Called with a `tacit.ErrorEvent` if a score raises.
        context: A `tacit.PrivacyContext` instead of the arguments that it has: ledger, subject, unit, …

    Returns:
        The chosen candidate and what was released.

    Raises:
        ValueError: The score raises or is out of range; nothing was charged.
        BudgetExceeded: The subject cannot afford it; nothing was charged.
    """
    del context  # its arguments are here; see takes_context
    if not candidates or size < 1:
        raise ValueError("There is at least one candidate, and at least one unit.")
    if release not in ("scores", "winner"):
        raise ValueError(f"release is 'scores' or 'winner'; got {release!r}.")
    if not budget.private:
        raise ValueError(f"A private choice needs a finite epsilon, not {budget}.")
    if precision is not None and not (0 < precision < 1 and release == "scores"):
        raise ValueError("precision is a share between 0 and 1, of released scores.")
    unit, relation = unit_of(score, unit, "score"), Neighbours(neighbours)
    known = ledger.get_subject(subject)
    if known is not None:
        known.check_terms(unit=unit, neighbours=relation)
    if release == "scores":
        event, error = _scores(budget, len(candidates), size, precision, relation)
    else:
        event, error = _winner(budget, size, relation, None if known is None else known.terms.mode)
    rows = [attempt(_numbers, score, candidate, sentence=_FAILED, curator=curator) for candidate in candidates]
    plan = [event] if release == "winner" and not budget.pure else None
    ledger.open_subject(subject, budget, unit=unit, neighbours=relation, plan=plan)
    note = f"{release} of {len(candidates)} candidates"
    receipt = ledger.charge(subject, event, stage="tune", note=note, seed=seed)
    if release == "scores":
        noisy = [
            float(mechanisms.gaussian_query(grid_sum(row, low=0.0, high=1.0, grid=GRID), receipt)[0]) for row in rows
        ]
        released = tuple(value / size for value in noisy)
        index = max(range(len(released)), key=lambda place: released[place])
    else:
        longest = max(len(row) for row in rows)
        table = torch.stack([torch.nn.functional.pad(row, (0, longest - len(row))) for row in rows], dim=1)
        released = None
        index = mechanisms.noisy_max(grid_sum(table, low=0.0, high=1.0, grid=GRID), receipt)
    return Selected(
        candidate=candidates[index],
        index=index,
        scores=released,
        error=error,
        guarantee=ledger.spent(subject),
    )


def _scores(
    budget: Budget, count: int, size: int, precision: float | None, relation: Neighbours
) -> tuple[DpEvent, float]:
    """The event of all scores, and how far one is off."""
    check_budget(budget)
    mu = budget.mu * SHAVE / math.sqrt(count)
    if precision is not None:
        mu = min(mu, 1 / (precision * size))
    return events.gaussian(relation.factor / mu, steps=count), 1 / (mu * size)


def _winner(budget: Budget, size: int, relation: Neighbours, mode: Mode | None) -> tuple[DpEvent, float]:
    """The event of the choice alone, at the least noise that this mode can take for the budget."""
    if mode is Mode.GAUSSIAN:
        half = budget.mu * SHAVE / 2
        noise = 2 * relation.factor / math.log(float(ndtr(half)) / float(ndtr(-half)))
    else:
        noise = noise_multiplier(budget, events.noisy_max, neighbours=relation)
    return events.noisy_max(noise), noise / relation.factor / size


def _numbers(score: Callable[[Any], Tensor], candidate: Any) -> Tensor:
    """One number per unit."""
    found = torch.as_tensor(score(candidate)).detach().to("cpu", torch.float64)
    if found.dim() != 1:
        raise Refusal("A score is one number per unit, in one dimension. Nothing was charged.")
    return found
