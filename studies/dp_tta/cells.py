"""A cell of a study: one arm along one stream, from nothing to its accuracies."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError
from safetensors.torch import load_file

from studies import loaders
from studies.dp_tta.arms import Arm
from tacit.adapt import Adapter, Fisher, fisher, follow
from tacit.data import Stream, shifts, streams
from tacit.gradients import ClippedSum
from tacit.models import ConvNet, embedded
from tacit.privacy import Ledger

Setting = Literal["episodic", "continual", "mixed"]
FORMAT = 1  # of a cell's file; raised when the same recipe would give other numbers


@dataclass(frozen=True, kw_only=True)
class Data:
    """Which images, under which shifts. `images` is a split of Fashion-MNIST or an .npz with `images` and `labels`."""

    images: str = "unseen"
    anchor: str = "seen"  # public images for EATA's anchor
    shifts: Literal["test", "extra", "clean"] = "test"
    severity: int = 3
    per_shift: int = 1000


@dataclass(frozen=True, kw_only=True)
class Model:
    """The embedded model, or a convolutional net from a file of weights."""

    weights: str = "embedded"
    widths: tuple[int, ...] = (32, 64)
    depths: tuple[int, ...] = (4, 4)
    channels: int = 1
    classes: int = 10

    def load(self) -> ConvNet:
        if self.weights == "embedded":
            return embedded()
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
        return model.eval()


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
    """What a cell came to. `touched` is the share of rows clipped or filtered, of data declared public."""

    accuracy: dict[str, float]
    seconds: float
    steps: int
    touched: float | None
    epsilon: float | None
    promise: str

    @property
    def mean(self) -> float:
        return statistics.fmean(self.accuracy.values())


def compute(cell: Cell) -> dict[str, Any]:
    """Run one cell from nothing; its ledger is in memory unless it is to be kept."""
    ledger = cell.ledger
    stream = _stream(cell.data, cell.setting, cell.seed)
    model, arm = cell.model.load(), cell.arm
    touched = _Touched()
    predictor: ConvNet | Adapter = model
    if arm.method != "source":
        episodes = len(stream.shifts) if cell.setting == "episodic" else 1
        if ledger is not None:
            ledger.unlink(missing_ok=True)  # of a cell that was stopped half way: this one starts from nothing
        predictor = arm.adapter(
            model,
            anchor=_anchor(cell.model, cell.data.anchor) if arm.anchored else None,
            classes=model.head.out_features,
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
        )
    )


class _Touched:
    """The share of rows that were scaled down or left out; a curator's view, here of public data."""

    def __init__(self) -> None:
        self._rows = self._touched = 0

    def __call__(self, total: ClippedSum) -> None:
        norms, factors = total.private.norms, total.private.factors
        self._rows += len(norms)
        self._touched += int(((factors < 1) | (norms == 0)).sum())

    @property
    def share(self) -> float | None:
        return self._touched / self._rows if self._rows else None


@lru_cache(maxsize=4)
def _stream(data: Data, setting: Setting, seed: int) -> Stream:
    images, labels = loaders.images(data.images)
    names = {"test": shifts.TEST, "extra": shifts.EXTRA, "clean": (streams.CLEAN,)}[data.shifts]
    return streams.corrupted(
        images,
        labels,
        shifts=names,
        severity=data.severity,
        setting=setting,
        per_shift=data.per_shift,
        seed=seed,
    )


@lru_cache(maxsize=4)
def _anchor(model: Model, name: str) -> Fisher:
    images = loaders.images(name)[0][:500]
    return fisher(model.load(), images.float() / 255, public=True)
