"""DP-SGD with noise, clip or learning rate that change over training."""

from __future__ import annotations

from typing import Unpack

from tacit.finetune._adaptive import QuantileClip
from tacit.finetune._loss_probes import LossProbes
from tacit.finetune._noise_schedules import Decaying, Shape
from tacit.finetune._optimizers._optimizer import Optimizer, expected_batch_size
from tacit.finetune._queries import ClippedGradient
from tacit.finetune._sampling import Everyone, Poisson
from tacit.finetune._updates import Options, Update
from tacit.gradients import Automatic, Policy


def AdpAlloc(  # noqa: N802
    *,
    batch_size: int | None = None,
    steps: int,
    clip: float | Policy = 1.0,
    noise: Shape = "exponential",
    k: float | None = None,
    period: int | None = None,
    end: float = 0.5,
    batch: int | None = None,
    **update: Unpack[Options],
) -> Optimizer:
    """DP-SGD with noise that decays over training (Yu et al., 2019); see `Decaying` for the four schedules.

    Formal guarantee: unit and neighbours as in DPSGD. Step t releases one sum of clipped gradients over a Poisson draw
    with noise sigma_0 * shape(t); the shape is fixed in advance, and sigma_0 is the least at which all the different
    steps, composed by PLD, meet the target.

    Args:
        batch_size: The expected batch size.
        steps: The number of steps.
        clip: The L2 bound of a unit's gradient, or a clip policy.
        noise: The shape of the decay.
        k: Its parameter; see `Decaying`.
        period: Steps that share a noise; see `Decaying`.
        end: The last noise relative to the first.
        batch: The earlier name of `batch_size`; it warns.
        **update: Arguments of `Update`.

    Returns:
        An optimizer for `fit`.
    """
    decaying = Decaying(shape=noise, k=k, period=period, end=end)
    return Optimizer(
        name="AdpAlloc",
        steps=steps,
        sampler=Poisson(expected_batch_size(batch_size, batch, "AdpAlloc")),
        query=ClippedGradient(clip),
        noise=decaying,
        update=Update(**update),
    )


def AdpClip(  # noqa: N802
    *,
    batch_size: int | None = None,
    steps: int,
    clip: float = 1.0,
    quantile: float = 0.5,
    rate: float = 0.2,
    count_noise: float | None = None,
    batch: int | None = None,
    **update: Unpack[Options],
) -> Optimizer:
    """DP-SGD with a clip that follows a quantile of the units' gradient norms (Andrew et al., 2021).

    After each step the clip is multiplied by exp(-rate (b - quantile)), where b is the released share of units below
    it.

    Formal guarantee: unit and neighbours as in DPSGD. Gradient and count of a step come from one Poisson draw and are
    one Gaussian release: 1/z^2 = 1/z_delta^2 + 1/(2 sigma_b)^2, sampled once, with the z that was charged. One unit
    moves the gradient by at most the current clip, to which the noise is proportional, and the count by 1/2.

    Args:
        batch_size: The expected batch size.
        steps: The number of steps.
        clip: The clip at the start.
        quantile: The share of units whose gradient should be below the clip.
        rate: The step size in the logarithm of the clip.
        count_noise: The noise of the count; see `QuantileClip`.
        batch: The earlier name of `batch_size`; it warns.
        **update: Arguments of `Update`.

    Returns:
        An optimizer for `fit`.
    """
    query = QuantileClip(clip=clip, quantile=quantile, rate=rate, count_noise=count_noise)
    return Optimizer(
        name="AdpClip",
        steps=steps,
        sampler=Poisson(expected_batch_size(batch_size, batch, "AdpClip")),
        query=query,
        update=Update(**update),
    )


def HyFreeDP(  # noqa: N802
    *,
    batch_size: int | None = None,
    steps: int,
    clip: float | Policy | None = None,
    every: int = 5,
    loss_clip: float = 0.5,
    share: float = 0.05,
    **update: Unpack[Options],
) -> Optimizer:
    """Private training whose step size comes from losses that leave with the gradients (HyFreeDP; Liu and Bu, 2025).

    Gradients are normalised (`Automatic`), so there is no clip to choose, and `lr` is only where the learning rate
    begins: every few steps a parabola through three noisy losses along the way just made says how long it should have
    been, and the rate is multiplied by that (by a half to two). Other than in the paper, what is released are bounded
    differences of losses, which is all that a parabola needs and has less noise; they are of the next batch, so
    that they leave in one call with its gradient; and a way whose effect is below the noise makes the rate grow.

    Formal guarantee: unit and neighbours as in DPSGD (as in DPGD without `batch_size`). Gradient and losses of a step
    come from one draw and are one Gaussian release: 1/z^2 = (1 - share)/z^2 + share/z^2, sampled once. One unit moves
    the gradient by at most its bound and the losses by sqrt(2) loss_clip.

    Args:
        batch_size: The expected batch size; without it everybody takes part in every step.
        steps: The number of steps.
        clip: One bound of a unit's whole gradient, or such a policy; `Automatic()` by default.
        every: Steps from one probe to the next; one probe is three forward passes.
        loss_clip: The bound of a unit's difference of losses.
        share: What losses have of the precision (1/z^2) of a step with a probe.
        **update: Arguments of `Update`; `lr` is where the learning rate begins.

    Returns:
        An optimizer for `fit`.

    Examples:
        >>> from tacit.finetune import HyFreeDP
        >>> HyFreeDP(batch_size=50, steps=200, lr=0.1).sampler.rate(size=1000)
        0.05
    """
    query = LossProbes(clip=Automatic() if clip is None else clip, loss_clip=loss_clip, every=every, share=share)
    return Optimizer(
        name="HyFreeDP",
        steps=steps,
        sampler=Everyone() if batch_size is None else Poisson(batch_size),
        query=query,
        update=Update(**update),
    )
