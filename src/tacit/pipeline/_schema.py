"""What a pipeline recipe may say: frozen dataclasses, read from TOML by `tacit.recipes`.

    [model]                       which model
    [data]                        the private, labelled data
    [budget]                      what may be spent on one unit, over all stages
    [pretrain] [tune] [finetune]  the stages, any of them, in this order
    [adapt] [calibrate] [audit]

Paths are relative to the recipe's own folder. A stage that touches private data has `epsilon` (what it may spend) or
`share` (of the budget), or gets an equal part of what the others leave.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tacit._deprecation import renamed_fields
from tacit.pipeline._schema_data import Data, Embedded, Images, Outputs, Texts, check_positive
from tacit.privacy import Budget as Total
from tacit.privacy import Neighbours, Unit


@dataclass(frozen=True, kw_only=True)
class Model:
    """`timm:NAME`, `transformers:NAME_OR_FOLDER`, `small:NAME`, `embedded`, `module:function`, or a folder or file."""

    name: str
    weights: Path | None = None  # a file of weights for a timm or own model
    pretrained: bool = True  # timm: with its published weights (from the local cache, or the network)
    pooling: Literal["model", "mean"] = "model"  # transformers, texts: the model's own classifier, or a mean and a head


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What may be spent on one unit by all stages together, and where it is written down."""

    epsilon: float
    delta: float
    unit: str = "sample"
    neighbours: Neighbours = Neighbours.ZERO_OUT
    size: int | None = None  # the public number of units in [data]
    ledger: Path = Path("ledger.db")

    def __post_init__(self) -> None:
        Total(self.epsilon, self.delta)
        Unit(self.unit)
        if not math.isfinite(self.epsilon) or self.epsilon <= 0 or self.delta == 0:
            raise ValueError("a pipeline needs an epsilon that is finite and above 0, and a delta above 0.")
        check_positive(size=self.size)
        if self.delta > 0.01 or (self.size is not None and self.delta * self.size >= 1):
            raise ValueError(
                f"a delta of {self.delta:g} is no protection: with that probability anything may happen. Take one well "
                f"below one over the number of {self.unit}s."
            )

    @property
    def total(self) -> Total:
        return Total(self.epsilon, self.delta)


@dataclass(frozen=True, kw_only=True)
class Spending:
    """What a stage may spend: `epsilon` at the budget's delta, or `share`, a part of the budget."""

    epsilon: float | None = None
    share: float | None = None

    def __post_init__(self) -> None:
        if self.epsilon is not None and self.share is not None:
            raise ValueError("a stage has epsilon or share, not both.")
        check_positive(epsilon=self.epsilon)
        if self.share is not None and not 0 < self.share <= 1:
            raise ValueError(f"share is a part of the budget, above 0 and at most 1; got {self.share:g}.")


@renamed_fields(batch="batch_size")
@dataclass(frozen=True, kw_only=True)
class Pretrain:
    """Public training; charges nothing, and `public = true` says that its data needs no protection."""

    data: Images | Embedded
    public: bool
    method: Literal["standard", "sam", "amp", "dpadapter"] = "standard"
    epochs: int = 10
    steps: int | None = None
    batch_size: int = 50
    rule: Literal["sgd", "adamw"] = "sgd"
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 1e-4
    decay: Literal["constant", "steps", "cosine", "onecycle"] = "steps"
    radius: float = 2.0
    perturb_batch: int = 5000
    perturb_lr: float = 1.0
    seed: int = 0
    every: int = 500

    def __post_init__(self) -> None:
        if not self.public:
            raise ValueError("pretraining is not private: its data must be public = true; use [finetune] for others.")
        check_positive(epochs=self.epochs, steps=self.steps, batch_size=self.batch_size, lr=self.lr, every=self.every)


@dataclass(frozen=True, kw_only=True)
class Tune(Spending):
    """A search for lr and steps by linear scaling; its last run is the fine-tuning, as [finetune] says otherwise."""

    lr: tuple[float, float]
    steps: tuple[int, int]
    trials: int = 3
    draw_seed: int = 0  # of which points are tried: public

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, (low, high) in (("lr", self.lr), ("steps", self.steps)):
            if not 0 < low <= high:
                raise ValueError(f"{name} goes from a number above 0 up to a larger one; got {low:g}, {high:g}.")
        check_positive(trials=self.trials)


@renamed_fields(batch="batch_size")
@dataclass(frozen=True, kw_only=True)
class Finetune(Spending):
    """Private fine-tuning on [data]: the arguments of `finetune.fit`."""

    scheme: str = "selective"
    optimizer: Literal["dpgd", "dpsgd", "adpclip", "dpzo"] = "dpgd"
    steps: int = 30
    batch_size: int | None = None  # expected size of a Poisson batch; for all but dpgd
    lr: float = 0.5
    momentum: float = 0.9
    clip: float = 1.0
    rule: Literal["sgd", "adam", "adamw"] = "sgd"
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    head: Literal["new", "keep"] = "new"
    bias: bool = True
    rows_each: int | None = None
    augment: int | None = None
    microbatch: int | None = None
    every: int = 10  # a checkpoint each so many steps
    # The training loss on the page, from released gradients; None: where it is possible. It changes no release.
    track_loss: bool | None = field(default=None, compare=False)
    evaluate: Data | None = None  # data to score the model on, exactly: public
    evaluate_public: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(
            steps=self.steps,
            batch_size=self.batch_size,
            lr=self.lr,
            clip=self.clip,
            every=self.every,
            rows_each=self.rows_each,
        )
        if (self.batch_size is None) != (self.optimizer == "dpgd"):
            need = "every unit takes part in every step of dpgd: leave batch_size out."
            raise ValueError(
                need if self.batch_size else f"{self.optimizer} needs batch_size, the expected size of a batch."
            )
        if self.track_loss and not (self.rule == "sgd" and self.optimizer in ("dpgd", "dpsgd")):
            raise ValueError("track_loss is for the steps of rule sgd with dpgd or dpsgd: leave it out.")
        if (self.evaluate is not None) != self.evaluate_public:
            raise ValueError("evaluate is scored without noise: give evaluate_public = true if that data is public.")


