"""A private optimizer: a sampler, a query, a noise schedule and an update rule put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tacit._deprecation import renamed_argument
from tacit._refusals import Refusal
from tacit.finetune._noise_schedules import Banded, ConstantNoise, Correlated, Noise
from tacit.finetune._queries import ClippedGradient, GradientQuery, Query
from tacit.finetune._sampling import BallsInBins, CyclicPoisson, FixedSize, Passes, Poisson, Sampler
from tacit.finetune._updates import KNOWS_NOISE, Update
from tacit.privacy import Neighbours, released
from tacit.privacy.events import DpEvent, check_count, leaves, same

_PLACED = (Passes, CyclicPoisson)  # samplers for which it matters who a unit is
_OWN = f"{__package__}."  # the functions that make an optimizer are beside this module


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """A private optimizer: `steps` times, sample units, sum what is queried of them, add noise, update.

    Args:
        name: What reports call it.
        steps: The number of releases.
        sampler: Which units take part in a step: `Poisson`, `FixedSize`, `BallsInBins`, `Everyone`, `Passes`.
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
        if isinstance(self.noise, Correlated) and isinstance(self.sampler, Poisson | FixedSize | BallsInBins):
            raise ValueError(
                "Correlated noise needs to know in which steps a unit takes part, and random sampling leaves that to "
                "chance: use Passes."
            )
        if isinstance(self.sampler, BallsInBins) and type(self.noise) is not ConstantNoise:
            raise ValueError(
                "Balls-in-bins sampling is accounted for the same noise in every step: use Poisson batches with a "
                "noise schedule, or let the clip fall with clip_schedule=."
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
            Refusal: This optimizer has no guarantee under these.
        """
        if neighbours is not Neighbours.REPLACE_ONE and isinstance(self.sampler, FixedSize):
            raise Refusal(
                "Batches of a fixed size are bounded under replace-one alone: give neighbours='replace-one' (the "
                f"number of units is then public), or Poisson batches, which {neighbours} has a bound for."
            )
        if neighbours is Neighbours.REPLACE_ONE and isinstance(self.sampler, BallsInBins):
            raise Refusal(
                "Balls-in-bins sampling has no bound under replace-one, for who comes may be in another bin than who "
                "goes: give neighbours='add-remove' or 'zero-out', or take sampling='poisson' or 'fixed-size'."
            )
        if neighbours is Neighbours.REPLACE_ONE and isinstance(self.sampler, CyclicPoisson):
            raise Refusal(
                f"{self.name} has no known guarantee under replace-one, for who comes may be of another group than who "
                "goes: give neighbours='add-remove' (with unit_ids=) or 'zero-out'."
            )
        if neighbours is Neighbours.ADD_REMOVE and isinstance(self.sampler, _PLACED) and not named:
            others = "'zero-out'" if isinstance(self.sampler, CyclicPoisson) else "'replace-one' or 'zero-out'"
            raise Refusal(
                f"{self.name} gives everybody a fixed place, which others would lose if somebody was added or removed: "
                f"give unit_ids=, which keep it, or give neighbours={others} (the number of units is then public)."
            )
        if resumable and isinstance(self.noise, Correlated):
            raise Refusal(
                "A run with correlated noise cannot be resumed, for the noise of its past steps is not kept: "
                "leave checkpoint= out."
            )

    def check_size(self, size: int, units: int) -> None:
        """Refuse a declared number of units that is not the true one, where draws are from all of them.

        Args:
            size: The declared number of units.
            units: The true one, which is public where it matters.

        Raises:
            Refusal: They differ.
        """
        if isinstance(self.sampler, FixedSize) and size != units:
            raise Refusal(
                "Batches of a fixed size are drawn from all units, whose number is public under replace-one: leave "
                "size= out, or give the true number."
            )

    def check_split(self, query: GradientQuery, scale: float) -> None:
        """Refuse a noise that cannot be split as the query wants it, before anything is charged."""
        for noise in {self.noise.multiplier(scale, step, self.steps) for step in range(self.steps)}:
            query.split(noise)


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
    if callable(optimizer) and str(getattr(optimizer, "__module__", "")).startswith(_OWN):
        raise TypeError(f"optimizer=finetune.{own} is not called: write finetune.{own}(…) with its settings.")
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    torchs = kind.__module__.startswith("torch.optim")
    way = "; tacit.make_private takes one of torch's, for a loop of your own" if torchs else ""
    raise TypeError(f"{example}, not {kind.__name__}{way}.")


def expected_batch_size(batch_size: int | None, batch: int | None, optimizer: str) -> int:
    """What was given as `batch_size`, or as `batch`, the earlier name of that argument."""
    found = renamed_argument("batch", batch, "batch_size", batch_size, where=f"finetune.{optimizer}", stacklevel=3)
    if found is None:
        raise TypeError(f"finetune.{optimizer} needs batch_size=, the expected number of units in a batch.")
    return found
