"""Videos of photographs under a moving camera: the class is the motion (pan, tilt, zoom, rotate), not the picture.

Real files: each video is one photograph of its own, seen through a window that moves as the class says for part of the
time, and drifts and trembles in every way all the time. Nothing in the pictures was made for this.
"""

from __future__ import annotations

import json
import math
import zipfile
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

CLASSES = ("pan", "tilt", "zoom", "rotate")
MANIFEST = "manifest.json"
Track = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Camera:
    """How the window moves; lengths are shares of half the photograph, angles in radians."""

    frames: int = 16
    size: int = 96
    fps: int = 8
    window: tuple[float, float] = (0.5, 0.65)  # of the photograph
    speed: tuple[float, float] = (0.1, 0.2)  # per frame, of the motion of the class
    moves: tuple[int, int] = (3, 6)  # frames
    pauses: tuple[int, int] = (2, 6)
    drift: float = 0.03  # per frame, in every way, for the length of a part
    tremble: float = 0.006


def write_camera(folder: str | Path, images: str | Path, *, start: int, videos: int, seed: int, camera: Camera) -> Path:
    """Write `folder/CLASS/000.mp4` and so on from photographs `start` to `start + videos` of a zip file, in its order.

    The same arguments write the same pictures; a folder that holds them already is left as it is.
    """
    home = Path(folder)
    facts = {"start": start, "videos": videos, "seed": seed, "camera": asdict(camera)}
    manifest = json.dumps(facts, indent=2)
    if (home / MANIFEST).is_file() and (home / MANIFEST).read_text("utf-8") == manifest:
        return home
    random = np.random.default_rng(seed)
    with zipfile.ZipFile(images) as opened:
        names = sorted(name for name in opened.namelist() if name.endswith(".jpg"))
        order = np.random.default_rng(0).permutation(len(names))  # of all splits: no photograph is in two
        if start + videos > len(names):
            raise ValueError(f"{images} has {len(names)} photographs, too few for this split.")
        for number in range(videos):
            name = CLASSES[number % len(CLASSES)]
            photograph = _photograph(opened.read(names[order[start + number]]))
            file = home / name / f"{number // len(CLASSES):03}.mp4"
            file.parent.mkdir(parents=True, exist_ok=True)
            _write(file, _film(photograph, _path(name, camera, random), camera), camera.fps)
    (home / MANIFEST).write_text(manifest, "utf-8")
    return home


def _photograph(content: bytes) -> Tensor:
    with Image.open(BytesIO(content)) as opened:
        return torch.from_numpy(np.array(opened.convert("RGB"))).permute(2, 0, 1).float()


def _path(name: str, camera: Camera, random: np.random.Generator) -> Track:
    """Pan, tilt, zoom and angle at each frame."""
    steps = random.normal(0, camera.tremble, (camera.frames, 4))
    frame, moving = -int(random.integers(0, camera.moves[1])), bool(random.random() < 0.5)
    while frame < camera.frames:
        shortest, longest = camera.moves if moving else camera.pauses
        stop = frame + int(random.integers(shortest, longest + 1))
        here = slice(max(frame, 0), max(stop, 0))
        steps[here] += random.normal(0, camera.drift, 4)
        if moving:
            steps[here, CLASSES.index(name)] += random.choice([-1, 1]) * random.uniform(*camera.speed)
        frame, moving = stop, not moving
    path: Track = np.cumsum(steps, 0)
    path -= path.mean(0)  # the middle of the way is the middle of the photograph
    return path


def _film(photograph: Tensor, path: Track, camera: Camera) -> NDArray[np.uint8]:
    """Every frame through its window; what lies outside is mirrored."""
    random = np.random.default_rng(round(abs(path[0, 0]) * 1e9))
    window = random.uniform(*camera.window)
    middles = (np.arange(camera.size) + 0.5) / camera.size * 2 - 1
    y, x = np.meshgrid(middles, middles, indexing="ij")
    grids = []
    for pan, tilt, zoom, angle in path:
        scale, turn = window * math.exp(2 * zoom), 2 * angle
        cos, sin = math.cos(turn), math.sin(turn)
        grids.append(np.stack([scale * (cos * x - sin * y) + pan, scale * (sin * x + cos * y) + tilt], -1))
    grid = torch.from_numpy(np.stack(grids)).float()
    whole = photograph.expand(len(grid), -1, -1, -1)
    shown = F.grid_sample(whole, grid, mode="bilinear", padding_mode="reflection", align_corners=False)
    film: NDArray[np.uint8] = shown.round().clamp(0, 255).byte().permute(0, 2, 3, 1).contiguous().numpy()
    return film


def _write(file: Path, film: NDArray[np.uint8], fps: int) -> None:
    import av  # only these studies need it

    with av.open(str(file), "w") as container:
        # MPEG-4 part 2 is FFmpeg's own: it is in every build, and every build writes the same pictures
        stream = container.add_stream("mpeg4", rate=fps, options={"qmin": "2", "qmax": "3", "threads": "1"})
        stream.width, stream.height, stream.pix_fmt = film.shape[2], film.shape[1], "yuv420p"
        for picture in film:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
