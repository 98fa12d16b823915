"""Long streams that outlive a process: releases are leased in blocks, durably, and a stream can be resumed.

A lease is an entry of the ledger which says "up to release n"; nothing is written per release. After a kill, whatever
was leased counts as used, for it is unknown how far the process came: the stream goes on behind the lease with a fresh
key. After a clean ``save`` it goes on exactly where it stopped, with the same key and the same correlated noise, from
a secret that the caller keeps in a private file and that is worth nothing a second time.

Formal guarantee: no two processes ever hold the same releases of a receipt. Each process that resumes a stream gets a
holder's name, written into the chain; a lease is only granted to the last holder, and a saved state is handed out once,
in the transaction that writes who took it. A process that was overtaken and still runs can do no more than use up the
lease it has: these releases have a key of their own, count as made and never come back. (The exception is ``replay``,
where the key is the same on purpose.) Releases on a lease are made in the order of the event, so that their number says
which they were.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field
from typing import Any

from tacit.privacy import _resume as resuming
from tacit.privacy._ledger import Ledger
from tacit.privacy._noise import NoiseKey
from tacit.privacy._receipt_state import fresh_holder
from tacit.privacy._receipts import Receipt, ReceiptError, check_charged
from tacit.privacy.correlated import Strategy
from tacit.privacy.events import BallsInBinsDpEvent, StreamDpEvent, check_count, leaves
from tacit.privacy.mechanisms import GaussianStream, check_strategy


@dataclass(frozen=True, kw_only=True)
class Secret:
    """What goes on exactly where a stream stopped: the key and the correlated noise. Never printed; keep it private."""

    receipt: str
    token: str = field(repr=False)
    used: int
    key: str = field(repr=False)
    mixer: dict[str, Any] = field(repr=False)


def extend(ledger: Ledger, receipt: Receipt, releases: int) -> int:
    """Lease the next ``releases`` releases; returns the number up to which the receipt may now release.

    A receipt that was leased once releases nothing beyond its lease. What the chain says was given away never becomes
    less by it: a process that replays leases again what an earlier one had leased.
    """
    if not receipt.live:
        raise ReceiptError(f"Receipt {receipt.id[:8]} is closed or belongs to another process: lease nothing on it.")
    check_count(releases, "A lease is at least one release: its releases")
    if not receipt.in_order:
        raise ReceiptError(
            f"On receipt {receipt.id[:8]} releases were made in another order than that of its event: it cannot be "
            "leased any more."
        )
    upto = min(receipt.used + int(releases), receipt.releases)
    ledger._book.give(receipt.id, resuming.holder_of(receipt), "lease", upto, {})
    with receipt._state.lock:
        receipt._state.leased = upto
    return upto


def begin(ledger: Ledger, receipt: Receipt) -> None:
    """From here on nothing is released without a lease: a process that takes the receipt up later can rely on it."""
    check_charged(receipt)
    resuming.stop_at_start(receipt)
    ledger._book.give(receipt.id, resuming.holder_of(receipt), "lease", None, {})


def settled(ledger: Ledger, receipt_id: str) -> bool:
    """Whether a receipt that was leased is over."""
    last = ledger._book.held(receipt_id)
    return last is not None and last[0] == "settle"


def check_holder(ledger: Ledger, receipt: Receipt) -> None:
    """Refuse a process whose stream another one has resumed."""
    holder, last = resuming.holder_of(receipt), ledger._book.held(receipt.id)
    if last is not None and last[0] == "settle":
        raise ReceiptError(f"Receipt {receipt.id[:8]} was settled: its stream is over.")
    if last is not None and last[1]["holder"] != holder:
        raise ReceiptError(f"Another process has resumed the stream of receipt {receipt.id[:8]}: stop here.")


def secret_of(stream: GaussianStream) -> Secret:
    """The state of a stream between two releases. Write it to a private file, then tell the ledger with ``save``."""
    receipt = stream.receipt
    if not receipt.live or receipt._key is None:
        raise ReceiptError(f"Receipt {receipt.id[:8]} is closed or belongs to another process: there is no state.")
    if receipt._state.stream is not stream:
        raise ReceiptError("Another noise stream was opened on this receipt: save that one.")
    with stream._lock:
        return Secret(
            receipt=receipt.id,
            token=secrets.token_hex(16),
            used=receipt.used,
            key=receipt._key.secret(),
            mixer=stream._mixer.state(),
        )


def digest(secret: Secret) -> str:
    """A digest that identifies a saved state, and is public."""
    return hashlib.sha256(secret.token.encode()).hexdigest()


def save(ledger: Ledger, receipt: Receipt, secret: Secret) -> None:
    """Record that the stream stands at ``secret``: whoever shows it first may go on from there, exactly.

    The unused rest of the lease is returned. If the stream goes on in this process instead, its next lease makes the
    secret worthless.
    """
    if not receipt.live or secret.receipt != receipt.id:
        raise ReceiptError(f"Receipt {receipt.id[:8]} is closed, or it belongs to another process or state.")
    with receipt._state.lock:  # from here on nothing is released, by any thread, until it is leased anew
        if secret.used != receipt.used:
            raise ReceiptError("This state is older than the stream: take a new one.")
        receipt._state.leased = secret.used
    ledger._book.give(receipt.id, resuming.holder_of(receipt), "saved", secret.used, {"token": digest(secret)})


def resume(
    ledger: Ledger, receipt_id: str, secret: Secret | None, *, strategy: Strategy | None = None
) -> tuple[Receipt, GaussianStream, bool]:
    """Resume a stream; the last value says whether it goes on exactly where it was saved.

    Otherwise (no secret, a used one, or releases after it) all that was leased counts as used and a new noise block
    starts. ``receipt.used`` is then the number of the next release: no row of an earlier one may be fed again.

    The coefficients of its noise are those of the secret, or ``strategy``, and only without both are they computed
    here: on another processor they come out a little different (see ``mechanisms.check_strategy``).
    """
    stated = ledger.receipt(receipt_id)
    if not isinstance(stated.event, StreamDpEvent):
        raise ReceiptError(f"Receipt {receipt_id[:8]} paid for no stream: there is nothing to resume.")
    if secret is not None and secret.receipt == stated.id:
        strategy = Strategy(**secret.mixer["strategy"])
    if strategy is not None:
        check_strategy(strategy, stated.event)  # before the state is handed out, once
    receipt, exact = _resume(ledger, stated, secret)
    stream = GaussianStream(receipt, strategy=strategy)
    if exact and secret is not None:
        stream._mixer = stream.strategy.mixer(secret.mixer)
    return receipt, stream, exact


def resume_after_lease(ledger: Ledger, receipt_id: str) -> Receipt:
    """Resume separate releases behind whatever was leased, with a fresh key; what was leased counts as made."""
    stated = ledger.receipt(receipt_id)
    if isinstance(stated.event, StreamDpEvent):
        raise ReceiptError(f"Receipt {receipt_id[:8]} paid for a stream: resume it with resume.")
    if any(isinstance(leaf, BallsInBinsDpEvent) for leaf, _ in leaves(stated.event)):
        raise ReceiptError(
            f"Receipt {receipt_id[:8]} paid for one throw of all units into bins: a fresh key would throw them again. "
            "Resume it with the key that was kept (tacit.privacy.replay)."
        )
    return _resume(ledger, stated, None)[0]


def _resume(ledger: Ledger, stated: Receipt, secret: Secret | None) -> tuple[Receipt, bool]:
    holder = fresh_holder()
    proof = digest(secret) if secret is not None and secret.receipt == stated.id else ""
    used, exact = ledger._book.hand_over(stated.id, holder, "stream", proof, 0)
    if exact and secret is not None:
        key = NoiseKey.from_secret(secret.key, seeded=stated.seeded)
    else:
        key = NoiseKey((stated.id, used)) if stated.seeded else NoiseKey()
    return resuming.issue(stated, key, holder, used=used), exact
