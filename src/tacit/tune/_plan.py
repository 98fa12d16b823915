"""How a total is split between the trials of a search, their scores and the final run, before anything runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tacit.privacy import Budget, Guarantee, Neighbours, Unit, epsilon_of, mu_of
from tacit.privacy.events import check_count

SHAVE = 1 - 1e-9  # of the last run, so that no rounding in a ledger's sum goes over the total
_BLIND = 0.1  # a score whose noise has a standard deviation above ten points distinguishes no trials


class BudgetTooSmall(ValueError):
    """The total pays for no search that could find anything; nothing was spent."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What each part of a search may spend, in mu: one trial of each sweep, one score, the final run.

    Formal guarantee: all parts are Gaussian releases, and later ones may depend on what earlier ones released, so the
    whole is mu-GDP with mu^2 = trials * (mu1^2 + mu2^2 + ...) + scores * mu_score^2 + mu_final^2 (Dong et al., 2022,
    corollary 3.3; a filter on sums of mu^2 holds the ledger to it). It never exceeds the total.

    Args:
        budget: The total.
        trials: Trials in each sweep.
        sweeps: mu of one trial, sweep by sweep.
        mu_score: mu of one score.
        mu_final: mu of the final run.
        size: The public number of units.
        neighbours: The neighbouring relation.
        unit: The privacy unit.
        composed: The guarantee by PLD, where runs are Poisson-subsampled and sums of mu^2 do not apply.
    """

    budget: Budget
    trials: int
    sweeps: tuple[float, ...]  # mu of one trial, sweep by sweep
    mu_score: float
    mu_final: float
    size: int | None = None
    neighbours: Neighbours = Neighbours.ADD_REMOVE
    unit: Unit = Unit.SAMPLE
    composed: Guarantee | None = None  # by PLD, where batches are Poisson-subsampled and no sum of mu^2 applies

    @property
    def mu1(self) -> float:
        return self.sweeps[0]

    @property
    def mu2(self) -> float:
        return self.sweeps[1]

    @property
    def runs(self) -> int:
        """All runs, the final one included."""
        return self.trials * len(self.sweeps) + 1

    @property
    def mu(self) -> float:
        """Of everything together (composed by PLD: of the Gaussian release with the same epsilon and delta)."""
        if self.composed is not None:
            return mu_of(self.composed.epsilon, self.budget.delta)
        scores = self.trials * len(self.sweeps) * self.mu_score**2
        return math.sqrt(self.trials * sum(mu**2 for mu in self.sweeps) + scores + self.mu_final**2)

    @property
    def guarantee(self) -> Guarantee:
        """What the whole search promises."""
        return self.composed or Guarantee(
            epsilon=epsilon_of(self.mu, self.budget.delta),
            delta=self.budget.delta,
            mu=self.mu,
            neighbours=self.neighbours,
            unit=self.unit,
            accountant="exact Gaussian",
        )

    def left_after(self, sweeps: int) -> float:
        """The mu of a final run that gets all that is left if the search stops after so many sweeps."""
        spared = sum(mu**2 + self.mu_score**2 for mu in self.sweeps[sweeps:])
        return math.sqrt(self.mu_final**2 + self.trials * spared) * SHAVE

    def epsilon(self, mu: float) -> float:
        """What a part of so much mu would promise by itself."""
        return epsilon_of(mu, self.budget.delta)

    @property
    def score_error(self) -> float | None:
        """The standard deviation of a score's noise, in points of accuracy; None if the size was not said."""
        return None if self.size is None else 100 / (self.mu_score * self.size)

    def rows(self) -> list[tuple[str, float, float, float]]:
        """Each part: what it is, the mu of each run in it, the epsilon of one alone, and the part's share of mu^2.

        Composed by PLD, the shares are those that the parts would have if sums of mu^2 were the price.
        """
        count = self.trials * len(self.sweeps)
        parts = [(f"sweep {i}, {self.trials} trials", self.trials, mu) for i, mu in enumerate(self.sweeps, 1)]
        parts += [(f"scores, {count}", count, self.mu_score), ("final run", 1, self.mu_final)]
        whole = sum(times * mu**2 for _, times, mu in parts)
        found = [(what, mu, self.epsilon(mu), times * mu**2 / whole) for what, times, mu in parts]
        return [*found, ("all together", self.mu, self.guarantee.epsilon, 1.0)]

    def __str__(self) -> str:
        lines = [f"{'':20} {'mu of each':>10} {'epsilon':>9} {'of the total':>13}"]
        lines += [f"{what:20} {mu:10.4f} {eps:9.4f} {100 * share:12.1f}%" for what, mu, eps, share in self.rows()]
        return "\n".join([f"A search within {self.budget}", *lines])


