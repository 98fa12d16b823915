"""Every recipe of the laboratory runs, with everything in it that has a size made tiny, and is read back."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from studies import runner
from studies.tables import tables
from tacit.models import ConvNet, ResNet, ViT, save_net

sys.path.insert(0, str(Path(__file__).parent.parent / "data"))
import words

RECIPES = runner.listed()
CLASSES, FEATURES = 10, 8


def quiet(what: str, done: int, total: int, *, spent: tuple[float, float] | None = None) -> None:
    del what, done, total, spent


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small files of every kind that recipes name."""
    home = tmp_path_factory.mktemp("files")
    random = np.random.default_rng(0)
    for channels, side in ((1, 28), (3, 32)):
        images = random.integers(0, 256, (120, channels, side, side), dtype=np.uint8)
        np.savez(home / f"images-{channels}.npz", images=images, labels=np.arange(120) % CLASSES)
    parts = {}
    for part, rows in (("train", 2000), ("test", 100)):
        labels = np.arange(rows) % CLASSES
        parts[f"{part}_labels"] = labels
        noise = random.normal(size=(rows, FEATURES)).astype(np.float32)
        parts[f"{part}_features"] = noise + np.eye(CLASSES, FEATURES, dtype=np.float32)[labels]
    np.savez(home / "features.npz", **parts)
    several = random.integers(0, 2, (2000, CLASSES))
    np.savez(home / "labels.npz", **parts | {"train_labels": several, "test_labels": several[:100]})
    np.savez(home / "pairs.npz", **{name: found % 2 if "labels" in name else found for name, found in parts.items()})
    clips = {}
    for part, videos in (("private", 24), ("tuning", 16), ("held_out", 8), ("test", 8)):
        clips[f"{part}_features"] = random.normal(size=(videos, 2, 3 * FEATURES)).astype(np.float32)
        clips[f"{part}_labels"] = np.arange(videos) % 4
    np.savez(home / "clips.npz", **clips)
    shifted = dict.fromkeys(("fog", "snow"), parts["test_features"][:20])
    np.savez(home / "shifted.npz", labels=parts["test_labels"][:20], **shifted)
    logits = random.normal(size=(400, CLASSES)).astype(np.float32)
    probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.savez(home / "outputs.npz", probs=probs, labels=np.arange(400) % CLASSES)
    torch.manual_seed(0)
    told: dict[str, Any] = {"channels": 3, "classes": CLASSES, "mean": [0.5] * 3, "std": [0.25] * 3}
    save_net(ConvNet(**told, widths=(4,), depths=(2,)), home / "convnet", **told, widths=(4,), depths=(2,))
    save_net(ResNet(**told, widths=(8,), depths=(2,)), home / "resnet", **told, widths=(8,), depths=(2,))
    vit = {"size": 32, "patch": 8, "width": 8, "depth": 2, "heads": 2, **told}
    save_net(ViT(**vit), home / "vit", **vit)
    words.saved(words.bert(), home / "bert")
    words.saved(words.gpt2(), home / "gpt", marks=False)
    texts = [" ".join(random.choice(words.WORDS, 6)) + f"\t{row % 2}" for row in range(200)]
    (home / "texts.tsv").write_text("\n".join(["sentence\tlabel", *texts]) + "\n")
    return home


def adapt(study: Any, files: Path) -> Any:
    if study.data.images.endswith(".npz"):  # ImageNet's: other images under other strengths, and the embedded model
        images = str(files / "images-1.npz")
        data = replace(study.data, images=images, anchor=images, strengths="clothes")
        study = replace(study, data=data, model=type(study.model)())
    lists = ("epsilon", "lr", "clip", "fisher_alpha", "similarity")
    grids = [replace(grid, **{name: getattr(grid, name)[:1] for name in lists}, batch_size=(2,)) for grid in study.arms]
    shifts = "extra" if study.data.shifts == "test" else study.data.shifts  # four instead of fifteen
    data = replace(study.data, per_shift=2, shifts=shifts, anchor=str(files / "images-1.npz"))  # 120 images
    return replace(study, arms=tuple(grids), data=data, seeds=study.seeds[:1], workers=1)


def source_model(study: Any, files: Path) -> Any:
    images = str(files / f"images-{len(study.mean) or 1}.npz")
    train = replace(study.train, epochs=1, batch_size=16)
    return replace(study, images=images, test=images, widths=(4,), depths=(1,), train=train)


def pretrain(study: Any, files: Path) -> Any:
    sizes = {"public": 40, "private": 40, "tuning": 10, "held_out": 10, "tested": 20}
    named = {name: str(files / "images-3.npz") for name in ("train", "test", "private_train", "private_test")}
    data = replace(study.data, **sizes, **{name: file for name, file in named.items() if getattr(study.data, name)})
    groups = []
    for group in study.pretrain:
        small = {name: getattr(group, name)[:2] for name in ("radius", "reuse", "perturb_lr", "lr")}
        batches = {"perturb_batch": (8, 12)[: len(group.perturb_batch)], "batch_size": (8, 10)[: len(group.batch_size)]}
        groups.append(replace(group, **small, **batches))
    tiny = {"batch_size": 8, "steps": 2, "public_rows": 10, "dimensions": 2, "refresh": 1}
    return replace(
        study,
        data=data,
        net=replace(study.net, widths=(8,), depths=(1,)),
        noise=replace(study.noise, draws=1, rows=20, rho_rows=2),
        train=replace(study.train, steps=2, batch_size=8),
        pretrain=tuple(groups),
        finetune=tuple(replace(one, epsilon=one.epsilon[:1], lr=one.lr[:1], **tiny) for one in study.finetune),
        seeds=study.seeds[:1],
        workers=1,
    )