@renamed_fields(batch="batch_size")
@dataclass(frozen=True, kw_only=True)
class Adapt(Spending):
    """Private test-time adaptation to an unlabelled stream: the rows of `data`, in the order of its table."""

    data: Images | Texts | Embedded
    method: Literal["tent", "eata", "sar", "deyo", "come"] = "tent"
    batch_size: int = 64
    lr: float | Literal["auto"] = "auto"  # from public quantities: nothing can be tuned on a private stream
    momentum: float = 0.9
    clip: float = 1.0
    scheme: str = "norms"
    noise: Literal["independent", "correlated"] = "independent"
    filters: Literal["none", "per-sample"] = "none"
    contributions: int = 1
    separation: int = 1
    every: int = 20  # a checkpoint each so many batches
    size: int | None = None  # the public number of rows: correlated noise needs it

    def __post_init__(self) -> None:
        super().__post_init__()
        rate = None if self.lr == "auto" else self.lr
        check_positive(batch_size=self.batch_size, lr=rate, clip=self.clip, contributions=self.contributions)
        check_positive(every=self.every)
        if self.noise == "correlated" and self.size is None:
            raise ValueError("correlated noise needs size, the public number of rows of the stream.")


@dataclass(frozen=True, kw_only=True)
class Calibrate(Spending):
    """Recalibration from several private sources; a unit is in one source only."""

    data: Images | Texts | Embedded | Outputs
    sources: tuple[str, ...]
    method: Literal["signed-gap", "acc-t", "nll-t", "ece-t", "histogram"] = "signed-gap"
    low: float = 0.5  # the temperatures that are searched
    high: float = 5.0
    cautious: bool = True
    sizes: tuple[int, ...] | None = None  # the public numbers of units of the sources

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.sources or len(set(self.sources)) < len(self.sources):
            raise ValueError("sources are one or more different names.")
        if self.sizes is not None and len(self.sizes) != len(self.sources):
            raise ValueError("sizes has one number for each of the sources.")
        if not 0.01 <= self.low < self.high <= 100:
            raise ValueError(f"temperatures go from low to high within 0.01 and 100; got {self.low:g}, {self.high:g}.")


@dataclass(frozen=True, kw_only=True)
class Audit:
    """An attack on every kind of release that was charged, on synthetic inputs; reads no data, charges nothing."""

    trials: int = 20_000

    def __post_init__(self) -> None:
        if self.trials < 1000:
            raise ValueError(f"an audit of fewer than 1,000 trials finds nothing; got {self.trials}.")


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A whole recipe."""

    budget: Budget
    title: str = ""
    model: Model | None = None
    data: Data | None = None
    pretrain: Pretrain | None = None
    tune: Tune | None = None
    finetune: Finetune | None = None
    adapt: Adapt | None = None
    calibrate: Calibrate | None = None
    audit: Audit | None = None
    home: Path = field(default=Path(), init=False, compare=False)  # where paths begin

    def __post_init__(self) -> None:
        if self.tune is None and self.finetune is None and self.adapt is None and self.calibrate is None:
            raise ValueError("a pipeline has at least one of [tune], [finetune], [adapt] and [calibrate].")
        if self.tune is not None and self.finetune is None:
            raise ValueError("[tune] searches for what [finetune] trains with: add [finetune].")
        if self.finetune is not None and self.data is None:
            raise ValueError("[finetune] needs [data], the private data to train on.")
        if self.tune is not None and self.finetune is not None:
            self._check_search(self.finetune, alone=self.adapt is None and self.calibrate is None)
        alone = self.calibrate is not None and isinstance(self.calibrate.data, Outputs)
        if self.model is None and not (alone and self.finetune is None and self.adapt is None):
            raise ValueError("[model] is missing: name the model.")
        if alone and self.model is not None:
            raise ValueError("[calibrate] takes outputs from disk and needs no [model]: leave one of them out.")
        if self.adapt is not None and self.budget.neighbours is Neighbours.ADD_REMOVE:
            raise ValueError('[adapt] needs neighbours = "zero-out" or "replace-one": a stream has fixed places.')
        if self.finetune is not None and self.budget.neighbours is Neighbours.ADD_REMOVE and self.budget.size is None:
            raise ValueError("under add-remove the number of units is private: say budget.size, the public number.")

    @staticmethod
    def _check_search(finetune: Finetune, *, alone: bool) -> None:
        if finetune.optimizer != "dpgd" and not alone:
            raise ValueError(
                f"the trials of [tune] with {finetune.optimizer} compose only as a list that is fixed before the first "
                "of them, and later stages depend on what it found: take dpgd, or run [adapt] and [calibrate] from a "
                "recipe of their own."
            )
        if finetune.epsilon is not None or finetune.share is not None:
            raise ValueError("[tune] pays for the search and its last run: put epsilon or share there.")

    def path(self, path: Path) -> Path:
        """A path of the recipe as one that can be opened."""
        return path if path.is_absolute() else self.home / path
