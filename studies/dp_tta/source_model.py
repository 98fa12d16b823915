"""Training a source model from a recipe: how the embedded one was made, and how to make another."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from studies import loaders
from studies.findings import Findings
from tacit.models import ConvNet
from tacit.pretrain import Perturbation, Recipe, accuracy, fit
from tacit.recipes import Progress
from tacit.report import Column, Section, Table


@dataclass(frozen=True, kw_only=True)
class SourceModel:
    """A convolutional net, the public images it learns from, and those it is tried on.

    `images` and `test` are splits of Fashion-MNIST or files .npz with `images` and `labels`. `mean` and `std` of the
    pixels, per channel, are used inside the net; by default they are those of `images`.
    """

    title: str
    public: bool
    images: str = "seen"
    test: str = "test"
    widths: tuple[int, ...] = (32, 64)
    depths: tuple[int, ...] = (4, 4)
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    train: Recipe = field(default_factory=Recipe)
    perturb: Perturbation = field(default_factory=Perturbation)  # standard training by default
    threads: int = field(default=2, compare=False)

    def __post_init__(self) -> None:
        if not self.public:
            raise ValueError("a source model protects nobody in its data: declare public = true or do not train it")


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Where the weights are, and how good the model is on images that it has not seen."""

    config: SourceModel
    weights: Path
    parameters: int
    accuracy: float  # in percent, of public data


def run(config: SourceModel, *, out: Path, progress: Progress) -> Trained:
    """Train, save the weights to `out/source.safetensors` and try them."""
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.train.seed)
    images, labels = _scaled(config.images)
    model = ConvNet(
        channels=images.shape[1],
        classes=int(labels.max()) + 1,
        widths=config.widths,
        depths=config.depths,
        mean=config.mean or images.mean((0, 2, 3)).tolist(),
        std=config.std or images.std((0, 2, 3)).tolist(),
    )

    fit(
        model,
        (images, labels),
        public=config.public,
        progress=progress,
        **vars(config.perturb),
        **config.train.options(),
    )
    out.mkdir(parents=True, exist_ok=True)
    weights = out / "source.safetensors"
    save_file(model.state_dict(), weights)
    return Trained(
        config=config,
        weights=weights,
        parameters=sum(p.numel() for p in model.parameters()),
        accuracy=100 * accuracy(model, _scaled(config.test)),
    )


def render(trained: Trained) -> Findings:
    """What it came to, for people."""
    config = trained.config
    rows = [(config.images, trained.parameters, config.train.epochs, trained.accuracy)]
    columns = ("images", Column("parameters", ",d"), "epochs", Column(f"accuracy on {config.test} (%)", ".2f"))
    table = Table("Source model", columns, rows, note="Trained and tried on data declared public.")
    return Findings(
        title=config.title,
        lead=f"The weights are {trained.weights.name}.",
        sections=[Section("Training", tables=[table])],
        summary=[table],
        facts={"accuracy": trained.accuracy, "parameters": trained.parameters, "weights": trained.weights.name},
        not_covered=["everybody whose images the model was trained on: they were declared public"],
    )


def _scaled(name: str) -> tuple[Tensor, Tensor]:
    images, labels = loaders.images(name)
    return images.float() / 255, labels
