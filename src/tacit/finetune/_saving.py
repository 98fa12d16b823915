"""Checkpoints of a run, and resuming it after a crash.

The checkpoint holds released values only (weights, optimizer, counters, which receipt paid) and may be shared. The key
of noise and sampling is in a private file (0600) beside the ledger, with fingerprints of the data and of the run, and
is destroyed when the run ends. After a kill the lost steps are replayed: same key, same batch, same weights, hence the
same release. Data, weights or settings that changed since are refused, for they would give another sum under the same
noise. So are another precision, version of torch, `microbatch` and kind of device: they round sums differently. What
no fingerprint sees (a helper of the loss, a loop of one's own) shows in the sums, which are compared with a private
record of each step (`_step_record`). What remains is rounding where the number of threads or the machine changed, or
where a GPU adds up in any order: some 1e-7 of the clip.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from tacit import _checkpoints as checkpoints
from tacit.finetune._step_record import StepRecord
from tacit.privacy import Ledger, Receipt, replay

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What the private file holds."""

    receipt: str
    key: str = field(repr=False)
    data: str = field(repr=False)  # fingerprints
    run: str
    start: str  # the digest of the trained weights before the first step
    scale: float  # the noise multiplier: found again it might differ in a digit, and the same noise would be scaled
    checkpoints: list[str]  # the digests of those that this run wrote
    evaluation: str | None = None  # the receipt of charged evaluations


class Store:
    """One run's checkpoint and its private file."""

    def __init__(self, path: str | Path, ledger: Ledger, private: str | Path | None) -> None:
        self.path = Path(path)
        self.ledger = ledger
        name = hashlib.sha256(str(self.path.resolve()).encode()).hexdigest()[:16]
        self._secret = checkpoints.private_folder(ledger, private) / f"tacit-{name}.key"
        self._kept: Kept | None = self._read()
        self.steps = StepRecord(self._secret.with_suffix(".sums"))

    @property
    def kept(self) -> Kept | None:
        """The private file of a run that did not end, if there is one."""
        return self._kept

    def begin(self, receipt: Receipt, *, data: str, run: str, start: str, scale: float, evaluation: str | None) -> None:
        """Keep the key, durably, before anything is released."""
        key = replay.keep(self.ledger, receipt)
        self.steps.remove()  # of a run whose key is gone
        self._keep(
            Kept(
                receipt=receipt.id,
                key=key,
                data=data,
                run=run,
                start=start,
                scale=scale,
                checkpoints=[],
                evaluation=evaluation,
            )
        )

    def save(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Write a checkpoint: the private file learns of it first, so that no foreign one is ever taken for it."""
        content = checkpoints.pack("fine-tuning", VERSION, tensors, facts)
        if self._kept is not None:
            known = [*self._kept.checkpoints[-1:], hashlib.sha256(content).hexdigest()]
            self._keep(Kept(**(vars(self._kept) | {"checkpoints": known})))
        checkpoints.write(self.path, content)

    def load(self, *, run: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The last checkpoint, if there is one; it must be of this run."""
        if not self.path.exists():
            return None
        content = self.path.read_bytes()  # once: another file could take its place between check and use
        tensors, facts = checkpoints.unpack("fine-tuning", VERSION, self.path, content)
        if facts["run"] != run:
            raise ValueError(
                f"The checkpoint {self.path} is of another run (other model, data size or settings): give the same "
                "ones to go on with it, or another path to start anew."
            )
        if self._kept is not None and hashlib.sha256(content).hexdigest() not in self._kept.checkpoints:
            raise ValueError(f"{self.path} is not a checkpoint that this run wrote: put the right one back.")
        return tensors, facts

    def resume(self, *, data: str, run: str, start: str | None, used: int) -> tuple[Receipt, int]:
        """The receipt again, behind the first `used` steps; and how many steps may have been released by now.

        `start`: the digest of the weights to start from, if they are not those of a checkpoint.
        """
        if self._kept is None:
            raise ValueError(f"The key of the run in {self.path} is gone, so its steps cannot be replayed.")
        if self._kept.run != run:
            raise ValueError("The run that was begun here had other settings: give the same ones to go on with it.")
        if start is not None and self._kept.start != start:
            raise ValueError(
                f"The checkpoint {self.path} is gone, and the model does not start as it did then, so its steps cannot "
                "be replayed: put the checkpoint back, or give the same weights."
            )
        if self._kept.data != data:
            raise ValueError(
                "The data is not what it was when this run began, so its steps cannot be replayed: the same noise on "
                "other data would give both away. Put the data back, or start a new run with another path."
            )
        return replay.resume(self.ledger, self._kept.receipt, self._kept.key, used)

    def end(self) -> None:
        """Destroy the key and the record of steps, and what a kill in the middle of writing has left."""
        for partial in self._secret.parent.glob(f".{self._secret.name}.*"):
            partial.unlink(missing_ok=True)
        self._secret.unlink(missing_ok=True)
        self.steps.remove()
        self._kept = None

    def _keep(self, kept: Kept) -> None:
        checkpoints.write(self._secret, json.dumps(vars(kept)).encode(), 0o600)
        self._kept = kept

    def _read(self) -> Kept | None:
        if not self._secret.exists():
            return None
        try:
            return Kept(**json.loads(self._secret.read_text()))
        except (ValueError, TypeError):
            raise ValueError(f"The private file {self._secret.name} beside the ledger is damaged.") from None
