"""A cell of a study: one arm along one stream, from nothing to its accuracies."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from studies import loaders
from studies.dp_tta.arms import Arm
from tacit import CuratorEvent, StepEvent
from tacit.adapt import Adapter, Fisher, fisher, follow
from tacit.data import Stream, shifts, streams
from tacit.data.shifts import Strengths
from tacit.gradients import ClippedSum
from tacit.models import ConvNet, embedded, load
from tacit.privacy import Ledger

Setting = Literal["episodic", "continual", "mixed"]
FORMAT = 3  # of a cell's file; raised when the same recipe would give other numbers


@dataclass(frozen=True, kw_only=True)
class Data:
    """Which images, under which shifts. `images` is a split of Fashion-MNIST or an .npz with `images` and `labels`."""

    images: str = "unseen"
    anchor: str = "seen"  # public images for EATA's anchor
    shifts: Literal["test", "extra", "clean"] = "test"
    only: tuple[str, ...] = ()  # some shifts by their names, instead of all
    severity: int = 3
    per_shift: int = 1000
    strengths: Strengths = "clothes"
    part: Literal["all", "choose", "evaluate"] = (
        "all"  # every third image is to choose constants on, the rest to report
    )
    reuse: bool = False  # an image may come under several shifts: each occurrence stands for another person

    def rows(self) -> tuple[Tensor, Tensor]:
        """Images and labels of the part."""
        images, labels = loaders.images(self.images)
        if self.part == "all":
            return images, labels
        chosen = (torch.arange(len(images)) % 3 == 0) == (self.part == "choose")
        return images[chosen], labels[chosen]


@dataclass(frozen=True, kw_only=True)
class Model:
    """The embedded model, a convolutional net from a file of weights, or `net = "timm:NAME"` with such a file."""

    weights: str = "embedded"
    net: str = "convnet"
    widths: tuple[int, ...] = (32, 64)
    depths: tuple[int, ...] = (4, 4)
    channels: int = 1
    classes: int = 10

    def load(self) -> nn.Module:
        if self.weights == "embedded":
            return embedded()
        model: nn.Module
        if self.net.startswith("timm:"):
            model = load(self.net).model
        else:
            model = ConvNet(
                channels=self.channels,
                classes=self.classes,
                widths=self.widths,
                depths=self.depths,
                mean=(0.0,) * self.channels,
                std=(1.0,) * self.channels,
            )
        try:
            model.load_state_dict(load_file(self.weights))
        except FileNotFoundError:
            raise ValueError(f"There is no file of weights {self.weights}.") from None
        except (SafetensorError, RuntimeError) as error:
            raise ValueError(f"{self.weights} does not fit this net: {str(error).splitlines()[0]}") from None
        return (Normalised(model) if self.net.startswith("timm:") else model).eval()


class Normalised(nn.Module):
    """A timm model that takes images in [0, 1]: mean and deviation are those of its own configuration."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model
        config: Any = model.pretrained_cfg
        self.register_buffer("mean", torch.tensor(config["mean"]).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(config["std"]).view(-1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.inner((images - self.mean) / self.std)
        return logits


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One arm, once."""

    arm: Arm
    setting: Setting
    seed: int
    data: Data
    model: Model
    seeded_noise: bool
    ledger: Path | None = field(default=None, compare=False)  # where it is kept
    format: int = FORMAT


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a cell came to. `touched` is the share of rows clipped or filtered, of data declared public.

    `hits` has a digit per image, by shift: 1 where it was predicted right.
    """

    accuracy: dict[str, float]
    seconds: float
    steps: int
    touched: float | None
    epsilon: float | None
    promise: str
    hits: dict[str, str] = field(default_factory=dict)  # empty in cells that were kept before it was written

    @property
    def mean(self) -> float:
        return statistics.fmean(self.accuracy.values())


def compute(cell: Cell) -> dict[str, Any]:
    """Run one cell from nothing; its ledger is in memory unless it is to be kept."""
    ledger = cell.ledger
    stream = _stream(cell.data, cell.setting, cell.seed)
    model, arm = cell.model.load(), cell.arm
    touched = _Touched()
    predictor: nn.Module | Adapter = model
    if arm.method != "source":
        episodes = len(stream.shifts) if cell.setting == "episodic" else 1
        if ledger is not None:
            ledger.unlink(missing_ok=True)  # of a cell that was stopped half way: this one starts from nothing
        predictor = arm.adapter(
            model,
            anchor=_anchor(cell.model, cell.data) if arm.anchored else None,
            classes=1000 if cell.model.net.startswith("timm:") else cell.model.classes,
            horizon=stream.steps(arm.batch_size) // episodes,
            ledger=Ledger(ledger or "sqlite://") if arm.private else None,
            seed=cell.seed if cell.seeded_noise else None,
            curator=touched if arm.form == "clip" else None,
        )
    scores = follow(predictor, stream, batch_size=arm.batch_size, public=True)
    guarantee = predictor.guarantee if isinstance(predictor, Adapter) else None
    return asdict(
        Outcome(
            accuracy=scores.accuracy,
            seconds=scores.seconds,
            steps=scores.steps,
            touched=touched.share,
            epsilon=None if guarantee is None else guarantee.epsilon,
            promise="not private" if guarantee is None else str(guarantee),
            hits={name: "".join(str(int(hit)) for hit in found) for name, found in scores.hits.items()},
        )
    )


class _Touched:
    """The share of rows that were scaled down or left out; a curator's view, here of public data."""

    def __init__(self) -> None:
        self._rows = self._touched = 0

    def __call__(self, event: CuratorEvent) -> None:
        if not isinstance(event, StepEvent) or not isinstance(event.clipped_sum, ClippedSum):
            return
        norms, factors = event.clipped_sum.private.norms, event.clipped_sum.private.factors
        self._rows += len(norms)
        self._touched += int(((factors < 1) | (norms == 0)).sum())

    @property
    def share(self) -> float | None:
        return self._touched / self._rows if self._rows else None


@lru_cache(maxsize=4)
def _stream(data: Data, setting: Setting, seed: int) -> Stream:
    images, labels = data.rows()
    names = data.only or {"test": shifts.TEST, "extra": shifts.EXTRA, "clean": (streams.CLEAN,)}[data.shifts]
    return streams.corrupted(
        images,
        labels,
        shifts=names,
        severity=data.severity,
        setting=setting,
        per_shift=data.per_shift,
        seed=seed,
        strengths=data.strengths,
        reuse=data.reuse,
    )


@lru_cache(maxsize=4)
def _anchor(model: Model, data: Data) -> Fisher:
    """From 500 clean images; of a file with parts, from those that constants are chosen on."""
    part: Literal["all", "choose"] = "all" if data.part == "all" else "choose"
    images = replace(data, images=data.anchor, part=part).rows()[0][:500]
    return fisher(model.load(), images.float() / 255, public=True)
