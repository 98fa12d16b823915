"""Private epochs from end to end: tacit and opacus' PrivacyEngine, each against the same epoch without privacy.

    python benchmarks/finetune.py [--work NAME ...] [--rounds 24] [--quick] [--json FILE] [--markdown FILE]

What an epoch is, what is timed of it and how it is checked is told in loops.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from arms import Batch
from gradients import cross_entropy, images
from loops import BARS, BY_CLIP, NULL, PLAIN, STANDARD, Epoch, suite
from models import ViT
from tacit.models import VideoNet, select

CLIPS = 8
VIDEO = (PLAIN, NULL, "tacit", "opacus, by video", f"opacus hooks{BY_CLIP}", f"opacus ghost{BY_CLIP}")


class Positions(nn.Module):
    """Positions in a module of their own: opacus takes no bare parameters beside other modules."""

    def __init__(self, value: nn.Parameter) -> None:
        super().__init__()
        self.value = value

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens + self.value


class ClipNet(VideoNet):
    """The package's video net, in a form that opacus can take."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__(classes=classes)
        value = self.positions
        del self.positions
        self.positions = Positions(value)

    def forward(self, clips: Tensor) -> Tensor:
        tubes = self.cut(((clips - self.mean) / self.std).transpose(1, 2))
        tokens = self.positions(tubes.flatten(2).transpose(1, 2))
        return self.head(self.norm(self.body(tokens)).mean(1))


def selective() -> nn.Module:
    model = ViT()
    select(model, "selective")
    return model


def features(rows: int) -> Batch:
    return torch.randn(rows, 384), torch.randint(100, (rows,))


def videos(rows: int) -> Batch:
    """Clips of eight frames, those of a video side by side."""
    return torch.rand(rows, 8, 3, 32, 32), torch.randint(10, (rows // CLIPS,)).repeat_interleave(CLIPS)


def works() -> dict[str, Epoch]:
    net = partial(Epoch, batch=images, loss=cross_entropy, rows=256, arms=STANDARD, bars=BARS, check_rows=64)
    everything = (
        net("full", "Epoch of full fine-tuning, ViT 192 x 6, 50 tokens, 4 steps of 64 images", ViT, peers_every=2),
        net("selective", "Epoch of norms and head, ViT 192 x 6, 50 tokens, 4 steps of 64 images", selective),
        Epoch(
            "linear",
            "Epoch of a linear probe, 4,096 x 384 cached features, 100 classes, 8 steps of 512 rows",
            partial(nn.Linear, 384, 100),
            features,
            cross_entropy,
            4096,
            STANDARD,
            BARS,
            check_rows=512,
            expected=512,
        ),
        Epoch(
            "video",
            "Epoch of a small video transformer, 4 steps of 16 videos with 8 clips each; opacus: of 128 clips, each a "
            "unit of its own",
            ClipNet,
            videos,
            cross_entropy,
            4 * 16 * CLIPS,
            VIDEO,
            (BARS[0], *(replace(bar, against=f"{bar.against}{BY_CLIP}") for bar in BARS[1:])),
            unit_size=CLIPS,
            check_rows=16 * CLIPS,
            expected=16,
        ),
    )
    return {work.name: work for work in everything}


def main(argv: Sequence[str] | None = None) -> None:
    suite(works(), argv, description=__doc__.splitlines()[0])


if __name__ == "__main__":
    sys.exit(main())
