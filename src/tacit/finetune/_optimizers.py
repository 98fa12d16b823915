"""Private optimizers, each put together from four parts: who takes part, what is asked, how much noise, what follows.

A new optimizer is a new part, never a new loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Unpack

from tacit._deprecation import renamed_argument
from tacit.finetune._adaptive import QuantileClip
from tacit.finetune._loss_probes import LossProbes
from tacit.finetune._noise_schedules import Banded, ConstantNoise, Correlated, Decaying, Noise, Shape
from tacit.finetune._queries import ClippedGradient, GradientQuery, Query
from tacit.finetune._sampling import CyclicPoisson, Everyone, Passes, Poisson, Sampler
from tacit.finetune._sources import as_records
from tacit.finetune._subspace import Embedding
from tacit.finetune._updates import KNOWS_NOISE, Options, Update
from tacit.finetune._zeroth_order import ZerothOrderQuery
from tacit.gradients import Automatic, Policy
from tacit.privacy import Neighbours, released
from tacit.privacy.correlated import banded, buffered, running_sum_rms
from tacit.privacy.events import DpEvent, check_count, leaves, same

_PLACED = (Passes, CyclicPoisson)  # samplers for which it matters who a unit is
_BANDS = 16  # as many buffers, less one, each as large as the trained parameters


def called(optimizer: object, where: str = "finetune.fit") -> Optimizer:
    """The optimizer; refused if it is a function that makes one, or one of torch's.

    Args:
        optimizer: What somebody gave as optimizer=.
        where: To whom.

    Returns:
        The same.

    Raises:
        TypeError: It is no optimizer of tacit's.
    """
    if isinstance(optimizer, Optimizer):
        return optimizer
    example = f"{where} needs optimizer=, such as finetune.DPSGD(batch_size=…, steps=…)"
    if optimizer is None:
        raise TypeError(f"{example}.")
    own = getattr(optimizer, "__name__", "")
    if callable(optimizer) and getattr(optimizer, "__module__", "") == __name__:
        raise TypeError(f"optimizer=finetune.{own} is not called: write finetune.{own}(…) with its settings.")
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    torchs = kind.__module__.startswith("torch.optim")
    way = "; tacit.make_private takes one of torch's, for a loop of your own" if torchs else ""
    raise TypeError(f"{example}, not {kind.__name__}{way}.")


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """A private optimizer: `steps` times, sample units, sum what is queried of them, add noise, update.

    Args:
        name: What reports call it.
        steps: The number of releases.
        sampler: Which units take part in a step: `Poisson`, `Everyone`, `Passes`.
        query: What is summed over units: clipped gradients, projected gradients, slopes.
        noise: How noise varies over steps: `ConstantNoise`, `Decaying`, `Correlated`.
        update: The update rule.
    """

    name: str
    steps: int
    sampler: Sampler
    query: Query = field(default_factory=ClippedGradient)
    noise: Noise = field(default_factory=ConstantNoise)
    update: Update = field(default_factory=Update)

    def __post_init__(self) -> None:
        check_count(self.steps, "steps")
        self.sampler.participations(self.steps)
        if isinstance(self.noise, Correlated) and isinstance(self.sampler, Poisson):
            raise ValueError(
                "Correlated noise needs to know in which steps a unit takes part, and Poisson sampling leaves that to "
                "chance: use Passes."
            )
        flat = type(self.noise) is ConstantNoise and type(self.query) is ClippedGradient
        if self.update.rule in KNOWS_NOISE and not flat:
            raise ValueError(
                f"The rule {self.update.rule!r} takes one known variance of the noise off: it goes with DPSGD and DPGD."
            )
        if isinstance(self.noise, Banded) != isinstance(self.sampler, CyclicPoisson):
            raise ValueError("Banded noise and cyclic sampling belong together: see finetune.BandMF.")

    def event(self, scale: float, size: int) -> DpEvent:
        """Everything that a run releases, if its noise multiplier is `scale` and `size` the public number of units.

        Args:
            scale: The noise multiplier.
            size: The public number of units.

        Returns:
            The event that `fit` charges.
        """
        return self.noise.event(scale, sampler=self.sampler, size=size, steps=self.steps)

    def scale_of(self, event: DpEvent, size: int) -> float | None:
        """The noise multiplier at which a run releases exactly `event`; None if there is none.

        Args:
            event: What will be charged.
            size: The public number of units.

        Returns:
            The noise multiplier, or None.
        """
        first = next((released(leaf) for leaf, _ in leaves(event)), None)
        noise = getattr(first, "noise_multiplier", None)
        if noise is None:
            return None
        scale = float(noise) / self.noise.multiplier(1.0, 0, self.steps)
        return scale if same(self.event(scale, size), event) else None

    def over(self, ids: Sequence[int] | Sequence[str] | None) -> Optimizer:
        """The same over units with these ids, where that decides who takes part when.

        Args:
            ids: One id per unit; None if units have none.

        Returns:
            The optimizer.
        """
        return replace(self, sampler=self.sampler.over(ids)) if isinstance(self.sampler, _PLACED) else self

    def check(self, neighbours: Neighbours, *, resumable: bool, named: bool = False) -> None:
        """Refuse what this optimizer cannot promise; `named`: whether units have ids of their own.

        Args:
            neighbours: The neighbouring relation.
            resumable: Whether the run writes checkpoints.
            named: Whether units have ids of their own.

        Raises:
            ValueError: This optimizer has no guarantee under these.
        """
        if neighbours is Neighbours.REPLACE_ONE and isinstance(self.sampler, CyclicPoisson):
            raise ValueError(
                f"{self.name} has no known guarantee under replace-one, for who comes may be of another group than who "
                "goes: give neighbours='add-remove' (with unit_ids=) or 'zero-out'."
            )
        if neighbours is Neighbours.ADD_REMOVE and isinstance(self.sampler, _PLACED) and not named:
            raise ValueError(
                f"{self.name} gives everybody a fixed place, which others would lose if somebody was added or removed: "
                "give unit_ids=, which keep it, or give neighbours='replace-one' or 'zero-out' (the number of units is "
                "then public)."
            )
        if resumable and isinstance(self.noise, Correlated):
            raise ValueError(
                "A run with correlated noise cannot be resumed, for the noise of its past steps is not kept: "
                "leave checkpoint= out."
            )

    def check_split(self, query: GradientQuery, scale: float) -> None:
        """Refuse a noise that cannot be split as the query wants it, before anything is charged."""
        for noise in {self.noise.multiplier(scale, step, self.steps) for step in range(self.steps)}:
            query.split(noise)


def DPSGD(  # noqa: N802
    *,
    batch_size: int | None = None,
    steps: int,
    clip: float | Policy = 1.0,
    batch: int | None = None,
    **update: Unpack[Options],
) -> Optimizer:
    """DP-SGD (Abadi et al., 2016): Poisson subsampling of `batch_size` units, per-unit clipping, Gaussian noise.

    Formal guarantee: unit, that of the data; neighbours, add-remove by default. Each step releases one sum of
    clipped gradients over a Poisson draw with Gaussian noise; `steps` of them are composed by PLD. Empty batches are
    released like all others, and the divisor is `batch_size`.

    Args:
        batch_size: The expected batch size; the sampling rate is `batch_size` / size, and it is also the divisor.
        steps: The number of steps.
        clip: The L2 bound of a unit's gradient, or a clip policy.
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
    return Optimizer(
        name="DPSGD",
        steps=steps,
        sampler=Poisson(_batch_size(batch_size, batch, "DPSGD")),
        query=ClippedGradient(clip),
        update=Update(**update),
    )


