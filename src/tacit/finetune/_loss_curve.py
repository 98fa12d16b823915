"""The training loss of a run, estimated from its own released gradients: it costs nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tacit.finetune._adaptive import ScheduledClip
from tacit.finetune._noise_schedules import Correlated
from tacit.finetune._optimizers import Optimizer
from tacit.finetune._queries import ClippedGradient
from tacit.finetune._sampling import Everyone, FixedSize, Poisson
from tacit.gradients import Automatic, as_policy
from tacit.privacy.events import check_count

Weights = Mapping[str, Tensor]
_BYTES = 4  # of a weight, at least
_KEPT = ("change", "noise", "most", "most_noise")  # of each step in a checkpoint


@dataclass(frozen=True, kw_only=True)
class LossChange:
    """How much the mean training loss has changed since the start.

    Args:
        step: Steps done.
        change: The estimate: below zero where the model has learnt.
        noise: The standard deviation that the privacy noise gives it, at most.
        most: Its upper estimate where the loss is convex (a linear head): far above `change` where steps are too long
            for `change` to be right. Infinite: not known, in a checkpoint of an earlier version.
        most_noise: The standard deviation that the privacy noise gives `most`.
    """

    step: int
    change: float
    noise: float
    most: float = math.inf
    most_noise: float = 0.0

    def rise_since(self, earlier: LossChange) -> float:
        """How far it is above an earlier one, in standard deviations of the noise that came between."""
        rise, variance = self.change - earlier.change, self.noise * self.noise - earlier.noise * earlier.noise
        return rise / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, rise) if rise else 0.0


@dataclass(frozen=True, kw_only=True)
class TrackLoss:
    """Estimate the training loss along the way, and stop where it rises if `patience` is given.

    Args:
        patience: Stop when the estimate has not been lower for so many steps and the rise since then is beyond doubt,
            or the weights are not finite. What was not used is returned to the budget. None: never. For `DPGD`: where
            batches or rows are drawn, the estimate rises by itself once a run has ended learning.
        deviations: How many standard deviations of the noise are beyond doubt at one step; over s steps, the root of
            its square and 2 ln s.
        start: The mean training loss before the first step, where that is public: ln K for a head of zeros and K
            classes. No loss is below zero, so an estimate below minus `start` beyond doubt proves steps to be too long
            for it, and with `patience` ends the run, too. None: not known.
    """

    patience: int | None = None
    deviations: float = 3.0
    start: float | None = None

    def __post_init__(self) -> None:
        if self.patience is not None:
            check_count(self.patience, "patience")
        if self.start is not None and not 0 < self.start < math.inf:
            raise ValueError("start is the loss before the first step, above 0: ln K for a head of zeros on K classes.")
        if self.start is not None and self.patience is None:
            raise ValueError("start= is for stopping: give patience=, too.")
        if not 0 < self.deviations < math.inf:
            raise ValueError("deviations is above 0.")

    def check(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer whose releases are no gradients with independent noise, or that steps otherwise.

        Args:
            optimizer: Of the run.

        Raises:
            ValueError: The loss cannot be estimated from what it releases.
        """
        if not self.fits(optimizer):
            raise ValueError(
                "The loss is estimated from clipped gradients with independent noise, for steps of rule='sgd': with "
                "DPSGD (Poisson or fixed-size batches), DPGD or AdpAlloc, and no automatic clipping. Leave track_loss= "
                "out."
            )

    def check_run(self, parameters: Mapping[str, Tensor], optimizer: Optimizer, *, rows_drawn: bool) -> None:
        """Refuse weights or batches of which the estimate, or a stop by it, would be wrong; before the charge.

        Args:
            parameters: What is trained.
            optimizer: Of the run.
            rows_drawn: Whether the rows of a unit differ from step to step.

        Raises:
            ValueError: Weights that round steps away, or a stop with batches that are drawn.
        """
        if not self.fits(optimizer, parameters.values()):
            raise ValueError("Weights of 16 bits round steps away: train in float32, or leave track_loss= out.")
        drawn = rows_drawn or not isinstance(optimizer.sampler, Everyone)
        if drawn and self.patience is not None:
            raise ValueError(
                "A run is stopped by its loss where everybody takes part in every step (DPGD) with all rows: leave "
                "patience= out."
            )

    @staticmethod
    def fits(optimizer: Optimizer, weights: Iterable[Tensor] = ()) -> bool:
        """Whether the loss can be estimated from what an optimizer releases.

        Args:
            optimizer: Of the run.
            weights: What is trained.

        Returns:
            True for clipped gradients with independent noise, plain steps along them and weights that do not round them
            away.
        """
        if any(value.element_size() < _BYTES for value in weights):
            return False
        query = optimizer.query
        plain = isinstance(query, ClippedGradient | ScheduledClip) and not isinstance(as_policy(query.clip), Automatic)
        drawn = isinstance(optimizer.sampler, Everyone | Poisson | FixedSize)
        return plain and drawn and optimizer.update.rule == "sgd" and not isinstance(optimizer.noise, Correlated)


