"""A step size from losses that leave with the gradient (HyFreeDP; Liu and Bu, 2025): what HyFreeDP asks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from tacit.data import Rows
from tacit.finetune._queries import (
    Gradient,
    GradientAsker,
    GradientQuery,
    Loss,
    cut,
    placed,
    row_losses,
    unit_means,
)
from tacit.gradients import AdaptiveQuantile, Automatic, ClippedSum, Engine, PerLayer, Policy, as_policy
from tacit.privacy.events import check_count

_BLOCK = "losses"
_RANGE = 1e6  # the learning rate stays within this factor of where it began, whatever the noise does
_MOST = 2.0  # times, longer or shorter, after one probe
_GROWTH = math.sqrt(2)  # of a step that is too short for its effect to be seen


@dataclass(frozen=True, kw_only=True)
class LossProbes:
    """The clipped gradient and, every so many steps, how losses differ along the way that was just made.

    Let a be the weights at the last probe and w those of now. A unit's two numbers are l(a) - l(w) and
    l(2w - a) - l(w), each the mean over its rows and cut to [-loss_clip, loss_clip]. A parabola through the released
    means says how long the way from a should have been, and the learning rate is multiplied by that, by a half to two.
    The first step has the block as well, with zeros, so that what may be refused is refused before the charge.

    Formal guarantee: a and w are released values. One unit adds to the gradient a vector of at most the clip, and to
    the losses one of at most sqrt(2) loss_clip. Both come from one draw and leave in one call: with z / sqrt(1 - share)
    for the gradient and z / sqrt(share) for the losses they are one Gaussian release with multiplier z; in steps
    without a probe the gradient has z alone. The two numbers are rounded to a grid on which sums of 2^22 units are
    exact (`cut`).
    """

    clip: float | Policy = field(default_factory=Automatic)
    loss_clip: float = 0.5
    every: int = 5
    share: float = 0.05

    def __post_init__(self) -> None:
        policy = as_policy(self.clip)
        if isinstance(policy, PerLayer) or not policy.bounds({"gradient": ()}):
            raise ValueError("Loss probes go with one clip for the whole gradient: a number, or Automatic.")
        if isinstance(policy, AdaptiveQuantile):
            raise ValueError("A clip that follows a quantile needs its count released as well: use AdpClip.")
        check_count(self.every, "every")
        if not (0 < self.loss_clip < math.inf and 0 < self.share < 1):
            raise ValueError("loss_clip is above 0, and share between 0 and 1.")
        for name in ("loss_clip", "share"):  # in a scalar of 16 bits bound and noise would be rounded down
            object.__setattr__(self, name, float(getattr(self, name)))

    def open(self, model: nn.Module, loss: Loss, *, expected: float, microbatch: int | None) -> GradientQuery:
        return ProbingAsker(Engine(model, loss, clip=self.clip, microbatch=microbatch), expected, self)


class ProbingAsker(GradientAsker):
    """Asks an engine, and three forward passes where a probe is due."""

    def __init__(self, engine: Engine, expected: float, query: LossProbes) -> None:
        super().__init__(engine, expected)
        self._query = query
        self._parameters = {name: p for name, p in engine.model.named_parameters() if p.requires_grad}
        if _BLOCK in self._parameters:
            raise ValueError(f"A parameter is called {_BLOCK!r}, like the block of loss probes: rename the parameter.")
        self._step, self.factor = 0, 1.0
        self._anchor: dict[str, Tensor] | None = None
        self._noise = 0.0

    @property
    def probes(self) -> bool:
        """Whether losses leave with the gradient of this step."""
        return self._step % self._query.every == 0

    def _sum(self, rows: Rows, mute: Tensor | None) -> ClippedSum:
        found = super()._sum(rows, mute)
        return self._with(found, self._differences(rows, mute)) if self.probes else found

    def zero_sum(self) -> ClippedSum:
        found = super().zero_sum()
        return self._with(found, torch.zeros(0, 2, dtype=torch.float64)) if self.probes else found

    def split(self, noise: float) -> Mapping[str, float] | None:
        if noise == 0 or not self.probes:
            self._noise = 0.0
            return None
        share = self._query.share
        losses = noise / math.sqrt(share)
        self._noise = losses * self._bound / self.expected  # of each mean difference
        return {"gradient": noise / math.sqrt(1 - share), _BLOCK: losses}

    def gradient(self, released: Mapping[str, Tensor]) -> Gradient:
        if self.probes:
            if self._anchor is not None:
                behind, ahead = (released[_BLOCK].double() / self.expected).tolist()
                self.factor = min(max(self.factor * way(behind, ahead, self._noise), 1 / _RANGE), _RANGE)
            self._anchor = {name: p.detach().clone() for name, p in self._parameters.items()}
        self._step += 1
        return super().gradient({name: value for name, value in released.items() if name != _BLOCK})

    def state(self) -> dict[str, Tensor]:
        anchor = {} if self._anchor is None else {f"anchor.{name}": value for name, value in self._anchor.items()}
        return anchor | {"step": torch.tensor(self._step), "factor": torch.tensor(self.factor, dtype=torch.float64)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        self._step, self.factor = int(state["step"]), float(state["factor"])
        kept = {name: state.get(f"anchor.{name}") for name in self._parameters}
        found = {name: value.to(self._parameters[name].device) for name, value in kept.items() if value is not None}
        self._anchor = found or None

    @property
    def _bound(self) -> float:
        return self._query.loss_clip * math.sqrt(2)

    def _with(self, found: ClippedSum, differences: Tensor) -> ClippedSum:
        kept = cut(differences, self._query.loss_clip).sum(0)
        return replace(
            found,
            sum=found.sum | {_BLOCK: kept.to(next(iter(self._parameters.values())).device)},
            bounds=found.bounds | {_BLOCK: self._bound},
            blocks=found.blocks | {_BLOCK: (_BLOCK,)},
        )

    def _differences(self, rows: Rows, mute: Tensor | None) -> Tensor:
        """How much higher a unit's loss was at the anchor, and is as far ahead; zeros if there is no way yet."""
        anchor = self._anchor
        if anchor is None:
            return torch.zeros(0, 2, dtype=torch.float64)
        here = {name: p.data for name, p in self._parameters.items()}
        losses = []
        for times in (0.0, -1.0, 1.0):  # of the way from the anchor, beyond where the weights are
            values = ((name, value + times * (value - anchor[name])) for name, value in here.items())
            with placed(self._parameters, values):
                losses.append(row_losses(self.engine.model, self.engine.per_sample_loss, rows, self.engine.microbatch))
        return unit_means(torch.stack([losses[1] - losses[0], losses[2] - losses[0]], 1), rows.owner, mute)


def way(behind: float, ahead: float, noise: float) -> float:
    """How many times as long the way should have been, between a half and two.

    f(0) = `behind`, f(1) = 0 and f(2) = `ahead` are the loss along it, less the loss at its end, each with Gaussian
    noise of this standard deviation. The vertex of the parabola is at 1 + (behind - ahead) / (2 (behind + ahead)).
    Curvature below its noise counts as the noise; if slope and curvature are both below two deviations, then the way
    was too short for its effect to be seen, and it gets longer by sqrt(2).
    """
    slope, curvature, unsure = behind - ahead, behind + ahead, math.sqrt(2) * noise
    if abs(slope) <= 2 * unsure and abs(curvature) <= 2 * unsure:
        return _GROWTH
    floor = max(curvature, unsure)
    if floor <= 0:
        return _MOST if slope > 0 else 1 / _MOST
    return min(max(1 + slope / (2 * floor), 1 / _MOST), _MOST)
