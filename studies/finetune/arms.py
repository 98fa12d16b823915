"""The arms of a fine-tuning study: what is compared, and which constants are tuned."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple

from studies.grids import combinations
from tacit.finetune import DPFTRL, DPGD, DPSGD, DPZO, AdpAlloc, AdpClip, Optimizer
from tacit.recipes import renamed_fields

Kind = Literal["dpsgd", "dpgd", "adpalloc", "adpclip", "dpzo", "dpftrl"]
NAMES = {"dpgd": "DPGD", "adpalloc": "AdpAlloc", "adpclip": "AdpClip", "dpzo": "DPZO", "dpftrl": "correlated"}
Init = Literal["pretrained", "scratch"]
Level = Literal["unit", "clip"]
TUNED = ("lr", "clip", "steps")


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to fine-tune, with its constants. `level="clip"` protects clips and not videos, for comparison."""

    model: str
    scheme: str
    init: Init
    optimizer: Kind
    epsilon: float
    clips: int
    augment: int
    level: Level
    batch_size: int
    rule: Literal["sgd", "adam"]
    momentum: float
    schedule: Literal["constant", "cosine", "linear"]
    average: Literal["none", "ema", "swa"]
    lr: float
    clip: float
    steps: int
    last_blocks: int = 0  # what is trained of a net with blocks; 0: whatever the scheme says, of all

    @property
    def name(self) -> str:
        """What a table calls it, without what was tuned."""
        parts = ["from scratch" if self.init == "scratch" else self.scheme.replace("_", " ")]
        parts += [f"last {self.last_blocks} blocks"] if self.last_blocks else []
        parts += [NAMES[self.optimizer]] if self.optimizer in NAMES else []
        parts += ["Adam" if self.rule == "adam" else "SGD"] if self.last_blocks else []
        parts += [f"{self.clips} clips" if self.clips > 1 else "1 clip"] if self.clips else []
        parts += ["clip-level"] if self.level == "clip" else []
        parts += [f"{self.augment} views"] if self.augment > 1 else []
        return ", ".join([f"{self.model}: {parts[0]}", *parts[1:]])

    def optimize(self) -> Optimizer:
        options: dict[str, Any] = {
            "lr": self.lr,
            "rule": self.rule,
            "momentum": self.momentum,
            "schedule": self.schedule,
            "average": self.average,
        }
        if self.optimizer == "dpgd":
            return DPGD(steps=self.steps, clip=self.clip, **options)
        if self.optimizer == "dpftrl":  # one pass in `steps` batches
            return DPFTRL(batches=self.steps, clip=self.clip, **options)
        if self.optimizer == "adpalloc":
            return AdpAlloc(batch_size=self.batch_size, steps=self.steps, clip=self.clip, **options)
        if self.optimizer == "adpclip":
            return AdpClip(batch_size=self.batch_size, steps=self.steps, clip=self.clip, **options)
        if self.optimizer == "dpzo":
            return DPZO(batch_size=self.batch_size, steps=self.steps, clip=self.clip, **options)
        return DPSGD(batch_size=self.batch_size, steps=self.steps, clip=self.clip, **options)


class Choice(NamedTuple):
    """The candidates for one arm, and what is tried to choose among them (the same in order, maybe at one epsilon)."""

    arms: tuple[Arm, ...]
    trials: tuple[Arm, ...]


@renamed_fields(batch="batch_size")
@dataclass(frozen=True, kw_only=True)
class Grid:
    """Arms as a recipe writes them: each field a value or a list. `lr`, `clip`, `steps` are tuned, the rest crossed."""

    model: tuple[str, ...] = ("model",)
    scheme: tuple[str, ...] = ("selective",)
    init: Init = "pretrained"
    optimizer: tuple[Kind, ...] = ("dpsgd",)
    epsilon: tuple[float, ...] = (8.0,)
    clips: tuple[int, ...] = (0,)  # of a video; 0 for data that is not video
    augment: tuple[int, ...] = (1,)
    level: Level = "unit"
    batch_size: int = 256
    rule: Literal["sgd", "adam"] = "sgd"
    momentum: float = 0.9
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    average: Literal["none", "ema", "swa"] = "none"
    lr: tuple[float, ...] = (0.5,)
    clip: tuple[float, ...] = (1.0,)
    steps: tuple[int, ...] = (100,)
    last_blocks: int = 0
    tune_at: float | None = None  # the epsilon at which constants are chosen, for all of them; None: each for itself

    def __post_init__(self) -> None:
        for choice in self.arms():
            for arm in choice.arms:
                arm.optimize()
                if not arm.epsilon > 0:
                    raise ValueError("epsilon is above 0, or inf for no noise.")

    def arms(self) -> Iterator[Choice]:
        """Every combination, each as the candidates among which its constants are chosen."""
        crossed = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in (*TUNED, "tune_at")}
        tuned = {name: getattr(self, name) for name in TUNED}
        for values in combinations(crossed):
            arms = tuple(Arm(**values, **choice) for choice in combinations(tuned))
            yield Choice(arms, tuple(replace(arm, epsilon=self.tune_at or arm.epsilon) for arm in arms))


def label_of(epsilon: float) -> str:
    return "∞" if math.isinf(epsilon) else f"{epsilon:g}"
