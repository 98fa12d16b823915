"""A study of private fine-tuning: arms, tuned on a public split, then run on private data over several seeds."""

from __future__ import annotations

import math
import statistics
import time
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from studies import store
from studies.finetune.arms import Arm, Choice, Grid
from studies.finetune.data import Data, Split, make_videos, public_videos, videos_of
from studies.multi_clip.head import TemporalHead
from studies.multi_clip.motions import Motions
from studies.render import spread
from tacit.finetune import Backbone, Evaluation, cache_blocks, extract, fit
from tacit.models import VideoNet, embedded, load_net, save_net, text
from tacit.pretrain import Recipe
from tacit.pretrain import fit as pretrain
from tacit.privacy import Ledger
from tacit.recipes import Progress
from tacit.report import Spread

AT_ONCE = 500  # rows that are tried
FORMAT = 2  # of a cell's file; raised when the same recipe would give other numbers


@dataclass(frozen=True, kw_only=True)
class Pretraining:
    """A video net learns public motions first."""

    videos: int = 2000
    motions: Motions = field(default_factory=Motions)
    train: Recipe = field(default_factory=lambda: Recipe(epochs=10, lr=2e-3, augment=None))


@dataclass(frozen=True, kw_only=True)
class Net:
    """A pretrained model: a file of `models.saved`, "embedded", a model for texts, a linear one, or one to pretrain."""

    weights: str = ""
    text: str = ""  # as `models.text` takes it
    features: int = 0  # of a linear model, or of each moment
    moments: int = 0  # of a clip's features: a small net over them instead of a linear model
    file: Path | None = field(default=None, compare=False)  # of what was pretrained
    pretraining: Pretraining | None = None
    widths: tuple[int, ...] = (32, 64)
    depths: tuple[int, ...] = (2, 2)

    def load(self, data: Data) -> nn.Module:
        if self.moments:
            torch.manual_seed(0)  # the same start for every seed
            return TemporalHead(moments=self.moments, features=self.features, classes=data.classes)
        if self.features:
            return nn.Sequential(nn.Identity(), nn.Linear(self.features, data.classes))
        if self.text:
            return text(self.text, task="next-token" if data.kind == "messages" else "classes", classes=data.classes)[0]
        if self.weights == "embedded":
            return embedded()
        return load_net(self.file or self.weights)


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is compared, on which data. Nothing of it is private: it is a simulation on data declared public."""

    title: str
    public: bool
    data: Data
    models: dict[str, Net]
    arms: tuple[Grid, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    tuning_seeds: tuple[int, ...] = (100,)
    delta: float = 1e-5
    seeded_noise: bool = False
    microbatch: int | None = field(default=None, compare=False)
    workers: int = field(default=2, compare=False)

    def __post_init__(self) -> None:
        if not self.public:
            raise ValueError("a study prints exact scores of its data: declare public = true or do not run it")
        unknown = {name for grid in self.arms for name in grid.model} - set(self.models)
        if unknown:
            raise ValueError(f"there is no [models.{sorted(unknown)[0]}]; there are {', '.join(self.models)}")

    def choices(self) -> list[Choice]:
        return [choice for grid in self.arms for choice in grid.arms()]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run: an arm, trained on a split of the data, tried on another."""

    arm: Arm
    split: Literal["private", "tuning"]
    seed: int
    data: Data
    net: Net
    delta: float
    seeded_noise: bool
    format: int = FORMAT


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run came to: scores of data declared public."""

    scores: dict[str, float]
    shifted: dict[str, float]
    trained: int
    noise_multiplier: float
    epsilon: float
    unit_epsilon: float  # of the video, where clips were protected
    seconds: float
    promise: str


@dataclass(frozen=True, kw_only=True)
class Result:
    """The chosen candidate of every arm and what it came to over the seeds."""

    study: Study
    chosen: list[Arm]
    outcomes: dict[Cell, Outcome]

    @property
    def measure(self) -> str:
        return self.study.data.measure

    def named(self, arm: Arm) -> str:
        """What a table calls an arm; with its rule where another one differs in it alone."""
        twins = {(one.name, one.rule) for one in self.chosen if one.name == arm.name}
        return arm.name if len(twins) == 1 else f"{arm.name}, {'Adam' if arm.rule == 'adam' else 'SGD'}"

    def of(self, arm: Arm) -> list[Outcome]:
        """Over the seeds."""
        return [outcome for cell, outcome in self.outcomes.items() if cell.arm == arm and cell.split == "private"]

    def score(self, arm: Arm, measure: str | None = None) -> Spread | None:
        """Mean and standard deviation over seeds; None if it was not run."""
        return spread([outcome.scores[measure or self.measure] for outcome in self.of(arm)])

    def by_seed(self, arm: Arm) -> dict[int, float]:
        """The score of each seed: runs of one seed draw the same units and the same noise."""
        cells = self.outcomes.items()
        return {c.seed: o.scores[self.measure] for c, o in cells if c.arm == arm and c.split == "private"}

    def shifted(self, arm: Arm) -> Spread | None:
        """The same under the shifts, averaged over these."""
        return spread([statistics.fmean(o.shifted.values()) for o in self.of(arm) if o.shifted])


def run(study: Study, *, out: Path, progress: Progress) -> Result:
    """Make what is not there yet, tune, then run every arm's best candidate with every seed."""
    study = _ready(study, out, progress)
    folder = out / "cells"
    choices = study.choices()
    tried = [cell for choice in choices for cell in _trials(study, choice)]
    common = {"folder": folder, "workers": study.workers, "progress": progress, "name": _name}
    tuned = {cell: Outcome(**o) for cell, o in store.outcomes(tried, compute, **common).items()}  # type: ignore[arg-type]
    chosen = [_best(choice, tuned, study.data) for choice in choices]
    final = [_cell(study, arm, "private", seed) for arm in chosen for seed in study.seeds]
    found = {cell: Outcome(**o) for cell, o in store.outcomes(final, compute, **common).items()}  # type: ignore[arg-type]
    return Result(study=study, chosen=list(dict.fromkeys(chosen)), outcomes=tuned | found)


