"""From a released gradient to new weights. All of it is post-processing: it reads nothing private and costs nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypedDict, get_args

import torch
from torch import Tensor, nn

from tacit import _checkpoints as checkpoints
from tacit.finetune._step_rules import AdamBC, DoG

Rule = Literal["sgd", "adam", "adamw", "adambc", "adambcw", "dog"]
Schedule = Literal["constant", "cosine", "linear", "debiased"]
Average = Literal["none", "ema", "swa"]
_FEW = 4  # parameters that are updated one by one on a CPU: sorting them costs more than their updates
KNOWS_NOISE = ("adambc", "adambcw")


@dataclass(frozen=True, kw_only=True)
class Update:
    """How a step is taken from a released gradient: post-processing, free of charge.

    Args:
        rule: "sgd", "adam", "adamw"; "adambc" and "adambcw", where the variance of the noise is taken off the second
            moment (DP-AdamBC, Tang et al., 2024); "dog", whose step is the distance from the start over the root of the
            summed squared gradients (Ivgi et al., 2023), so that `lr` is a factor near 1 and needs no search.
        lr: The learning rate.
        momentum: Of "sgd".
        betas: Of "adam" and its kin.
        weight_decay: L2 penalty; decoupled for "adamw" and "adambcw".
        schedule: The learning rate over time; "debiased" makes of the momentum buffer what Adam calls its first moment.
        warmup: Steps of linear warm-up.
        average: Which weights are returned: "ema" an exponential moving average (`decay`), "swa" the plain mean over
            the last part of the run (from `swa_start` on), "none" the last ones.
        decay: Of "ema".
        swa_start: Where averaging starts, as a share of the steps.
        free_step: After the last release, one more step along the momentum buffer.
        floor: Of "adambc": what the second moment without its noise is at least.
        reach: Of "dog": the way that is assumed before the first step, in the length of all trained parameters.
    """

    rule: Rule = "sgd"
    lr: float = 0.1
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    schedule: Schedule = "constant"
    warmup: int = 0
    average: Average = "none"
    decay: float = 0.99
    swa_start: float = 0.5
    free_step: bool = False
    floor: float = 5e-8
    reach: float = 0.01

    def __post_init__(self) -> None:
        for what, value, known in (
            ("rule", self.rule, get_args(Rule)),
            ("schedule", self.schedule, get_args(Schedule)),
            ("average", self.average, get_args(Average)),
        ):
            if value not in known:
                raise ValueError(f"{what} is one of {', '.join(known)}, not {value!r}.")
        if not (0 < self.lr < math.inf and 0 <= self.momentum < 1 and 0 <= self.weight_decay < math.inf):
            raise ValueError("lr is above 0, momentum in [0, 1) and weight_decay not negative.")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas are two numbers in [0, 1), not {self.betas}.")
        if not (0 <= self.decay < 1 and 0 <= self.swa_start < 1 and self.warmup >= 0):
            raise ValueError("decay and swa_start are in [0, 1), and warmup is a number of steps.")
        if not (0 < self.floor < math.inf and 0 < self.reach < math.inf):
            raise ValueError("floor and reach are above 0.")
        if self.free_step and not (self.rule == "sgd" and self.momentum > 0):
            raise ValueError("A free step goes along the momentum buffer: it needs sgd with momentum.")
        if self.schedule == "debiased" and (self.rule != "sgd" or self.warmup):
            raise ValueError("The schedule 'debiased' is for the momentum of sgd from its first step on: no warmup.")

    def check(self, weights: Iterable[Tensor]) -> None:
        """Refuse factors that the type of the weights cannot hold, before anything is charged: a step would fail.

        Args:
            weights: What is trained.

        Raises:
            ValueError: The learning rate or another factor is larger.
        """
        most = min((torch.finfo(value.dtype).max for value in weights), default=math.inf)
        first = 1 - self.betas[0] if self.rule in ("adam", "adamw") else 1.0  # by which Adam's first step is divided
        for name, value, factor in (
            ("lr", self.lr, self.lr / first),
            ("weight_decay", self.weight_decay, self.weight_decay),
            ("floor", self.floor, self.floor),
        ):
            if factor > most:
                said = f"{name} is {value:g}" + (f", a first step of {factor:g}" if factor > value else "")
                raise ValueError(f"{said}, more than the weights' type can hold ({most:g}).")

    @property
    def inertia(self) -> float:
        """The momentum with which steps add up in the weights: of "sgd" alone, others scale their steps."""
        return self.momentum if self.rule == "sgd" else 0.0

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of a step."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        if self.schedule == "constant":
            return self.lr
        if self.schedule == "debiased":  # m / (1 - b^t) of Kingma & Ba (2015), where m is (1 - b) times the buffer
            return self.lr * (1 - self.momentum) / (1 - self.momentum ** (step + 1))
        done = (step - self.warmup) / max(1, steps - self.warmup)
        return self.lr * (0.5 * (1 + math.cos(math.pi * done)) if self.schedule == "cosine" else 1 - done)


class Options(TypedDict, total=False):
    """The fields of `Update`, for functions that pass them on."""

    rule: Rule
    lr: float
    momentum: float
    betas: tuple[float, float]
    weight_decay: float
    schedule: Schedule
    warmup: int
    average: Average
    decay: float
    swa_start: float
    free_step: bool
    floor: float
    reach: float


class Updates(Protocol):
    """Takes the steps of one run from released gradients, and keeps what a resumed run needs."""

    def step(self, gradient: Mapping[str, Tensor], number: int, factor: float = 1.0) -> None: ...

    def averaged_weights(self) -> AbstractContextManager[None]: ...

    def apply_averaged_weights(self) -> None: ...

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]: ...

    def load(self, tensors: dict[str, Tensor], facts: Mapping[str, Any]) -> None: ...


class Updater:
    """Takes the steps of one run."""

    def __init__(
        self, update: Update, parameters: Mapping[str, nn.Parameter], steps: int, *, noise: float = 0.0
    ) -> None:
        self._update = update
        self._parameters = dict(parameters)
        self._steps = steps
        self._optimizer = _optimizer(update, list(self._parameters.values()), noise)
        self._mean: dict[str, Tensor] = {}
        self._counted = 0

    @property
    def names(self) -> set[str]:
        """What is updated."""
        return set(self._parameters)

    def step(self, gradient: Mapping[str, Tensor], number: int, factor: float = 1.0) -> None:
        """Step `number` of the run, from its released gradient, at `factor` times its learning rate."""
        for group in self._optimizer.param_groups:
            group["lr"] = factor * self._update.rate(number, self._steps)
        set_gradient(self._parameters, gradient)
        self._optimizer.step()
        self._optimizer.zero_grad()
        if number + 1 == self._steps and self._update.free_step:
            self._follow_momentum()
        self._note(number)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """The weights that are handed out, for as long as it takes to look at them."""
        if not self._mean:
            yield
            return
        kept = {name: p.detach().clone() for name, p in self._parameters.items()}
        self.apply_averaged_weights()
        try:
            yield
        finally:
            _copy(self._parameters, kept)

    def apply_averaged_weights(self) -> None:
        """Leave the averaged weights in the model, if there are any."""
        if self._mean:
            _copy(self._parameters, self._mean)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What a checkpoint keeps: all of it made of released values."""
        tensors, scalars = checkpoints.optimizer_state(self._optimizer)
        tensors |= {f"weight.{name}": p.detach() for name, p in self._parameters.items()}
        tensors |= {f"mean.{name}": value for name, value in self._mean.items()}
        return tensors, {"scalars": scalars, "counted": self._counted}

    def load(self, tensors: dict[str, Tensor], facts: Mapping[str, Any]) -> None:
        _copy(self._parameters, {name: tensors[f"weight.{name}"] for name in self._parameters})
        self._mean = {
            name: tensors[f"mean.{name}"].to(p.device)
            for name, p in self._parameters.items()
            if f"mean.{name}" in tensors
        }
        self._counted = int(facts["counted"])
        checkpoints.load_optimizer(self._optimizer, tensors, facts["scalars"])

    def _follow_momentum(self) -> None:
        rate = self._optimizer.param_groups[0]["lr"]
        with torch.no_grad():
            for parameter in self._parameters.values():
                buffer = self._optimizer.state[parameter].get("momentum_buffer")
                if buffer is not None:
                    parameter.sub_(buffer, alpha=rate)

    def _note(self, number: int) -> None:
        """Take the new weights into the average."""
        how = self._update.average
        if how == "none" or (how == "swa" and number < self._update.swa_start * self._steps):
            return
        self._counted += 1
        weight = 1 / self._counted
        if how == "ema":  # the first steps weigh as in a plain mean, so that the start is forgotten
            weight = max(weight, 1 - self._update.decay)
        for name, parameter in self._parameters.items():
            now = parameter.detach()
            mean = self._mean.get(name)
            self._mean[name] = now.clone() if mean is None else mean.lerp(now, weight)


