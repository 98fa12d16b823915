"""Features of public images from a ViT-Ti/16 as ImageNet-1k left it: 192 numbers each, nothing trained here.

    pip install --no-deps timm torchvision==0.16.2
    python -m studies.prepare.vit_features DATA OUT [--side 112] [--train 3000] [--test 1000] [--only cifar10]

DATA holds the files of packed CIFAR (see unpack_cifar.py), pneumoniamnist_rebuilt.npz, imagenet_val_224_3_per_class.zip
and vit_tiny_patch16_224_imagenet1k.safetensors. OUT gets `imagenet-vit-features.npz`, `pneumonia-vit-features.npz`,
`cifar10-vit-features.npz` and `cifar100-vit-features.npz`, each with `train_features` (float32, N x 192),
`train_labels`, `test_features` and `test_labels`: the first 3,000 and 1,000 rows of CIFAR and X-rays. Of ImageNet two
images of each class train and one tests, and the labels are groups of 50 classes (these are in WordNet's order:
neighbours are alike). Images of CIFAR and X-rays are enlarged to `side` pixels, ImageNet's shrunk from 224, and the
positions of the net resized to match. A file that is there already is kept. A hundred images take a second of one core.
"""

from __future__ import annotations

import argparse
import io
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn
from torch.nn.functional import interpolate

from studies.prepare.pictures import Arrays, by_split, cifar, x_rays

NAME, NEIGHBOURS = "vit_tiny_patch16_224", 50


class Features(nn.Module):
    """uint8 images, N x 3 x H x W, to what the net's head would see of them."""

    def __init__(self, weights: Path, side: int) -> None:
        super().__init__()
        self.side = side
        self.net = timm.create_model(NAME, img_size=side).eval()
        found = load_file(str(weights))
        cells = side // 16
        found["pos_embed"] = resample_abs_pos_embed(found["pos_embed"], [cells, cells])
        self.net.load_state_dict(found)
        self.net.head = nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        size = (self.side, self.side)
        large = images.float()
        if images.shape[-2:] != size:
            large = interpolate(large, size, mode="bicubic", antialias=True).clamp(0, 255)
        features: Tensor = self.net((large / 255 - 0.5) / 0.5)
        return features


def first(splits: dict[str, tuple[Tensor, Tensor]], most: dict[str, int]) -> dict[str, tuple[Tensor, Tensor]]:
    return {name: (images[: most[name]], labels[: most[name]]) for name, (images, labels) in splits.items()}


def imagenet(path: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Two images of each class to train on, one to try."""
    with zipfile.ZipFile(path) as file:
        names = sorted(name for name in file.namelist() if name.endswith(".jpg"))
        images = torch.stack([_image(file.read(name)) for name in names])
    labels = torch.tensor([int(name.split("/")[-2]) for name in names])
    last = torch.cat([labels[1:] != labels[:-1], torch.tensor([True])])
    return {"train": (images[~last], labels[~last]), "test": (images[last], labels[last])}


def _image(blob: bytes) -> Tensor:
    return torch.from_numpy(np.array(Image.open(io.BytesIO(blob)).convert("RGB"))).permute(2, 0, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--side", type=int, default=112, help="pixels of the images that the net sees")
    parser.add_argument("--train", type=int, default=3_000, help="the most rows to train on")
    parser.add_argument("--test", type=int, default=1_000, help="the most rows to try models on")
    parser.add_argument("--only", nargs="*", help="these files alone")
    options = parser.parse_args()
    data = options.data
    most = {"train": options.train, "val": options.test, "test": options.test}
    net = Features(data / f"{NAME}_imagenet1k.safetensors", options.side)

    def of_imagenet() -> Arrays:
        arrays = by_split(net, imagenet(data / "imagenet_val_224_3_per_class.zip"))
        return arrays | {f"{part}_labels": arrays[f"{part}_labels"] // NEIGHBOURS for part in ("train", "test")}

    makers: dict[str, Callable[[], Arrays]] = {
        "imagenet": of_imagenet,
        "pneumonia": lambda: by_split(net, first(x_rays(data / "pneumoniamnist_rebuilt.npz"), most)),
        "cifar10": lambda: by_split(net, cifar(data / "cifar10_lossless_webp_train20k_test10k.npz", most)),
        "cifar100": lambda: by_split(net, cifar(data / "cifar100_lossless_webp_train20k_test10k.npz", most)),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    for name, make in makers.items():
        path = options.out / f"{name}-vit-features.npz"
        if path.exists() or (options.only and name not in options.only):
            continue
        start = time.perf_counter()
        np.savez(path, allow_pickle=False, **make())
        print(f"{path}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
