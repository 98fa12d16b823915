"""Who holds a receipt, and how far its releases are given away, as the chain has it.

The chain keeps one word per change: the holder's name and "up to release n".

Formal guarantee: only the holder that the chain named last may write, in the transaction that reads who it is; a fresh
name is given out with every hand-over, so that an earlier holder can lease and settle nothing from then on. What was
given away up to a hand-over counts as made for ever (``given`` never falls below it), whoever made it.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy.engine import Connection

from tacit.privacy import _chain as chain
from tacit.privacy._receipts import ReceiptError
from tacit.privacy._subject import canonical


def note(connection: Connection, kind: str, receipt: str, body: dict[str, Any]) -> None:
    """Append an entry about a receipt that costs nothing."""
    row = chain.find_charge(connection, receipt)
    known = None if row is None else chain.subject(connection, row.subject)
    if known is None:
        raise ReceiptError(f"Receipt {receipt[:8]} was charged in another ledger.")
    chain.append(connection, kind, known.name, receipt, canonical(body | {"state": known.fingerprint}))


def given(connection: Connection, receipt: str) -> int:
    """Up to which release the chain says a receipt was given away; never below what earlier holders were given."""
    last = last_word(connection, receipt)
    return 0 if last is None else max(int(last["upto"]), chain.made_before(connection, receipt))


def held_by(connection: Connection, receipt: str, holder: str) -> None:
    """Refuse a holder who is not the last one that the chain knows."""
    last = last_word(connection, receipt)
    if last is not None and last["holder"] != holder:
        raise ReceiptError(f"Another process has resumed the stream of receipt {receipt[:8]}: stop here.")


def last_word(connection: Connection, receipt: str) -> dict[str, Any] | None:
    """What the chain says last of a receipt's releases; refused once it was settled."""
    last = chain.last_lease(connection, receipt)
    if last is not None and last[0] == "settle":
        raise ReceiptError(f"Receipt {receipt[:8]} was settled: its stream is over.")
    return None if last is None else last[1]