def read(study: Study, out: Path) -> Result:
    """What an earlier run left; an arm whose candidates were not all tried is left out."""
    study = replace(study, data=replace(study.data, folder=out / "videos"), models=_weighted(study, out))
    chosen: list[Arm] = []
    outcomes: dict[Cell, Outcome] = {}
    for choice in study.choices():
        cells = _trials(study, choice)
        tuned = {c: Outcome(**o) for c, o in store.known(cells, out / "cells").items()}
        if len(tuned) < len(cells):
            continue
        best = _best(choice, tuned, study.data)
        final = [_cell(study, best, "private", seed) for seed in study.seeds]
        found = {c: Outcome(**o) for c, o in store.known(final, out / "cells").items()}
        if found:
            chosen.append(best)
            outcomes |= tuned | found
    return Result(study=study, chosen=list(dict.fromkeys(chosen)), outcomes=outcomes)


def compute(cell: Cell) -> dict[str, Any]:
    """One run from nothing, with a ledger of its own in memory."""
    torch.manual_seed(cell.seed)  # adapters start at random
    arm, data = cell.arm, cell.data
    held_out: Split = "test" if cell.split == "private" else "held_out"
    if arm.scheme == "linear" and data.kind == "motions":  # every cell has the same features: computed once
        records = _features(cell.net, data, cell.split, arm)
        tried = _features(cell.net, data, held_out, arm)
        model: nn.Module = nn.Sequential(nn.Identity(), nn.Linear(records.inputs.shape[1], data.classes))
    elif arm.scheme == "linear" and (data.kind == "texts" or (data.kind == "images" and not data.shifts)):
        records, tried = (_row_features(cell.net, data, split) for split in (cell.split, held_out))
        model = nn.Sequential(nn.Identity(), nn.Linear(records.inputs.shape[1], data.classes))
    elif arm.last_blocks:
        cached = partial(_blocks, cell.net, data, last_blocks=arm.last_blocks)
        records, tried, model = cached(cell.split), cached(held_out), _model(cell.net, data)
    else:
        records, tried, model = data.records(cell.split, arm), data.records(held_out, arm), _model(cell.net, data)
    start = time.perf_counter()
    ledger = Ledger("sqlite://")
    fitted = fit(
        model,
        records,
        optimizer=arm.optimize(),
        epsilon=arm.epsilon,
        delta=cell.delta,
        scheme=arm.scheme,
        init=arm.init,
        last_blocks=arm.last_blocks or None,
        neighbours="zero-out" if arm.optimizer == "dpftrl" else "add-remove",
        head="keep" if data.kind == "messages" else "new",
        size=len(records),
        task=data.task,
        ledger=ledger,
        evaluate=Evaluation(data=tried, public=True),
        seed=cell.seed if cell.seeded_noise or math.isinf(arm.epsilon) else None,
    )
    seconds = time.perf_counter() - start
    group = getattr(records, "largest_group", 1)
    shifted = {}
    if cell.split == "private":
        for name, (inputs, labels) in data.under_shifts().items():
            with torch.inference_mode():
                outputs = torch.cat([fitted.model(part) for part in torch.split(inputs, AT_ONCE)])
            shifted[name] = data.task.scores(data.task.probs(outputs), labels)[data.task.measure]
    return asdict(
        Outcome(
            scores=fitted.scores,
            shifted=shifted,
            trained=fitted.trained,
            noise_multiplier=fitted.noise_multiplier,
            epsilon=fitted.guarantee.epsilon,
            unit_epsilon=fitted.guarantee.group(group).epsilon if group > 1 else fitted.guarantee.epsilon,
            seconds=seconds,
            promise=str(fitted.guarantee),
        )
    )


