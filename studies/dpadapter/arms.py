"""The arms of a study of pretraining: how a net is pretrained, and how it is then fine-tuned privately."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from studies.grids import combinations
from tacit.finetune import DPSGD, GEP, AdpAlloc, AdpClip, Optimizer
from tacit.pretrain import Perturbation, Training
from tacit.recipes import renamed_fields

Start = Literal["scratch", "standard", "sam", "amp", "dpadapter"]
Kind = Literal["dpsgd", "gep", "adpalloc", "adpclip"]
OPTIMIZERS: dict[str, str] = {"dpsgd": "DPSGD", "gep": "GEP", "adpalloc": "AdpAlloc", "adpclip": "AdpClip"}
SWEPT = ("radius", "perturb_batch", "batch_size", "reuse", "perturb_lr", "lr")


@dataclass(frozen=True, kw_only=True)
class Upstream:
    """One way to pretrain: how weights are perturbed, and the training around it. None: nothing is learnt before."""

    perturb: Perturbation | None
    train: Training

    def passes(self, rows: int) -> int:
        """How many rows go forward and backward: what it costs."""
        return 0 if self.perturb is None else self.perturb.passes(self.train.batch_size, self.train.total(rows))

    def value(self, field: str) -> float:
        """One of its constants, by name."""
        return float(getattr(self.train if field in ("batch_size", "lr") else self.perturb, field))


@renamed_fields(batch="batch_size")
@dataclass(frozen=True, kw_only=True)
class Pretraining:
    """Ways to pretrain under one name: every combination of the lists. What is not said is as in the study's [train].

    `equal_compute`: the name of another [[pretrain]]; train for as many steps as its passes over rows would allow.
    """

    name: str
    method: Start
    radius: tuple[float, ...] = (2.0,)
    perturb_batch: tuple[int, ...] = (500,)
    batch_size: tuple[int, ...] = ()
    reuse: tuple[int, ...] = (1,)
    perturb_lr: tuple[float, ...] = (1.0,)
    lr: tuple[float, ...] = ()
    adaptive: bool = False
    per_tensor: bool = False
    warmup: float = 0.0
    equal_compute: str = ""

    def __post_init__(self) -> None:
        if self.equal_compute and self.method != "standard":
            raise ValueError("only standard training is given more steps: what it is compared with defines them")
        list(self.upstreams(Training()))

    def upstreams(self, train: Training) -> Iterator[Upstream]:
        """Every combination."""
        lists = {name: getattr(self, name) for name in SWEPT}
        lists |= {"batch_size": self.batch_size or (train.batch_size,), "lr": self.lr or (train.lr,)}
        for values in combinations(lists):
            changed = replace(train, batch_size=values.pop("batch_size"), lr=values.pop("lr"))
            if self.method == "scratch":
                yield Upstream(perturb=None, train=changed)
            else:
                fixed = {"adaptive": self.adaptive, "per_tensor": self.per_tensor, "warmup": self.warmup}
                how = Perturbation(method=self.method, **fixed, **values)  # type: ignore[arg-type]
                yield Upstream(perturb=how, train=changed)

    @property
    def swept(self) -> tuple[str, ...]:
        """The constants that take several values here."""
        return tuple(name for name in SWEPT if len(getattr(self, name)) > 1)


@dataclass(frozen=True, kw_only=True)
class Downstream:
    """One way to fine-tune privately, with its constants."""

    optimizer: Kind
    epsilon: float
    lr: float
    clip: float
    batch_size: int
    steps: int
    momentum: float
    scheme: str
    public_rows: int  # for GEP: whose gradients span its subspace
    dimensions: int
    refresh: int

    def optimize(self, public: Any) -> Optimizer:
        """The optimizer; `public` are rows for GEP, with labels of the private classes."""
        update: dict[str, Any] = {"lr": self.lr, "momentum": self.momentum}
        if self.optimizer == "gep":
            return GEP(
                public=public,
                batch_size=self.batch_size,
                steps=self.steps,
                dimensions=self.dimensions,
                refresh=self.refresh,
                clip_embedding=self.clip,
                clip_residual=0.2 * self.clip,
                **update,
            )
        make = {"dpsgd": DPSGD, "adpalloc": AdpAlloc, "adpclip": AdpClip}[self.optimizer]
        made: Optimizer = make(batch_size=self.batch_size, steps=self.steps, clip=self.clip, **update)  # type: ignore[operator]
        return made


@renamed_fields(batch="batch_size")
@dataclass(frozen=True, kw_only=True)
class Finetuning:
    """Ways to fine-tune the nets of some [[pretrain]]: optimizers and epsilons are crossed.

    Of several learning rates one is chosen, for each way to pretrain and each optimizer, at the epsilon `tune_at` (or
    at each for itself), on rows that are not evaluated.
    """

    of: tuple[str, ...]
    optimizer: tuple[Kind, ...] = ("dpsgd",)
    epsilon: tuple[float, ...] = (1.0, 4.0)
    lr: tuple[float, ...] = (0.01,)
    tune_at: float | None = None
    clip: float = 4.0
    batch_size: int = 256
    steps: int = 100
    momentum: float = 0.9
    scheme: str = "full"
    public_rows: int = 100
    dimensions: int = 50
    refresh: int = 10

    def __post_init__(self) -> None:
        if not self.lr or any(not epsilon > 0 for epsilon in self.epsilon):
            raise ValueError("there is at least one lr, and every epsilon is above 0")
        if self.dimensions > self.public_rows:
            raise ValueError("public_rows span at most as many dimensions")

    def downstreams(self) -> Iterator[tuple[Downstream, ...]]:
        """Every way, each as the candidates for its learning rate."""
        same = {
            f.name: getattr(self, f.name) for f in fields(Downstream) if f.name not in ("optimizer", "epsilon", "lr")
        }
        for values in combinations({"optimizer": self.optimizer, "epsilon": self.epsilon}):
            yield tuple(Downstream(**values, lr=lr, **same) for lr in self.lr)
