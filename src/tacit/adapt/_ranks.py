"""A stream over several ranks: each computes portions of whole units, the first one charges and adds the noise.

Every rank is called with the same batch. Only the leader has the ledger's receipt, the key of the noise and the record
of who took part; it sends what was released to the others, so that all of them have the same model after every step.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tacit.adapt._noise import Account, NoisyStream, open_account
from tacit.adapt._participation import Participation
from tacit.adapt._privacy_config import DP
from tacit.data import Rows
from tacit.distributed import MOST_UNITS, Team
from tacit.gradients import ClippedSum, count_rows, leaves, rows_of
from tacit.privacy import Guarantee, Ledger, Unit

_SHARES, _FEWEST = 8, 16  # portions of a batch, whatever the number of ranks, and the units that each has at least


@dataclass(frozen=True)
class StreamTerms:
    """What the leader says of the stream that it pays for."""

    guarantee: Guarantee
    seeded: bool
    durable: bool
    sensitivity: float


def open_stream(
    team: Team | None,
    form: DP,
    ledger: Ledger | None,
    subject: str | None,
    *,
    unit: Unit | str,
    lease: int,
    seed: int | None,
    batch_size: int,
) -> NoisyStream:
    """The stream of an adapter. Of several ranks only the leader opens the ledger, and if it is refused, all are."""
    if team is None:
        account = open_account(form, ledger, subject, unit=unit, lease=lease, seed=seed)
        return NoisyStream(form, account, batch_size)
    if batch_size > MOST_UNITS:
        raise ValueError(f"A batch over several ranks has up to {MOST_UNITS:,} rows, not {batch_size:,}.")
    found = team.alone(lambda: open_account(form, ledger, subject, unit=unit, lease=lease, seed=seed))
    if found is None:
        known = Ledger("sqlite://") if ledger is None else ledger  # is asked nothing here
        found = Account(ledger=known, subject=subject or "stream", unit=Unit(unit), lease=lease, seed=seed)
    return SharedStream(form, found, batch_size, team)


class SharedStream(NoisyStream):
    """The noise of one stream over several ranks: drawn once, by the leader, and the release sent to all.

    Formal guarantee: that of `NoisyStream`, on the leader. The others have no key and no receipt; what they get is
    released.
    """

    def __init__(self, form: DP, account: Account, units: int, team: Team) -> None:
        super().__init__(form, account, units)
        self.team = team
        self._terms: StreamTerms | None = None
        self._released = 0

    @property
    def guarantee(self) -> Guarantee:
        if self.team.leads:
            return super().guarantee
        if self._terms is None:
            raise RuntimeError("Rank 0 charges with the first batch: nothing is promised yet.")
        return self._terms.guarantee

    @property
    def seeded(self) -> bool:
        return super().seeded or (self._terms is not None and self._terms.seeded)

    @property
    def durable(self) -> bool:
        return super().durable if self._terms is None else self._terms.durable

    @property
    def sensitivity(self) -> float:
        return super().sensitivity if self._terms is None else self._terms.sensitivity

    @property
    def steps(self) -> int:
        return super().steps if self.team.leads else self._released

    def charge(self, note: str) -> None:
        def pay() -> StreamTerms:
            NoisyStream.charge(self, note)
            return StreamTerms(self.guarantee, self.seeded, self.durable, self.sensitivity)

        self._terms = self.team.lead(pay)

    def lease(self) -> None:
        self.team.alone(lambda: NoisyStream.lease(self))

    def release(
        self, total: ClippedSum, policy: object, shares: Mapping[str, float] | None = None
    ) -> dict[str, Tensor]:
        found = self.team.lead_tensors(lambda: NoisyStream.release(self, total, policy, shares))
        self._released += 1
        return {name: value.to(total.sum[name].device) for name, value in found.items()}


def admit(
    team: Team | None, participation: Participation, units: Tensor | None, step: int, *, named: bool
) -> Tensor | bool:
    """Which rows may take part (True: all, nothing says whose they are); of several ranks the first keeps the record.

    `named`: every row so far had an id, as the last checkpoint says; that one has none is noted before its release.
    """
    if units is None:
        if named and team is not None:
            team.alone(participation.admit_unnamed)
        elif named:
            participation.admit_unnamed()
        return True
    if team is None:
        return participation.admit(units, step)
    return team.lead(lambda: participation.admit(units, step))


def check_batch_alike(team: Team, images: Any, units: Tensor | None) -> None:
    """Refuse ranks that were called with different batches: each row would be somebody else's on every rank.

    Before anything is released; a program that gives all ranks the same rows never sees it, whatever the rows hold.
    """
    found = hashlib.sha256(repr([(t.shape, t.dtype) for t in leaves(images)]).encode())
    for part in [*leaves(images), *([] if units is None else [units])]:
        raw = part.detach().cpu().contiguous().view(-1).view(torch.uint8)
        found.update(raw.numpy().tobytes())
    team.check_same(found.hexdigest())


def sum_over_ranks(
    team: Team,
    compute: Callable[[Rows, Tensor | None], tuple[ClippedSum, Tensor]],
    rows: Rows,
    mute: Tensor | None,
    zero: ClippedSum,
    *,
    batch_size: int,
    everyone: bool,
) -> tuple[ClippedSum, Tensor]:
    """The clipped sum and the logits of a batch, whose portions of whole units are computed by all ranks.

    Formal guarantee: that of `Team.add_up`; how a batch is cut depends on its units and the declared batch size alone.

    Args:
        team: The ranks.
        compute: The sum and the logits of some rows.
        rows: The batch, the same on every rank.
        mute: Rows that contribute nothing.
        zero: The gradient's sum over no unit.
        batch_size: The declared one.
        everyone: Whether every rank gets the sum; else the leader.

    Returns:
        The sum (see `everyone`) and the logits of all rows.
    """
    order: Tensor = torch.unique(rows.owner, return_inverse=True)[1]
    at_once = max(_FEWEST, math.ceil(batch_size / _SHARES))
    portions = [torch.nonzero(order // at_once == k).flatten() for k in range(int(order.max()) // at_once + 1)]
    count, found = count_rows(rows.inputs), []
    for index in team.mine(portions):
        part = Rows(rows_of(rows.inputs, index, count), rows.labels[index], rows.owner[index])
        found.append((index, *compute(part, None if mute is None else mute[index])))

    def kind() -> tuple[Any, ...]:  # the leader has the first portion, so it knows
        _, total, logits = found[0]
        return total.bounds, total.blocks, {n: v.shape for n, v in total.sum.items()}, logits.shape[1:], logits.dtype

    bounds, blocks, shapes, tail, dtype = team.lead(kind)
    nothing = {n: torch.zeros(shape, dtype=torch.float64, device=order.device) for n, shape in shapes.items()}
    empty = replace(zero, sum=nothing, bounds=bounds, blocks=blocks)
    total = team.add_up((each for _, each, _ in found), empty, everyone=everyone)
    whole = torch.zeros(count, *tail, dtype=dtype, device=order.device)
    for index, _, logits in found:
        whole[index] = logits
    return total, team.join_rows(whole)
