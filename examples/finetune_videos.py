"""Fine-tune a small video net on private videos, every video protected as a whole.

    python examples/finetune_videos.py FOLDER --size 1000 --clips 8 --epsilon 8

FOLDER holds one folder per class with its video files. Every video that is drawn is shown as `--clips` clips whose
gradients are averaged and clipped once: eight clips cost what one costs. Charged to `tacit.db`; kill it and run it
again, and it goes on. Needs PyAV (pip install 'tacit[video]').
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tacit import data, finetune, models
from tacit.models import load_net
from tacit.privacy import Ledger


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", type=int, required=True, help="the public number of videos, rounded")
    parser.add_argument("--clips", type=int, default=8)
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--batch-size", type=int, default=120, help="videos per step, on average")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=1.25)
    parser.add_argument("--net", type=Path, help="a pretrained VideoNet (models.saved); without it one starts anew")
    parser.add_argument("--ledger", default="tacit.db")
    options = parser.parse_args(argv)

    videos = data.VideoClips.folder(options.folder, clips=options.clips, frames=8, stride=2, size=32, colour=False)
    classes = len(videos.classes)
    net = load_net(options.net) if options.net else models.VideoNet(classes=classes, channels=1)
    with Ledger(options.ledger) as ledger:
        fitted = finetune.fit(
            net,
            videos,
            unit="video",
            size=options.size,
            classes=classes,
            scheme="selective" if options.net else "full",
            optimizer=finetune.DPSGD(batch_size=options.batch_size, steps=options.steps, clip=0.1, lr=options.lr),
            epsilon=options.epsilon,
            delta=options.delta,
            ledger=ledger,
            subject=options.folder.name,
            checkpoint=f"{options.folder.name}.safetensors",
            every=10,
            progress=True,
        )
    print(f"{fitted.trained:,} numbers trained in {fitted.steps} steps of {options.clips} clips per video")
    print(fitted.guarantee)


if __name__ == "__main__":
    main()
