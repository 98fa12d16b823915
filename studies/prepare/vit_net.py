"""A ViT-Ti/16 of ImageNet-1k as a net that recipes fine-tune, and CIFAR enlarged to the images that it takes.

    python -m studies.prepare.vit_net DATA OUT [--side 96] [--train 7000] [--test 2000] [--only cifar10]

DATA holds the files of packed CIFAR (see unpack_cifar.py) and vit_tiny_patch16_224_imagenet1k.safetensors. OUT gets
`vit-ti-SIDE.safetensors`, a `models.ViT` of 192 features, twelve blocks and a class token, whose positions are resized
to SIDE pixels, and `cifar10-SIDE-train.npz`, `-test.npz` and the same of `cifar100`, the first rows of each part
(uint8, bicubic). timm's net has 1e-6 in its LayerNorms and `models.ViT` torch's 1e-5; the class token's position is
added to the token.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import interpolate

from studies.prepare.pictures import cifar
from tacit.models import ViT, save_net

NAME, PATCH = "vit_tiny_patch16_224", 16
DATA_SETS = ("cifar10", "cifar100")
PARTS = {"attn.qkv": "attention.ask", "attn.proj": "attention.answer", "mlp.fc1": "up", "mlp.fc2": "down"}


def arguments(side: int) -> dict[str, Any]:
    """How the net is made."""
    sizes = {"size": side, "patch": PATCH, "width": 192, "depth": 12, "heads": 3, "expansion": 4}
    return {"channels": 3, "classes": 1000, **sizes, "pooling": "token", "mean": [0.5] * 3, "std": [0.5] * 3}


def converted(found: dict[str, Tensor], side: int) -> ViT:
    """The net with timm's weights."""
    positions = found["pos_embed"]
    old = round((positions.shape[1] - 1) ** 0.5)
    grid = positions[:, 1:].transpose(1, 2).reshape(1, -1, old, old)
    cells = (side // PATCH, side // PATCH)
    resized = grid if cells == (old, old) else interpolate(grid, cells, mode="bicubic", antialias=True)
    state = {"positions": resized.flatten(2).transpose(1, 2), "token": found["cls_token"] + positions[:, :1]}
    for name, value in found.items():
        if name.startswith("patch_embed.proj"):
            state[name.replace("patch_embed.proj", "cut")] = value
        elif name.startswith("blocks"):
            own = name.replace("blocks", "body")
            for theirs, ours in PARTS.items():
                own = own.replace(theirs, ours)
            state[own] = value
        elif name.startswith(("norm.", "head.")):
            state[name] = value
    net = ViT(**arguments(side))
    net.load_state_dict(net.state_dict() | state)
    return net.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--side", type=int, default=96, help="pixels of the images that the net sees")
    parser.add_argument("--train", type=int, default=7_000, help="the most rows of the training part")
    parser.add_argument("--test", type=int, default=2_000, help="the most rows to try models on")
    parser.add_argument("--only", nargs="*", choices=DATA_SETS, default=DATA_SETS, help="these data sets alone")
    options = parser.parse_args()
    side = options.side
    options.out.mkdir(parents=True, exist_ok=True)
    net = converted(load_file(str(options.data / f"{NAME}_imagenet1k.safetensors")), side)
    save_net(net, options.out / f"vit-ti-{side}.safetensors", **arguments(side))
    most = {"train": options.train, "test": options.test}
    for name in options.only:
        packed = options.data / f"{name}_lossless_webp_train20k_test10k.npz"
        for split, (images, labels) in cifar(packed, most).items():
            large = interpolate(images.float(), (side, side), mode="bicubic", antialias=True).clamp(0, 255).round()
            path = options.out / f"{name}-{side}-{split}.npz"
            np.savez(path, images=large.byte().numpy(), labels=labels.numpy())


if __name__ == "__main__":
    main()
