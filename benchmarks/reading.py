"""Rows per second of JPEG folders: read in this process, and by worker processes ahead of time, as `fit` reads them.

    PYTHONPATH=. python benchmarks/reading.py [--json FILE]

An epoch over a folder of photographs that were made for it (smooth noise, 500 x 375, quality 90) is read in portions,
decoded, resized to 224 x 224 and normalized. Every arm reads the same portions; nothing is kept between epochs. The
ratio is of rounds in which all arms took part, in shuffled order; the second copy of the one process says how far a
ratio strays when there is nothing to see. With two cores the bar is 1.6 times the rows per second of one process.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from paired import machine, paired_ratio, time_rounds
from tacit.data import ImageFiles, ImageShape, TensorRecords
from tacit.finetune._reading import Portion, Reader, Where, likeness

BAR = 1.6
ONE, AGAIN = "one process", "one process, again"


def photographs(folder: Path, count: int) -> None:
    """JPEG files with the detail of photographs: noise at several scales."""
    generator = np.random.default_rng(0)
    for i in range(count):
        picture = np.zeros((375, 500, 3))
        for side in (4, 16, 64, 256):
            coarse = Image.fromarray(generator.integers(0, 256, (side, side, 3), dtype=np.uint8))
            picture += np.asarray(coarse.resize((500, 375), Image.Resampling.BICUBIC), dtype=float) / side**0.5
        scaled = (picture - picture.min()) / np.ptp(picture) * 255
        place = folder / str(i % 2)
        place.mkdir(exist_ok=True)
        Image.fromarray(scaled.astype(np.uint8)).save(place / f"{i}.jpg", quality=90)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="reading", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", type=int, default=1024)
    parser.add_argument("--portion", type=int, default=32, help="rows that are read together")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--workers", type=int, nargs="+", default=[2])
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="tacit-reading-") as folder:
        photographs(Path(folder), options.files)
        shape = ImageShape(mean=(0.5,) * 3, std=(0.5,) * 3)
        records = TensorRecords(ImageFiles.folder(folder, shape=shape, memory=0))
        like = likeness(records, training=False)
        portions = [Portion(part, None) for part in torch.split(torch.arange(options.files), options.portion)]

        def epoch(workers: int) -> int:
            reader = Reader(records, like, Where(torch.device("cpu")), workers=workers)
            with reader.ahead(portions) as read:
                return sum(len(rows.labels) for _, rows, _ in read)

        names = {f"{workers} workers": workers for workers in options.workers}
        steps = {name: (lambda workers=workers: epoch(workers)) for name, workers in names.items()}
        steps |= {ONE: lambda: epoch(0), AGAIN: lambda: epoch(0)}
        assert all(step() == options.files for step in steps.values())
        seconds = time_rounds(steps, rounds=options.rounds, warmups=0)
    results = {"machine": machine(), "files": options.files, "arms": {}}
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    for name, taken in seconds.items():
        rate = options.files / float(np.median([value for value in taken if value is not None]))
        faster = paired_ratio(seconds[ONE], taken)
        results["arms"][name] = {"rows_per_second": rate, "times_one_process": asdict(faster)}
        met = "" if name in (ONE, AGAIN) else f"; bar {BAR}: {'met' if faster.low >= BAR else 'not met'}"
        print(f"{name:20} {rate:8.0f} rows a second, {faster} times one process{met}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