def DPGD(*, steps: int, clip: float | Policy = 1.0, **update: Unpack[Options]) -> Optimizer:  # noqa: N802
    """Full-batch private gradient descent: momentum, unit clip, a free last step (Panda et al., 2024).

    Formal guarantee: `steps` Gaussian releases over everybody, exactly mu = sqrt(steps) / noise under add-remove. The
    last step follows the momentum buffer, which is made of released values: it costs nothing.

    Args:
        steps: The number of steps.
        clip: The L2 bound of a unit's gradient, or a clip policy.
        **update: Arguments of `Update`.

    Returns:
        An optimizer for `fit`.
    """
    options: Options = {"free_step": update.get("momentum", 0.9) > 0 and update.get("rule", "sgd") == "sgd"}
    options.update(update)
    return Optimizer(
        name="DPGD", steps=steps, sampler=Everyone(), query=ClippedGradient(clip), update=Update(**options)
    )


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
        sampler=Poisson(_batch_size(batch_size, batch, "AdpAlloc")),
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
        sampler=Poisson(_batch_size(batch_size, batch, "AdpClip")),
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


def GEP(  # noqa: N802
    *,
    public: Any,
    batch_size: int | None = None,
    steps: int,
    dimensions: int = 100,
    clip_embedding: float = 1.0,
    clip_residual: float = 0.2,
    residual: bool = True,
    refresh: int = 1,
    power_iterations: int = 1,
    batch: int | None = None,
    **update: Unpack[Options],
) -> Optimizer:
    """Gradient embedding perturbation (Yu et al., 2021): little noise where public gradients point, the rest clipped.

    The gradients of public rows span a subspace, made anew every `refresh` steps. Memory: `dimensions` times the
    trained parameters for the basis, and one gradient per row of a micro-batch.

    Formal guarantee: unit and neighbours as in DPSGD. A step releases, from one Poisson draw, the sum of embeddings
    (one unit: at most `clip_embedding`) and the sum of residuals (`clip_residual`), each with sqrt(2) times the noise
    multiplier that was charged: one Gaussian release, sampled once. The basis is made of public rows and released
    weights. `residual=False` releases the embeddings alone.

    Args:
        public: (inputs, labels) or any records, of rows that need no protection.
        batch_size: The expected batch size.
        steps: The number of steps.
        dimensions: Of the subspace.
        clip_embedding: The L2 bound of a unit's embedding.
        clip_residual: The L2 bound of a unit's residual.
        residual: Whether residuals are released at all.
        refresh: Steps between two bases.
        power_iterations: Of the basis.
        batch: The earlier name of `batch_size`; it warns.
        **update: Arguments of `Update`.

    Returns:
        An optimizer for `fit`.
    """
    query = Embedding(
        public=as_records(public),
        dimensions=dimensions,
        clip_embedding=clip_embedding,
        clip_residual=clip_residual,
        residual=residual,
        refresh=refresh,
        power_iterations=power_iterations,
    )
    return Optimizer(
        name="GEP",
        steps=steps,
        sampler=Poisson(_batch_size(batch_size, batch, "GEP")),
        query=query,
        update=Update(**update),
    )


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
        sampler=Poisson(_batch_size(batch_size, batch, "DPZO")),
        query=query,
        update=Update(**update),
    )


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
    another one comes, whose id nobody else has and may lead to another batch. Later steps may depend on what earlier
    ones released (Denisov et al., 2022).

    Args:
        batches: Batches per pass.
        passes: Participations of each unit.
        clip: The L2 bound of a unit's gradient, or a clip policy.
        strategy: See `Correlated`; by default "buffered" for one pass, and for more the one of "buffered" and a banded
            form whose running sum has less noise.
        **update: Arguments of `Update`.

    Returns:
        An optimizer for `fit`.
    """
    sampler = Passes(batches, passes)
    return Optimizer(
        name="DPFTRL",
        steps=sampler.steps,
        sampler=sampler,
        query=ClippedGradient(clip),
        noise=Correlated(strategy or _quietest(sampler)),
        update=Update(**update),
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
        strategy: "toeplitz": bands that minimise the noise of the running sum; "banded": the square root, cut off.
        **update: Arguments of `Update`.

    Returns:
        An optimizer for `fit`.

    Examples:
        >>> from tacit.finetune import BandMF
        >>> BandMF(batch_size=50, steps=200, bands=4, lr=0.5).sampler.rate(size=1000)
        0.2
    """
    return Optimizer(
        name="BandMF",
        steps=steps,
        sampler=CyclicPoisson(batch_size, bands),
        query=ClippedGradient(clip),
        noise=Banded(strategy),
        update=Update(**update),
    )


def _quietest(plan: Passes) -> str:
    if plan.passes == 1:
        return "buffered"
    bands = min(plan.batches, _BANDS)
    choices = {"buffered": buffered(plan.steps), f"banded:{bands}": banded(plan.steps, bands)}
    return min(choices, key=lambda name: running_sum_rms(choices[name], plan.passes, plan.batches))


def _batch_size(batch_size: int | None, batch: int | None, optimizer: str) -> int:
    """`batch` is the name that the argument once had."""
    found = renamed_argument("batch", batch, "batch_size", batch_size, where=f"finetune.{optimizer}")
    if found is None:
        raise TypeError(f"finetune.{optimizer} needs batch_size=, the expected number of units in a batch.")
    return found
