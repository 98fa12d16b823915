"""Repeat and select: a random number of trials under one receipt, of which only the winner leaves.

    event = events.repeat_and_select(events.compose([training, score]), mean=10, shape=1)
    receipt = ledger.charge("clinic-a", event, stage="tune")
    winner = best(run(trial) for trial in SelectionTrials(receipt))  # run: draw settings, train, release a score

Formal guarantee (Papernot & Steinke 2022, theorems 2 and 6). Unit, neighbours and sensitivity are those of the inner
event, the releases of one trial. If one trial is (order, eps)-RDP at every order, then the winner is (order, eps')-RDP,

    eps' = eps + (1 + shape) ((1 - 1/other) eps(other) + log(1/gamma) / other) + log(mean) / (order - 1)

for any ``other`` order, where the number of trials is truncated negative binomial of halting probability gamma; and
eps' = eps + mean delta + log(mean) / (order - 1), where it is Poisson and one trial is (log(1 + 1/(order - 1)),
delta)-DP. This is what the accountant charges, and it holds provided that

- the trials are independent runs of one fixed randomised mechanism. Its settings are drawn inside, from a
  distribution that depends neither on the data nor on other trials (``SelectionTrial.uniforms``): a public list gone
  through in order would reveal by the winner's place how many trials there were. Different settings may mean different
  releases, as long as none costs more than the inner event (``SelectionTrial.pay``): a mixture diverges no more than
  its worst part;
- the score is a part of what a trial releases: noisy, on the trial's own receipt. An exact score is not covered;
- every trial is run and the best of all is taken (``best``). Stopping at a good one is another mechanism.

Two audiences: how many trials there were, how long they took, and every model, score and setting but the winner's
stay with the curator. Whoever sees any of these has seen more than was paid for.

The number is drawn from the receipt's key when the search starts, and from then on nothing is refunded, whatever
crashes: which searches are repeated would depend on their outcomes.
"""

from __future__ import annotations

import math
import threading
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from decimal import Decimal, localcontext
from typing import SupportsFloat, TypeVar

from dp_accounting import dp_event
from torch import Tensor

from tacit.privacy._noise import NoiseKey
from tacit.privacy._receipts import Receipt, ReceiptError, consume
from tacit.privacy._subject import canonical
from tacit.privacy.accounting import halting
from tacit.privacy.events import DpEvent, compose, joint_noise, leaves, repeat_and_select, to_json

Model = TypeVar("Model")
_CHOICE = 3  # the purpose of uniforms: 0 to 2 are noise, sampling and views
_DIGITS = 60


class SelectionTrial:
    """One run of a search. It reveals neither its place nor how many there are."""

    def __init__(self, search: Receipt, key: NoiseKey) -> None:
        self._search, self._key = search, key
        self._paid: list[DpEvent] = []
        self._lock = threading.Lock()

    def uniforms(self, count: int) -> Tensor:
        """``count`` random numbers in (0, 1] (float64) to draw this trial's settings from, always the same ones.

        They come from the search's secret key: other trials' numbers and all noise are independent of them.
        """
        _check_live(self._search)
        return self._key.uniforms(0, count, _CHOICE)

    def pay(self, event: DpEvent | None = None) -> Receipt:
        """A live receipt for a part of this trial, by default for all of it (the search's inner event).

        All parts together may cost no more than the inner event, at any Renyi order: their Gaussians jointly have no
        less noise than its Gaussians (T steps of noise sqrt(T)/mu cost the same for every T), and what else they
        release is among what else it releases. Every receipt has noise of its own. It dies with the search's receipt,
        and no ledger knows it.
        """
        _check_live(self._search)
        inner = self._search.event.event
        event = inner if event is None else event
        with self._lock:
            parts = [*self._paid, event]
            if not _covers(inner, compose(parts)):
                raise ReceiptError(
                    "This costs more than one trial of the search may: take Gaussians whose joint noise is not below "
                    "the inner event's, and any other release exactly as it stands there. Nothing was paid."
                )
            self._paid = parts
            key = self._key.derived("receipt", len(parts))
        search = self._search
        receipt = Receipt(
            id=uuid.uuid4().hex,
            subject=search.subject,
            event=event,
            stage=search.stage,
            note=search.note,
            neighbours=search.neighbours,
            unit=search.unit,
            mode=search.mode,
            head=search.head,
            bound=search.bound,
            seeded=search.seeded,
        )
        receipt._state.search, receipt._state.rehearsal = search, search._state.rehearsal
        return receipt.issued(key)

    def __repr__(self) -> str:
        return f"a trial on {self._search}"

    def __reduce__(self) -> str:
        raise TypeError("A trial stays in the process that drew it.")


