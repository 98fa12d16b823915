"""The ledger of a run that may be killed: what was charged and never left is resumed, not charged twice.

Every stage keeps what it needs to resume (a key, a lease, a saved answer) right after its charge. A kill in between
leaves a charge that nothing was released from. Every charge of a run has the run's id in its note, so that a resumed
run finds such a charge and makes it live again.
"""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from typing import Any

from tacit.privacy import Ledger, Mode, Receipt, ReceiptError, Remaining, epsilon_of, events, replay


class RunLedger(Ledger):
    """A ledger as one run of a pipeline sees it; one process at a time uses it (see `_folder.locked`).

    Formal guarantee: a charge is made live again only if it has this run's id, the same subject, event, stage and note,
    this object has issued no receipt of it, and the chain says that it was neither settled nor any of its releases
    given away. Nothing that was drawn on it has left the earlier process: fine-tuning and streams release on leases, a
    search settles a trial's receipts once its result is written (`finish`), and a source's answer is written before it
    leaves. So at most one set of releases of each charge ever leaves.
    """

    def __init__(self, url: str | Path, run: str) -> None:
        super().__init__(url)
        self.run = run
        self._issued: list[Receipt] = []

    def charge(
        self,
        subject: Any,
        event: events.DpEvent,
        *,
        stage: str,
        note: str = "",
        bound: float | None = None,
        seed: int | None = None,
    ) -> Receipt:
        """As `Ledger.charge`; a charge of this run that was interrupted before anything left is resumed instead."""
        name, note = str(getattr(subject, "name", subject)), f"{note} [run {self.run}]"
        found = self._interrupted(name, events.to_json(event), stage, note)
        if found is None:
            receipt = super().charge(name, event, stage=stage, note=note, bound=bound, seed=seed)
        else:
            receipt = replay.adopt(self, found)
        self._issued.append(receipt)
        return receipt

    def finish(self) -> None:
        """Close every receipt that this process has: what was charged stays spent, and nothing is drawn on it again.

        Call it when what the receipts released is written down.
        """
        for receipt in self._issued:
            if receipt.live:
                self.settle(receipt, receipt.releases)
                continue
            with suppress(ReceiptError):  # settled, or given away on leases: the chain knows it
                closed = replay.adopt(self, receipt.id)  # closed here alone (a search): released on, and open there
                self.settle(closed, closed.releases)
        self._issued.clear()

    def finish_interrupted(self, subject: str) -> None:
        """Close every receipt of this run and subject that an earlier process left open: what it released is there."""
        while (found := self._open(subject)) is not None:
            receipt = replay.adopt(self, found)
            self.settle(receipt, receipt.releases)

    def remaining(self, subject: Any) -> Remaining:
        """As `Ledger.remaining`, with what this run has charged: it is resumed, and not charged again."""
        left = super().remaining(subject)
        if left.mu is None:
            return left
        name = str(getattr(subject, "name", subject))
        known = next(each for each in self.subjects() if each.name == name)
        mine = [e.body["cost"] or 0 for e in self.entries(name) if e.kind == "charge" and self._own(e.body["note"])]
        if known.terms.mode is not Mode.GAUSSIAN or not mine:
            return left
        mu = math.sqrt(left.mu**2 + sum(mine) / 2**96)
        delta, factor = known.terms.budget.delta, known.terms.neighbours.factor
        return Remaining(epsilon=epsilon_of(mu, delta), mu=mu, noise_multiplier=factor / mu)

    def _own(self, note: str) -> bool:
        return note.endswith(f"[run {self.run}]")

    def _interrupted(self, subject: str, event: Any, stage: str, note: str) -> str | None:
        if subject not in {known.name for known in self.subjects()}:
            return None
        return self._open(subject, (event, stage, note))

    def _open(self, subject: str, like: tuple[Any, str, str] | None = None) -> str | None:
        """The first charge of this run that was neither settled nor drawn on; only one with these terms, if given.

        What was issued here is not among them: the same charge a second time is a second charge.
        """
        entries = self.entries(subject)
        over = {e.receipt for e in entries if e.kind == "settle" or (e.kind != "charge" and e.body.get("upto", 0))}
        over |= {receipt.id for receipt in self._issued}
        for entry in entries:
            if entry.kind != "charge" or entry.receipt in over or not self._own(entry.body["note"]):
                continue
            if like is None or (entry.body["event"], entry.body["stage"], entry.body["note"]) == like:
                return entry.receipt
        return None
