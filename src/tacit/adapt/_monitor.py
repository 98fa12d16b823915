"""Watching a model that learns without labels: how far it has moved, how certain it is, and what it predicts.

The distance from the source is post-processing of what was released, and free. Mean entropy and mean prediction are
people's data: they ride on the gradient's release, with so small a share of the budget that it loses less than 2%.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from tacit._guard_rails import GuardRailWarning
from tacit.adapt._default_rate import USUAL_STEPS
from tacit.adapt._uncertainty import entropy

ENTROPY, PREDICTION = "mean entropy", "mean prediction"
_FARTHEST = 2.5  # of the strain; docs/adapt.md says how it was chosen
CERTAIN = 0.029  # of ln K: SAR's threshold for a model that is certain of everything
_ONE_CLASS = 0.4  # that the share of one class grows among the predictions
_LOST = 4.0  # of the strain that noise alone will have added at the end of the horizon
_ADVICE = 'Lower lr (or say lr="auto"), raise batch_size, or take noise="correlated".'
_SURE = 3.5  # standard deviations: a false alarm has a chance of 2e-4 per step, if all is well


@dataclass(frozen=True, kw_only=True)
class Monitor:
    """What a private stream releases beside the gradient, to be watched.

    Args:
        share: Of the budget (of mu squared), for both together; the gradient's noise grows by 1 / sqrt(1 - share).
        rate: Of the moving averages.
        on_alarm: "warn", "reset" (back to the source) or "shrink" (half of the way back), in each case with a warning.

    Examples:
        >>> from tacit.adapt import Monitor
        >>> round((1 - Monitor().share) ** -0.5, 4)  # how much noisier the gradient is
        1.0196
    """

    share: float = 0.038
    rate: float = 0.1
    on_alarm: Literal["warn", "reset", "shrink"] = "warn"

    def __post_init__(self) -> None:
        if not 0 < self.share < 1 or not 0 < self.rate <= 1:
            raise ValueError(f"share lies in (0, 1) and rate in (0, 1], not {self.share!r} and {self.rate!r}.")
        if self.on_alarm not in ("warn", "reset", "shrink"):
            raise ValueError(f"on_alarm is warn, reset or shrink, not {self.on_alarm!r}.")

    @property
    def shares(self) -> dict[str, float]:
        """Half each: one number for the certainty, one per class for the predictions."""
        return {ENTROPY: self.share / 2, PREDICTION: self.share / 2}


def watched_rows(logits: Tensor) -> dict[str, tuple[Tensor, float]]:
    """What each row adds, and its L2 bound.

    Entropy as a share of ln K, less 1/2: at most 1/2. Probabilities less 1 / K: at most sqrt(1 - 1/K) < 1, since
    |p|_2 <= |p|_1 = 1 and the mean of p is 1 / K. `_side_blocks.bounded_total` enforces both in floating point.
    """
    classes = logits.shape[1]
    wide = logits.detach().double()
    unsure = entropy(wide) / math.log(classes) - 0.5
    shape = wide.softmax(1) - 1 / classes
    return {ENTROPY: (unsure[:, None], 0.5), PREDICTION: (shape, 1.0)}


@dataclass
class Watch:
    """What has been seen of a stream so far. In the private form all of it is released values.

    Args:
        entropy: Moving average of the mean entropy, as a share of ln K, with noise; one number per step.
        entropy_noise: Its standard deviation, step by step.
        strain: The number of adapted layers times |theta - theta_0| / |theta_0|; one number per step.
        prediction: Moving average of the mean prediction, with noise; None without a monitor.
        prediction_noise: The standard deviation of each of its entries.
        alarm: What is wrong, in a sentence; None if nothing is.
        first: The mean prediction of the first step, with noise: what the alarm compares with.
        first_noise: The standard deviation of each of its entries.
    """

    entropy: list[float] = field(default_factory=list)
    entropy_noise: list[float] = field(default_factory=list)
    strain: list[float] = field(default_factory=list)
    prediction: Tensor | None = None
    prediction_noise: float = 0.0
    alarm: str | None = None
    first: Tensor | None = None
    first_noise: float = 0.0

    def take(self, released: dict[str, Tensor], noise: dict[str, float], rows: int, monitor: Monitor) -> None:
        """A step's releases: sums over `rows` rows, with the standard deviation of their noise."""
        unsure = float(released[ENTROPY]) / rows + 0.5
        seen = released[PREDICTION].double().cpu() / rows
        seen = seen + 1 / len(seen)
        deviations = {name: noise.get(name, 0.0) / rows for name in (ENTROPY, PREDICTION)}
        rate, first = monitor.rate, not self.entropy
        if first or self.prediction is None:
            self.entropy.append(unsure)
            self.entropy_noise.append(deviations[ENTROPY])
            self.prediction, self.prediction_noise = seen, deviations[PREDICTION]
            self.first, self.first_noise = seen, deviations[PREDICTION]
        else:
            self.entropy.append((1 - rate) * self.entropy[-1] + rate * unsure)
            self.entropy_noise.append(math.hypot((1 - rate) * self.entropy_noise[-1], rate * deviations[ENTROPY]))
            self.prediction = (1 - rate) * self.prediction + rate * seen
            self.prediction_noise = math.hypot((1 - rate) * self.prediction_noise, rate * deviations[PREDICTION])

    def look(self, recovery: float) -> str | None:
        """Whether the model has collapsed, by what is known of it; `recovery` is the least entropy that is healthy."""
        if self.strain and self.strain[-1] > _FARTHEST:
            return (
                f"its normalisation layers have moved far from the source (strain {self.strain[-1]:.1f}; beyond "
                f"{_FARTHEST:g} models lose what they had learnt)"
            )
        if self.entropy and self.entropy[-1] + _SURE * self.entropy_noise[-1] < recovery:
            return f"it is certain of everything (mean entropy {self.entropy[-1]:.2f} of ln K)"
        if self.prediction is not None and self.first is not None:
            more = float((self.prediction - self.first).max())
            if more - _SURE * math.hypot(self.prediction_noise, self.first_noise) > _ONE_CLASS:
                return f"the share of one class among its predictions has grown by {more:.2f}"
        return None

    def forecast(self, strain: float) -> None:
        """Warn, before anything is charged, if noise alone will carry the model farther than models bear."""
        if strain > _LOST:
            warnings.warn(
                f"At this learning rate noise alone will carry the model away (a strain of {strain:.1f} at the end of "
                f"the horizon, or after {USUAL_STEPS} steps; beyond {_FARTHEST:g} models lose what they had learnt). "
                f"{_ADVICE}",
                GuardRailWarning,
                stacklevel=5,
            )

    def raise_alarm(self, found: str, step: int, action: str) -> None:
        """Say it once, with what was done and what to do; a model that only is warned of is not spoken of again."""
        done = {"warn": "", "reset": " It was reset to the source.", "shrink": " It was moved half of the way back."}
        if action == "warn":
            self.alarm = found
        warnings.warn(f"Step {step}: the adapted model looks lost: {found}.{done[action]} {_ADVICE}", stacklevel=5)

    def forget(self) -> None:
        """A new start; earlier numbers are gone."""
        self.entropy, self.entropy_noise, self.strain = [], [], []
        self.prediction, self.prediction_noise, self.alarm = None, 0.0, None
        self.first, self.first_noise = None, 0.0

    def usual(self, similarity: float) -> Tensor | None:
        """The mean prediction for EATA's diversity filter, if noise leaves enough of it: within the simplex again."""
        if self.prediction is None or self.prediction_noise > similarity / 4:
            return None
        found = self.prediction.clamp(min=0)
        return found / found.sum() if bool(found.any()) else None
