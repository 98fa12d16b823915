"""Private optimisers, each put together from four parts: who takes part, what is asked, how much noise, what follows.

A new optimiser is a new part, never a new loop.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Unpack

from tacit.finetune.noises import Noise, Steady
from tacit.finetune.queries import ClippedGradient, Query
from tacit.finetune.sampling import Everyone, Poisson, Sampler
from tacit.finetune.updates import Options, Update
from tacit.gradients.clipping import Policy
from tacit.privacy.events import DpEvent, check_count


@dataclass(frozen=True, kw_only=True)
class Optimiser:
    """`steps` times: draw units, sum what they are asked, add noise, update."""

    name: str
    steps: int
    sampler: Sampler
    query: Query = field(default_factory=ClippedGradient)
    noise: Noise = field(default_factory=Steady)
    update: Update = field(default_factory=Update)

    def __post_init__(self) -> None:
        check_count(self.steps, "steps")

    def event(self, scale: float, size: int) -> DpEvent:
        """Everything that a run releases, if its noise multiplier is `scale` and `size` the public number of units."""
        return self.noise.event(scale, rate=self.sampler.rate(size), steps=self.steps)


def DPSGD(  # noqa: N802
    *, batch: int, steps: int, clip: float | Policy = 1.0, **update: Unpack[Options]
) -> Optimiser:
    """Private SGD: Poisson batches of `batch` units on average, clipped, noised (Abadi et al., 2016).

    The other arguments are those of `Update`: lr, momentum, rule="adam", schedule, average, ...

    Formal guarantee: unit, what `fit` is told; neighbours, add-remove by default. Each step releases one sum of
    clipped gradients over a Poisson draw with Gaussian noise; `steps` of them are composed by PLD. Empty batches are
    released like all others, and the divisor is `batch`.
    """
    return Optimiser(
        name="DPSGD", steps=steps, sampler=Poisson(batch), query=ClippedGradient(clip), update=Update(**update)
    )


def DPGD(*, steps: int, clip: float | Policy = 1.0, **update: Unpack[Options]) -> Optimiser:  # noqa: N802
    """Private gradient descent: everybody in every step, momentum, unit clip, a free last step (Panda et al., 2024).

    Formal guarantee: `steps` Gaussian releases over everybody, exactly mu = sqrt(steps) / noise under add-remove. The
    last step follows the momentum buffer, which is made of released values: it costs nothing.
    """
    options: Options = {"free_step": update.get("momentum", 0.9) > 0 and update.get("rule", "sgd") == "sgd"}
    options.update(update)
    return Optimiser(
        name="DPGD", steps=steps, sampler=Everyone(), query=ClippedGradient(clip), update=Update(**options)
    )
