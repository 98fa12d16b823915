"""Replaying releases after a crash: the same key, release and batch give the same release, not a second one.

Training that dies goes back to its last checkpoint, and the steps in between have been released already. Drawing new
noise for them would release them twice; so they are computed again with the noise and the sampling that they had.

Formal guarantee: a receipt is resumed only with the key that was kept when it was new (the ledger has its digest), by
one process at a time (the last one that the chain names; an older one can lease and settle nothing). Replaying release
t with the same key, the same model and the same data gives the value that was, or would have been, released: nothing
new about anybody. Small queries get noise that no key draws again (OpenDP's samplers), so they are refused on a receipt
whose key was kept. A search (repeat and select) is not replayed: receipts of its trials have keys that come from its
own, and no lease. That model and data are the same is the caller's to check, by fingerprints, before it replays; that
the machine computes the same to the last bit is an assumption.

A process that was overtaken and still runs has the same key. Within this process its receipt stops at once. In another
process it can use up the lease that it has and no more (the next one is refused): those are releases that the new
holder makes, too, with the same key, numbers, model and data, so that they are the same values; they count as made, and
are never returned. The lease is the window: keep it short, and end the old process first.
"""

from __future__ import annotations

import hashlib

from dp_accounting import dp_event

from tacit.privacy import _resume as resuming
from tacit.privacy._ledger import Ledger
from tacit.privacy._noise import NoiseKey
from tacit.privacy._receipt_state import fresh_holder
from tacit.privacy._receipts import Receipt, ReceiptError, check_charged
from tacit.privacy.events import StreamDpEvent


def keep(ledger: Ledger, receipt: Receipt) -> str:
    """The key of a receipt on which nothing was released yet, for a private file; the ledger gets its digest."""
    if not receipt.live or receipt._key is None:
        raise ReceiptError(f"Receipt {receipt.id[:8]} is closed or belongs to another process: it has no key here.")
    if receipt.used:
        raise ReceiptError("A key is kept before the first release, not after it.")
    if isinstance(receipt.event, StreamDpEvent):
        raise ReceiptError("A stream is saved and resumed through tacit.privacy.leases.")
    _refuse_search(receipt)
    check_charged(receipt)
    resuming.stop_at_start(receipt)  # nothing is released that the chain does not know was given away
    receipt._state.replays = True
    secret = receipt._key.secret()
    ledger._book.give(receipt.id, resuming.holder_of(receipt), "kept", None, {"key": _digest(secret)})
    resuming.remember(receipt)
    return secret


def resume(ledger: Ledger, receipt_id: str, secret: str, used: int) -> tuple[Receipt, int]:
    """The receipt, live again behind its first ``used`` releases; and how many may have been made by now.

    ``Ledger.settle`` returns no more than what lies behind the second number.
    """
    stated = ledger.receipt(receipt_id)
    _refuse_search(stated)
    used = stated.counted(used)
    holder = fresh_holder()
    made, _ = ledger._book.hand_over(receipt_id, holder, "replay", _digest(secret), used)
    resuming.overtake(receipt_id)
    receipt = resuming.issue(stated, NoiseKey.from_secret(secret, seeded=stated.seeded), holder, used=used)
    receipt._state.replays = True
    resuming.remember(receipt)
    return receipt, made


def adopt(ledger: Ledger, receipt_id: str) -> Receipt:
    """A charge whose process ended before anything left it, live here with a fresh key; nothing is charged.

    Refused if the chain says that a release of it was ever given away, or that it was settled.

    Formal guarantee: rests on the caller, who knows that the earlier process is gone and that whatever it drew on this
    receipt never left it: no value was returned, written or shown (a receipt that was leased or saved is refused). Then
    what leaves is one set of releases, with noise that is independent of the one that was lost.
    """
    stated = ledger.receipt(receipt_id)
    holder = fresh_holder()
    ledger._book.hand_over(receipt_id, holder, "adopt", "", 0)
    resuming.overtake(receipt_id)
    key = NoiseKey((stated.id, holder)) if stated.seeded else NoiseKey()
    return resuming.issue(stated, key, holder, leased=False)


def _refuse_search(receipt: Receipt) -> None:
    if isinstance(receipt.event, dp_event.RepeatAndSelectDpEvent):
        raise ReceiptError(
            f"Receipt {receipt.id[:8]} pays for a search, which is not replayed: its trials would have the same noise "
            "for other sums, and their queries other noise. Charge again."
        )


def _digest(secret: str) -> str:
    return hashlib.sha256(f"tacit key {secret}".encode()).hexdigest()
