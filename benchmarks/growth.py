"""How the time and the memory of a full fine-tuning step grow with batch, tokens, width and depth: log-log slopes.

The private step beside the plain one, on a small ViT (width 96, depth 3, 50 tokens, batch 32 where nothing else is
said). Times are the least of a few interleaved steps with two threads; peak memory is that of a fresh process, at the
smallest and the largest size. A slope is that of the least-squares line through the logarithms.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from arms import Batch, Work, build
from gradients import STANDARD, cross_entropy
from models import ViT
from paired import RefusedError, peak_memory

ARMS = ("no privacy", "tacit")
SIZES: dict[str, tuple[int, ...]] = {
    "batch": (16, 32, 64, 128),
    "tokens": (26, 50, 122, 197),
    "width": (48, 96, 192, 384),
    "blocks": (2, 4, 8),
}


def net(width: int, blocks: int, image: int) -> nn.Module:
    return ViT(width, blocks, 3, 10, image=image, patch=4)


def pictures(image: int, rows: int) -> Batch:
    return torch.randn(rows, 3, image, image), torch.randint(10, (rows,))


def work(**size: int) -> Work:
    given = {"batch": 32, "tokens": 50, "width": 96, "blocks": 3} | size
    image = 4 * round(math.sqrt(given["tokens"] - 1))
    model = partial(net, given["width"], given["blocks"], image)
    return Work("growth", "", model, partial(pictures, image), cross_entropy, given["batch"], STANDARD)


def slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    x, y = (torch.tensor(t, dtype=torch.float64).log() for t in (sizes, values))
    x = x - x.mean()
    return float((x * y).sum() / (x * x).sum())


def peak(given: Work, arm: str) -> int:
    try:
        return peak_memory(partial(build, given, arm), partial(build, given, arm, rows=2), preload=("torch",))
    except RefusedError:
        return 0


def measure(*, quick: bool = False) -> dict[str, dict[str, float]]:
    """What grows -> slopes of time and memory, plain and private."""
    found = {}
    for name, every in SIZES.items():
        sizes = (every[0], every[-1]) if quick else every
        seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
        for size in sizes:
            steps = {arm: build(work(**{name: size}), arm) for arm in ARMS}
            least = dict.fromkeys(ARMS, math.inf)
            for number in range(2 if quick else 9):
                for arm, step in steps.items():
                    start = time.perf_counter()
                    step()
                    if number:  # the first one checks the model
                        least[arm] = min(least[arm], time.perf_counter() - start)
            for arm in ARMS:
                seconds[arm].append(least[arm])
        found[name] = {f"time, {arm}": slope(sizes, seconds[arm]) for arm in ARMS}
        if not quick:
            ends = every[0], every[-1]
            for arm in ARMS:
                peaks = [peak(work(**{name: size}), arm) for size in ends]
                found[name][f"memory, {arm}"] = slope(ends, peaks) if min(peaks) > 0 else math.nan
    return found
