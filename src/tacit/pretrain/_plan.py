"""How public training goes: its steps and learning rate, and how weights are perturbed on the way."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, TypedDict

from tacit._deprecation import renamed_fields
from tacit.pretrain._augment import Augment

Method = Literal["standard", "sam", "amp", "dpadapter"]
METHODS: tuple[Method, ...] = ("standard", "sam", "amp", "dpadapter")


@dataclass(frozen=True, kw_only=True)
class Perturbation:
    """Where the gradient of a step is taken: at the weights, or at a perturbation of bounded length uphill from them.

    Args:
        method: "standard"; "sam" goes `radius` uphill on the step's own batch; "amp" goes `perturb_lr` times its
            gradient, and at most `radius`; "dpadapter" does the same on another batch.
        radius: The largest length of the perturbation.
        perturb_batch: Rows of the batch that "dpadapter" perturbs on.
        perturb_lr: The step size of the perturbation.
        adaptive: Measure the length of each weight's part relative to that weight.
        per_tensor: The radius bounds each tensor's part of the perturbation, and not all of it together.
        reuse: Steps that share a perturbation.
        microbatch: Rows of the perturbing batch in memory at a time.
        warmup: The share of the steps, at the beginning, that are standard ones.
    """

    method: Method = "standard"
    radius: float = 2.0
    perturb_batch: int = 5000
    perturb_lr: float = 1.0
    adaptive: bool = False
    per_tensor: bool = False
    reuse: int = 1
    microbatch: int = 500
    warmup: float = 0.0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"There is no method {self.method!r}: choose one of {', '.join(METHODS)}.")
        if not 0 <= self.radius < math.inf:
            raise ValueError(f"The radius is a length, at least 0; got {self.radius:g}.")
        if not 0 < self.perturb_lr < math.inf:
            raise ValueError(f"perturb_lr is above 0; got {self.perturb_lr:g}.")
        for name in ("perturb_batch", "reuse", "microbatch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is at least 1; got {getattr(self, name)}.")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup is a share of the steps, at least 0 and below 1; got {self.warmup:g}.")

    @property
    def own_batch(self) -> bool:
        """Whether the weights are perturbed on the rows of the step itself."""
        return self.method in ("sam", "amp")

    def passes(self, batch_size: int, steps: int) -> int:
        """How many rows go forward and backward in so many steps: what training costs."""
        if self.method == "standard":
            return batch_size * steps
        perturbed = steps - self.first(steps)
        return batch_size * steps + -(-perturbed // self.reuse) * (batch_size if self.own_batch else self.perturb_batch)

    def first(self, steps: int) -> int:
        """The first step whose weights are perturbed."""
        return math.ceil(self.warmup * steps)


@renamed_fields(batch="batch_size")
@dataclass(frozen=True, kw_only=True)
class Training:
    """Steps, learning rate and update rule, by default those of the DPAdapter paper (section 5.1), but for its 1,000
    epochs.

    Args:
        epochs: Passes over the data.
        steps: The number of steps, instead of `epochs`.
        batch_size: Rows of a step.
        rule: "sgd" or "adamw".
        lr: The learning rate.
        momentum: Of "sgd".
        weight_decay: Spares scales and biases.
        decay: "steps" divides the learning rate by ten after a half and after three quarters; "onecycle" raises and
            lowers it (and moves momentum between 0.95 and 0.85, whatever `momentum` is).
        clip: Bounds the norm of a batch's gradient; it gives no privacy.
        augment: Data augmentation.
        seed: Of order and augmentation.
    """

    epochs: int = 10
    steps: int | None = None
    batch_size: int = 50
    rule: Literal["sgd", "adamw"] = "sgd"
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 1e-4
    decay: Literal["constant", "steps", "cosine", "onecycle"] = "steps"
    clip: float | None = None
    augment: Augment | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "steps", "batch_size"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} is at least 1; got {value}.")
        if self.rule not in ("sgd", "adamw"):
            raise ValueError(f"There is no rule {self.rule!r}: choose sgd or adamw.")
        if self.decay not in ("constant", "steps", "cosine", "onecycle"):
            raise ValueError(f"There is no decay {self.decay!r}: choose constant, steps, cosine or onecycle.")
        if not (0 < self.lr < math.inf and 0 <= self.momentum < 1 and 0 <= self.weight_decay < math.inf):
            raise ValueError("lr is above 0, momentum in [0, 1) and weight_decay not negative.")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip is above 0, or None; got {self.clip:g}.")

    def total(self, rows: int) -> int:
        """The number of steps on so many rows; the rows that do not fill a last batch sit an epoch out."""
        return self.epochs * (rows // self.batch_size) if self.steps is None else self.steps

    def pace(self, step: int, steps: int) -> tuple[float, float]:
        """Learning rate and momentum of a step."""
        if self.decay == "onecycle":
            return _one_cycle(step, steps, self.lr)
        if self.decay == "cosine":
            return self.lr * 0.5 * (1 + math.cos(math.pi * step / steps)), self.momentum
        tenths = (2 * step >= steps) + (4 * step >= 3 * steps) if self.decay == "steps" else 0
        return self.lr / 10**tenths, self.momentum


class Options(TypedDict, total=False):
    """The fields of `Training`, for functions that pass them on."""

    epochs: int
    steps: int | None
    batch_size: int
    rule: Literal["sgd", "adamw"]
    lr: float
    momentum: float
    weight_decay: float
    decay: Literal["constant", "steps", "cosine", "onecycle"]
    clip: float | None
    augment: Augment | None
    seed: int


@renamed_fields(batch="batch_size")
@dataclass(frozen=True, kw_only=True)
class Recipe:
    """AdamW on one cycle of the learning rate, with augmentation: how the package's own small nets are trained.

    Args:
        epochs: Passes over the data.
        batch_size: Rows of a step.
        lr: The largest learning rate.
        weight_decay: Decoupled weight decay.
        augment: Data augmentation.
        seed: Of initial order and augmentation.
    """

    epochs: int = 8
    batch_size: int = 128
    lr: float = 4e-3
    weight_decay: float = 0.05
    augment: Augment | None = field(default_factory=Augment)
    seed: int = 0

    def options(self) -> Options:
        """The same as options of `fit`."""
        return {
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "rule": "adamw",
            "lr": self.lr,
            "weight_decay": self.weight_decay,
            "decay": "onecycle",
            "clip": 1.0,
            "augment": self.augment,
            "seed": self.seed,
        }


def _one_cycle(step: int, steps: int, highest: float) -> tuple[float, float]:
    """Up along a cosine for three tenths of the steps, then down to next to nothing (Smith and Topin, 2018)."""
    top = 0.3 * steps - 1
    if step <= top:
        return _eased(highest / 25, highest, step / top), _eased(0.95, 0.85, step / top)
    share = (step - top) / (steps - 1 - top)
    return _eased(highest, highest / 25 / 1e4, share), _eased(0.85, 0.95, share)


def _eased(start: float, end: float, share: float) -> float:
    return end + (start - end) / 2 * (math.cos(math.pi * share) + 1)
