"""The private side of an adapter: one charge for the whole stream, and releases that are leased in blocks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from tacit._guard_rails import warn_of_delta
from tacit.adapt._privacy_config import DP
from tacit.adapt._side_blocks import split
from tacit.gradients import ClippedSum
from tacit.privacy import Guarantee, Ledger, Neighbours, Receipt, ReceiptError, Unit, leases
from tacit.privacy.events import StreamDpEvent
from tacit.privacy.mechanisms import GaussianStream


@dataclass(frozen=True, kw_only=True)
class Account:
    """Who pays: a ledger's subject, its unit, and how many steps are leased at a time."""

    ledger: Ledger
    subject: str
    unit: Unit
    lease: int
    seed: int | None


def open_account(
    form: DP, ledger: Ledger | None, subject: str | None, *, unit: Unit | str, lease: int, seed: int | None
) -> Account:
    """The given ledger's subject, declared with exactly this budget if it is new; without a ledger, one in memory.

    Refused if the subject is of another unit or relation: it would pay for a promise that was made to somebody else.
    """
    if ledger is None:
        warnings.warn(
            "No ledger was given: this run keeps its own in memory (not durable), and nothing stops a second run from "
            "spending the same budget again. Give ledger= to protect people over more than this run.",
            stacklevel=6,
        )
        ledger = Ledger("sqlite://")
    name = subject or "stream"
    ledger.open_subject(name, form.budget, unit=unit, neighbours=form.neighbours)
    return Account(ledger=ledger, subject=name, unit=Unit(unit), lease=lease, seed=seed)


class NoisyStream:
    """Adds the noise of one stream, step by step; charges when the first step is there.

    Formal guarantee: the whole stream is one charge (`DP.event`). Each step's sum of clipped gradients goes through
    `GaussianStream` once, on releases that were leased before, and with it what rides on the same release (the count of
    an adaptive clip, statistics, the monitor): the noise of all blocks together is what was charged. The clip of an
    adaptive policy follows released counts only.
    """

    def __init__(self, form: DP, account: Account, units: int) -> None:
        self.form = form
        self.account = account
        self.noise_multiplier = form.noise_multiplier()
        self._units = units
        if form.horizon is not None:
            warn_of_delta(form.delta, form.horizon * units, "unit", stacklevel=7)
        self._receipt: Receipt | None = None
        self._stream: GaussianStream | None = None

    @property
    def receipt(self) -> Receipt | None:
        """None before the first step."""
        return self._receipt

    @property
    def stream(self) -> GaussianStream | None:
        return self._stream

    @property
    def seeded(self) -> bool:
        """Whether the noise can be drawn again by anyone: then nothing is private."""
        return self.account.seed is not None or (self._receipt is not None and self._receipt.seeded)

    @property
    def guarantee(self) -> Guarantee:
        """What was spent on the subject so far."""
        return self.account.ledger.spent(self.account.subject)

    @property
    def durable(self) -> bool:
        """Whether what is charged outlives the process."""
        return self.account.ledger.durable

    @property
    def sensitivity(self) -> float:
        """Of the noise's strategy: by how much it stretches a contribution; 1 before the charge."""
        return 1.0 if self._stream is None else self._stream.sensitivity

    @property
    def steps(self) -> int:
        """Releases used or given up: the number of the next one."""
        return 0 if self._receipt is None else self._receipt.used

    def assumptions(self, unit: Unit, *, enforced: bool) -> list[str]:
        """What the guarantee rests on, for the card; `enforced`: every batch said whose its rows are."""
        contributions = self.form.contributions
        times = "one row" if contributions == 1 else f"rows in at most {contributions} steps"
        said = ["arrival times, batch sizes and the length of the stream are public"]
        if not enforced:
            said.append(f"assumes {times} per person: not every batch came with unit_ids, so it was not enforced")
        elif self.form.neighbours is Neighbours.REPLACE_ONE:
            said.append(f"a {unit} that takes another's place brings an id that nobody else has")
        if not self.durable:
            said.append("the ledger is in memory (not durable): it stops no second run on the same people")
        if self.seeded:
            said.append("seeded: not private")
        return said

    def charge(self, note: str) -> None:
        """Pay for the stream, once, before anything is released. `Adapter._prepare` alone calls it."""
        if self._stream is None:
            account = self.account
            event = self.form.event(self.noise_multiplier)
            self._receipt = account.ledger.charge(account.subject, event, stage="adapt", note=note, seed=account.seed)
            self._stream = GaussianStream(self._receipt)

    def lease(self) -> None:
        """See to it that the next release is leased; refused if another process has resumed the stream."""
        receipt = self._receipt
        if receipt is not None and receipt.used >= (receipt.leased or 0):
            leases.extend(self.account.ledger, receipt, self.account.lease)

    def release(
        self, total: ClippedSum, policy: object, shares: Mapping[str, float] | None = None
    ) -> dict[str, Tensor]:
        """The sum of this step with its noise, on a release that was charged and leased before.

        `shares` says how much of the budget each block beside the gradient gets.
        """
        if self._stream is None:
            raise ReceiptError("This stream was not charged: nothing can be released.")
        noise = split(self.noise_multiplier, total.bounds, dict(shares or {}), policy, self._units)
        return self._stream.release(total, noise=noise)

    def deviations(self, bounds: Mapping[str, float], shares: Mapping[str, float]) -> dict[str, float]:
        """The standard deviation of the noise in the blocks beside the gradient, as if steps were independent."""
        scale = self.noise_multiplier * self.sensitivity
        return {name: scale / share**0.5 * bounds[name] for name, share in shares.items()}

    def reset(self) -> None:
        """A new noise block, with fresh noise."""
        if self._stream is not None:
            self._stream.reset()

    def refuse_stranger(self, receipt: Receipt) -> None:
        """Only a receipt that paid for this very stream, with this noise, may be gone on with."""
        account, event = self.account, receipt.event
        same = isinstance(event, StreamDpEvent) and event == self.form.event(event.noise_multiplier)
        if not same or not math.isclose(event.noise_multiplier, self.noise_multiplier, rel_tol=1e-9):
            raise ValueError(f"Receipt {receipt.id[:8]} paid for another stream than this adapter's.")
        if receipt.subject != account.subject:
            raise ValueError(f"Receipt {receipt.id[:8]} was charged to {receipt.subject}, not to {account.subject}.")

    def resume(self, receipt: Receipt, stream: GaussianStream) -> None:
        """Go on with a stream that an earlier process paid for."""
        self._receipt, self._stream = receipt, stream
