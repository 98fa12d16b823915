"""Adapt a timm vision transformer to a folder of unlabelled, private images while it predicts them.

    python examples/adapt_a_timm_vit.py FOLDER --model vit_base_patch16_224 --weights weights.safetensors --epsilon 1

Prints one line per image: its file and the predicted class. The model learns from each batch after predicting it, with
(epsilon, 1e-6)-differential privacy for each image, charged to `tacit.db`. Needs timm (see pyproject.toml).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image
from torch import Tensor

from tacit import adapt
from tacit.privacy import Ledger


def read(paths: list[Path], size: int) -> Tensor:
    pictures = [Image.open(path).convert("RGB").resize((size, size), Image.Resampling.BICUBIC) for path in paths]
    return torch.stack([torch.from_numpy(np.array(p)).permute(2, 0, 1).float() / 255 for p in pictures])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="vit_base_patch16_224")
    parser.add_argument("--weights", help="a checkpoint for the model; without one it is untrained")
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--ledger", default="tacit.db")
    options = parser.parse_args(argv)

    net = timm.create_model(options.model, checkpoint_path=options.weights or "")
    adapter = adapt.Tent(
        net.eval(),
        privacy=adapt.DP(options.epsilon, 1e-6, clip=options.clip),
        batch_size=options.batch_size,
        lr=options.lr,
        normalize="model",  # mean and std of the model's own configuration
        ledger=Ledger(options.ledger),
        subject=options.folder.name,
    )
    print(adapter.normalize)
    paths = sorted(p for p in options.folder.rglob("*") if p.suffix.lower() in {".png", ".jpg", ".jpeg"})
    for start in range(0, len(paths), options.batch_size):
        batch = paths[start : start + options.batch_size]
        logits = adapter(read(batch, net.pretrained_cfg["input_size"][1]))
        for path, row in zip(batch, logits, strict=True):
            print(path.name, int(row.argmax()))
    print(adapter.guarantee)


if __name__ == "__main__":
    main()
