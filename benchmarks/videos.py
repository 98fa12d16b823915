"""Decoding videos in worker processes: clips per second beside one process, in one run, in turns.

Real H.264 files of 320 x 240 pixels, as UCF-101 has, are written first. A round reads the same drawn clips once in this
process and once by the workers that `finetune.fit(workers=...)` uses, through the same reader, with nothing kept
between rounds; the order is shuffled. Both must be equal, bit for bit. Starting the workers is part of their time.

    python benchmarks/videos.py --workers 2 --rounds 9
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import av
import numpy as np
import torch
from torch import Tensor

from paired import machine, paired_ratio, time_rounds
from tacit.data import VideoClips
from tacit.finetune._reading import Portion, Reader, Where, likeness

BAR = 1.6
BATCH = 8  # videos of a portion


def write(file: Path, frames: int, seed: int) -> Path:
    """A film with something to decode: coloured noise that drifts."""
    random = np.random.default_rng(seed)
    scene = random.integers(0, 255, (60, 80, 3), np.uint8).repeat(8, 0).repeat(8, 1)
    with av.open(str(file), "w") as container:
        stream = container.add_stream("libx264", rate=25, options={"crf": "23", "g": "48", "preset": "veryfast"})
        stream.width, stream.height, stream.pix_fmt = 320, 240, "yuv420p"
        for frame in range(frames):
            shown = np.ascontiguousarray(scene[frame : frame + 240, frame : frame + 320])
            container.mux(stream.encode(av.VideoFrame.from_ndarray(shown, format="rgb24")))
        container.mux(stream.encode())
    return file


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--videos", type=int, default=64)
    parser.add_argument("--clips", type=int, default=8)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options, _ = parser.parse_known_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        files = [write(Path(folder) / f"{i}.mp4", 160, i) for i in range(options.videos)]
        data = VideoClips(files, [i % 2 for i in range(len(files))], clips=options.clips, size=112, memory=0)
        generator = torch.Generator().manual_seed(0)
        units = torch.randperm(len(data), generator=generator)
        uniforms = torch.rand(len(data), data.uniforms, generator=generator).clamp_min(1e-9)
        parts = list(zip(torch.split(units, BATCH), torch.split(uniforms, BATCH), strict=True))
        like = likeness(data, training=True)

        def read(workers: int) -> Iterator[Tensor]:
            reader = Reader(data, like, Where(torch.device("cpu")), workers=workers)
            with reader.ahead(Portion(*part) for part in parts) as found:
                yield from (rows.inputs for _, rows, _ in found)

        if not all(torch.equal(a, b) for a, b in zip(read(0), read(options.workers), strict=True)):
            print("The workers read other clips than one process.", file=sys.stderr)
            return 1
        names = {"one process": 0, f"{options.workers} workers": options.workers}
        steps = {name: (lambda count=count: deque(read(count), maxlen=0)) for name, count in names.items()}
        seconds = time_rounds(steps, rounds=options.rounds, warmups=1)
    one, many = seconds.values()
    gain = paired_ratio(one, many)
    clips = options.videos * options.clips
    for name, taken in seconds.items():
        print(f"{name}: {clips / float(np.median([t for t in taken if t])):.1f} clips per second")
    met = gain.median >= BAR
    print(f"clips per second, ratio of one run: {gain}; at least {BAR}: {'met' if met else 'missed'}")
    if options.json:
        told = {"machine": machine(), "seconds": seconds, "gain": [gain.median, gain.low, gain.high], "met": met}
        options.json.write_text(json.dumps(told, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
