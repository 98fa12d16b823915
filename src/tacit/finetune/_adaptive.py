"""Clips that change over training: by a public schedule, or after a quantile of the norms (Andrew et al., 2021)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tacit.data import Rows
from tacit.finetune._noise_schedules import Decaying
from tacit.finetune._queries import Gradient, GradientAsker, GradientQuery, Loss
from tacit.gradients import AdaptiveQuantile, ClippedSum, Engine, Flat, Policy, as_policy

_LEAST = 1e-30  # of a scheduled clip: below it a factor is taken for zero, and nothing is left of a gradient
_RANGE = 1e6  # the clip stays within this factor of where it began, whatever the noise does


@dataclass(frozen=True, kw_only=True)
class QuantileClip:
    """The clipped gradient, and how many units were below the clip, as two blocks of one sum.

    `count_noise` is the standard deviation of the released count, in units (sigma_b in the paper). By default it is a
    twentieth of the batch, as there, or twice the run's noise multiplier where that is more: then the count takes at
    most a sixteenth of the precision.

    Formal guarantee: one unit adds to the gradient at most the clip and to the count 1/2 or -1/2. With the multiplier
    2 sigma_b for the count and z_delta = (z^-2 - (2 sigma_b)^-2)^(-1/2) for the gradient, both from the same draw, the
    two are one Gaussian release with multiplier z. The next clip is made of the released count alone.
    """

    clip: float = 1.0
    quantile: float = 0.5
    rate: float = 0.2
    count_noise: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "clip", AdaptiveQuantile(self.clip).bound)
        if not (0 < self.quantile < 1 and 0 < self.rate < math.inf):
            raise ValueError("quantile is between 0 and 1, and the clip's rate above 0.")
        if self.count_noise is not None and not 0 < self.count_noise < math.inf:
            raise ValueError("count_noise is a standard deviation, in units, above 0.")
        object.__setattr__(self, "count_noise", None if self.count_noise is None else float(self.count_noise))

    def open(self, model: nn.Module, loss: Loss, *, expected: float, microbatch: int | None) -> GradientQuery:
        return QuantileAsker(Engine(model, loss, clip=self.clip, microbatch=microbatch), expected, self)


class _ClipOfTheStep(GradientAsker):
    """Asks an engine with the clip of the step."""

    clip: Policy

    def _sum(self, rows: Rows, mute: Tensor | None) -> ClippedSum:
        return self.engine((rows.inputs, rows.labels), unit_ids=rows.owner, clip=self.clip, mute=mute)

    def zero_sum(self) -> ClippedSum:
        return self.engine.zero_sum(self.clip)


@dataclass(frozen=True, kw_only=True)
class ScheduledClip:
    """The clipped gradient, with a clip that follows a schedule which is fixed in advance.

    Formal guarantee: in step t one unit adds at most clip * shape(t), and the noise is relative to that: as many
    releases of one noise multiplier as with a constant clip.
    """

    clip: float
    schedule: Decaying
    steps: int

    def __post_init__(self) -> None:
        as_policy(self.clip)
        if not isinstance(self.schedule, Decaying):
            raise TypeError(
                f"clip_schedule is a schedule such as finetune.Decaying(end=0.1), not {type(self.schedule).__name__}."
            )
        last = self.schedule.multiplier(self.clip, self.steps - 1, self.steps)
        if not last >= _LEAST:
            raise ValueError(
                f"By this schedule the clip falls to {last:g}, and nothing is left of a gradient below {_LEAST:g}: let "
                "it fall more slowly."
            )

    def of_step(self, step: int) -> Flat:
        """The clip of a step, from 0 on; that of the last one also after it."""
        return Flat(self.schedule.multiplier(self.clip, min(step, self.steps - 1), self.steps))

    def open(self, model: nn.Module, loss: Loss, *, expected: float, microbatch: int | None) -> GradientQuery:
        return ScheduledAsker(Engine(model, loss, clip=self.clip, microbatch=microbatch), expected, self)


class ScheduledAsker(_ClipOfTheStep):
    """Counts the steps that were released."""

    def __init__(self, engine: Engine, expected: float, query: ScheduledClip) -> None:
        super().__init__(engine, expected)
        self._query, self._step = query, 0
        self.clip = query.of_step(0)

    def gradient(self, released: Mapping[str, Tensor]) -> Gradient:
        self._step += 1
        self.clip = self._query.of_step(self._step)
        return super().gradient(released)

    def state(self) -> dict[str, Tensor]:
        return {"step": torch.tensor(self._step)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        self._step = int(state["step"])
        self.clip = self._query.of_step(self._step)


class QuantileAsker(_ClipOfTheStep):
    """Lets the clip follow the released count."""

    clip: AdaptiveQuantile

    def __init__(self, engine: Engine, expected: float, query: QuantileClip) -> None:
        super().__init__(engine, expected)
        self._query = query
        self.clip = AdaptiveQuantile(query.clip, query.quantile, query.rate)
        self.zero_sum()  # refuses a model with a parameter called like the count

    def split(self, noise: float) -> Mapping[str, float] | None:
        if noise == 0:
            return None
        given = self._query.count_noise
        count = max(self.expected / 10, 4 * noise) if given is None else 2 * given
        if count <= noise:
            raise ValueError(
                f"count_noise={given:g} would by itself tell more than the budget allows: it must be above half the "
                f"noise multiplier, {noise / 2:.4g}."
            )
        return {"gradient": (noise**-2 - count**-2) ** -0.5, "count": count}

    def gradient(self, released: Mapping[str, Tensor]) -> Gradient:
        followed = self.clip.updated(float(released["count"]), self.expected)
        low, high = self._query.clip / _RANGE, self._query.clip * _RANGE
        self.clip = AdaptiveQuantile(min(max(followed.bound, low), high), followed.quantile, followed.rate)
        return super().gradient({name: value for name, value in released.items() if name != "count"})

    def state(self) -> dict[str, Tensor]:
        return {"clip": torch.tensor(self.clip.bound, dtype=torch.float64)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.clip = AdaptiveQuantile(float(state["clip"]), self._query.quantile, self._query.rate)
