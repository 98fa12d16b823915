"""Zeroth-order private training: forward passes alone."""

from __future__ import annotations

from typing import Unpack

from tacit.finetune._optimizers._optimizer import Optimizer, expected_batch_size
from tacit.finetune._sampling import Poisson
from tacit.finetune._updates import Options, Update
from tacit.finetune._zeroth_order import ZerothOrderQuery


def DPZO(  # noqa: N802
    *,
    batch_size: int | None = None,
    steps: int,
    clip: float = 1.0,
    scale: float = 1e-3,
    directions: int = 1,
    direction_seed: int = 0,
    batch: int | None = None,
    **update: Unpack[Options],
) -> Optimizer:
    """Zeroth-order private training: the slope along a random direction from two forward passes (Tang et al., 2024).

    For models too big for a backward pass. A step moves along the direction by the released mean slope, so learning
    rates are small: the direction is as long as the square root of the number of trained parameters. No activations are
    kept; memory holds the trained parameters twice.

    Formal guarantee: unit and neighbours as in DPSGD. A step releases, over a Poisson draw, the sum of the units'
    slopes, one number per direction, each cut to [-clip, clip]: one unit moves it by clip * sqrt(directions) at most.
    The directions come from `direction_seed` and the step, and are public.

    Args:
        batch_size: The expected batch size.
        steps: The number of steps.
        clip: The bound of a unit's slope.
        scale: How far along the direction the loss is evaluated (the paper's mu).
        directions: Directions per step.
        direction_seed: Draws the directions. Public.
        batch: The earlier name of `batch_size`; it warns.
        **update: Arguments of `Update`.

    Returns:
        An optimizer for `fit`.
    """
    query = ZerothOrderQuery(clip=clip, scale=scale, directions=directions, seed=direction_seed)
    return Optimizer(
        name="DPZO",
        steps=steps,
        sampler=Poisson(expected_batch_size(batch_size, batch, "DPZO")),
        query=query,
        update=Update(**update),
    )
