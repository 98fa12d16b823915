"""Outputs on one disk as if they were many sources': disjoint samples for each, the rest for evaluation."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tacit._files import write_atomically
from tacit._unit_ids import distinct
from tacit.calibrate._calibrated import Result
from tacit.calibrate._measures import ece
from tacit.calibrate._outputs import check_labels, read
from tacit.calibrate._source import Source, Trust
from tacit.calibrate._statistics import Noise
from tacit.privacy import Budget, Ledger, Neighbours, Unit

PARTITION = "deal.json"  # beside the ledgers: which samples they speak for (the name that folders already have)


@dataclass(frozen=True, eq=False)
class Partition:
    """Sources with disjoint samples, and what is left over: that is declared public, for the evaluation alone."""

    sources: list[Source]
    logits: Tensor  # of the samples that no source has
    labels: Tensor

    def check_accuracy(self) -> None:
        """Refuse labels that have nothing to do with the outputs, as far as the left-over (public) samples show.

        Raises:
            ValueError: Predictions are right about as often as by chance.
        """
        count, classes = len(self.labels), self.logits.shape[1]
        right = float((self.logits.argmax(dim=1) == self.labels).double().mean()) if count else 1.0
        chance = 1 / classes
        if count >= 50 and right < chance + 3 * math.sqrt(chance * (1 - chance) / count):
            raise ValueError(
                f"Predictions are right in {right:.1%} of the samples left over, which is chance among {classes} "
                "classes: labels and outputs do not belong together, or a column is no class. Nothing was charged."
            )

    def evaluate(self, result: Result) -> tuple[float, float] | None:
        """The calibration error on the left-over samples, before and after, if there are any."""
        if not len(self.labels):
            return None
        before = ece(logits=self.logits, labels=self.labels)
        return before, ece(logits=result.apply(self.logits), labels=self.labels)


def calibrated_probs(result: Result, *, logits: Any = None, probs: Any = None) -> Tensor:
    """Calibrated probabilities of outputs as they were given."""
    return torch.softmax(result.apply(read(logits=logits, probs=probs)), dim=1)


def partition(
    *,
    logits: Any = None,
    probs: Any = None,
    labels: Any,
    sources: int | None = None,
    samples: int | None = None,
    source_ids: Any = None,
    budget: Budget,
    noise: Noise | None = None,
    neighbours: Neighbours | str = Neighbours.ADD_REMOVE,
    unit: Unit | str | None = None,
    unit_ids: Any = None,
    ledgers: Path | None = None,
    seed: int = 0,
    trust: Trust = "local",
    colluding: float = 0.5,
) -> Partition:
    """Partition ``samples`` to each of ``sources`` by a seeded shuffle; each source has a ledger of its own.

    With ``unit_ids``, one per row, whole units are assigned: ``samples`` of them to each source, with all their rows.

    With ``source_ids``, one per row, the sources are those: each has its rows, or ``samples`` of its units if that is
    given, and publishes no size. Rows whose id is empty, and those beyond ``samples``, are left over.

    ``ledgers`` is a folder with a file per source. It speaks for one partition: other samples under the same names
    would let a person spend twice, so another partition is refused there.
    """
    scores = read(logits=logits, probs=probs)
    classes = check_labels(labels, scores)
    owner = torch.arange(len(classes)) if unit_ids is None else distinct(unit_ids, len(classes))[1]
    assigned = _assigned(owner, sources, samples, source_ids, seed, "samples" if unit_ids is None else "units")
    if ledgers is not None:
        whose = b"" if unit_ids is None else owner.numpy().tobytes()
        where = b"" if source_ids is None else repr([str(each) for each in source_ids]).encode()
        _same_deal(
            ledgers, (scores.numpy().tobytes(), classes.numpy().tobytes(), whose, where),
            sources=len(assigned), samples=samples, seed=seed,
        )  # fmt: skip
    ledger_of = _ledgers(ledgers)
    made = [
        Source(
            name,
            logits=scores[mine],
            labels=classes[mine],
            budget=budget,
            ledger=ledger_of(name),
            unit=unit,
            unit_ids=None if unit_ids is None else owner[mine],
            neighbours=neighbours,
            noise=noise,
            size=samples if source_ids is None else None,
            trust=trust,
            colluding=colluding,
        )
        for name, mine in assigned.items()
    ]
    rest = torch.ones(len(classes), dtype=torch.bool)
    for mine in assigned.values():
        rest[mine] = False
    return Partition(made, scores[rest], classes[rest])


def _assigned(
    owner: Tensor, sources: int | None, samples: int | None, source_ids: Any, seed: int, what: str
) -> dict[str, Tensor]:
    """The rows of each source, unit by unit."""
    units = int(owner.max()) + 1 if len(owner) else 0
    place = torch.empty(units, dtype=torch.long)
    place[torch.from_numpy(np.random.default_rng(seed).permutation(units))] = torch.arange(units)
    order = torch.argsort(place[owner], stable=True)
    if source_ids is not None:
        if sources is not None:
            raise ValueError("The sources are those that the rows name: leave the number of sources out.")
        return _named(owner, order, [str(each).strip() for each in source_ids], samples)
    if sources is None or samples is None:
        raise ValueError("Say how many sources there are and how many samples each gets, or at which source a row is.")
    if sources < 1 or samples < 1:
        raise ValueError(f"There is at least one source with one sample; got {sources} with {samples}.")
    used = sources * samples
    if used >= units:
        raise ValueError(
            f"{sources} sources of {samples} {what} take {used} of {units} {what}: none is left to evaluate on."
        )
    source_of = torch.div(place[owner][order], samples, rounding_mode="floor")
    digits = len(str(sources))
    return {f"source-{number + 1:0{digits}d}": order[source_of == number] for number in range(sources)}


def _named(owner: Tensor, order: Tensor, names: list[str], samples: int | None) -> dict[str, Tensor]:
    """The rows of sources that the rows themselves name, of at most ``samples`` units each."""
    if len(names) != len(owner):
        raise ValueError(f"There are {len(owner)} rows and {len(names)} names of sources.")
    if samples is not None and samples < 1:
        raise ValueError(f"A source has at least one sample; got {samples}.")
    rows: dict[str, list[int]] = {}
    seen: dict[str, dict[int, None]] = {}
    of_unit: dict[int, str] = {}
    for row, unit in zip(order.tolist(), owner[order].tolist(), strict=True):
        name = names[row]
        if of_unit.setdefault(unit, name) != name:
            raise ValueError(
                "Some unit has rows at several sources, which count as disjoint: assign it to one of them."
            )
        mine = seen.setdefault(name, {})
        if name and (unit in mine or samples is None or len(mine) < samples):
            mine[unit] = None
            rows.setdefault(name, []).append(row)
    if not rows:
        raise ValueError("No row names its source.")
    if any(len(name) > 100 or not name.isprintable() for name in rows):
        raise ValueError("The name of a source is printable and at most 100 characters long; some are not.")
    return {name: torch.tensor(rows[name]) for name in sorted(rows)}


def _ledgers(folder: Path | None) -> Callable[[str], Ledger]:
    if folder is None:
        return lambda _: Ledger("sqlite://")
    return lambda name: Ledger(folder / f"{re.sub(r'[^-.@ 0-9A-Za-z_]', '_', name)}.db")  # subjects keep them apart


def _same_deal(folder: Path, parts: tuple[bytes, ...], *, sources: int, samples: int | None, seed: int) -> None:
    print_of = hashlib.sha256(b"".join(parts)).hexdigest()
    wanted = {"data": print_of, "sources": sources, "samples": samples, "seed": seed}
    path = folder / PARTITION
    if path.exists():
        try:
            known = json.loads(path.read_text("utf-8"))
        except ValueError:
            known = None
        if known != wanted:
            raise ValueError(
                f"The ledgers in {folder} are those of another partition (other data, sources, samples or seed): "
                "give a new folder, and remember that people in both have spent both."
            )
        with suppress(OSError):  # another's file, or a medium without permissions
            path.chmod(0o600)  # earlier versions let everybody read it
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(wanted), 0o600)  # whoever knows all rows but one finds that one by the digest
