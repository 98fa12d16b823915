"""Where a live receipt stands: what is left of its releases, who holds it, and how far it may go.

Formal guarantee: whether a release is made is decided under ``lock``, and its number is counted there, so that no two
threads are handed the same noise. A copy in another process (forked or unpickled) is of another ``process``: it is
never live there.
"""

from __future__ import annotations

import os
import secrets
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dp_accounting import dp_event

from tacit.privacy.events import BallsInBinsDpEvent, CyclicPoissonDpEvent, DpEvent, calls, gaussian_noise, leaves

if TYPE_CHECKING:
    from tacit.privacy._receipts import Receipt
    from tacit.privacy.mechanisms import GaussianStream

_process = object()  # another one in every child: process ids come round again


def _forked() -> None:
    global _process
    _process = object()


os.register_at_fork(after_in_child=_forked)


@dataclass
class Slot:
    """Equal releases in a row, and how many of them are left."""

    kind: type[DpEvent]
    leaf: DpEvent
    rate: float  # with which each unit is drawn; 1: all units
    left: int
    fixed: tuple[int, int] | None = None  # so many units are drawn, of so many; None: each by itself
    place: int = 0  # among the slots of the tree
    made: int = 0
    thrown: BallsInBinsDpEvent | None = None  # all units were thrown into bins; None: they are drawn anew each time


@dataclass
class _ReceiptState:
    """What changes about a receipt while it is used."""

    slots: list[Slot]
    used: int = 0
    drawn: Slot | None = None  # the slot whose units were drawn: the next release is of it
    closed: bool = False
    run: bool = False  # whether one run has claimed all releases
    rehearsal: bool = False  # whether what is released on it is noise alone
    stream: GaussianStream | None = None  # the one noise stream that may go on
    search: Receipt | None = None  # of which this receipt pays for a trial
    holder: str | None = None  # the name under which the ledger's chain knows this process
    leased: int | None = None  # no release from this number on; None: it was never leased
    replays: bool = False  # whether its releases may be made again, by its key: none may have other noise then
    overtaken: bool = False  # whether a newer holder in this process has the same key
    process: object | None = field(default_factory=lambda: _process)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, event: DpEvent) -> _ReceiptState:
        """The state of a receipt on which nothing was released yet."""
        return cls(
            [
                Slot(
                    type(released(leaf)),
                    released(leaf),
                    _rate(leaf),
                    count(leaf, n),
                    _fixed(leaf),
                    place,
                    thrown=leaf if isinstance(leaf, BallsInBinsDpEvent) else None,
                )
                for place, (leaf, n) in enumerate(leaves(event))
            ]
        )

    @property
    def open(self) -> bool:
        """Whether this process holds it and it is not closed."""
        return self.process is _process and not self.closed

    def next(self, kind: type[DpEvent] | None = None) -> Slot | None:
        """The first slot of the tree that has releases left (of this kind)."""
        return next((slot for slot in self.slots if slot.left > 0 and kind in (None, slot.kind)), None)

    def later(self, ahead: int) -> Slot | None:
        """The slot of the release that comes ``ahead`` after the next one, in the order of the tree, as it will be."""
        for slot in self.slots:
            if ahead < slot.left:
                return replace(slot, left=slot.left - ahead, made=slot.made + ahead)
            ahead -= slot.left
        return None

    def consume(self, slot: Slot) -> int:
        """Count one release of this slot as made; its number. The caller holds the lock."""
        slot.left -= 1
        slot.made += 1
        self.drawn = None
        self.used += 1
        return self.used - 1

    def skip(self, used: int) -> None:
        """Count the next ``used`` releases, in the order of the tree, as made."""
        self.used += used
        self.drawn = None
        for slot in self.slots:
            now = min(slot.left, used)
            slot.left -= now
            slot.made += now
            used -= now

    def named(self) -> str:
        """The holder's name; a fresh one the first time."""
        with self.lock:
            self.holder = self.holder or fresh_holder()
            return self.holder

    def overtake(self) -> None:
        """Take the rest of the lease away, for good: a newer holder draws the same noise."""
        with self.lock:
            self.leased, self.overtaken = self.used, True

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"lock": None, "process": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state | {"lock": threading.Lock()})


def fresh_holder() -> str:
    """A name that no holder had before."""
    return secrets.token_hex(8)


def released(leaf: DpEvent) -> DpEvent:
    """What is drawn for one leaf: sampling changes what it costs, not what is added to the (joint) sum."""
    if isinstance(leaf, BallsInBinsDpEvent):
        return dp_event.GaussianDpEvent(leaf.noise_multiplier)
    if not isinstance(leaf, dp_event.PoissonSampledDpEvent | dp_event.SampledWithoutReplacementDpEvent):
        return leaf
    noise = gaussian_noise(leaf.event)
    return leaf.event if noise is None else dp_event.GaussianDpEvent(noise)


def count(leaf: DpEvent, times: int) -> int:
    """The releases of a leaf that is there ``times`` times."""
    return times * calls(leaf)


def _rate(leaf: DpEvent) -> float:
    if isinstance(leaf, dp_event.SampledWithoutReplacementDpEvent):
        return float(leaf.sample_size / leaf.source_dataset_size)
    if isinstance(leaf, CyclicPoissonDpEvent):
        return float(leaf.sample_rate)
    if isinstance(leaf, BallsInBinsDpEvent):
        return 1 / leaf.bins
    return float(leaf.sampling_probability) if isinstance(leaf, dp_event.PoissonSampledDpEvent) else 1.0


def _fixed(leaf: DpEvent) -> tuple[int, int] | None:
    if isinstance(leaf, dp_event.SampledWithoutReplacementDpEvent):
        return int(leaf.sample_size), int(leaf.source_dataset_size)
    return None
