"""Three small nets for 32 x 32 images, pretrained on public ones: a transformer, a ConvNeXt-like net and a ResNet.

    python -m studies.prepare.pretrain_small_nets DATA OUT [--net vit convnet resnet] [--epochs 12]

DATA holds train.npz and test.npz as unpack_cifar.py writes them, of CIFAR-100. OUT gets vit-cifar100.safetensors,
convnet-cifar100.safetensors and resnet-cifar100.safetensors; their metadata say how the net is made and how good it is,
and `load` makes it again. An epoch takes about half a minute of one core.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from studies.loaders import read_images
from tacit.models import ConvNet, ResNet, ViT
from tacit.pretrain import Augment, Recipe, fit

CLASSES = {"vit": ViT, "convnet": ConvNet, "resnet": ResNet}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "vit": {"size": 32, "patch": 4, "width": 48, "depth": 3, "heads": 4, "expansion": 2},
    "convnet": {"widths": [24, 64], "depths": [1, 3], "expansion": 2},
    "resnet": {"widths": [8, 32, 64], "depths": [1, 1, 1], "groups": 8},
}
LR = {"vit": 2e-3, "convnet": 4e-3, "resnet": 4e-3}


def load(path: str | Path) -> nn.Module:
    """A net of this recipe, from its file, in evaluation mode. It takes images in [0, 1] and normalises them inside."""
    with safe_open(path, framework="pt") as file:
        notes = file.metadata()
    net: nn.Module = CLASSES[notes["net"]](**json.loads(notes["arguments"]))
    net.load_state_dict(load_file(path))
    return net.eval()


def train(name: str, images: Tensor, labels: Tensor, *, epochs: int, seed: int) -> tuple[nn.Module, dict[str, Any]]:
    """The net, pretrained, and the arguments that made it."""
    arguments = {
        "channels": images.shape[1],
        "classes": int(labels.max()) + 1,
        **ARGUMENTS[name],
        "mean": [round(value, 4) for value in images.mean((0, 2, 3)).tolist()],
        "std": [round(value, 4) for value in images.std((0, 2, 3)).tolist()],
    }
    torch.manual_seed(seed)
    net = CLASSES[name](**arguments)
    recipe = Recipe(
        epochs=epochs,
        batch_size=64,
        lr=LR[name],
        augment=Augment(rotate=0.0, scale=0.0, shift=0.1, erase=0.0),
        seed=seed,
    )

    fit(net, (images, labels), public=True, progress=True, **recipe.options())
    return net, arguments


def accuracy(net: nn.Module, images: Tensor, labels: Tensor) -> float:
    with torch.inference_mode():
        found = torch.cat([net(part).argmax(1) for part in torch.split(images, 500)])
    return 100 * float((found == labels).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--net", nargs="+", choices=list(CLASSES), default=list(CLASSES))
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    splits = {split: read_images(options.data / f"{split}.npz") for split in ("train", "test")}
    seen, unseen = ((images.float() / 255, labels) for images, labels in splits.values())
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.net:
        start = time.perf_counter()
        net, arguments = train(name, *seen, epochs=options.epochs, seed=options.seed)
        seconds, percent = time.perf_counter() - start, accuracy(net, *unseen)
        notes = {
            "net": name,
            "arguments": json.dumps(arguments),
            "epochs": str(options.epochs),
            "accuracy": f"{percent:.2f}",
        }
        path = options.out / f"{name}-cifar100.safetensors"
        save_file(net.state_dict(), path, metadata=notes)
        count = sum(parameter.numel() for parameter in net.parameters())
        print(f"{path}: {count} parameters, {percent:.2f} % of the test images right, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
