"""The private side of an adapter: one charge for the whole stream, and releases that are leased in blocks."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

from torch import Tensor

from tacit.adapt._privacy_config import DP
from tacit.gradients import AdaptiveQuantile, ClippedSum
from tacit.privacy import Guarantee, Ledger, Receipt, ReceiptError, Unit, leases
from tacit.privacy.events import StreamDpEvent
from tacit.privacy.mechanisms import GaussianStream

_COUNT = "count"  # the block in which AdaptiveQuantile tells how many were below the bound


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
            stacklevel=4,
        )
        ledger = Ledger("sqlite://")
    name = subject or "stream"
    ledger.open_subject(name, form.budget, unit=unit, neighbours=form.neighbours)
    return Account(ledger=ledger, subject=name, unit=Unit(unit), lease=lease, seed=seed)


class NoisyStream:
    """Adds the noise of one stream, step by step; charges when the first step is there.

    Formal guarantee: the whole stream is one charge (`DP.event`). Each step's sum of clipped gradients goes through
    `GaussianStream` once, on releases that were leased before; the clip of an adaptive policy follows released counts
    only, whose noise and the gradient's together are what was charged.
    """

    def __init__(self, form: DP, account: Account, units: int) -> None:
        self.form = form
        self.account = account
        self.noise_multiplier = form.noise_multiplier()
        self._units = units
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
    def steps(self) -> int:
        """Releases used or given up: the number of the next one."""
        return 0 if self._receipt is None else self._receipt.used

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

    def release(self, total: ClippedSum, policy: object) -> dict[str, Tensor]:
        """The sum of this step with its noise, on a release that was charged and leased before."""
        if self._stream is None:
            raise ReceiptError("This stream was not charged: nothing can be released.")
        split = self._split() if isinstance(policy, AdaptiveQuantile) else None
        return self._stream.release(total, noise=split)

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

    def _split(self) -> dict[str, float]:
        """Noise of gradient and count, relative to their bounds, that together are what was paid for.

        Andrew et al. (2021) give the count a standard deviation of a twentieth of the units, which is a tenth of them
        relative to its bound of 1/2; at least twice the paid multiplier, so that the gradient's grows by 15% at most.
        """
        paid = self.noise_multiplier
        count = max(self._units / 10, 2 * paid)
        return {"gradient": (paid**-2 - count**-2) ** -0.5, _COUNT: count}
