"""A labelled video set from the images of the package: real mp4 files in which clothes move; the class is the motion.

One piece of clothing (drawn at random, so it says nothing about the class) moves as its class says, but not all the
time: it also stands still or drifts elsewhere. Another one, that changes its motion again and again, crosses part of
the video. So a short clip is often ambiguous, and several clips of one video together are not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from tacit.data import Split, fashion_mnist

Track = NDArray[np.float64]
Pixels = NDArray[np.uint8]  # frames x height x width
PUBLIC = ("left", "up", "up-right", "down-left", "clockwise", "zigzag", "grow", "blink")
PRIVATE = ("right", "down", "up-left", "down-right", "counterclockwise", "bounce", "shrink", "spin")
MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class Motions:
    """How the videos theme. Lengths are in frames and in pixels; a pair is a range to draw from."""

    frames: int = 64
    size: int = 32
    sprite: int = 14
    speed: tuple[float, float] = (0.5, 1.2)  # pixels per frame
    moves: tuple[int, int] = (6, 16)  # how long the motion of the class lasts
    pauses: tuple[int, int] = (4, 14)  # how long it then stands still or drifts
    drifting: float = 0.5  # the share of the pauses in which it drifts
    distractor: float = 0.4  # the share of the video in which there is a second sprite
    brightness: tuple[float, float] = (0.6, 1.0)
    noise: float = 0.05  # of the range of a pixel


@dataclass
class _Path:
    """Where a sprite is in each frame, and how it looks there."""

    x: Track
    y: Track
    scale: Track
    angle: Track
    light: Track


def write_motions(
    folder: str | Path,
    *,
    videos: int,
    classes: Sequence[str],
    seed: int,
    split: Split = "unseen",
    motions: Motions | None = None,
) -> Path:
    """Write `folder/CLASS/000.mp4` and so on, `videos` in all and evenly over the classes, and return the folder.

    The same arguments write the same pictures. A folder that holds them already is left as it is; one that holds other
    videos is an error. `manifest.json` says how they were made; it is written last.
    """
    motions = motions or Motions()
    home = Path(folder)
    if unknown := [name for name in classes if name not in _SHAPES]:
        raise ValueError(f"There is no motion {unknown[0]!r}: choose among {', '.join(_SHAPES)}.")
    if videos < len(classes) or not classes or len(set(classes)) != len(classes):
        raise ValueError(f"{videos} videos of {len(classes)} motions: name each motion once, with a video at least.")
    made = {"videos": videos, "classes": list(classes), "seed": seed, "split": split, "motions": asdict(motions)}
    manifest = json.dumps(made, indent=2)
    if (home / MANIFEST).is_file() and (home / MANIFEST).read_text("utf-8") == manifest:
        return home
    if home.is_dir() and any(home.iterdir()):
        raise ValueError(f"{home} holds something else already: name another folder, or empty it.")
    random = np.random.default_rng(seed)
    images, _ = fashion_mnist(split)
    sprites = images[torch.from_numpy(random.permutation(len(images)))]
    for number in range(videos):
        name, place = classes[number % len(classes)], number // len(classes)
        pair = sprites[[2 * number % len(sprites), (2 * number + 1) % len(sprites)]]
        file = home / name / f"{place:03}.mp4"
        file.parent.mkdir(parents=True, exist_ok=True)
        _write(file, _film(name, pair, motions, random))
    (home / MANIFEST).write_text(manifest, "utf-8")
    return home


def _film(name: str, sprites: Tensor, motions: Motions, random: np.random.Generator) -> Pixels:
    """All frames of a video: the sprite, the distractor, the noise."""
    small = F.interpolate(sprites.float() / 255, (motions.sprite, motions.sprite), mode="area")
    low, high = motions.brightness
    canvas = torch.zeros(motions.frames, motions.size, motions.size)
    for sprite, path in zip(small, (_object(name, motions, random), _distractor(motions, random)), strict=True):
        path.light = path.light * random.uniform(low, high)
        canvas = torch.maximum(canvas, _render(sprite, path, motions))
    noisy = canvas.numpy() + random.normal(0, motions.noise, canvas.shape)
    return np.round(255 * noisy.clip(0, 1)).astype(np.uint8)


def _object(name: str, motions: Motions, random: np.random.Generator) -> _Path:
    """Moves as its class says, then pauses, and so on; the video begins somewhere in that."""
    active, drift = np.zeros(motions.frames, bool), np.zeros((motions.frames, 2))
    low, high = motions.speed
    frame, moving = -int(random.integers(0, motions.moves[1])), bool(random.random() < 0.5)
    speeds = np.zeros(motions.frames)
    while frame < motions.frames:
        shortest, longest = motions.moves if moving else motions.pauses
        stop = frame + int(random.integers(shortest, longest + 1))
        here = slice(max(frame, 0), max(stop, 0))
        active[here] = moving
        speeds[here] = random.uniform(low, high)
        angle = random.uniform(0, 2 * math.pi)
        if not moving and random.random() < motions.drifting:
            drift[here] = random.uniform(low, high) * np.array([math.cos(angle), math.sin(angle)])
        frame, moving = stop, not moving
    path = _follow(name, np.cumsum(speeds * active), motions, random)
    wander = np.cumsum(drift, axis=0)
    path.x, path.y = path.x + wander[:, 0], path.y + wander[:, 1]
    return path


def _distractor(motions: Motions, random: np.random.Generator) -> _Path:
    """Another motion every few frames, in one part of the video."""
    low, high = motions.speed
    parts: list[_Path] = []
    frames = 0
    while frames < motions.frames:
        length = int(random.integers(motions.moves[0], motions.moves[1] + 1))
        name = str(random.choice(list(_SHAPES)))
        parts.append(_follow(name, np.arange(length, dtype=np.float64) * random.uniform(low, high), motions, random))
        frames += length
    joined = [np.concatenate([getattr(part, field) for part in parts])[: motions.frames] for field in _FIELDS]
    path = _Path(*joined)
    shown = round(motions.distractor * motions.frames)
    first = int(random.integers(0, motions.frames - shown + 1))
    path.light[:first] = 0
    path.light[first + shown :] = 0
    return path


def _follow(name: str, way: Track, motions: Motions, random: np.random.Generator) -> _Path:
    """The motion `name` after each length of way, from anywhere and from any phase."""
    way = way + random.uniform(0, 64)
    still = np.zeros_like(way)
    start = random.uniform(0, motions.size, 2)
    path = _Path(x=still + start[0], y=still + start[1], scale=still + 1, angle=still, light=still + 1)
    _SHAPES[name](path, way)
    return path


def _straight(x: int, y: int) -> Callable[[_Path, Track], None]:
    def move(path: _Path, way: Track) -> None:
        path.x = path.x + x * way / math.hypot(x, y)
        path.y = path.y + y * way / math.hypot(x, y)

    return move


def _circle(sense: int) -> Callable[[_Path, Track], None]:
    def move(path: _Path, way: Track) -> None:
        path.x = path.x + 4 * np.cos(way / 4)
        path.y = path.y + sense * 4 * np.sin(way / 4)

    return move


def _zigzag(path: _Path, way: Track) -> None:
    path.x = path.x - way / 2
    path.y = path.y + 6 * np.abs(way / 6 % 2 - 1)


def _bounce(path: _Path, way: Track) -> None:
    path.y = path.y - 10 * np.abs(np.sin(way / 7))


def _size(sense: int) -> Callable[[_Path, Track], None]:
    def move(path: _Path, way: Track) -> None:
        path.scale = 0.6 * 2.3 ** (sense * way / 20 % 1)

    return move


def _spin(path: _Path, way: Track) -> None:
    path.angle = way / 4


def _blink(path: _Path, way: Track) -> None:
    path.light = np.where(way / 8 % 1 < 0.5, 1.0, 0.25)


_FIELDS = ("x", "y", "scale", "angle", "light")
_SHAPES: dict[str, Callable[[_Path, Track], None]] = {
    "left": _straight(-1, 0),
    "up": _straight(0, -1),
    "up-right": _straight(1, -1),
    "down-left": _straight(-1, 1),
    "clockwise": _circle(1),
    "zigzag": _zigzag,
    "grow": _size(1),
    "blink": _blink,
    "right": _straight(1, 0),
    "down": _straight(0, 1),
    "up-left": _straight(-1, -1),
    "down-right": _straight(1, 1),
    "counterclockwise": _circle(-1),
    "bounce": _bounce,
    "shrink": _size(-1),
    "spin": _spin,
}


def _render(sprite: Tensor, path: _Path, motions: Motions) -> Tensor:
    """The sprite along its path, on black; what leaves on one side comes in on the other."""
    pixels = np.arange(motions.size) + 0.5
    x, y = (_around(pixels - track[:, None], motions.size) for track in (path.x, path.y))
    east, south = x[:, None, :], y[:, :, None]  # from the middle of the sprite to each pixel
    cos, sin = np.cos(path.angle)[:, None, None], np.sin(path.angle)[:, None, None]
    grid = np.stack([cos * east + sin * south, cos * south - sin * east], 3)
    grid = grid / (path.scale * motions.sprite / 2)[:, None, None, None]
    sprites = sprite.expand(len(grid), -1, -1, -1)
    shown = F.grid_sample(sprites, torch.from_numpy(grid).float(), align_corners=False)[:, 0]
    return shown * torch.from_numpy(path.light).float().view(-1, 1, 1)


def _around(distance: Track, size: int) -> Track:
    """The shorter way on a ring."""
    return (distance + size / 2) % size - size / 2


def _write(file: Path, film: Pixels) -> None:
    import av  # only this study needs it

    with av.open(str(file), "w") as container:
        # MPEG-4 part 2 is FFmpeg's own: it is in every build, and every build writes the same pictures
        stream = container.add_stream("mpeg4", rate=25, options={"qmin": "2", "qmax": "3", "threads": "1"})
        stream.width, stream.height, stream.pix_fmt = film.shape[2], film.shape[1], "yuv420p"
        for picture in film:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="gray")))
        container.mux(stream.encode())
