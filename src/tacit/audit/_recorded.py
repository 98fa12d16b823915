"""What a stage hands to `privacy.mechanisms`, recorded where it is handed over, and released again many times.

A stage that takes milliseconds per release cannot be run a hundred thousand times. But what it computes from the data
(the sum, its bounds, the charge) is deterministic; chance comes in with the mechanism. So the stage is run once with
the unit and once without, and the mechanism itself then releases the two sums as often as an audit asks for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from dp_accounting import dp_event

from tacit.audit._findings import Claim, Finding, PromiseBroken
from tacit.audit._mechanism import Array, Release
from tacit.audit._releases import Sum, paid
from tacit.privacy import BoundedSum, GridSum, Neighbours, Receipt, events, mechanisms

Stage = Callable[[bool], Any]  # (is the unit there?) -> anything: what it releases is recorded
_NORMS: dict[str, Any] = {"gaussian_query": "l2", "laplace": "l1", "noisy_max": "linf"}
_lock = threading.RLock()


@dataclass(frozen=True, kw_only=True, eq=False)
class Recorded:
    """One release of a stage: the mechanism, the sum that it was given, and the receipt that paid."""

    mechanism: str
    total: BoundedSum | GridSum = field(repr=False)
    receipt: Receipt
    noise: dict[str, float] | None = None

    @property
    def event(self) -> events.DpEvent:
        """The one release that it is."""
        event = self.receipt.event
        if self.mechanism == "stream":
            known = isinstance(event, events.StreamDpEvent) and event.strategy.startswith("independent")
            if not known or event.contributions != 1:
                raise ValueError("Only a stream of independent steps, one for each unit, is made again.")
            return events.stream(event.noise_multiplier, 2)
        kinds = {"noisy_max": events.NoisyMaxDpEvent, "laplace": dp_event.LaplaceDpEvent}
        wanted = kinds.get(self.mechanism, dp_event.GaussianDpEvent)
        found = [leaf for leaf, _ in events.leaves(self.receipt.event) if isinstance(leaf, wanted)]
        if len(set(map(str, found))) != 1:
            raise ValueError(f"A release of {self.mechanism} on a charge of another kind cannot be made again.")
        return found[0]

    @property
    def terms(self) -> tuple[Any, ...]:
        """What must be the same whoever is there: mechanism, charge, bounds, shapes."""
        if isinstance(self.total, GridSum):
            norm, relation = _NORMS[self.mechanism], self.receipt.neighbours
            size = (len(self.total.total), self.total.grid, self.total.bound(norm, relation))
            return self.mechanism, str(self.receipt.event), size
        shapes = {name: tuple(value.shape) for name, value in self.total.sum.items()}
        return self.mechanism, str(self.receipt.event), str((shapes, dict(self.total.bounds))), str(self.noise)

    def again(self, trials: int) -> Array:
        """The same sum, released ``trials`` times by the same mechanism: one row of numbers per trial."""
        relation = self.receipt.neighbours
        if not isinstance(self.total, GridSum):
            shape = {name: (trials, *value.shape) for name, value in self.total.sum.items()}
            tiled = {name: value.expand(shape[name]).clone() for name, value in self.total.sum.items()}
            sums = Sum(tiled, dict(self.total.bounds), {k: tuple(v) for k, v in self.total.blocks.items()})
            with paid(self.event, relation) as receipt:
                if self.mechanism == "stream":
                    out = mechanisms.GaussianStream(receipt).release(sums, noise=self.noise)
                else:
                    out = mechanisms.gaussian(sums, receipt, noise=self.noise)
            return np.concatenate([out[name].reshape(trials, -1).double().numpy() for name in tiled], axis=1)
        values = self.total.total
        if self.mechanism == "noisy_max":
            with paid(events.repeat(self.event, trials), relation) as receipt:
                chosen = np.array([mechanisms.noisy_max(self.total, receipt) for _ in range(trials)])
            return np.asarray(chosen[:, None] == np.arange(len(values) - 1), dtype=np.float64)
        release = mechanisms.laplace if self.mechanism == "laplace" else mechanisms.gaussian_query
        with paid(self.event, relation) as receipt:
            found = release(_tiled(self.total, trials, _NORMS[self.mechanism], relation), receipt)
        return found.numpy().reshape(trials, len(values))


def _tiled(total: GridSum, trials: int, norm: Any, relation: Neighbours) -> GridSum:
    """The same values ``trials`` times over, of which one unit moves one copy: its bound stays what it was."""
    bound = total.bound(norm, relation)
    return GridSum(total=total.total * trials, grid=total.grid, low=-bound, high=bound, l1=bound, l2=bound)


@contextmanager
def recording() -> Iterator[list[Recorded]]:
    """Every call of a mechanism, and every step of a stream, in this block; the calls go through unchanged."""
    found: list[Recorded] = []

    def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def instead(total: Any, receipt: Receipt, **options: Any) -> Any:
            out = call(total, receipt, **options)
            noise = options.get("noise")
            kept = None if noise is None else dict(noise)
            found.append(Recorded(mechanism=name, total=total, receipt=receipt, noise=kept))
            return out

        return instead

    def step(stream: mechanisms.GaussianStream, total: Any, *, noise: Any = None) -> Any:
        out = released(stream, total, noise=noise)
        kept = None if noise is None else dict(noise)
        found.append(Recorded(mechanism="stream", total=total, receipt=stream.receipt, noise=kept))
        return out

    names, released = ("gaussian", *_NORMS), mechanisms.GaussianStream.release
    with _lock:
        before = {name: getattr(mechanisms, name) for name in names}
        try:
            for name, call in before.items():
                setattr(mechanisms, name, watched(name, call))
            setattr(mechanisms.GaussianStream, "release", step)  # noqa: B010
            yield found
        finally:
            setattr(mechanisms.GaussianStream, "release", released)  # noqa: B010
            for name, call in before.items():
                setattr(mechanisms, name, call)


def releases_of(stage: Stage, *, name: str = "stage", subject: str | None = None) -> tuple[Release, Claim]:
    """The releases of a stage, to be made as often as one likes, and the claim of what it charged for them.

    Args:
        stage: Runs the stage on the data with the unit or without, on a ledger of its own.
        name: Of the stage, for the error.
        subject: Only what this subject of the ledger pays for: the data that the unit is in.

    Returns:
        A release for `audit.mechanism`: everything that the stage let out, one row per trial; and the claim of all
        receipts that paid, composed.

    Raises:
        PromiseBroken: The stage made other releases with the unit than without: their number or their bounds tell.
    """
    worlds: list[list[Recorded]] = []
    for there in (False, True):
        with recording() as found:
            stage(there)
        worlds.append([each for each in found if subject in (None, each.receipt.subject)])
    if not worlds[0] and not worlds[1]:
        raise ValueError(f"The stage {name} released nothing.")
    receipts = {id(each.receipt): each.receipt for each in worlds[1]}
    relation = worlds[1][0].receipt.neighbours if worlds[1] else Neighbours.ADD_REMOVE
    claim = Claim.of(events.compose([receipt.event for receipt in receipts.values()]), neighbours=relation)
    if [each.terms for each in worlds[0]] != [each.terms for each in worlds[1]]:
        finding = Finding(
            name=f"{name}: other releases with the unit than without",
            measure=claim.measure,
            claimed=claim.value,
            measured=float("inf"),
            trials=1,
            confidence=1.0,
        )
        raise PromiseBroken([finding])

    pairs = [_where_they_differ(*pair) for pair in zip(*worlds, strict=True)]

    def release(present: bool, trials: int) -> Array:
        return np.concatenate([pair[present].again(trials) for pair in pairs], axis=1)

    return release, claim


def _where_they_differ(gone: Recorded, there: Recorded) -> tuple[Recorded, Recorded]:
    """Two releases of numbers, cut to those that differ: the others are the same noise in both worlds, and independent.

    The bound stays that of the whole.
    """
    one, other = gone.total, there.total
    if not isinstance(one, GridSum) or not isinstance(other, GridSum) or gone.mechanism == "noisy_max":
        return gone, there
    places = [i for i, (a, b) in enumerate(zip(one.total, other.total, strict=True)) if a != b] or [0]
    bound = one.bound(_NORMS[gone.mechanism], gone.receipt.neighbours)
    parts = (
        replace(each, total=tuple(each.total[i] for i in places), low=-bound, high=bound, l1=bound, l2=bound)
        for each in (one, other)
    )
    cut, kept = parts
    return replace(gone, total=cut), replace(there, total=kept)
