"""Who holds a receipt, and how far its releases are given away: what ``leases`` and ``replay`` resume by.

The ledger's chain keeps one word per change: the holder's name and "up to release n". ``write`` is the holder's own
word, ``hand_over`` the one that makes somebody else the holder, and ``issue`` makes the new holder's receipt live.

Formal guarantee: only the holder that the chain named last may write, in the transaction that reads who it is; a fresh
name is given out with every hand-over, so that an earlier holder can lease and settle nothing from then on. What was
given away up to a hand-over counts as made for ever (``given`` never falls below it), whoever made it.
"""

from __future__ import annotations

import weakref
from typing import Any

from sqlalchemy.engine import Connection

from tacit.privacy import _chain as chain
from tacit.privacy._noise import NoiseKey
from tacit.privacy._receipt_state import fresh_holder
from tacit.privacy._receipts import Receipt, ReceiptError, check_charged
from tacit.privacy._subject import canonical

_newest: weakref.WeakValueDictionary[str, Receipt] = weakref.WeakValueDictionary()  # of the receipts with one key, here


def write(connection: Connection, kind: str, receipt: Receipt, upto: int, **facts: Any) -> None:
    """The holder's word: releases up to ``upto`` are given away. Refused if another process has taken it up."""
    note(connection, kind, receipt, {"upto": upto, "holder": held_by(connection, receipt)} | facts)


def hand_over(connection: Connection, told: Receipt, upto: int, *, exact: bool) -> str:
    """The name of a new holder, written into the chain: what lies before ``upto`` counts as made by earlier ones."""
    holder = fresh_holder()
    note(connection, "resumed", told, {"upto": upto, "holder": holder, "exact": exact})
    return holder


def issue(told: Receipt, key: NoiseKey, holder: str, *, used: int = 0, leased: bool = True) -> Receipt:
    """The receipt, live for its new holder behind ``used`` releases; with ``leased`` none follows without a lease."""
    receipt = told.issued(key)
    receipt.skip(used)
    receipt._state.holder = holder
    receipt._state.leased = used if leased else None
    return receipt


def note(connection: Connection, kind: str, receipt: Receipt, body: dict[str, Any]) -> None:
    """Append an entry about a receipt that costs nothing."""
    known = chain.subject(connection, receipt.subject)
    if known is None:
        raise ReceiptError(f"Receipt {receipt.id[:8]} was charged in another ledger.")
    chain.append(connection, kind, receipt.subject, receipt.id, canonical(body | {"state": known.fingerprint}))


def given(connection: Connection, receipt_id: str) -> int:
    """Up to which release the chain says a receipt was given away; never below what earlier holders were given."""
    last = last_word(connection, receipt_id)
    return 0 if last is None else max(int(last["upto"]), chain.made_before(connection, receipt_id))


def held_by(connection: Connection, receipt: Receipt) -> str:
    """The name of this receipt's holder, who must be the last one that the chain knows."""
    check_charged(receipt)
    holder = receipt._state.named()
    last = last_word(connection, receipt.id)
    if last is not None and last["holder"] != holder:
        raise ReceiptError(f"Another process has resumed the stream of receipt {receipt.id[:8]}: stop here.")
    return holder


def last_word(connection: Connection, receipt_id: str) -> dict[str, Any] | None:
    """What the chain says last of a receipt's releases; refused once it was settled."""
    last = chain.last_lease(connection, receipt_id)
    if last is not None and last[0] == "settle":
        raise ReceiptError(f"Receipt {receipt_id[:8]} was settled: its stream is over.")
    return None if last is None else last[1]


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
    """Take the rest of its lease from whoever held the receipt in this process: two would draw the same noise."""
    old = _newest.get(receipt_id)
    if old is not None:
        old._state.overtake()
