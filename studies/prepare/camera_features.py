"""Clip features of videos under a moving camera, from a ViT-Ti/16 as ImageNet left it; nothing is trained here.

    python -m studies.prepare.camera_features IMAGES.zip VIT.safetensors OUT

IMAGES holds photographs (`CLASS/NAME.jpg`), VIT the weights of timm's vit_tiny_patch16_224. OUT gets the video files of
four splits, each of photographs of its own, and camera-features.npz with `SPLIT_features` (float32, videos x clips x
numbers) and `SPLIT_labels`. Frames are read from the files by `data.VideoClips`. Of two frames that follow each other,
the tokens of the net's sixth block are compared: how alike each token is to its nine neighbours one frame later, mean
over the nine parts of the picture, 81 numbers. A clip is four frames: three such comparisons side by side, 243 numbers.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from studies.multi_clip.camera import Camera, write_camera
from tacit.data import VideoClips

SPLITS = {"private": 300, "tuning": 300, "held_out": 100, "test": 200}
BLOCKS, PARTS, PAIRS = 6, 3, 3
AT_ONCE = 8  # videos


def net(weights: Path, size: int) -> Any:
    """The first blocks of the net, for smaller pictures than it was trained on."""
    timm = importlib.import_module("timm")
    model = timm.create_model("vit_tiny_patch16_224", img_size=size)
    state = load_file(weights)
    resized = importlib.import_module("timm.layers").resample_abs_pos_embed
    state["pos_embed"] = resized(state["pos_embed"], [size // 16, size // 16])
    model.load_state_dict(state)
    model.blocks = model.blocks[:BLOCKS]
    return model.eval()


def compared(tokens: Tensor) -> Tensor:
    """Frames x side x side x features -> pairs x numbers: likeness of each token to its neighbours a frame later."""
    tokens = F.normalize(tokens - tokens.mean((1, 2), keepdim=True), dim=-1)
    before, after = tokens[:-1], F.pad(tokens[1:].permute(0, 3, 1, 2), (1, 1, 1, 1), mode="replicate")
    side = tokens.shape[1]
    maps = [
        (before * after[:, :, y : y + side, x : x + side].permute(0, 2, 3, 1)).sum(-1)
        for y in range(3)
        for x in range(3)
    ]
    return F.adaptive_avg_pool2d(torch.stack(maps, 1), PARTS).flatten(1)


@torch.inference_mode()
def features(model: Any, videos: VideoClips) -> Tensor:
    found = []
    for units in torch.split(torch.arange(len(videos)), AT_ONCE):
        frames = videos.rows(units, None).inputs
        tokens = model.forward_features(frames.flatten(0, 1))[:, 1:]
        side = round(tokens.shape[1] ** 0.5)
        for one in tokens.view(len(units), -1, side, side, tokens.shape[-1]):
            pairs = compared(one)
            found.append(pairs.unfold(0, PAIRS, 1).permute(0, 2, 1).flatten(1))
        print(f"{len(found)} of {len(videos)} videos", flush=True)
    return torch.stack(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("images", type=Path)
    parser.add_argument("weights", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    camera = Camera()
    model = net(options.weights, camera.size)
    arrays: dict[str, Any] = {}
    start = 0
    for number, (split, videos) in enumerate(SPLITS.items()):
        kept = options.out / f"camera-{split}.npz"
        home = write_camera(options.out / split, options.images, start=start, videos=videos, seed=number, camera=camera)
        start += videos
        if not kept.exists():
            data = VideoClips.folder(home, clips=1, frames=camera.frames, stride=1, mean=(0.5,) * 3, std=(0.5,) * 3)
            np.savez(kept, features=features(model, data).numpy(), labels=data.labels().numpy())
        with np.load(kept) as found:
            arrays |= {f"{split}_{name}": found[name] for name in ("features", "labels")}
    np.savez(options.out / "camera-features.npz", **arrays)


if __name__ == "__main__":
    main()