class SelectionTrials(Iterator[SelectionTrial]):
    """The trials of one search, a secret number of them; iterate over all, once.

    ``receipt`` is live and paid for one ``events.repeat_and_select`` and nothing else. Making this object draws the
    number and uses the receipt up: it serves one search, in this process, until it is settled.
    """

    def __init__(self, receipt: Receipt) -> None:
        event = receipt.event if isinstance(receipt, Receipt) else None
        if not isinstance(event, dp_event.RepeatAndSelectDpEvent):
            raise ReceiptError(
                "A search needs a receipt for one search: charge tacit.privacy.events.repeat_and_select."
            )
        repeat_and_select(event.event, mean=event.mean, shape=event.shape)  # it may have been made by hand
        _, release, key = consume(receipt, dp_event.RepeatAndSelectDpEvent, receipt.bound or 1.0)
        self.receipt = receipt
        self._started, self._number = 0, number_of_trials(event, *key.uniforms(release, 2, _CHOICE).tolist())
        self._lock = threading.Lock()

    def __next__(self) -> SelectionTrial:
        with self._lock:
            if self._started == self._number:
                raise StopIteration
            key = _check_live(self.receipt)
            self._started += 1
            return SelectionTrial(self.receipt, key.derived("trial", self._started))

    def __repr__(self) -> str:
        return f"the trials on {self.receipt}"

    def __reduce__(self) -> str:
        raise TypeError("A search stays in the process that started it.")


def best(scored: Iterable[tuple[SupportsFloat, Model]]) -> tuple[float, Model] | None:
    """The (score, model) with the largest score; None if there was no trial or none has a finite score.

    The scores are the trials' noisy releases. The order of outcomes is by score, with all that are not finite below
    the rest. Among equal scores the first wins: trials are alike and independent, so it is as likely to be any of
    them, which is the total order "by score, then by a random number of one's own" that the theorems speak of. That
    no trial wins without a finite score is post-processing. One model is kept at a time.
    """
    leader: tuple[float, Model] | None = None
    for score, model in scored:
        value = float(score)
        if math.isfinite(value) and (leader is None or value > leader[0]):
            leader = value, model
    return leader


def number_of_trials(event: DpEvent, high: float, low: float) -> int:
    """The number of trials that two uniforms of 53 bits give: the inverse distribution function at 106 bits.

    With p(k + 1)/p(k) = (1 - gamma)(k + shape)/(k + 1) for the truncated negative binomial distribution (definition 1)
    and mean/(k + 1) for the Poisson one. Sums have 60 digits, so what remains is the grid of the uniform: each number
    is off by at most 2^-106, the far tail (where one step of the grid has more than one number) by 2^-106 in all. That
    is a total variation below 1e-25 as long as fewer than a million numbers are more likely than that.
    """
    with localcontext() as context:
        context.prec = _DIGITS
        grid = (int(high * 2**53) - 1) * 2**53 + int(low * 2**53) - 1
        wanted = (grid + Decimal("0.5")) / 2**106
        mean, shape = Decimal(event.mean), Decimal(event.shape)
        if shape.is_infinite():
            number, share = 0, (-mean).exp()
        else:
            stop = Decimal(halting(event.mean, event.shape))  # log(1/gamma)
            goes_on = 1 - (-stop).exp()
            if not goes_on:
                return 1
            number, share = 1, goes_on / stop if not shape else shape * goes_on / ((shape * stop).exp() - 1)
        below = share
        while below < wanted:
            share *= mean / (number + 1) if shape.is_infinite() else goes_on * (number + shape) / (number + 1)
            number += 1
            below += share
        return number


def _covers(inner: DpEvent, event: DpEvent) -> bool:
    """Whether ``event`` costs no more than ``inner`` at any order, Gaussians joined and the rest one by one."""
    (paid, others), (noise, more) = _parts(inner), _parts(event)
    return noise >= paid * (1 - 1e-12) and more <= others


def _parts(event: DpEvent) -> tuple[float, Counter[str]]:
    noises: list[float] = []
    others: Counter[str] = Counter()
    for leaf, times in leaves(event):
        if isinstance(leaf, dp_event.GaussianDpEvent):
            noises.append(leaf.noise_multiplier / math.sqrt(times))
        else:
            others[canonical(to_json(leaf))] += times
    return joint_noise(noises), others


def _check_live(receipt: Receipt) -> NoiseKey:
    if not receipt.live or receipt._key is None:
        raise ReceiptError(
            f"The search on receipt {receipt.id[:8]} is over here: it was settled, or it belongs to another process."
        )
    return receipt._key
