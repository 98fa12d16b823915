"""The forms of a method: as published (None), with clipped gradients (`Clip`), or differentially private (`DP`)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from tacit.gradients import Policy
from tacit.privacy import Budget, Neighbours, accounting, events
from tacit.privacy.correlated import Strategy, by_name
from tacit.privacy.events import DpEvent

BLOCKS = 1 << 20  # noise blocks that a stream is charged for: beyond `contributions` their number costs nothing
ENDLESS = 1 << 20  # steps of a block of independent noise, where no horizon is given: their number costs nothing


@dataclass(frozen=True)
class Clip:
    """Clip each unit's gradient, keep the filters, add no noise: not private.

    The sum is divided by the batch size, whatever passed the filters.

    Args:
        clip: The L2 bound, or any policy of `tacit.gradients`, those without a bound included.
        ascent: Clip SAR's ascent gradient like the update's (by default only the update's is).
    """

    clip: float | Policy
    ascent: bool = False

    def __post_init__(self) -> None:
        _check_clip(self.clip)


@dataclass(frozen=True)
class DP:
    """Differential privacy over the stream.

    Args:
        epsilon: For the whole stream; `inf` adds no noise and is not private.
        delta: For the whole stream.
        clip: The L2 bound of a unit's gradient, or a clip policy.
        noise: "independent" at every step, or "correlated" over a `horizon` of steps so that it cancels in the running
            sum, at the same epsilon. By default correlated where a horizon is given, else independent.
        horizon: The steps of the stream (or of an episode): of a block of correlated noise.
        filters: "per-sample" keeps the filters that look at one row alone, with the batch size as denominator (the
            paper's "v2").
        contributions: The most participations of a unit, in steps.
        separation: The least distance between two of them, in steps.
        neighbours: The neighbouring relation; add-remove is refused for streams.

    Examples:
        >>> from tacit.adapt import DP
        >>> round(DP(epsilon=1.0, delta=1e-6).noise_multiplier(), 2)  # relative to the clip, under replace-one
        8.45
    """

    epsilon: float
    delta: float = 1e-6
    clip: float | Policy = 1.0
    noise: Literal["independent", "correlated"] | None = None
    horizon: int | None = None
    filters: Literal["none", "per-sample"] = "none"
    contributions: int = 1
    separation: int = 1
    neighbours: Neighbours = Neighbours.REPLACE_ONE

    def __post_init__(self) -> None:
        _check_clip(self.clip)
        if self.private:
            Budget(self.epsilon, self.delta)  # which checks both
            if self.delta == 0:
                raise ValueError("Gaussian noise needs a delta above 0 (1e-6, say): it is never pure.")
        object.__setattr__(self, "neighbours", Neighbours(self.neighbours))
        if self.noise is None:
            object.__setattr__(self, "noise", "independent" if self.horizon is None else "correlated")
        if self.neighbours is Neighbours.ADD_REMOVE:
            raise ValueError("A stream has fixed slots: choose the relation replace-one or zero-out, not add-remove.")
        for name, allowed in (("noise", ("independent", "correlated")), ("filters", ("none", "per-sample"))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is one of {', '.join(allowed)}, not {getattr(self, name)!r}.")
        if self.noise == "correlated" and self.horizon is None:
            raise ValueError("Correlated noise needs horizon=, the number of steps of the stream (or of an episode).")
        for value in (self.horizon or 1, self.contributions, self.separation):
            events.check_count(value, "horizon, contributions and separation")

    @property
    def private(self) -> bool:
        return self.epsilon != math.inf

    @property
    def budget(self) -> Budget:
        return Budget(self.epsilon, self.delta)

    def refuse_unbounded(self, names: tuple[str, ...]) -> None:
        """No noise makes a sum private whose clip policy has no bound.

        Args:
            names: The adapted parameters.

        Raises:
            ValueError: The clip policy has no bound.
        """
        if isinstance(self.clip, Policy) and not self.clip.bounds(self.clip.blocks(names)):
            kind = type(self.clip).__name__
            raise ValueError(f"{kind} bounds nobody's gradient: use it with Clip(...), and give DP(...) a clip.")

    def event(self, noise_multiplier: float) -> DpEvent:
        """The whole stream as one release.

        Args:
            noise_multiplier: Relative to the clip.

        Returns:
            The event.
        """
        return events.stream(
            noise_multiplier,
            self.horizon or ENDLESS,
            strategy="independent" if self.noise == "independent" else "buffered",
            contributions=self.contributions,
            separation=self.separation,
            blocks=BLOCKS,
        )

    def strategy(self, steps: int) -> Strategy:
        """The noise's strategy over its horizon, or over so many steps where none is given.

        Args:
            steps: Where there is no horizon.

        Returns:
            The strategy.
        """
        name = "independent" if self.noise == "independent" else "buffered"
        return by_name(name, self.horizon or steps)

    def noise_multiplier(self) -> float:
        """The smallest noise, relative to the clip, that meets the budget."""
        return accounting.noise_multiplier(self.budget, self.event, neighbours=self.neighbours)


Privacy = Clip | DP | None


def _check_clip(clip: float | Policy) -> None:
    if not isinstance(clip, Policy) and not (isinstance(clip, int | float) and 0 < clip < math.inf):
        raise ValueError(f"clip is a positive number or a clip policy, not {clip!r}.")
