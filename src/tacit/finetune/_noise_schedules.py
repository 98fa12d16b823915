"""How much noise each step gets: the shape of the schedule; its scale is solved for by the budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from tacit.finetune._sampling import CyclicPoisson, Sampler
from tacit.privacy import BoundedSum, Receipt, events, mechanisms
from tacit.privacy.events import DpEvent, check_count
from tacit.privacy.mechanisms import Released

Release = Callable[[BoundedSum, Mapping[str, float] | None], Released]
Shape = Literal["exponential", "time", "step", "polynomial"]
_LEVELS = {"exponential": 16, "time": 16, "step": 5, "polynomial": 16}  # different noises in a run, by default


class Noise(Protocol):
    """The releases of a run, as an event, and the function that makes them."""

    def event(self, scale: float, *, sampler: Sampler, size: int, steps: int) -> DpEvent:
        """All steps of a run whose noise multiplier is `scale`, over `size` units."""

    def multiplier(self, scale: float, step: int, steps: int) -> float:
        """The noise multiplier of one step."""

    def releases(self, receipt: Receipt) -> Release:
        """What adds the noise, step by step."""


@dataclass(frozen=True)
class ConstantNoise:
    """The same noise at every step, independent from step to step."""

    def event(self, scale: float, *, sampler: Sampler, size: int, steps: int) -> DpEvent:
        return sampler.event(size, events.gaussian(scale), steps)

    def multiplier(self, scale: float, step: int, steps: int) -> float:
        del step, steps
        return scale

    def releases(self, receipt: Receipt) -> Release:
        return lambda total, noise: mechanisms.gaussian(total, receipt, noise=noise)


@dataclass(frozen=True, kw_only=True)
class Decaying(ConstantNoise):
    """Noise that falls while training goes on: sigma_t = sigma_0 * shape(t) (Yu et al., 2019, section 5.2).

    As `clip_schedule=` of `DPSGD` and `DPGD` it is the clip that falls so, and the noise in proportion to it. t counts
    periods of `period` steps (the paper's epochs), T of them in all, which share a noise:

    - "exponential": e^(-kt)
    - "time": 1 / (1 + kt)
    - "step": k^t, with long periods
    - "polynomial": (1 - end) (1 - t/T)^k + end

    Without `k` the last period has `end` times the noise of the first (polynomial: a straight line towards it).
    Without `period` the noise takes 16 values ("step": 5): composing them takes seconds, hundreds take minutes.

    Args:
        shape: The shape of the decay.
        k: Its parameter.
        period: Steps that share a noise.
        end: The last noise relative to the first.
    """

    shape: Shape = "exponential"
    k: float | None = None
    period: int | None = None
    end: float = 0.5

    def __post_init__(self) -> None:
        if self.shape not in _LEVELS:
            raise ValueError(f"There is no noise schedule {self.shape!r}: choose one of {', '.join(_LEVELS)}.")
        if self.period is not None:
            check_count(self.period, "period")
        most = 1.0 if self.shape == "step" else math.inf
        if not (self.k is None or (0 < self.k <= most and math.isfinite(self.k))):
            raise ValueError("k is above 0, and at most 1 for the schedule 'step'.")
        if not 0 < self.end <= 1:
            raise ValueError("end is the last noise relative to the first: above 0, at most 1.")

    def event(self, scale: float, *, sampler: Sampler, size: int, steps: int) -> DpEvent:
        multipliers = (self.multiplier(scale, step, steps) for step in range(steps))
        return events.compose(sampler.event(size, events.gaussian(multiplier)) for multiplier in multipliers)

    def multiplier(self, scale: float, step: int, steps: int) -> float:
        period = self.period or math.ceil(steps / _LEVELS[self.shape])
        return scale * self._relative(step // period, math.ceil(steps / period))

    def _relative(self, t: int, periods: int) -> float:
        last = max(periods - 1, 1)
        match self.shape:
            case "exponential":
                return math.exp(-(-math.log(self.end) / last if self.k is None else self.k) * t)
            case "time":
                return 1 / (1 + ((1 / self.end - 1) / last if self.k is None else self.k) * t)
            case "step":
                return float((self.end ** (1 / last) if self.k is None else self.k) ** t)
            case "polynomial":
                return float((1 - self.end) * (1 - t / periods) ** (1 if self.k is None else self.k) + self.end)


@dataclass(frozen=True)
class Correlated:
    """Noise that is drawn anew at every step less a part of what was added before (see `privacy.correlated`).

    The running sum of the steps, which is what training follows, then carries far less noise at the same guarantee.
    Formal guarantee: the whole run is ONE Gaussian release. The sensitivity is the norm of the sum of those columns
    of the strategy's matrix that one unit can meet, for the sampler's number of steps per unit and their distance. It
    rests on steps that a unit itself decides (`Passes`, `Everyone`), whoever else is there.

    Args:
        strategy: "buffered", "buffered:BUFFERS", "banded:BANDS", "toeplitz:BANDS", "full" or "independent"; with
            "@MOMENTUM" behind "buffered" or "toeplitz" it is optimised for SGD with this momentum, and "buffered" for
            the passes, too (see `privacy.correlated.by_name`).
    """

    strategy: str = "buffered"

    def __post_init__(self) -> None:
        events.stream(1.0, 1, strategy=self.strategy)  # refuses names that do not exist

    def event(self, scale: float, *, sampler: Sampler, size: int, steps: int) -> DpEvent:
        del size
        contributions, separation = sampler.participations(steps)
        return events.passes(scale, steps, strategy=self.strategy, contributions=contributions, separation=separation)

    def multiplier(self, scale: float, step: int, steps: int) -> float:
        del step, steps
        return scale

    def releases(self, receipt: Receipt) -> Release:
        stream = mechanisms.GaussianStream(receipt)
        return lambda total, noise: stream.release(total, noise=noise)


@dataclass(frozen=True)
class Banded(Correlated):
    """Banded noise for units that are drawn from one of as many groups after the other (`CyclicPoisson`).

    Formal guarantee: ceil(steps / bands) Poisson-subsampled Gaussian releases, composed by PLD; see
    `privacy.events.CyclicPoissonDpEvent`.

    Args:
        strategy: "toeplitz" (optimised bands) or "banded" (the square root, cut off).
        momentum: Of the steps that "toeplitz" is optimised for.
    """

    strategy: str = "toeplitz"
    momentum: float = 0.0

    def __post_init__(self) -> None:
        if self.strategy not in ("toeplitz", "banded"):
            raise ValueError(f"Cyclic sampling goes with banded noise: 'toeplitz' or 'banded', not {self.strategy!r}.")

    def event(self, scale: float, *, sampler: Sampler, size: int, steps: int) -> DpEvent:
        if not isinstance(sampler, CyclicPoisson):
            raise ValueError("Banded noise with cyclic sampling needs the sampler CyclicPoisson.")
        return events.cyclic_poisson(
            scale,
            steps,
            strategy=self.strategy,
            bands=sampler.bands,
            sample_rate=sampler.rate(size),
            momentum=self.momentum,
        )