class LossTracker:
    """Adds up, step by step, how far the released gradients say that the loss has gone.

    Formal guarantee: post-processing. It reads released gradients, the weights that were made of them, and public
    constants: noise multiplier, learning rate, clip, expected batch size.

    A step d changes the mean loss by (g . d + g' . d) / 2 up to third order, where g and g' are the gradients before
    and after it (the trapezoid rule; exact for quadratic losses). Released gradients r and r' stand for them. r' has
    noise that is independent of d. But d is -lr r and a rest that is older than r, so r . d has -lr |r|^2, the square
    of r's own noise, instead of -lr |g|^2. With everybody in every step that is lr times the known variance of the
    noise too little on average, which is added back. Where batches are drawn, the draw has a variance that nobody
    released, so -lr r . r' stands there instead: on average it counts the curvature along the newest part of a step
    twice, which raises the estimate of a convex loss and never lowers it. Which of the two is computed is declared by
    the records (`varies`), and no matter of how many rows anybody has.

    Along a long step a loss that is not quadratic may fall early and be flat behind, and the rule counts too much. A
    convex loss changes by at least g . d and at most g' . d, so the sum of the r' . d is kept as well: right on average
    for that bound as it is, since the noise of r' is independent of d.
    """

    def __init__(
        self,
        how: TrackLoss,
        parameters: Mapping[str, nn.Parameter],
        optimizer: Optimizer,
        *,
        size: int,
        rows_drawn: bool,
    ) -> None:
        self.curve: list[LossChange] = []
        self._how, self._parameters, self._optimizer = how, dict(parameters), optimizer
        self._expected = optimizer.sampler.expected(size)
        self._drawn = rows_drawn or not isinstance(optimizer.sampler, Everyone)
        self._first = 0  # the step of the first estimate: of a resumed run that had none before
        self._weights: dict[str, Tensor] = {}  # before the last step
        self._gradient: dict[str, Tensor] = {}  # that was released for it
        self._last = _Release()
        self._settled = 0.0  # the variance that all releases but the last have given the estimate

    def note(self, gradient: Weights, *, bound: float, scale: float) -> None:
        """Take in what the next step has released, before the weights move.

        Args:
            gradient: The released mean gradient.
            bound: The L2 bound of what one unit adds to the sum.
            scale: The run's noise multiplier.
        """
        number, steps = self._first + len(self.curve), self._optimizer.steps
        noise = self._optimizer.noise.multiplier(scale, number, steps) * bound / self._expected
        gradient = {name: gradient[name].detach().clone() for name in self._parameters}
        change, along, most, most_noise = 0.0, 0.0, 0.0, 0.0
        if self._weights:
            lr = self._last.lr
            step = {name: _exact(p) - _exact(self._weights[name]) for name, p in self._parameters.items()}
            older = {name: value + lr * _exact(self._gradient[name]) for name, value in step.items()}
            own = _dot(self._gradient, gradient) if self._drawn else self._last.square
            before = _dot(self._gradient, older) - lr * own
            change = self.curve[-1].change + (before + _dot(gradient, step)) / 2
            self._settled += self._last.variance(_norm(older if self._drawn else step), drawn=self._drawn)
            newest = {name: value - lr * _exact(self._gradient[name]) for name, value in step.items()}
            along = _norm(newest if self._drawn else step)
            most = self.curve[-1].most + _dot(gradient, step)
            most_noise = math.hypot(self.curve[-1].most_noise, noise * _norm(step))
        numbers = sum(value.numel() for value in gradient.values())
        self._last = _Release(
            lr=self._optimizer.update.rate(number, steps),
            noise=noise,
            numbers=numbers,
            square=_dot(gradient, gradient) - numbers * noise * noise,
            along=along,
        )
        deviation = math.sqrt(self._settled + _square(noise * along / 2))
        self.curve.append(LossChange(step=number, change=change, noise=deviation, most=most, most_noise=most_noise))
        self._weights = {name: p.detach().clone() for name, p in self._parameters.items()}
        self._gradient = gradient

    @property
    def rises(self) -> bool:
        """Whether the estimates so far say to stop."""
        how = self._how
        if how.patience is None or not self.curve:
            return False
        last = self.curve[-1]
        least = min(self.curve, key=lambda at: at.change)
        if not math.isfinite(last.change):
            return True
        doubt = math.hypot(how.deviations, math.sqrt(2 * math.log(len(self.curve))))
        if how.start is not None and not self._first and last.change + how.start < -doubt * last.noise:
            return True  # the loss would be below zero
        return last.step - least.step >= how.patience and last.rise_since(least) > doubt

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What a checkpoint keeps: made of released values."""
        tensors = {f"weights.{name}": value for name, value in self._weights.items()}
        tensors |= {f"gradient.{name}": value for name, value in self._gradient.items()}
        facts = {
            "first": self._first,
            "curve": [[at.change, at.noise, at.most, at.most_noise] for at in self.curve],
            "last": asdict(self._last),
            "settled": self._settled,
        }
        return tensors, facts

    def load(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any] | None, *, done: int) -> None:
        """Go on from a checkpoint; from one that has no estimates, begin with the change since then.

        Args:
            tensors: What `state` returned.
            facts: The other half of it; None: nothing was estimated.
            done: Steps done.
        """
        if facts is None:
            self._first = done
            return

        def kept(kind: str) -> dict[str, Tensor]:
            return {n.removeprefix(kind): v for n, v in tensors.items() if n.startswith(kind)}

        self._weights, self._gradient = kept("weights."), kept("gradient.")
        self._first = int(facts.get("first", 0))
        self.curve = [
            LossChange(**dict(zip(_KEPT, values, strict=False)), step=step)  # two values in earlier versions
            for step, values in enumerate(facts["curve"], self._first)
        ]
        self._last, self._settled = _Release(**facts["last"]), float(facts["settled"])


@dataclass(frozen=True, kw_only=True)
class _Release:
    """What is known of a released gradient when the next one comes."""

    lr: float = 0.0
    noise: float = 0.0  # the standard deviation of each number
    numbers: int = 0
    square: float = 0.0  # its squared norm, less what noise adds on average
    along: float = 0.0  # what multiplies its noise where it says something of the step before it

    def variance(self, along: float, *, drawn: bool) -> float:
        """What its noise gives the estimate, at most; `along` multiplies it where it says something of its own step."""
        linear = _square(self.noise * (self.along + along) / 2)
        return linear if drawn else linear + self.numbers * _square(self.lr * self.noise * self.noise / 2)


def _exact(value: Tensor) -> Tensor:
    return value.detach().cpu().double()  # some devices have no float64


def _dot(one: Weights, other: Weights) -> float:
    flat = ((_exact(value).flatten(), _exact(other[name]).flatten()) for name, value in one.items())
    return sum(float(torch.dot(*pair)) for pair in flat)


def _norm(values: Weights) -> float:
    return math.sqrt(_dot(values, values))


def _square(value: float) -> float:
    return value * value  # infinite where ** would raise
