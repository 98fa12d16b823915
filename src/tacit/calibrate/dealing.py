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

from tacit.calibrate.calibrated import Result
from tacit.calibrate.measures import ece
from tacit.calibrate.outputs import check_labels, read
from tacit.calibrate.source import Source
from tacit.calibrate.statistics import Noise
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
    unit: Unit | str = Unit.SAMPLE,
    ledgers: Path | None = None,
    seed: int = 0,
) -> Deal:
    """Deal ``samples`` to each of ``sources`` by a seeded shuffle; each source has a ledger of its own.

    ``ledgers`` is a folder with a file per source. It speaks for one deal: other samples under the same names would let
    a person spend twice, so another deal is refused there.
    """
    scores = read(logits=logits, probs=probs)
    classes = check_labels(labels, scores)
    if sources < 1 or samples < 1:
        raise ValueError(f"There is at least one source with one sample; got {sources} with {samples}.")
    rows, used = len(classes), sources * samples
    if used >= rows:
        raise ValueError(
            f"{sources} sources of {samples} samples take {used} of {rows} samples: none is left to evaluate on."
        )
    order = torch.from_numpy(np.random.default_rng(seed).permutation(rows))
    if ledgers is not None:
        _same_deal(ledgers, scores, classes, sources=sources, samples=samples, seed=seed)
    ledger_of = _ledgers(ledgers)
    digits = len(str(sources))
    made = []
    for place in range(sources):
        mine = order[place * samples : (place + 1) * samples]
        name = f"source-{place + 1:0{digits}d}"
        made.append(
            Source(
                name,
                logits=scores[mine],
                labels=classes[mine],
                budget=budget,
                ledger=ledger_of(name),
                unit=unit,
                neighbours=neighbours,
                noise=noise,
                size=samples,
            )
        )
    rest = order[used:]
    return Deal(made, scores[rest], classes[rest])


def _ledgers(folder: Path | None) -> Callable[[str], Ledger]:
    if folder is None:
        return lambda _: Ledger("sqlite://")
    return lambda name: Ledger(folder / f"{name}.db")


def _same_deal(folder: Path, scores: Tensor, classes: Tensor, *, sources: int, samples: int, seed: int) -> None:
    print_of = hashlib.sha256(scores.numpy().tobytes() + classes.numpy().tobytes()).hexdigest()
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
