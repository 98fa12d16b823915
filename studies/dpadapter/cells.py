"""The cells of a study of pretraining: one public training, or one private fine-tuning of what it left."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from studies.dpadapter.arms import Downstream, Upstream
from studies.dpadapter.data import Data
from studies.store import replacing
from tacit.finetune import Evaluation
from tacit.finetune import fit as finetune
from tacit.models import ConvNet, ResNet, load_net, save_net
from tacit.pretrain import Noisy, Rho, accuracy, fit, rho, under_noise
from tacit.privacy import Ledger
from tacit.recipes import fingerprint

FORMAT = 2  # of a cell's file; raised when the same recipe would give other numbers


@dataclass(frozen=True, kw_only=True)
class Net:
    """A small net without batch statistics; its pixels are normalised inside, by what public rows say."""

    kind: Literal["convnet", "resnet"] = "convnet"
    widths: tuple[int, ...] = (8, 32, 64)
    depths: tuple[int, ...] = (0, 1, 2)

    def make(self, data: Data, seed: int) -> tuple[nn.Module, dict[str, Any]]:
        """A fresh net, and what it was made with."""
        images, _ = data.rows("public")
        options: dict[str, Any] = {
            "channels": images.shape[1],
            "classes": data.public_labels,
            "widths": self.widths,
            "depths": self.depths,
            "mean": images.mean((0, 2, 3)).tolist(),
            "std": images.std((0, 2, 3)).tolist(),
        }
        torch.manual_seed(seed)
        return (ConvNet if self.kind == "convnet" else ResNet)(**options), options


@dataclass(frozen=True, kw_only=True)
class Noise:
    """The noise that nets are tried under: on all parameters, and relative to each parameter tensor; draws of it."""

    stds: tuple[float, ...] = (0.01, 0.02, 0.05, 0.1, 0.2, 0.31622776601683794)
    relative: tuple[float, ...] = (0.1, 0.2, 0.5)
    draws: int = 5
    after: float = 0.1  # the std under which fine-tuned nets are tried, too
    rows: int = 500  # tried
    rho_rows: int = 8

    def __post_init__(self) -> None:
        if self.after not in self.stds:
            raise ValueError("after is one of the stds, so that before and after can be compared")


@dataclass(frozen=True, kw_only=True)
class Before:
    """A cell: one pretraining."""

    upstream: Upstream
    seed: int
    data: Data
    net: Net
    noise: Noise
    folder: Path = field(default=Path(), compare=False)  # where weights are
    format: int = FORMAT


@dataclass(frozen=True, kw_only=True)
class After:
    """A cell: one private fine-tuning of what a pretraining left."""

    before: Before
    downstream: Downstream
    split: Literal["private", "tuning"]
    delta: float
    seeded_noise: bool
    format: int = FORMAT


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """What a pretraining came to, on public test rows; accuracies from 0 to 1."""

    clean: float
    noisy: tuple[Noisy, ...]
    rho: Rho
    parameters: int
    passes: int
    seconds: float

    def under(self, std: float, *, relative: bool = False) -> float:
        return next(one.mean for one in self.noisy if one.std == std and one.relative == relative)


@dataclass(frozen=True, kw_only=True)
class Finetuned:
    """What a private fine-tuning came to, on test rows declared public; accuracies from 0 to 1."""

    accuracy: float
    robust: float  # under the noise `after`
    noise_multiplier: float
    epsilon: float
    seconds: float
    promise: str


def compute(cell: Before | After) -> dict[str, Any]:
    """One cell from nothing but the weights that it starts from."""
    return asdict(_pretrain(cell) if isinstance(cell, Before) else _finetune(cell))


def _pretrain(cell: Before) -> Pretrained:
    start = time.perf_counter()
    model = weights(cell)
    seconds = time.perf_counter() - start
    images, labels = cell.data.rows("public_test")
    some = images[: cell.noise.rows], labels[: cell.noise.rows]
    noises = [(std, False) for std in cell.noise.stds] + [(std, True) for std in cell.noise.relative]
    draws = cell.noise.draws
    return Pretrained(
        clean=accuracy(model, (images, labels)),
        noisy=tuple(under_noise(model, some, std, relative=relative, draws=draws) for std, relative in noises),
        rho=rho(model, some, rows=cell.noise.rho_rows, directions=1),
        parameters=sum(p.numel() for p in model.parameters()),
        passes=cell.upstream.passes(len(cell.data.rows("public")[1])),
        seconds=seconds,
    )


def weights(cell: Before) -> nn.Module:
    """The pretrained net: from its file, or trained now and kept there."""
    path = cell.folder / f"{fingerprint(replace(cell, noise=Noise()))}.safetensors"  # noise comes later
    if path.exists():
        return load_net(path)
    model, options = cell.net.make(cell.data, cell.seed)
    how = cell.upstream
    if how.perturb is not None:
        training = vars(how.train) | {"seed": cell.seed}
        fit(model, cell.data.rows("public"), public=True, **vars(how.perturb), **training)
    cell.folder.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        save_net(model, partial, **options)
    return model.eval()


def _finetune(cell: After) -> Finetuned:
    data, seed, noise = cell.before.data, cell.before.seed, cell.before.noise
    model = weights(cell.before)
    images, labels = data.rows("public")
    count = cell.downstream.public_rows
    public = images[:count], labels[:count] % data.private_labels
    rows, tried = data.rows(cell.split), data.rows("test" if cell.split == "private" else "held_out")
    start = time.perf_counter()
    fitted = finetune(
        model,
        rows,
        optimizer=cell.downstream.optimize(public),
        epsilon=cell.downstream.epsilon,
        delta=cell.delta,
        scheme=cell.downstream.scheme,
        classes=data.private_labels,
        size=len(rows[1]),
        ledger=Ledger("sqlite://"),
        evaluate=Evaluation(data=tried, public=True),
        seed=seed if cell.seeded_noise or math.isinf(cell.downstream.epsilon) else None,
    )
    seconds = time.perf_counter() - start
    some = tried[0][: noise.rows], tried[1][: noise.rows]
    return Finetuned(
        accuracy=fitted.scores["accuracy"] / 100,
        robust=under_noise(fitted.model, some, noise.after, draws=noise.draws).mean,
        noise_multiplier=fitted.noise_multiplier,
        epsilon=fitted.guarantee.epsilon,
        seconds=seconds,
        promise=str(fitted.guarantee),
    )


def pretrained(found: dict[str, Any]) -> Pretrained:
    """An outcome of a `Before` as it was before it became a file."""
    noisy = tuple(Noisy(**{**one, "accuracies": tuple(one["accuracies"])}) for one in found["noisy"])
    return Pretrained(**{**found, "noisy": noisy, "rho": Rho(**found["rho"])})


def called(cell: Before | After) -> str:
    """What a bar calls it."""
    if isinstance(cell, Before):
        how = cell.upstream.perturb
        return "pretraining " + ("from scratch" if how is None else how.method)
    way = cell.downstream
    return f"{way.optimizer}, epsilon {way.epsilon:g}" + (" (tuning)" if cell.split == "tuning" else "")