def finetune(study: Any, files: Path) -> Any:
    data, nets = study.data, dict(study.models)
    sizes: dict[str, Any] = {"private": 24, "tuning": 16, "held_out": 8, "tested": 8, "shifts": min(data.shifts, 4)}
    if data.kind == "images":
        sizes |= {"train": str(files / "images-3.npz"), "test": str(files / "images-3.npz")}
        nets = {name: replace(net, weights=str(files / name)) for name, net in nets.items()}
    elif data.kind == "features":
        file = "labels.npz" if data.labels else "pairs.npz" if data.classes == 2 else "features.npz"
        shifted = str(files / "shifted.npz") if data.shifted else ""
        sizes |= {"train": str(files / file), "shifted": shifted, "classes": 2 if data.classes == 2 else CLASSES}
        nets = {name: replace(net, features=FEATURES) for name, net in nets.items()}
    elif data.kind == "clips":
        sizes |= {"train": str(files / "clips.npz")}
        nets = {name: replace(net, features=FEATURES * 3 // (net.moments or 1)) for name, net in nets.items()}
    elif data.kind == "motions":
        sizes |= {"classes": 2, "tried": 2, "motions": replace(data.motions, frames=20)}
        how = nets["video"].pretraining
        how = replace(
            how, videos=8, motions=replace(how.motions, frames=20), train=replace(how.train, epochs=1, batch_size=8)
        )
        nets = {"video": replace(nets["video"], pretraining=how, widths=(8, 16), depths=(1, 1))}
    else:
        folder = str(files / ("gpt" if data.kind == "messages" else "bert"))
        sizes |= {"train": str(files / "texts.tsv"), "test": str(files / "texts.tsv"), "tokens": folder, "longest": 12}
        sizes |= {"classes": 4 + len(words.WORDS) if data.kind == "messages" else 2}
        nets = {name: replace(net, text=folder) for name, net in nets.items()}
    arms = [
        replace(grid, epsilon=grid.epsilon[:1], clips=grid.clips[:1], lr=grid.lr[:2], steps=(2,), batch_size=8)
        for grid in study.arms
    ]
    return replace(study, data=replace(data, **sizes), models=nets, arms=tuple(arms), seeds=study.seeds[:1], workers=1)


def tune(study: Any, files: Path) -> Any:
    tasks = {
        name: replace(
            task, file=str(files / ("pairs.npz" if task.classes == 2 else "features.npz")), private=2000, tested=100
        )
        for name, task in study.tasks.items()
    }
    tasks = {name: replace(task, classes=min(task.classes, CLASSES)) for name, task in tasks.items()}
    methods = []
    for method in study.methods:
        changed: dict[str, Any] = {"epsilon": (), "seeds": (), "tasks": method.tasks[:1]}
        if method.oracle is not None:
            changed["oracle"] = replace(method.oracle, lr=(), steps=(), points=(1, 2), best=1, repeats=1)
        if method.repeat is not None:
            changed["repeat"] = replace(method.repeat, mean=2.0)
        if method.hypo is not None:
            changed |= {"hypo": replace(method.hypo, mean=2.0), "epsilon": method.epsilon[:1]}  # for its ratio
        if method.subset is not None:
            changed["subset"] = replace(method.subset, mean=2.0)
        if method.training.batch_size is not None:
            changed["training"] = replace(method.training, batch_size=200)
        methods.append(replace(method, **changed))
    return replace(
        study,
        tasks=tasks,
        methods=tuple(methods),
        space=replace(study.space, steps=(1, 3)),
        epsilon=(1.0,),
        seeds=study.seeds[:1],
        workers=1,
    )


def recalibration(study: Any, files: Path) -> Any:
    sweeps = [
        replace(
            sweep,
            sources=(2, 3) if sweep.vary == "sources" else (3,),
            samples=(5, 10) if sweep.vary == "samples" else (10,),
            epsilon=sweep.epsilon[:2],
            iterations=sweep.iterations[:2],
            bins=sweep.bins[:2],
        )
        for sweep in study.sweeps
    ]
    return replace(
        study,
        sweeps=tuple(sweeps),
        shifted=study.shifted and replace(study.shifted, per_shift=100, shifts="extra"),
        files=tuple(replace(file, path=str(files / "outputs.npz")) for file in study.files),
        trials=2,
    )


SMALLER = {
    "adapt": adapt,
    "finetune": finetune,
    "pretrain": pretrain,
    "recalibration": recalibration,
    "source-model": source_model,
    "tune": tune,
}


# The longest of their kinds: minutes on a busy machine, where shorter ones of the same kind run in `make test`.
LONG = {"finetune-image-nets", "linear-scaling-ablations", "dpadapter"}


@pytest.mark.parametrize(
    "recipe", [pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.stem in LONG)) for path in RECIPES]
)
def test_every_recipe_runs(recipe: Path, files: Path, tmp_path: Path) -> None:
    kind, config = runner.read(recipe)
    small = SMALLER[kind](config, files)
    result = runner.load(runner.KINDS[kind].run)(small, out=tmp_path, progress=quiet)
    findings = runner.load(runner.KINDS[kind].render)(result)
    assert findings.title == config.title
    assert findings.summary
    assert all(table.rows for table in findings.summary)
    json.dumps(findings.facts, default=str)
    if kind in ("adapt", "finetune", "pretrain", "tune"):
        kept = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()}
        read = [table.markdown() for table in tables(small, tmp_path)]
        runner.load(runner.KINDS[kind].run)(small, out=tmp_path, progress=quiet)
        assert kept == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()}
        if kind in ("finetune", "tune"):
            assert {table.markdown() for table in findings.summary} <= set(read)
