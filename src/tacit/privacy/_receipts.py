"""Receipts: the only tickets that ``mechanisms`` accepts.

A receipt states what was paid for: which releases, with which noise, of contributions within which bound, under which
relation. It is live in the process that was handed it by ``Ledger.charge`` and nowhere else: a copy in a forked or
another process, or one read back from the ledger, states the same facts but releases nothing, for two processes
drawing the same noise for different data would give the data away.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any

from tacit.privacy._budget import Neighbours, Unit
from tacit.privacy._noise import NoiseKey
from tacit.privacy._receipt_state import Slot, _ReceiptState, count
from tacit.privacy.events import BallsInBinsDpEvent, DpEvent, StreamDpEvent, calls, compose, from_json, leaves, repeat

if TYPE_CHECKING:
    from tacit.privacy._subject import Subject

_WHOLE = StreamDpEvent | BallsInBinsDpEvent  # what costs as much from its first release on


class ReceiptError(Exception):
    """A release that no receipt covers."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Receipt:
    """Proof of a charge: it covers ``releases`` mechanism calls, each kind in the order of the event's tree, no more.

    Receipts are made by ``Ledger.charge`` only.

    Args:
        id: The receipt's identifier in the ledger.
        subject: Which subject was charged.
        event: What may be released.
        stage: Which stage spends it.
        note: Free text.
        neighbours: The neighbouring relation.
        unit: The privacy unit.
        mode: How the subject composes.
        head: The ledger's hash chain, up to and including this charge.
        bound: No sum with a larger bound is accepted; None: the noise scales with each sum's bound.
        seeded: The noise is reproducible: not private.
    """

    id: str
    subject: str
    event: DpEvent
    stage: str
    note: str
    neighbours: Neighbours
    unit: Unit
    mode: str
    head: str  # the ledger's chain, up to and including this charge
    bound: float | None = None  # no contribution may be larger; None: the noise follows the bound of each sum
    seeded: bool = False
    # not of __init__, so that dataclasses.replace makes no live copy
    _key: NoiseKey | None = field(default=None, repr=False, init=False)
    _state: _ReceiptState = field(repr=False, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_state", _ReceiptState.of(self.event))

    def issued(self, key: NoiseKey) -> Receipt:
        """This receipt, live; for ``Ledger.charge`` alone.

        Args:
            key: The key of the receipt's noise.

        Returns:
            The live receipt.
        """
        object.__setattr__(self, "_key", key)
        return self

    @property
    def releases(self) -> int:
        return sum(count(leaf, times) for leaf, times in leaves(self.event))

    @property
    def used(self) -> int:
        """Releases drawn from this receipt so far, in this process; 0: no private value left on it."""
        return self._state.used

    @property
    def live(self) -> bool:
        whole = self._state.search  # of which this one pays for a trial
        return self._key is not None and self._state.open and (whole is None or whole.live)

    @property
    def leased(self) -> int | None:
        """The number up to which it may release now; None: all of it, no lease was ever taken on it."""
        return self._state.leased

    @property
    def private(self) -> bool:
        return not self.seeded

    @property
    def _called(self) -> str:
        """What messages call it."""
        return "'rehearsal' in the dry run" if self.mode == "rehearsal" else self.id[:8]

    def __str__(self) -> str:
        seeded = " (seeded: not private)" if self.seeded else ""
        return f"receipt {self._called}{seeded}: {self.stage}, {self.releases} release(s) on {self.subject}"

    def skip(self, used: int) -> None:
        """Count the first ``used`` releases, in the order of the tree, as made; for ``leases`` and ``replay`` alone.

        Args:
            used: The number of releases made earlier.
        """
        if not 0 <= used <= self.releases - self.used:
            raise ReceiptError(f"Receipt {self._called} pays for {self.releases} releases: {used} cannot be skipped.")
        self._state.skip(used)

    def close(self, used: int | None = None) -> DpEvent:
        """No release after this. Returns what ``used`` releases (by default those made so far) amount to.

        What was released counts whatever its place in the tree; releases beyond it are taken in the tree's order. A
        stream, or a run of balls-in-bins sampling, counts in full from its first step on.

        Args:
            used: The number of releases that count.

        Returns:
            The event that they amount to.
        """
        with self._state.lock:
            if self._state.closed:
                raise ReceiptError(f"Receipt {self._called} is closed already.")
            more = self.counted(used) - self.used
            kept = []
            for (leaf, times), slot in zip(leaves(self.event), self._state.slots, strict=True):
                extra = min(slot.left, more)
                more -= extra
                made = count(leaf, times) - slot.left + extra
                if made:
                    kept.append(repeat(leaf, -(-made // calls(leaf)) if isinstance(leaf, _WHOLE) else made))
            self._state.closed = True
        return compose(kept)

    def counted(self, used: int | None = None, *, least: int = 0) -> int:
        """How many releases count as made, of which ``used`` are said to be: at least ``least``, and no number else.

        Args:
            used: The caller's own count.
            least: A floor.

        Returns:
            The number of releases that count as made.
        """
        stated = self.used if used is None else used
        whole = isinstance(stated, Integral) and not isinstance(stated, bool)
        if not whole or not self.used <= stated <= self.releases:
            raise ReceiptError(
                f"Receipt {self._called} released {self.used} of {self.releases}: {stated!r} cannot be right."
            )
        return max(int(stated), least)

    @property
    def in_order(self) -> bool:
        """Whether what was released so far is the first of the tree, and nothing behind it."""
        parts = zip(leaves(self.event), self._state.slots, strict=True)
        left = [(slot.left, count(leaf, times)) for (leaf, times), slot in parts]
        first = next((place for place, (now, _) in enumerate(left) if now), len(left))
        return all(now == all_ for now, all_ in left[first + 1 :])

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_key": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __copy__(self) -> Receipt:
        return self

    def __deepcopy__(self, memo: Mapping[int, object]) -> Receipt:
        return self


def stated(subject: Subject, receipt_id: str, body: Mapping[str, Any], head: str) -> Receipt:
    """The receipt of a charge as its entry of the ledger states it; it releases nothing until it is issued."""
    return Receipt(
        id=receipt_id,
        subject=subject.name,
        event=from_json(body["event"]),
        stage=body["stage"],
        note=body["note"],
        neighbours=subject.terms.neighbours,
        unit=subject.terms.unit,
        mode=subject.terms.mode.value,
        head=head,
        bound=body["bound"],
        seeded=body["seeded"],
    )


def consume(receipt: Receipt, kind: type[DpEvent], bound: float) -> tuple[DpEvent, int, NoiseKey]:
    """Use up one release: its event, its number and the key of its noise. Refused if the receipt does not cover it.

    Formal guarantee: a draw (``sampling.draw``) binds the slot of the tree whose rate it used, and the next release is
    of that slot or is refused; a slot that was charged as Poisson-subsampled gives nothing without a draw. So no sum
    over units that were drawn at one rate leaves at the price of another.
    """
    if not isinstance(receipt, Receipt):
        raise ReceiptError("A release needs the receipt of a charge: call Ledger.charge first.")
    key = receipt._key
    if not receipt.live or key is None:
        raise _dead(receipt)
    if not 0 < bound < float("inf"):
        raise ReceiptError("A release needs a finite bound on each unit's contribution; this sum has none.")
    if receipt.bound is not None and bound > receipt.bound * (1 + 1e-12):
        raise ReceiptError(
            f"The receipt covers contributions up to {receipt.bound:g}; this sum is bounded by {bound:g}."
        )
    state = receipt._state
    with state.lock:  # two threads must never be handed the same noise
        if not receipt.live:
            raise _dead(receipt)
        slot, drawn = state.next(kind), state.drawn
        if drawn is not None and drawn is not slot:
            raise ReceiptError(
                f"The units of the next release on receipt {receipt._called} were drawn for a {drawn.kind.__name__}, "
                f"at the rate {drawn.rate:g}: that release comes first."
            )
        if slot is None:
            paid = ", ".join(sorted({slot.kind.__name__ for slot in state.slots}))
            raise ReceiptError(
                f"No {kind.__name__} is left on receipt {receipt._called}: {receipt.used} of {receipt.releases} "
                f"releases were used, and it paid for {paid}."
            )
        if state.overtaken:
            raise ReceiptError(f"Another process or run has resumed receipt {receipt._called}: stop here.")
        if state.leased is not None and state.used >= state.leased:
            raise ReceiptError(f"The lease on receipt {receipt._called} is used up: lease more releases first.")
        if slot.rate < 1 and drawn is None:
            raise ReceiptError(
                f"Receipt {receipt._called} paid for units that are drawn with probability {slot.rate:g}: draw them "
                "with tacit.privacy.sampling.draw, then release."
            )
        first = state.next() or slot
        if state.leased is not None and first is not slot:
            # whoever resumes it later knows a number of releases, not which they were
            raise ReceiptError(
                f"Releases on a lease are made in the order of the event: the next one on receipt {receipt._called} "
                f"is a {first.kind.__name__}."
            )
        return slot.leaf, state.consume(slot), key


def upcoming(receipt: Receipt, *, draws_from: int | None = None, ahead: int = 0) -> tuple[Slot, int, NoiseKey]:
    """The slot (how its units are drawn) and the number of the next release, and the key of its draw; for ``sampling``.

    With ``draws_from``, a number of units, the next release is held to this slot. ``ahead``: of the release that comes
    so many after it, if the releases between are made in the order of the event; it holds nothing.
    """
    if not isinstance(receipt, Receipt):
        raise ReceiptError("A draw needs the receipt of a charge: call Ledger.charge first.")
    state = receipt._state
    with state.lock:
        slot = state.drawn or state.next() if ahead == 0 else state.later(ahead)
        if not receipt.live or receipt._key is None or slot is None:
            raise _dead(receipt)
        if draws_from is not None and slot.fixed and slot.fixed[1] != draws_from:
            raise ReceiptError(
                f"Receipt {receipt._called} paid for {slot.fixed[0]:,} of {slot.fixed[1]:,} units in each draw: a "
                "sample of fixed size needs the true number of units."
            )
        if draws_from is not None and ahead == 0:
            state.drawn = slot
        return slot, state.used + ahead, receipt._key


def claim(receipt: Receipt) -> None:
    """Take a receipt for one run, which makes all its releases: a run that begins anew would use rows twice.

    What a stream costs rests on who takes part when, so half a run and another from the start are not what was paid.
    """
    if not isinstance(receipt, Receipt):
        raise ReceiptError("A run needs the receipt of a charge: call Ledger.charge first.")
    state = receipt._state
    with state.lock:
        if not receipt.live:
            raise _dead(receipt)
        if state.used or state.run:
            raise ReceiptError(f"Receipt {receipt._called} has served a run already: charge again for another one.")
        state.run = True


def check_used(receipt: Receipt) -> None:
    """Refuse a receipt from which nothing was released: no guarantee follows from noise that was never drawn."""
    if not receipt.used:
        raise ReceiptError(
            f"Nothing was released on receipt {receipt._called}: what was computed has none of the noise that a "
            "charge pays for, so it is not private, and it is not handed out. Read the data through the receipt alone."
        )


def check_charged(receipt: Receipt) -> None:
    """Refuse a receipt that no ledger knows: one that pays for a trial inside a search."""
    whole = receipt._state.search
    if whole is not None:
        raise ReceiptError(
            "This receipt pays for one trial of a search and was not charged by itself: what can be settled or leased "
            f"is the search's receipt {whole.id[:8]}."
        )


def _dead(receipt: Receipt) -> ReceiptError:
    return ReceiptError(
        f"Receipt {receipt._called} releases nothing here: it was settled, or it belongs to another process or an "
        "earlier run. Charge again."
    )
