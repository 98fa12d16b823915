"""What a run promises, in the form in which trainers of other libraries take their settings."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tacit import Curator, Ledger, Neighbours, Unit
from tacit.finetune import PrivateLoop
from tacit.gradients import Policy

_NOT_PASSED_ON = ("public_evaluation",)


@dataclass(frozen=True, kw_only=True)
class PrivacyArguments:
    """The privacy settings of a trainer; see `tacit.make_private`, which they are handed to.

    Args:
        epsilon: What the run may spend.
        delta: The failure probability of the guarantee.
        clip: The L2 bound of a unit's gradient, or a clip policy.
        unit: What a unit is ("patient"), where the trainer is given `unit_ids`.
        size: The public number of units, for add-remove.
        neighbours: The neighbouring relation.
        rows_each: The most rows of a unit shown in one step.
        microbatch: The most rows in memory at a time.
        ledger: Where the run is charged; by default in memory, where a trainer that trains again is charged, too.
        subject: The data set's name in the ledger.
        checkpoint: A file by which a killed run is resumed, by running the same program again.
        every: Steps between checkpoints.
        private: The folder for keys.
        seed: Reproducible noise and sampling: "seeded: not private".
        curator: Receives private facts.
        public_evaluation: The trainer's evaluation data are public. Trainers print and keep what they
            evaluate, so without this such data are refused.
    """

    epsilon: float
    delta: float
    clip: float | Policy = 1.0
    unit: Unit | str | None = None
    size: int | None = None
    neighbours: Neighbours | str | None = None
    rows_each: int | None = None
    microbatch: int | None = None
    ledger: Ledger | None = None
    subject: str | None = None
    checkpoint: str | Path | None = None
    every: int = 100
    private: str | Path | None = None
    seed: int | None = None
    curator: Curator | None = None
    public_evaluation: bool = False

    def options(self, before: PrivateLoop | None) -> dict[str, Any]:
        """The arguments of `make_private`; `before` is the loop that the same trainer had before, if it had one.

        Formal guarantee: without a ledger of its own, a trainer that trains again is charged where it was before, in
        memory. Else the model would hold two runs and promise one.
        """
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        if before is not None and self.ledger is None:
            found["ledger"] = before.ledger
        return {name: value for name, value in found.items() if name not in _NOT_PASSED_ON}

    def check_evaluation(self, what: str) -> None:
        """Refuse evaluation data that were not declared public."""
        if not self.public_evaluation:
            raise ValueError(
                f"Scores of {what} are printed and kept without noise. Say PrivacyArguments(public_evaluation=True) if "
                "they are public, or leave them out; finetune.fit evaluates private data, charged."
            )
