"""Replaying releases after a crash: the same key, release and batch give the same release, not a second one.

Training that dies goes back to its last checkpoint, and the steps in between have been released already. Drawing new
noise for them would release them twice; so they are computed again with the noise and the sampling that they had.

Formal guarantee: a receipt is taken up only with the key that was kept when it was new (the ledger has its digest), by
one process at a time (the last one that the chain names; an older one can lease and settle nothing). Replaying release
t with the same key, the same model and the same data gives the value that was, or would have been, released: nothing
new about anybody. That model and data are the same is the caller's to check, by fingerprints, before it replays.
"""

from __future__ import annotations

import hashlib
import secrets

from tacit.privacy import chain
from tacit.privacy.events import StreamDpEvent
from tacit.privacy.leases import held_by, last_word, note
from tacit.privacy.ledger import Ledger
from tacit.privacy.noise import NoiseKey
from tacit.privacy.receipts import Receipt, ReceiptError


def keep(ledger: Ledger, receipt: Receipt) -> str:
    """The key of a receipt on which nothing was released yet, for a private file; the ledger gets its digest."""
    if not receipt.live or receipt._key is None:
        raise ReceiptError(f"Receipt {receipt.id[:8]} is closed or belongs to another process: it has no key here.")
    if receipt.used:
        raise ReceiptError("A key is kept before the first release, not after it.")
    if isinstance(receipt.event, StreamDpEvent):
        raise ReceiptError("A stream is saved and taken up through tacit.privacy.leases.")
    secret = receipt._key.secret()
    with ledger._transaction() as connection:
        holder = held_by(connection, receipt)
        note(connection, "kept", receipt, {"upto": 0, "holder": holder, "key": _digest(secret)})
    return secret


def take_up(ledger: Ledger, receipt_id: str, secret: str, used: int) -> tuple[Receipt, int]:
    """The receipt, live again behind its first ``used`` releases; and how many may have been made by now.

    Whoever settles it returns no more than what lies behind the second number.
    """
    told = ledger.receipt(receipt_id)
    holder = secrets.token_hex(8)
    with ledger._transaction() as connection:
        last = last_word(connection, receipt_id)
        if last is None or chain.kept_key(connection, receipt_id) != _digest(secret):
            raise ReceiptError(f"This is not the key of receipt {receipt_id[:8]}: its releases cannot be replayed.")
        made = max(int(last["upto"]), used)
        note(connection, "resumed", told, {"upto": made, "holder": holder, "exact": True})
    receipt = told.issued(NoiseKey.from_secret(secret, seeded=told.seeded))
    receipt.skip(used)
    receipt._use.update(holder=holder, leased=used)
    return receipt, made


def _digest(secret: str) -> str:
    return hashlib.sha256(f"tacit key {secret}".encode()).hexdigest()
