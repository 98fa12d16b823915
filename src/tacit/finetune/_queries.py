"""What is asked of the drawn units at each step: a bounded sum, and how its noisy form becomes a gradient.

Only `sum` looks at private rows. What `gradient` gets has its noise; everything from there on is post-processing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tacit.data import Rows
from tacit.finetune._predictions import units_at_once
from tacit.finetune._reading import in_place
from tacit.gradients import AdaptiveQuantile, ClippedSum, Engine, Policy, as_policy, rows_of, wrong_shape
from tacit.privacy import BoundedSum

Loss = Any  # (model, (inputs, labels)) -> one loss per row
Gradient = dict[str, Tensor]


class Query(Protocol):
    """What is asked, as plain configuration; `open` makes the one who asks."""

    def open(self, model: nn.Module, loss: Loss, *, expected: float, microbatch: int | None) -> GradientQuery: ...


class GradientQuery(Protocol):
    """Asks at every step of one run, and remembers what a run may remember: released values.

    `factor` multiplies the learning rate of the step that the last `gradient` is for.
    """

    factor: float

    def sum(self, rows: Rows, mute: Tensor | None = None) -> BoundedSum:
        """The sum over the units of these rows. Several sums of one step are added before the noise.

        A unit with a muted row (a bool per row), or one whose rows make model or loss raise, adds exactly zero, in its
        place. Sums are float64 (or exact), so that their rounding is far below what noise hides; see `Run.step`.
        """

    def zero_sum(self) -> BoundedSum:
        """The sum over no unit."""

    def check(self, inputs: Any, labels: Tensor) -> None:
        """Try the model on synthetic rows like these, before anything is charged."""

    def split(self, noise: float) -> Mapping[str, float] | None:
        """The noise multiplier of each block, jointly worth `noise`; None: the same noise for every number."""

    def gradient(self, released: Mapping[str, Tensor]) -> Gradient:
        """What the update gets: the mean gradient, from the noisy sum."""

    def state(self) -> dict[str, Tensor]:
        """What must survive a crash; released values only."""

    def load(self, state: Mapping[str, Tensor]) -> None: ...


@dataclass(frozen=True)
class ClippedGradient:
    """The sum of every unit's mean gradient, clipped: DP-SGD's question (Abadi et al., 2016).

    Formal guarantee: one unit adds a vector of L2 norm at most the clip, whatever its rows (`gradients.Engine`); the
    divisor is the public expected number of units, never the number that was drawn.
    """

    clip: float | Policy = 1.0

    def __post_init__(self) -> None:
        if not as_policy(self.clip).bounds({"gradient": ()}):
            raise ValueError("This clip policy has no bound, so no noise makes its sums private: choose another.")
        if isinstance(self.clip, AdaptiveQuantile):
            raise ValueError("A clip that follows a quantile needs its count released as well: use AdpClip.")

    def open(self, model: nn.Module, loss: Loss, *, expected: float, microbatch: int | None) -> GradientQuery:
        return GradientAsker(Engine(model, loss, clip=self.clip, microbatch=microbatch), expected)


class GradientAsker:
    """Asks an engine."""

    factor: float = 1.0

    def __init__(self, engine: Engine, expected: float) -> None:
        self.engine = engine
        self.expected = expected

    def sum(self, rows: Rows, mute: Tensor | None = None) -> ClippedSum:
        return in_place(self._sum, rows, mute)

    def _sum(self, rows: Rows, mute: Tensor | None) -> ClippedSum:
        alone = torch.equal(rows.owner, torch.arange(len(rows.owner), device=rows.owner.device))
        return self.engine((rows.inputs, rows.labels), unit_ids=None if alone else rows.owner, mute=mute)

    def zero_sum(self) -> ClippedSum:
        return self.engine.zero_sum()

    def check(self, inputs: Any, labels: Tensor) -> None:
        # As many rows as a draw will have, so that no later one is checked anew for its size.
        self.engine.validate((inputs, labels), rows=units_at_once(self.expected))

    def split(self, noise: float) -> Mapping[str, float] | None:
        del noise
        return None

    def gradient(self, released: Mapping[str, Tensor]) -> Gradient:
        return {name: value / self.expected for name, value in released.items()}

    def state(self) -> dict[str, Tensor]:
        return {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        del state


# -- losses of rows, for queries that need no backward pass -----------------------------------------------------------


@contextmanager
def placed(parameters: Mapping[str, nn.Parameter], values: Iterator[tuple[str, Tensor]]) -> Iterator[None]:
    """Other values in the parameters' place; their own stay untouched and are put back whatever happens."""
    own = {name: p.data for name, p in parameters.items()}
    try:
        for name, value in values:
            parameters[name].data = value
        yield
    finally:
        for name, p in parameters.items():
            p.data = own[name]


def row_losses(model: nn.Module, loss: Loss, rows: Rows, microbatch: int | None) -> Tensor:
    """The loss of each row, in float64 and without a graph."""
    batch, count = (rows.inputs, rows.labels), len(rows.owner)
    found = []
    with torch.no_grad():
        for part in torch.split(torch.arange(count), microbatch or max(count, 1)):
            losses = loss(model, rows_of(batch, part, count))
            if losses.shape != (len(part),):
                raise wrong_shape(losses.shape, len(part))
            found.append(losses.double().cpu())
    return torch.cat(found)


def unit_means(values: Tensor, owner: Tensor, mute: Tensor | None) -> Tensor:
    """The mean of each unit's rows (rows x numbers), as units x numbers; not a number for a unit with a muted row."""
    owner = owner.cpu()
    units = int(owner.max()) + 1 if len(owner) else 0
    if mute is not None:
        values = values.masked_fill(mute.cpu()[:, None], math.nan)
    sizes = torch.bincount(owner, minlength=units).double()
    found = torch.zeros(units, values.shape[1], dtype=torch.float64).index_add_(0, owner, values)
    return (found / sizes[:, None])[sizes > 0]


def cut(values: Tensor, clip: float) -> Tensor:
    """Each number cut to [-clip, clip] and rounded to 2^-30 of a power of two near it; units x numbers, float64.

    A unit with a number that is not finite becomes zero. Sums of up to 2^22 such numbers are exact in float64, so
    no unit's number changes how the others round.
    """
    grid = 2.0 ** (math.frexp(clip)[1] - 30)
    most = math.floor(clip / grid)
    kept = torch.where(torch.isfinite(values).all(1, keepdim=True), values, 0)
    return (kept / grid).round().clamp(-most, most) * grid
