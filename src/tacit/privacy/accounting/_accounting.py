"""From event trees to guarantees, and from a target back to the noise that meets it.

Formal guarantee: the epsilon returned is an upper bound. Unsampled Gaussian releases are composed exactly (sum of
mu^2) and converted by the closed form. Everything else goes through privacy loss distributions, rounded pessimistically
(``loss``), and, where these cannot take an event, a delta or the time limit, through Renyi divergences, or without the
gain of sampling where that is less; its notes then state it. All of this is composition of mechanisms fixed in
advance; spending that depends on what was released before is the ledger's business (privacy filters).

tacit applies the relation's factor itself: noise is relative to the clip C, and under REPLACE_ONE a sum moves by up
to 2C, so an unsampled event is handed on with half its noise. Poisson sampling under REPLACE_ONE needs its own
dominating pair, which only the Gaussian PLD has; it is used, or the event is refused.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Literal

from dp_accounting import NeighboringRelation, dp_event
from dp_accounting.rdp import RdpAccountant

from tacit.privacy import _pld as loss
from tacit.privacy._budget import Budget, Guarantee, Neighbours, Unit, check_delta, delta_of, epsilon_of, mu_of_pure
from tacit.privacy._decompose import Decomposition as Decomposition
from tacit.privacy._decompose import UnsupportedEvent as UnsupportedEvent
from tacit.privacy._decompose import pure_epsilon as pure_epsilon
from tacit.privacy._decompose import pure_of as pure_of
from tacit.privacy._decompose import take_apart as take_apart
from tacit.privacy.events import BallsInBinsDpEvent, DpEvent, NoisyMaxDpEvent, gaussian, leaves

Accountant = Literal["pld", "rdp", "gdp"]
ACCOUNTANTS: tuple[Accountant, ...] = ("pld", "rdp", "gdp")
ORDERS = tuple(1 + x / 10 for x in range(1, 100)) + tuple(range(11, 64)) + (80, 128, 192, 256, 384, 512, 1024, 4096)


def guarantee(
    event: DpEvent,
    *,
    delta: float,
    neighbours: Neighbours = Neighbours.ADD_REMOVE,
    unit: Unit | str = Unit.SAMPLE,
    accountant: Accountant = "pld",
    time_limit: float = 60.0,
) -> Guarantee:
    """The guarantee of a plan of releases that was fixed in advance, by an accountant.

    Args:
        event: Everything that is released.
        delta: The delta to report at.
        neighbours: The neighbouring relation.
        unit: The privacy unit, for the sentence.
        accountant: ``"pld"`` (privacy loss distributions) is the tightest and the default; ``"rdp"`` (Renyi) is looser
            and always quick; ``"gdp"`` takes only unsampled Gaussian (and pure-epsilon) releases and is exact for the
            former.
        time_limit: Seconds after which PLD gives way to RDP; the guarantee's notes state it.

    Returns:
        The guarantee, with lower bound and estimate where the accountant brackets it.

    Raises:
        UnsupportedEvent: No accountant can bound the event under this relation.
        ValueError: An invalid delta or event.

    Examples:
        >>> from tacit.privacy import events, guarantee
        >>> dpsgd = events.poisson(0.01, events.gaussian(1.0), steps=1000)  # 1,000 Poisson-subsampled Gaussian steps
        >>> round(guarantee(dpsgd, delta=1e-5).epsilon, 2)
        1.83
    """
    check_delta(delta)
    if accountant not in ACCOUNTANTS:
        raise ValueError(f"Unknown accountant {accountant!r}: choose one of {', '.join(ACCOUNTANTS)}.")
    neighbours = Neighbours(neighbours)
    terms = take_apart(event, neighbours)

    def promise(epsilon: float, how: str, *notes: str, mu: float | None = None) -> Guarantee:
        exact = epsilon if mu is not None and accountant != "rdp" and not terms.others else None
        return Guarantee(
            epsilon=epsilon,
            delta=delta,
            mu=mu,
            neighbours=neighbours,
            unit=Unit(unit),
            lower=exact,
            estimate=exact,
            accountant=how,
            notes=notes,
        )

    if not terms.private:
        return promise(math.inf, "none", "an event without noise")
    if delta == 0:
        return promise(pure_epsilon(event, neighbours), "sum of pure epsilons")
    if not terms.others and accountant != "rdp":
        return promise(epsilon_of(terms.mu, delta), "exact Gaussian", mu=terms.mu)
    if accountant == "gdp":
        mu = math.sqrt(terms.mu_squared + sum(n * mu_of_pure(pure_of(e)) ** 2 for e, n in terms.others.items()))
        return promise(epsilon_of(mu, delta), "Gaussian, pure releases by their dominating mu", mu=mu)
    if accountant == "rdp":
        return promise(_rdp_epsilon(terms, neighbours, delta), "RDP")
    try:
        upper = loss.epsilon(terms.mu_squared, terms.others, neighbours, delta, deadline=time.monotonic() + time_limit)
    except loss.CannotTakeError as reason:
        return promise(*_second_best(terms, neighbours, delta, str(reason)))
    return promise(upper, "PLD, pessimistic")


def noise_multiplier(
    budget: Budget,
    event: Callable[[float], DpEvent] = gaussian,
    *,
    neighbours: Neighbours = Neighbours.ADD_REMOVE,
    accountant: Accountant = "pld",
    time_limit: float = 60.0,
    tolerance: float = 1e-4,
) -> float:
    """The smallest noise multiplier (to ``tolerance`` in epsilon, on the safe side) at which ``event`` fits the budget.

    Args:
        budget: What may be spent.
        event: From the noise multiplier to everything that is released: one release, T steps, a schedule ``lambda s:
            schedule([s, s/2])``, Laplace queries, or a mixture of all these.
        neighbours: The neighbouring relation.
        accountant: As in ``guarantee``.
        time_limit: As in ``guarantee``.
        tolerance: Of epsilon.

    Returns:
        The noise's standard deviation relative to the clip.

    Raises:
        ValueError: No noise fits the budget.

    Examples:
        >>> from tacit.privacy import Budget, events, noise_multiplier
        >>> round(noise_multiplier(Budget(2.0, 1e-6), lambda s: events.gaussian(s, steps=20)), 1)
        10.0
    """
    if not budget.private:
        return 0.0
    deadline = time.monotonic() + time_limit

    def spent(noise: float) -> float:
        left = deadline - time.monotonic()
        if left < 0 and accountant == "pld":
            raise TimeoutError
        return guarantee(
            event(noise), delta=budget.delta, neighbours=neighbours, accountant=accountant, time_limit=left
        ).epsilon

    exact = not take_apart(event(1.0), Neighbours(neighbours)).others and accountant != "rdp"
    try:
        return _smallest(spent, budget.epsilon, 1e-13 if exact or budget.pure else tolerance)
    except TimeoutError:  # RDP all the way: more noise than needed, never less
        return noise_multiplier(budget, event, neighbours=neighbours, accountant="rdp", tolerance=tolerance)


def _smallest(spent: Callable[[float], float], target: float, tolerance: float) -> float:
    """The smallest x with spent(x) <= target, for a falling function that is nearly a line in log-log."""
    low, high = 1.0, 1.0  # spent(low) > target >= spent(high)
    cost_low = cost_high = spent(1.0)
    while cost_high > target:
        low, cost_low, high = high, cost_high, high * _stride(cost_high, target)
        if high > 1e12:
            raise UnsupportedEvent("No amount of noise meets this budget: a part of the plan costs more by itself.")
        cost_high = spent(high)
    while cost_low <= target:
        high, cost_high, low = low, cost_low, low / _stride(target, cost_low)
        if low < 1e-9:
            return high
        cost_low = spent(low)
    halve = False
    while cost_high < target * (1 - tolerance) and high / low > 1 + tolerance * 1e-3:
        share = 0.5
        if not halve and math.isfinite(cost_low) and cost_high > 0:
            share = math.log(cost_low / (target * (1 - tolerance / 2))) / math.log(cost_low / cost_high)
        middle = low * (high / low) ** min(max(share, 0.01), 0.99)
        cost, width = spent(middle), high / low
        if cost > target:
            low, cost_low = middle, cost
        else:
            high, cost_high = middle, cost
        halve = math.log(high / low) > 0.5 * math.log(width) and not halve
    return high


def _stride(above: float, below: float) -> float:
    """How far to jump from a cost towards another, as if cost fell with 1/noise."""
    return min(max(1.1 * above / below, 1.5), 100.0) if below > 0 and math.isfinite(above) else 8.0


def renyi(event: DpEvent, neighbours: Neighbours, orders: Sequence[float]) -> list[float]:
    """The Renyi divergence of a tree at each order; the divergences of separate releases add.

    Args:
        event: What is released.
        neighbours: The neighbouring relation.
        orders: Renyi orders above 1.

    Returns:
        One divergence per order.
    """
    return _renyi(take_apart(event, neighbours), neighbours, orders)


def epsilon_of_renyi(order: float, divergence: float, delta: float) -> float:
    """(order, divergence)-RDP as epsilon at ``delta`` (Canonne, Kamath & Steinke 2020, proposition 12).

    Args:
        order: The Renyi order.
        divergence: The divergence at that order.
        delta: The allowed failure probability.

    Returns:
        The epsilon.
    """
    return max(0.0, divergence + math.log1p(-1 / order) - math.log(delta * order) / (order - 1))


def renyi_of_epsilon(order: float, budget: Budget) -> float:
    """The largest divergence at ``order`` that the budget pays for; negative if this order cannot serve it.

    Args:
        order: The Renyi order.
        budget: What may be spent.

    Returns:
        The divergence.
    """
    return budget.epsilon - math.log1p(-1 / order) + math.log(budget.delta * order) / (order - 1)


def best_order(budget: Budget, event: DpEvent | None = None, neighbours: Neighbours = Neighbours.ADD_REMOVE) -> float:
    """The order at which the budget pays for the most of ``event`` (a plain Gaussian if none is given).

    Args:
        budget: What may be spent.
        event: What it will be spent on.
        neighbours: The neighbouring relation.

    Returns:
        The Renyi order.
    """
    caps = [renyi_of_epsilon(order, budget) for order in ORDERS]
    costs = list(ORDERS) if event is None else renyi(event, neighbours, ORDERS)
    value, order = max((cap / cost if cost > 0 else 0.0, o) for cap, cost, o in zip(caps, costs, ORDERS, strict=True))
    if value <= 0:
        raise ValueError(f"No Renyi order serves a budget of {budget}: use the gaussian mode or a larger delta.")
    return order


def _renyi(terms: Decomposition, neighbours: Neighbours, orders: Sequence[float]) -> list[float]:
    if not terms.private:
        return [math.inf] * len(orders)
    total = [terms.mu_squared * order / 2 for order in orders]
    for leaf, times in terms.others.items():
        if isinstance(leaf, dp_event.RepeatAndSelectDpEvent):
            best = _renyi_of_best(leaf, neighbours, orders)
            total = [a + times * b for a, b in zip(total, best, strict=True)]
            continue
        if isinstance(leaf, dp_event.ZCDpEvent):
            total = [a + times * _concentrated(leaf, o, neighbours) for a, o in zip(total, orders, strict=True)]
            continue
        event, relation = leaf, NeighboringRelation.ADD_OR_REMOVE_ONE
        if isinstance(leaf, dp_event.PoissonSampledDpEvent) and neighbours is Neighbours.REPLACE_ONE:
            raise UnsupportedEvent(
                "Poisson sampling under replace-one is accounted by PLD only (in a ledger: the plan mode)."
            )
        if isinstance(leaf, BallsInBinsDpEvent):
            raise UnsupportedEvent(
                "Balls-in-bins sampling is accounted by PLD only (in a ledger: the plan mode, which a run that may "
                "stop early cannot use)."
            )
        if isinstance(leaf, NoisyMaxDpEvent | dp_event.DiscreteLaplaceDpEvent):  # two-point response dominates it
            often = math.exp(-pure_of(leaf))
            event = dp_event.RandomizedResponseDpEvent(2 * often / (1 + often), 2)
        if isinstance(event, dp_event.RandomizedResponseDpEvent | dp_event.SampledWithoutReplacementDpEvent):
            relation = NeighboringRelation.REPLACE_ONE
        ledger = RdpAccountant(list(orders), relation)
        if not ledger.supports(event):
            raise UnsupportedEvent(f"Neither PLD nor RDP bounds {type(leaf).__name__} under {neighbours}.")
        ledger.compose(event, times)
        total = [a + float(b) for a, b in zip(total, ledger._rdp, strict=True)]
    return total


def _concentrated(leaf: DpEvent, order: float, neighbours: Neighbours) -> float:
    """The divergence of a (xi, rho)-zCDP release, its rho already times the relation's factor squared.

    Formal guarantee: D(order) <= xi + rho order between neighbours that differ by one unit more or less. Replacing is
    two such steps, and by Hoelder D_a(P, R) <= 2a/(2a - 1) D_(2a - 1)(P, Q) + D_2a(Q, R) (Bun & Steinke 2016, lemma 5.2
    with k = 2), that is xi (1 + 2a/(2a - 1)) + 4 rho a: up to 3 xi near order 1, not 2 xi.
    """
    steps = 1 + 2 * order / (2 * order - 1) if neighbours is Neighbours.REPLACE_ONE else 1.0
    return float(steps * leaf.xi + leaf.rho * order)


def halting(mean: float, shape: float) -> float:
    """log(1/gamma) of the truncated negative binomial distribution of this shape whose mean is at most ``mean``.

    With t = log(1/gamma) the mean is shape (e^t - 1)/(1 - e^(-shape t)), at shape 0 its limit (e^t - 1)/t, and grows
    with t (Papernot & Steinke 2022, definition 1).

    Args:
        mean: The mean number of trials.
        shape: The distribution's shape.

    Returns:
        t = log(1/gamma).
    """
    low, high = 0.0, 2 * math.log(mean) + 2
    while low < (middle := (low + high) / 2) < high:
        per_shape = -math.expm1(-shape * middle) / shape if shape else middle
        if math.expm1(middle) <= mean * per_shape:
            low = middle
        else:
            high = middle
    return low


def _renyi_of_best(leaf: DpEvent, neighbours: Neighbours, orders: Sequence[float]) -> list[float]:
    """The divergences of a random number of runs of which the best leaves (Papernot & Steinke 2022).

    Theorem 2 (truncated negative binomial) may be used with any second order, theorem 6 (Poisson) needs one run's delta
    at one epsilon; both look at all of ``ORDERS``, whichever are asked for. A divergence never falls with its order.
    """
    one = Decomposition()
    for part, times in leaves(leaf.event):  # the factor was applied when the search was taken apart
        one.add(part, times)
    if neighbours is Neighbours.REPLACE_ONE and any(isinstance(e, dp_event.PoissonSampledDpEvent) for e in one.others):
        raise UnsupportedEvent(
            "A search is bounded by Renyi divergences, and Poisson sampling under replace-one has none: account under "
            "add-remove or zero-out, or train without sampling."
        )
    one.others = loss.rounded(one.others, 48)
    grid = sorted({*map(float, ORDERS), *map(float, orders)})
    runs = _renyi(one, neighbours, grid)
    more = [math.log(leaf.mean) / (order - 1) for order in grid]
    if math.isinf(leaf.shape):
        near = [math.log1p(1 / (order - 1)) for order in grid]
        deltas = [_delta(one, grid, runs, epsilon) for epsilon in near]
        more = [a + leaf.mean * delta for a, delta in zip(more, deltas, strict=True)]
    else:
        stop = halting(leaf.mean, leaf.shape)
        second = min((1 - 1 / order) * run + stop / order for order, run in zip(grid, runs, strict=True))
        more = [a + (1 + leaf.shape) * second for a in more]
    best, found = math.inf, {}
    for order, run, extra in reversed(list(zip(grid, runs, more, strict=True))):
        found[order] = best = min(best, run + extra)
    return [found[float(order)] for order in orders]


def _delta(terms: Decomposition, orders: Sequence[float], divergences: Sequence[float], epsilon: float) -> float:
    """Delta at ``epsilon``: exact for Gaussians, else by the inverse of ``epsilon_of_renyi``."""
    if not terms.others:
        return delta_of(epsilon, terms.mu)
    pairs = zip(orders, divergences, strict=True)
    return math.exp(min(0.0, *((o - 1) * (r - epsilon + math.log1p(-1 / o)) - math.log(o) for o, r in pairs)))


def _rdp_epsilon(terms: Decomposition, neighbours: Neighbours, delta: float) -> float:
    few = Decomposition(terms.mu_squared, loss.rounded(terms.others, 48), terms.private)
    divergences = _renyi(few, neighbours, ORDERS)
    pairs = [(o, r) for o, r in zip(ORDERS, divergences, strict=True) if math.isfinite(r)]
    return min((epsilon_of_renyi(o, r, delta) for o, r in pairs), default=math.inf)


def _second_best(terms: Decomposition, neighbours: Neighbours, delta: float, reason: str) -> tuple[float, str, str]:
    """Epsilon where PLD cannot serve, what gave it, and a note that says why."""
    refused: UnsupportedEvent | None = None
    try:
        by_rdp = _rdp_epsilon(terms, neighbours, delta)
    except UnsupportedEvent as error:
        refused, by_rdp = error, math.inf
    plain = _without_sampling(terms, neighbours, delta)
    if plain < by_rdp:
        return plain, "Gaussian without sampling", f"without the gain of sampling because {reason}"
    if refused is not None:
        raise refused
    return by_rdp, "RDP", f"RDP because {reason}"


def _without_sampling(terms: Decomposition, neighbours: Neighbours, delta: float) -> float:
    """The bound as if everybody were always drawn; infinite if there is something that is neither Gaussian nor pure.

    Formal guarantee: a draw at rate q gives the mixture of a release from everybody (q) and one without the unit
    (1 - q), and divergences are jointly convex: they are at most q times those of the release from everybody.
    """
    mu_squared = terms.mu_squared
    for event, times in terms.others.items():
        if isinstance(event, BallsInBinsDpEvent):
            mu_squared += times * -(-event.steps // event.bins) / event.noise_multiplier**2
            continue
        inner = event.event if isinstance(event, dp_event.PoissonSampledDpEvent) else event
        try:
            gaussian_ = isinstance(inner, dp_event.GaussianDpEvent)
            mu = neighbours.factor / inner.noise_multiplier if gaussian_ else mu_of_pure(pure_of(inner))
        except UnsupportedEvent:
            return math.inf
        mu_squared += times * mu**2
    return epsilon_of(math.sqrt(mu_squared), delta)
