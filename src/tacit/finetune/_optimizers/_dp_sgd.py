"""DP-SGD on Poisson-subsampled batches, and its full-batch form."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, Unpack

from tacit.finetune._adaptive import ScheduledClip
from tacit.finetune._noise_schedules import Decaying
from tacit.finetune._optimizers._optimizer import Optimizer, expected_batch_size
from tacit.finetune._queries import ClippedGradient, Query
from tacit.finetune._sampling import BallsInBins, Everyone, FixedSize, Poisson, Sampler
from tacit.finetune._updates import Options, Update
from tacit.gradients import Policy

SAMPLERS: dict[str, Callable[[int], Sampler]] = {
    "poisson": Poisson,
    "fixed-size": FixedSize,
    "balls-in-bins": BallsInBins,
    "random-allocation": partial(BallsInBins, anew=True),
}


def DPSGD(  # noqa: N802
    *,
    batch_size: int | None = None,
    steps: int,
    clip: float | Policy = 1.0,
    clip_schedule: Decaying | None = None,
    sampling: Literal["poisson", "fixed-size", "balls-in-bins", "random-allocation"] = "poisson",
    batch: int | None = None,
    **update: Unpack[Options],
) -> Optimizer:
    """DP-SGD (Abadi et al., 2016): Poisson subsampling of `batch_size` units, per-unit clipping, Gaussian noise.

    Formal guarantee: unit, that of the data; neighbours, add-remove by default. Each step releases one sum of
    clipped gradients over a Poisson draw with Gaussian noise; `steps` of them are composed by PLD. Empty batches are
    released like all others, and the divisor is `batch_size`. With `sampling="fixed-size"` a step draws exactly
    `batch_size` units without replacement: under replace-one only, composed by PLD as well. With "balls-in-bins" every
    unit takes part once in each epoch of size / `batch_size` steps, at the same random step in all of them; with
    "random-allocation" at a step that is drawn anew in every epoch: not under replace-one, by PLD as well.

    Args:
        batch_size: The expected batch size; the sampling rate is `batch_size` / size, and it is also the divisor.
        steps: The number of steps.
        clip: The L2 bound of a unit's gradient, or a clip policy.
        clip_schedule: How the clip falls from step to step, such as `Decaying(shape="time", end=0.1)`; the noise falls
            with it, and the cost stays. For a clip that is a number.
        sampling: "poisson"; "fixed-size": batches that never vary in size, for more noise; "random-allocation" or
            "balls-in-bins": everybody once in each epoch, thrown into its batches anew or once and for all.
        batch: The earlier name of `batch_size`; it warns.
        **update: Arguments of `Update`: lr, momentum, rule="adam", schedule, average, ...

    Returns:
        An optimizer for `fit`.

    Examples:
        >>> from tacit.finetune import DPSGD
        >>> optimizer = DPSGD(batch_size=50, steps=200, lr=0.5, clip=1.0)
        >>> optimizer.sampler.rate(size=1000)
        0.05
    """
    if sampling not in SAMPLERS:
        raise ValueError(f"sampling={sampling!r} is unknown: choose one of {', '.join(SAMPLERS)}.")
    return Optimizer(
        name="DPSGD",
        steps=steps,
        sampler=SAMPLERS[sampling](expected_batch_size(batch_size, batch, "DPSGD")),
        query=_clipped(clip, clip_schedule, steps),
        update=Update(**update),
    )


def DPGD(  # noqa: N802
    *, steps: int, clip: float | Policy = 1.0, clip_schedule: Decaying | None = None, **update: Unpack[Options]
) -> Optimizer:
    """Full-batch private gradient descent: momentum, unit clip, a free last step (Panda et al., 2024).

    Formal guarantee: `steps` Gaussian releases over everybody, exactly mu = sqrt(steps) / noise under add-remove. The
    last step follows the momentum buffer, which is made of released values: it costs nothing.

    Args:
        steps: The number of steps.
        clip: The L2 bound of a unit's gradient, or a clip policy.
        clip_schedule: As in `DPSGD`.
        **update: Arguments of `Update`.

    Returns:
        An optimizer for `fit`.
    """
    options: Options = {"free_step": update.get("momentum", 0.9) > 0 and update.get("rule", "sgd") == "sgd"}
    options.update(update)
    query = _clipped(clip, clip_schedule, steps)
    return Optimizer(name="DPGD", steps=steps, sampler=Everyone(), query=query, update=Update(**options))


def _clipped(clip: float | Policy, schedule: Decaying | None, steps: int) -> Query:
    """The query for clipped gradients, with the same clip in every step or by a schedule."""
    if schedule is None:
        return ClippedGradient(clip)
    if isinstance(clip, Policy):
        raise ValueError("clip_schedule= goes with a clip that is a number: a clip policy says itself how it clips.")
    return ScheduledClip(clip=clip, schedule=schedule, steps=steps)
