"""Who pays for a run: its subject in a ledger, the noise that fits the budget, and what was spent so far."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from tacit._guard_rails import check_batch, check_unit_name, warn_of_delta
from tacit.finetune._optimizers import Optimizer
from tacit.finetune._queries import ClippedGradient
from tacit.finetune._sampling import BallsInBins, FixedSize, Poisson
from tacit.finetune._updates import Update
from tacit.privacy import (
    Budget,
    Guarantee,
    Ledger,
    Mode,
    Neighbours,
    Receipt,
    Terms,
    Unit,
    accounting,
    claim,
    epsilon_of,
    events,
)
from tacit.privacy.events import DpEvent


@dataclass(frozen=True, kw_only=True)
class Promise:
    """What a run promises, and to whom: all of it public and fixed before the first step."""

    budget: Budget
    unit: Unit
    neighbours: Neighbours
    size: int  # the declared number of units; sampling rates and divisors come from it
    stops: bool = False  # whether the run may stop early, by what it released


@dataclass(frozen=True, kw_only=True)
class Account:
    """A subject that pays, and the noise multiplier at which the run fits its budget."""

    ledger: Ledger
    subject: str
    promise: Promise
    scale: float
    event: DpEvent
    seed: int | None

    @property
    def durable(self) -> bool:
        """Whether what is charged outlives the process."""
        return self.ledger.durable

    def charge(self, stage: str, note: str) -> Receipt:
        """Reserve the whole run."""
        return self.ledger.charge(self.subject, self.event, stage=stage, note=note, seed=self.seed)

    def settle(self, receipt: Receipt, used: int) -> None:
        """Return what was not used."""
        self.ledger.settle(receipt, used)

    @property
    def guarantee(self) -> Guarantee:
        """What the subject was promised: after a run that may stop by its releases, the cap.

        The epsilon of the steps that were made is an odometer's reading: taken at a time that releases chose, it is no
        bound. The cap was fixed before the first step, and holds wherever the run stops.
        """
        return self.ledger.spent(self.subject, promised=self.promise.stops or self.ledger.stopped(self.subject))


@dataclass(frozen=True, kw_only=True)
class Paid(Account):
    """A run that somebody else has charged: its receipt stays theirs to settle."""

    ledger: Ledger = field(default=None, repr=False)  # type: ignore[assignment]  # nothing here asks it
    receipt: Receipt

    @property
    def durable(self) -> bool:
        return True  # for the caller that charged to say

    def charge(self, stage: str, note: str) -> Receipt:
        """The receipt, which serves this run and no other."""
        del stage, note
        claim(self.receipt)
        return self.receipt

    def settle(self, receipt: Receipt, used: int) -> None:
        """Nothing: what is left on the receipt is for the caller that charged it."""

    @property
    def guarantee(self) -> Guarantee:
        receipt, delta = self.receipt, self.promise.budget.delta
        return accounting.guarantee(receipt.event, delta=delta, neighbours=receipt.neighbours, unit=receipt.unit)


@dataclass(frozen=True, kw_only=True)
class FollowerAccount(Account):
    """Of a rank that does not lead: what the leader has charged."""

    ledger: Ledger = field(default=None, repr=False)  # type: ignore[assignment]  # the leader alone asks it
    charged: Guarantee | None = None

    @property
    def guarantee(self) -> Guarantee:
        if self.charged is None:
            raise RuntimeError("Rank 0 has not charged yet: nothing is promised.")
        return self.charged


def plan(
    optimizer: Optimizer,
    *,
    epsilon: float,
    delta: float,
    size: int,
    neighbours: Neighbours | str = Neighbours.ADD_REMOVE,
    others: Sequence[DpEvent] = (),
) -> DpEvent:
    """The event that `fit` will charge with these arguments, for a subject in the plan mode that declares all events
    first.

    Args:
        optimizer: As in `fit`.
        epsilon: As in `fit`.
        delta: As in `fit`.
        size: As in `fit`.
        neighbours: As in `fit`.
        others: Events that share the budget (private feature statistics, a search before this run).

    Returns:
        The event.

    Examples:
        >>> from tacit import finetune
        >>> from tacit.privacy import events
        >>> events.releases(finetune.plan(finetune.DPSGD(batch_size=50, steps=200), epsilon=4.0, delta=1e-5, size=1000))
        200
    """
    budget, relation = Budget(epsilon, delta), Neighbours(neighbours)
    return optimizer.event(_scale(optimizer, budget, size, relation, others), size)


def check_promise(optimizer: Optimizer, promise: Promise) -> None:
    """Refuse, or warn of, what is probably a mistake, before any work is done."""
    check_unit_name(promise.unit)
    if isinstance(optimizer.sampler, Poisson | FixedSize | BallsInBins):
        check_batch(optimizer.sampler.batch_size, promise.size)
    if promise.budget.private:
        warn_of_delta(promise.budget.delta, promise.size, str(promise.unit), stacklevel=5)


def open_account(
    optimizer: Optimizer,
    promise: Promise,
    ledger: Ledger | None,
    subject: str | None,
    *,
    others: Sequence[DpEvent] = (),
    seed: int | None = None,
) -> Account:
    """The given ledger's subject; a new one is declared with exactly this budget, in the mode that suits the run.

    Poisson batches go to the plan mode (PLD, the tightest), or to the renyi mode if the run may stop early; steps over
    everybody to the gaussian mode, which allows for that as well.
    """
    if ledger is None:
        warnings.warn(
            "No ledger was given: this run keeps its own in memory (not durable), and nothing stops a second run from "
            "spending the same budget again. Give ledger= to protect people over more than this run.",
            stacklevel=5,
        )
        ledger = Ledger("sqlite://")
    name = subject or "fine-tuning"
    known = ledger.get_subject(name)
    if known is not None:
        known.check_terms(unit=promise.unit, neighbours=promise.neighbours)
        scale = _scale_in(known.terms, optimizer, promise, others)
    else:
        scale = _declare(ledger, name, optimizer, promise, others)
    event = optimizer.event(scale, promise.size)
    return Account(ledger=ledger, subject=name, promise=promise, scale=scale, event=event, seed=seed)


def paid_account(optimizer: Optimizer, promise: Promise, receipt: Receipt) -> Account:
    """The account of a run on a receipt, which must have paid for exactly this run."""
    scale = optimizer.scale_of(receipt.event, promise.size)
    if scale is None:
        raise ValueError(
            f"This receipt did not pay for {optimizer.steps} steps of {optimizer.name} over {promise.size:,} units: "
            "charge the optimizer's own event."
        )
    return Paid(
        subject=receipt.subject,
        promise=promise,
        scale=scale,
        event=receipt.event,
        seed=0 if receipt.seeded else None,
        receipt=receipt,
    )


def no_account(optimizer: Optimizer, promise: Promise) -> Account:
    """Of a rank that does not lead: it charges nothing, and the leader says what was promised."""
    return FollowerAccount(
        subject="", promise=promise, scale=math.nan, event=optimizer.event(1.0, promise.size), seed=None
    )


def cost(receipt: Receipt, delta: float) -> Budget:
    """What a receipt has paid, as a budget."""
    found = accounting.guarantee(receipt.event, delta=delta, neighbours=receipt.neighbours)
    return Budget(found.epsilon, delta)


class Meter:
    """What the first t steps cost, for progress bars: an upper bound, quick, and never above the budget."""

    def __init__(self, optimizer: Optimizer, account: Account) -> None:
        self._optimizer, self._account = optimizer, account
        self._at = 0
        self._mu_squared = 0.0
        self._divergence = [0.0] * len(accounting.ORDERS)
        self._costs: dict[float, list[float] | None] = {}
        self._rate = optimizer.sampler.rate(account.promise.size)

    def __call__(self, steps: int) -> float:
        """Epsilon of the first `steps` steps."""
        promise = self._account.promise
        if not promise.budget.private:
            return math.inf
        for step in range(self._at, steps):
            self._add(self._optimizer.noise.multiplier(self._account.scale, step, self._optimizer.steps))
        self._at = max(self._at, steps)
        if not self._at:
            return 0.0
        if self._rate == 1:
            found = epsilon_of(math.sqrt(self._mu_squared), promise.budget.delta)
        else:
            orders = zip(accounting.ORDERS, self._divergence, strict=True)
            found = min(accounting.epsilon_of_renyi(o, d, promise.budget.delta) for o, d in orders)
        return min(found, promise.budget.epsilon)

    def _add(self, multiplier: float) -> None:
        promise = self._account.promise
        self._mu_squared += (promise.neighbours.factor / multiplier) ** 2
        if self._rate == 1:
            return
        if multiplier not in self._costs:
            try:
                event = self._optimizer.sampler.event(promise.size, events.gaussian(multiplier))
                self._costs[multiplier] = accounting.renyi(event, promise.neighbours, accounting.ORDERS)
            except accounting.UnsupportedEvent:
                self._costs[multiplier] = None  # no quick bound: the whole budget counts from the first step on
        cost = self._costs[multiplier]
        none = [math.inf] * len(self._divergence)
        self._divergence = [a + b for a, b in zip(self._divergence, cost or none, strict=True)]


def _declare(ledger: Ledger, name: str, optimizer: Optimizer, promise: Promise, others: Sequence[DpEvent]) -> float:
    """A new subject for this run alone."""
    budget, relation = promise.budget, promise.neighbours
    sampled = optimizer.sampler.rate(promise.size) < 1
    scale = _scale(optimizer, budget, promise.size, relation, others, rdp=sampled and promise.stops)
    event = optimizer.event(scale, promise.size)
    if sampled and promise.stops and budget.private:
        order = accounting.best_order(budget, events.compose([*others, event]), relation)
        terms = Terms(budget=budget, unit=promise.unit, neighbours=relation, mode=Mode.RENYI, order=order)
        scale = _until_it_fits(terms, optimizer, promise.size, others, scale)
        ledger.subject(name, budget, unit=promise.unit, neighbours=relation, mode=Mode.RENYI, order=order)
    elif sampled:
        ledger.subject(name, budget, unit=promise.unit, neighbours=relation, plan=[*others, event])
    else:
        ledger.subject(name, budget, unit=promise.unit, neighbours=relation)
    return scale


def _scale_in(terms: Terms, optimizer: Optimizer, promise: Promise, others: Sequence[DpEvent]) -> float:
    """The noise for a run that an existing subject pays for."""
    if promise.stops and terms.mode is Mode.PLAN and terms.private:
        raise ValueError(
            "A run that may stop early needs a subject in the renyi or gaussian mode: a plan refunds nothing."
        )
    rdp = terms.mode is Mode.RENYI
    scale = _scale(optimizer, promise.budget, promise.size, promise.neighbours, others, rdp=rdp)
    if rdp and promise.budget == terms.budget and terms.private:
        return _until_it_fits(terms, optimizer, promise.size, others, scale)
    return scale


def _scale(
    optimizer: Optimizer,
    budget: Budget,
    size: int,
    neighbours: Neighbours,
    others: Sequence[DpEvent],
    *,
    rdp: bool = False,
) -> float:
    plan = replace(optimizer, name="", query=ClippedGradient(), update=Update())  # what decides what is released
    return _solved(plan, budget, size, neighbours, tuple(others), rdp)


@lru_cache(maxsize=256)  # it takes seconds, and a search asks the same again and again
def _solved(
    plan: Optimizer, budget: Budget, size: int, neighbours: Neighbours, others: tuple[DpEvent, ...], rdp: bool
) -> float:
    def everything(noise: float) -> DpEvent:
        return events.compose([*others, plan.event(noise, size)])

    return accounting.noise_multiplier(budget, everything, neighbours=neighbours, accountant="rdp" if rdp else "pld")


def _until_it_fits(terms: Terms, optimizer: Optimizer, size: int, others: Sequence[DpEvent], scale: float) -> float:
    """A filter at one order may need a little more noise than the best of all orders."""
    while terms.cost(events.compose([*others, optimizer.event(scale, size)])) > terms.cap:
        scale *= 1.0005
    return scale


def assumptions(account: Account, promise: Promise, *, named: bool) -> list[str]:
    """What a run's guarantee rests on, for its card."""
    said = [f"one {promise.unit} per person: somebody with several has a guarantee for a group of that size"]
    if promise.neighbours is Neighbours.ADD_REMOVE:
        said.append(f"the declared size {promise.size:,} is public and was not computed from the exact number")
    if named and promise.neighbours is Neighbours.REPLACE_ONE:
        said.append(f"a {promise.unit} that takes another's place brings an id that nobody else has")
    if not account.durable:
        said.append("the ledger is in memory (not durable): it stops no second run on the same people")
    if account.seed is not None:
        said.append("seeded: not private")
    if not promise.budget.private:
        said.append("epsilon = inf: clipped, without noise; not private")
    return said