def _trials(study: Study, choice: Choice) -> list[Cell]:
    """What must be run to choose; nothing if there is no choice."""
    if len(choice.arms) == 1:
        return []
    return [_cell(study, arm, "tuning", seed) for arm in choice.trials for seed in study.tuning_seeds]


def _best(choice: Choice, tuned: dict[Cell, Outcome], data: Data) -> Arm:
    """The candidate with the best mean score on the held-out public split; the first of equals."""
    if len(choice.arms) == 1:
        return choice.arms[0]

    def mean(trial: Arm) -> float:
        found = [o.scores[data.measure] for c, o in tuned.items() if c.arm == trial and c.split == "tuning"]
        return statistics.fmean(found)

    means = [mean(trial) for trial in choice.trials]
    best = min(means) if data.measure == "perplexity" else max(means)
    return choice.arms[means.index(best)]


def _ready(study: Study, out: Path, progress: Progress) -> Study:
    """Videos on disk and nets pretrained; what is there already is used."""
    if study.data.kind == "motions":
        progress("writing videos", 0, 1)
        make_videos(study.data, out / "videos")
    for name, net in study.models.items():
        if net.pretraining is not None and not _weights(out, name).exists():
            _pretrain(study, net, net.pretraining, _weights(out, name), progress)
    return replace(study, data=replace(study.data, folder=out / "videos"), models=_weighted(study, out))


def _weighted(study: Study, out: Path) -> dict[str, Net]:
    return {
        name: net if net.pretraining is None else replace(net, file=_weights(out, name))
        for name, net in study.models.items()
    }


def _weights(out: Path, name: str) -> Path:
    return out / f"{name}.safetensors"


def _pretrain(study: Study, net: Net, how: Pretraining, path: Path, progress: Progress) -> None:
    videos = public_videos(study.data, path.parent / "videos", how.videos, how.motions)
    rows = videos.rows(torch.arange(len(videos)), None)
    size = how.motions.size
    arguments: dict[str, Any] = {
        "classes": len(videos.classes),
        "channels": 1,
        "frames": study.data.frames,
        "size": size,
        "widths": net.widths,
        "depths": net.depths,
    }
    torch.manual_seed(how.train.seed)
    model = VideoNet(**arguments)
    pretrain(model, (rows.inputs, rows.labels), public=True, progress=progress, **how.train.options())
    save_net(model, path, **arguments)


@lru_cache(maxsize=4)
def _loaded(net: Net, data: Data) -> nn.Module:
    return net.load(data)


def _features(net: Net, data: Data, split: Split, arm: Arm) -> Any:
    training = split in ("private", "tuning")
    return _clip_features(net, data, split, arm.clips if training else data.tried)


@lru_cache(maxsize=16)
def _clip_features(net: Net, data: Data, split: Split, clips: int) -> Any:
    """The clips of a split with the net's features in their place: what `fit` does by itself, kept between cells."""
    table = videos_of(data, split, clips).as_table(training=split in ("private", "tuning"))
    backbone = Backbone(_model(net, data).eval())
    with torch.inference_mode():
        parts = [backbone(table.read(part)) for part in torch.split(torch.arange(len(table.labels())), AT_ONCE)]
    return table.with_inputs(torch.cat(parts))


@lru_cache(maxsize=4)
def _row_features(net: Net, data: Data, split: Split) -> Any:
    """Texts or images with the net's features in their place: what `fit` does by itself, kept between cells."""
    records = data.plain(split)
    return records.with_inputs(extract(Backbone(_model(net, data).eval()), records))


@lru_cache(maxsize=4)
def _blocks(net: Net, data: Data, split: Split, *, last_blocks: int) -> Any:
    """What comes into the trained blocks, kept between cells."""
    return cache_blocks(_model(net, data), data.plain(split), last_blocks=last_blocks)


def _model(net: Net, data: Data) -> nn.Module:
    return deepcopy(_loaded(net, data))


def _cell(study: Study, arm: Arm, split: Literal["private", "tuning"], seed: int) -> Cell:
    return Cell(
        arm=arm,
        split=split,
        seed=seed,
        data=study.data,
        net=study.models[arm.model],
        delta=study.delta,
        seeded_noise=study.seeded_noise,
    )


def _name(cell: Cell) -> str:
    return f"{cell.arm.name}, epsilon {cell.arm.epsilon:g}" + (" (tuning)" if cell.split == "tuning" else "")