def plan(
    budget: Budget,
    trials: int = 3,
    *,
    sweeps: Sequence[float] = (0.1, 0.2),
    final: float | None = None,
    size: int | None = None,
    precision: float = 0.01,
    scores: float = 0.1,
    neighbours: Neighbours | str = Neighbours.ADD_REMOVE,
    unit: Unit | str = Unit.SAMPLE,
) -> Plan:
    """Split a total budget: `trials` runs in each sweep, a score of each, and the final run, which gets what is left.

    Args:
        budget: The total.
        trials: Trials in each sweep.
        sweeps: The epsilon of one trial in each sweep, as a share of the total's (the paper's 0.1 and 0.2), rising.
        final: The final run's share, if it is not to get all that is left.
        size: The public number of units. With it a score gets just the noise at which its standard deviation is
            `precision`; without it all scores together get the share `scores` of the total's mu^2, which is also the
            most that they get with it.
        precision: The standard deviation of a score's noise that is enough (0.01: one point of accuracy).
        scores: The largest share of mu^2 that scores may take.
        neighbours: The neighbouring relation.
        unit: The privacy unit.

    Returns:
        The plan; nothing is charged.

    Raises:
        BudgetTooSmall: A score would be off by more than ten points.
        ValueError: The parts do not fit.

    Examples:
        >>> from tacit.privacy import Budget
        >>> from tacit.tune import plan
        >>> split = plan(Budget(epsilon=1.0, delta=1e-5), trials=3, size=10_000)
        >>> split.mu1 < split.mu2 < split.mu_final, split.guarantee.epsilon <= 1.0
        (True, True)
    """
    check_count(trials, "trials")
    relation = Neighbours(neighbours)
    if budget.pure or not budget.private:
        raise ValueError(f"A search is planned for a finite epsilon and a delta above 0, not for {budget}.")
    shares = tuple(sweeps)
    if not shares or list(shares) != sorted(set(shares)) or not 0 < shares[0] <= shares[-1] < 1:
        raise ValueError(f"sweeps are rising shares of epsilon between 0 and 1; got {list(shares)}.")
    total = budget.mu
    mus = tuple(mu_of(share * budget.epsilon, budget.delta) for share in shares)
    count = trials * len(mus)
    mu_score = score_share(budget, total, count, size=size, precision=precision, scores=scores)
    left = total**2 - trials * sum(mu**2 for mu in mus) - count * mu_score**2
    wanted = math.sqrt(max(left, 0.0)) * SHAVE if final is None else mu_of(final * budget.epsilon, budget.delta)
    made = Plan(
        budget=budget,
        trials=trials,
        sweeps=mus,
        mu_score=mu_score,
        mu_final=wanted,
        size=size,
        neighbours=relation,
        unit=Unit(unit),
    )
    if wanted <= mus[-1]:
        raise ValueError("The trials leave less for the final run than one of them has: plan fewer or cheaper ones.")
    if made.mu > total:
        raise ValueError(
            f"Trials, scores and {final:g} of epsilon for the final run are together epsilon "
            f"{made.guarantee.epsilon:.4f}, above {budget.epsilon:g}: plan cheaper trials, or leave final= out."
        )
    return made


def score_share(budget: Budget, mu: float, count: int, *, size: int | None, precision: float, scores: float) -> float:
    """The mu of each of `count` scores: just enough for `precision`, together at most `scores` of mu^2; see `plan`."""
    if not (0 < scores < 1 and 0 < precision < 1):
        raise ValueError("scores and precision are shares, between 0 and 1.")
    most = math.sqrt(scores / count) * mu
    found = most if size is None else min(most, 1 / (precision * size))
    if size is not None and 1 / (found * size) > _BLIND:
        raise BudgetTooSmall(
            f"{budget} is too small for a search over {size:,} units: with {100 * scores:.0f}% of it the score of a "
            f"trial would be off by {100 / (found * size):.0f} points. Use it for one run: at the default "
            "(tune.suggest with tune.train) or settings known to work; or bring more people or a larger budget. "
            "Nothing is spent."
        )
    return found
