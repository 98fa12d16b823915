"""Receipts that change hands: what ``leases`` and ``replay`` share beside the ledger's book (see ``_holders``)."""

from __future__ import annotations

import weakref

from tacit.privacy._noise import NoiseKey
from tacit.privacy._receipts import Receipt, ReceiptError, check_charged

_newest: weakref.WeakValueDictionary[str, Receipt] = weakref.WeakValueDictionary()  # of the receipts with one key, here


def holder_of(receipt: Receipt) -> str:
    """The name under which this process holds a receipt; only one that a ledger charged has one."""
    check_charged(receipt)
    return receipt._state.named()


def issue(stated: Receipt, key: NoiseKey, holder: str, *, used: int = 0, leased: bool = True) -> Receipt:
    """The receipt, live for its new holder behind ``used`` releases; with ``leased`` none follows without a lease."""
    receipt = stated.issued(key)
    receipt.skip(used)
    receipt._state.holder = holder
    receipt._state.leased = used if leased else None
    return receipt


def stop_at_start(receipt: Receipt) -> None:
    """Let nothing be released on a receipt without a lease; refused if something was."""
    with receipt._state.lock:  # no thread releases between the question and the limit
        if not receipt.live or receipt.used:
            raise ReceiptError(f"Receipt {receipt.id[:8]} is closed or in use already: leasing begins before it.")
        receipt._state.leased = 0


def remember(receipt: Receipt) -> None:
    """The newest receipt with its key in this process: ``overtake`` finds it."""
    _newest[receipt.id] = receipt


def overtake(receipt_id: str) -> None:
    """Revoke the lease of the receipt's earlier holder in this process: two holders would draw the same noise."""
    old = _newest.get(receipt_id)
    if old is not None:
        old._state.overtake()