def set_gradient(parameters: Mapping[str, nn.Parameter], gradient: Mapping[str, Tensor]) -> None:
    """Put a released gradient in place of whatever gradient the parameters have."""
    for name, parameter in parameters.items():
        parameter.grad = gradient[name].to(parameter.dtype).to(parameter.device)


def _optimizer(update: Update, parameters: list[nn.Parameter], noise: float) -> torch.optim.Optimizer:
    if update.rule in KNOWS_NOISE:
        return AdamBC(
            parameters,
            lr=update.lr,
            betas=update.betas,
            noise=noise,
            floor=update.floor,
            weight_decay=update.weight_decay,
            decoupled=update.rule == "adambcw",
        )
    if update.rule == "dog":
        return DoG(parameters, lr=update.lr, reach=update.reach, weight_decay=update.weight_decay)
    if update.rule == "sgd":
        together = len(parameters) > _FEW or parameters[0].device.type != "cpu"  # the same numbers either way
        return torch.optim.SGD(
            parameters, lr=update.lr, momentum=update.momentum, weight_decay=update.weight_decay, foreach=together
        )
    kind = torch.optim.Adam if update.rule == "adam" else torch.optim.AdamW
    return kind(parameters, lr=update.lr, betas=update.betas, weight_decay=update.weight_decay, foreach=True)


def _copy(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(values[name])
