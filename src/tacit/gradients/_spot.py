"""A check during the run: is one unit's clipped gradient the same among others and among copies of itself?"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tacit.gradients._batches import change, rows_of
from tacit.gradients._isolation import RowsMixed, seed_all
from tacit.gradients._recorder import Recorder
from tacit.gradients._result import ClippedSumAccumulator
from tacit.gradients._units import Units

_SHARE = 1 / 128  # of the steps, in the long run: two passes each
_MOST = 0.01  # of the bound; rounding is far below it
_MOST_COARSE = 0.25  # in bfloat16 and float16

MIXED = (
    "A unit's clipped gradient changed with who else was in the batch: rows are mixed in a way that the checks on "
    "synthetic rows did not see, so no bound holds. Nothing of this step was released. Look for what depends on the "
    "whole batch (a count, a rank, a capacity, a maximum), or for state that changes later."
)

Watch = Callable[[Any, Units], tuple[Recorder, Tensor]]


def due(step: int, units: int) -> int | None:
    """The unit to look at in this step, if one is due: the first step, then less and less often, down to a share.

    Which steps and which places in the batch is public: a hash of the step's number.
    """
    digest = hashlib.sha256(f"tacit.gradients.spot {step}".encode()).digest()
    chance, place = (int.from_bytes(digest[i : i + 8], "big") / 2**64 for i in (0, 8))
    return int(place * units) if chance < max(_SHARE, 1 / (step + 1)) else None


def copied(mine: Tensor, rows: int) -> Tensor:
    """The rows of a unit in their own places, and again in everybody else's."""
    copies = mine[torch.arange(rows, device=mine.device) % mine.numel()]
    copies[mine] = mine
    return copies


def check_unit(
    watch: Watch, tally: ClippedSumAccumulator, batch: Any, part: Tensor, local: Units, unit: int, coarse: bool
) -> None:
    """Compare a unit's clipped gradient with what it is if everybody else is a copy of it.

    Formal guarantee: this stops a run, with a sentence that is always the same and before anything of the step is
    released, only if somebody's contribution depends on others by more than a hundredth of the bound. Where rows are
    kept apart, which is what every bound rests on, both passes have the same shapes, the same random numbers and the
    same values in this unit's places, so they differ by rounding at most, for all data: the stop has probability zero
    with every unit and without it, and reveals nothing. Where rows are mixed no bound holds, and the stop, which
    depends on the data, is the lesser evil.
    """
    mine = torch.nonzero(local.of_row == unit).flatten()
    copies = copied(mine, local.rows)
    weights = torch.zeros(local.count, dtype=torch.float64, device=part.device)
    weights[unit] = 1
    contributions = []
    given = rows_of(batch, part, -1)
    for rows in (torch.arange(local.rows, device=part.device), copies):
        seed_all()
        # An index makes a copy, which a model may change in place.
        recorder, losses = watch(change(given, lambda t, rows=rows: t[rows.to(t.device)]), local)  # type: ignore[misc]
        silent = torch.arange(local.count, device=part.device) != unit
        alone = tally.another(local.count)
        alone.add(recorder.settled, local, torch.arange(local.count), local.mean(losses), silent)
        contributions.append(alone.result())
    first, second = contributions
    if not first.bounds:
        return
    squares = sum(bound**2 for bound in first.bounds.values())
    gap = 0.0
    for name, value in second.sum.items():
        apart = first.sum.pop(name).sub_(value).flatten()  # in place: a table of words is large
        gap += float(apart @ apart)
    finite = bool(torch.isfinite(first.private.norms[unit]) & torch.isfinite(second.private.norms[unit]))
    if finite and not gap <= (_MOST_COARSE if coarse else _MOST) ** 2 * squares:
        raise RowsMixed(MIXED)
