"""Private training with correlated noise (matrix factorisation): in passes, or with cyclic Poisson sampling."""

from __future__ import annotations

from typing import Literal, Unpack

from tacit.finetune._noise_schedules import Banded, Correlated
from tacit.finetune._optimizers._optimizer import Optimizer
from tacit.finetune._queries import ClippedGradient
from tacit.finetune._sampling import CyclicPoisson, Passes
from tacit.finetune._updates import Options, Update
from tacit.gradients import Policy
from tacit.privacy.correlated import by_name, running_sum_rms
from tacit.privacy.events import strategy_name

_BANDS = 16  # as many buffers, less one, each as large as the trained parameters


def DPFTRL(  # noqa: N802
    *,
    batches: int,
    passes: int = 1,
    clip: float | Policy = 1.0,
    strategy: str | None = None,
    **update: Unpack[Options],
) -> Optimizer:
    """DP-FTRL: fixed passes over the data with correlated noise, no subsampling (Kairouz et al., 2021; Choquette-Choo
    et al.).

    Units are assigned to `batches` batches by a hash of their ids, or by their place where they have none, the same
    ones in every pass (see `Passes`): `batches` * `passes` steps.

    Formal guarantee: unit, that of the data; neighbours, replace-one or zero-out, and for units with ids of their own
    add-remove as well (without ids it would move the others, and is refused). A unit's id or place alone decides its
    steps, `passes` of them, `batches` apart; the whole run is ONE Gaussian release, whose sensitivity is the norm of
    the sum of the strategy's columns at these steps times the clip. Under replace-one it is twice that: a unit goes and
    another one comes, whose id no other unit has and may lead to another batch. Later steps may depend on what earlier
    ones released (Denisov et al., 2022).

    Args:
        batches: Batches per pass.
        passes: Participations of each unit.
        clip: The L2 bound of a unit's gradient, or a clip policy.
        strategy: See `Correlated`; by default the one of "buffered" and "toeplitz", optimised for the momentum of the
            update and the passes, that leaves less noise in the weights.
        **update: Arguments of `Update`.

    Returns:
        An optimizer for `fit`.
    """
    sampler, rule = Passes(batches, passes), Update(**update)
    return Optimizer(
        name="DPFTRL",
        steps=sampler.steps,
        sampler=sampler,
        query=ClippedGradient(clip),
        noise=Correlated(strategy or _quietest(sampler, rule.inertia)),
        update=rule,
    )


def BandMF(  # noqa: N802
    *,
    batch_size: int,
    steps: int,
    bands: int = 8,
    clip: float | Policy = 1.0,
    strategy: Literal["toeplitz", "banded"] = "toeplitz",
    **update: Unpack[Options],
) -> Optimizer:
    """Banded matrix factorisation with cyclic Poisson sampling (Choquette-Choo et al., 2023): both kinds of gain.

    Units are in `bands` groups by a hash of their ids (see `CyclicPoisson`), and step t draws from group t mod `bands`.
    The noise of `bands` neighbouring steps is correlated, so that much of it cancels in the running sum, and sampling
    amplifies as in DP-SGD, only at `bands` times the rate and for steps / `bands` of the steps. `bands=1` is DP-SGD.
    More bands help where epsilon is large or passes are few; `benchmark` numbers are on the page on fine-tuning.

    Formal guarantee: unit, that of the data; neighbours, add-remove for units with ids of their own, or zero-out
    (replace-one is refused). ceil(steps / bands) Poisson-subsampled Gaussian releases, composed by PLD; the sensitivity
    of each is a column's norm times the clip.

    Args:
        batch_size: The expected batch size, which is also the divisor; times `bands` at most the number of units.
        steps: The number of steps.
        bands: Groups of units, and bands of the noise: bands - 1 buffers as large as the trained parameters.
        clip: The L2 bound of a unit's gradient, or a clip policy.
        strategy: "toeplitz": bands that minimise the noise in the weights, for the momentum of the update; "banded":
            the square root, cut off.
        **update: Arguments of `Update`.

    Returns:
        An optimizer for `fit`.

    Examples:
        >>> from tacit.finetune import BandMF
        >>> BandMF(batch_size=50, steps=200, bands=4, lr=0.5).sampler.rate(size=1000)
        0.2
    """
    rule = Update(**update)
    return Optimizer(
        name="BandMF",
        steps=steps,
        sampler=CyclicPoisson(batch_size, bands),
        query=ClippedGradient(clip),
        noise=Banded(strategy, momentum=rule.inertia if strategy == "toeplitz" else 0.0),
        update=rule,
    )


def _quietest(plan: Passes, momentum: float) -> str:
    """The strategy that leaves the least noise in the weights."""
    if plan.passes == 1:
        return strategy_name("buffered", momentum=momentum)
    often = {"contributions": plan.passes, "separation": plan.batches}
    names = [
        strategy_name("buffered", momentum=momentum) if momentum else "buffered@0",
        strategy_name("toeplitz", min(plan.batches, _BANDS), momentum=momentum),
    ]

    def noise(name: str) -> float:
        made = by_name(name, plan.steps, **often)
        return running_sum_rms(made, plan.passes, plan.batches, momentum=momentum)

    return min(names, key=noise)
