"""Outputs on one disk as if they were many sources': disjoint samples are dealt out, the rest is for evaluation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tacit._unit_ids import distinct
from tacit.calibrate._calibrated import Result
from tacit.calibrate._measures import ece
from tacit.calibrate._outputs import check_labels, read
from tacit.calibrate._source import Source
from tacit.calibrate._statistics import Noise
from tacit.privacy import Budget, Ledger, Neighbours, Unit

DEAL = "deal.json"  # beside the ledgers: which samples they speak for


@dataclass(frozen=True, eq=False)
class Deal:
    """Sources with disjoint samples, and what is left over: that is declared public, for the evaluation alone."""

    sources: list[Source]
    logits: Tensor  # of the samples that no source has
    labels: Tensor

    def evaluate(self, result: Result) -> tuple[float, float]:
        """The calibration error on the left-over samples, before and after."""
        before = ece(logits=self.logits, labels=self.labels)
        return before, ece(logits=result.apply(self.logits), labels=self.labels)


def deal(
    *,
    logits: Any = None,
    probs: Any = None,
    labels: Any,
    sources: int,
    samples: int,
    budget: Budget,
    noise: Noise | None = None,
    neighbours: Neighbours | str = Neighbours.ADD_REMOVE,
    unit: Unit | str | None = None,
    unit_ids: Any = None,
    ledgers: Path | None = None,
    seed: int = 0,
) -> Deal:
    """Deal ``samples`` to each of ``sources`` by a seeded shuffle; each source has a ledger of its own.

    With ``unit_ids``, one per row, whole units are dealt: ``samples`` of them to each source, with all their rows.

    ``ledgers`` is a folder with a file per source. It speaks for one deal: other samples under the same names would let
    a person spend twice, so another deal is refused there.
    """
    scores = read(logits=logits, probs=probs)
    classes = check_labels(labels, scores)
    if sources < 1 or samples < 1:
        raise ValueError(f"There is at least one source with one sample; got {sources} with {samples}.")
    owner = torch.arange(len(classes)) if unit_ids is None else distinct(unit_ids, len(classes))[1]
    units, used = int(owner.max()) + 1 if len(owner) else 0, sources * samples
    what = "samples" if unit_ids is None else "units"
    if used >= units:
        raise ValueError(
            f"{sources} sources of {samples} {what} take {used} of {units} {what}: none is left to evaluate on."
        )
    place = torch.empty(units, dtype=torch.long)
    place[torch.from_numpy(np.random.default_rng(seed).permutation(units))] = torch.arange(units)
    order = torch.argsort(place[owner], stable=True)  # the rows, unit by unit as they are dealt
    dealt = torch.div(place[owner][order], samples, rounding_mode="floor")
    if ledgers is not None:
        _same_deal(ledgers, scores, classes, unit_ids, sources=sources, samples=samples, seed=seed)
    ledger_of = _ledgers(ledgers)
    digits = len(str(sources))
    made = []
    for number in range(sources):
        mine = order[dealt == number]
        name = f"source-{number + 1:0{digits}d}"
        made.append(
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
                size=samples,
            )
        )
    rest = order[dealt >= sources]
    return Deal(made, scores[rest], classes[rest])


def _ledgers(folder: Path | None) -> Callable[[str], Ledger]:
    if folder is None:
        return lambda _: Ledger("sqlite://")
    return lambda name: Ledger(folder / f"{name}.db")


def _same_deal(
    folder: Path, scores: Tensor, classes: Tensor, ids: Any, *, sources: int, samples: int, seed: int
) -> None:
    whose = b"" if ids is None else distinct(ids, len(classes))[1].numpy().tobytes()
    print_of = hashlib.sha256(scores.numpy().tobytes() + classes.numpy().tobytes() + whose).hexdigest()
    wanted = {"data": print_of, "sources": sources, "samples": samples, "seed": seed}
    path = folder / DEAL
    if path.exists():
        try:
            known = json.loads(path.read_text("utf-8"))
        except ValueError:
            known = None
        if known != wanted:
            raise ValueError(
                f"The ledgers in {folder} are those of another deal (other data, sources, samples or seed): "
                "give a new folder, and remember that people in both have spent both."
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(wanted), "utf-8")
