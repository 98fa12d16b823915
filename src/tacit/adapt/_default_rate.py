"""A learning rate that needs no tuning: from the norm of the weights, the batch size, the noise and the horizon.

People under differential privacy cannot tune on private data. What is used here is public before the first image.
"""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from tacit.adapt._privacy_config import DP, Clip, Privacy
from tacit.adapt._strain import layers_of, norm_of
from tacit.privacy.correlated import Strategy

WITHOUT = {"sgd": 0.005, "adam": 0.001}  # where no clip bounds a step, or Adam normalises it
USUAL_STEPS = 256  # where no horizon is given
DRIFT = 0.06  # the strain that one step of fully aligned gradients adds, momentum included
STRAIN = 0.5  # the strain that noise has added at the end of the horizon


def growth(strategy: Strategy, momentum: float, contributions: int = 1, separation: int = 1) -> float:
    """The standard deviation of a parameter at the end of the horizon, per unit of rate and of the noise multiplier.

    A step's noise is n_t = s sum_j w_j z_{t-j} (w: the strategy's inverse, s: its sensitivity). Gradient descent with
    momentum m moves a parameter by -lr sum_t h_{n-t} n_t with h_k = (1 - m^(k+1)) / (1 - m), so its variance is
    lr^2 s^2 sum_k (w * h)_k^2, with the convolution (w * h)_k = sum_{j<=k} w_j h_{k-j}.

    Args:
        strategy: Of the noise.
        momentum: Of SGD.
        contributions: The most participations of a unit, which the noise is scaled for.
        separation: The least distance between two of them.

    Returns:
        s sqrt(sum_k (w * h)_k^2).
    """
    steps = strategy.horizon
    kernel = (1 - momentum ** np.arange(1, steps + 1)) / (1 - momentum)
    size = 2 * steps
    mixed = np.fft.irfft(np.fft.rfft(strategy.inverse(), size) * np.fft.rfft(kernel, size), size)[:steps]
    return float(strategy.sensitivity(contributions, separation) * np.sqrt(np.square(mixed).sum()))


def strain_of_noise(
    form: Privacy, origin: dict[str, Tensor], *, lr: float, batch_size: int, momentum: float, noise: float
) -> float:
    """The strain that noise alone will have added at the end of the horizon, or of `USUAL_STEPS`, by SGD. Public.

    It is lr z (C / B) sqrt(d) A L / |theta_0| for d parameters, the bound C of a gradient, the noise multiplier z
    and A from `growth`.

    Args:
        form: Of the adapter.
        origin: The adapted parameters in the source model.
        lr: The rate.
        batch_size: The denominator.
        momentum: Of SGD.
        noise: The noise multiplier; zero without noise.

    Returns:
        The strain; zero without noise.
    """
    if not isinstance(form, DP) or not noise:
        return 0.0
    spread = noise * _bound(form, origin) / batch_size * math.sqrt(sum(p.numel() for p in origin.values()))
    far = growth(form.strategy(USUAL_STEPS), momentum, form.contributions, form.separation)
    return lr * spread * far * layers_of(origin) / norm_of(origin)


def _bound(form: Clip | DP, origin: dict[str, Tensor]) -> float:
    """The L2 bound of a unit's whole gradient; one where the policy has none."""
    clip = form.clip
    bounds = [float(clip)] if isinstance(clip, int | float) else list(clip.bounds(clip.blocks(tuple(origin))).values())
    return math.hypot(*bounds) if bounds else 1.0


def rate_for(
    form: Privacy,
    origin: dict[str, Tensor],
    *,
    batch_size: int,
    momentum: float,
    optimizer: str,
    noise: float,
) -> float:
    """The largest rate that keeps two promises, in units of strain: layers times |theta - theta_0| / |theta_0|.

    A step of gradients that all point the same way adds at most `DRIFT`: lr C L / ((1 - m) |theta_0|) for the bound C
    of a unit's gradient. Noise has added at most `STRAIN` when the horizon is over: see `strain_of_noise`.

    Args:
        form: Its form.
        origin: The adapted parameters in the source model.
        batch_size: The denominator.
        momentum: Of SGD.
        optimizer: "sgd" or "adam".
        noise: The noise multiplier; zero without noise.

    Returns:
        The rate.
    """
    if form is None or optimizer == "adam":
        return WITHOUT[optimizer]
    rate = DRIFT * norm_of(origin) * (1 - momentum) / (layers_of(origin) * _bound(form, origin))
    at_one = strain_of_noise(form, origin, lr=1.0, batch_size=batch_size, momentum=momentum, noise=noise)
    return min(rate, STRAIN / at_one) if at_one else rate
