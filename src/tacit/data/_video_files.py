"""Frames of video files, decoded with PyAV (the extra `video`): only those that are asked for.

Frames are numbered in the order in which they are shown. They are decoded in chunks of `CHUNK`, from the nearest key
frame before, if the file says where its key frames are, and from the start if it does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tacit._refusals import Refusal
from tacit.data._cache import Cache, Pixels, digest

CHUNK = 64
Chunk = tuple[int, Pixels]  # its number and its frames


class Unreadable(ValueError):
    """A file that gives no picture."""


class Skipped(NamedTuple):
    """A file that could not be read, and why. For the curator."""

    file: Path
    why: str


@dataclass(frozen=True, kw_only=True)
class Video:
    """What is known of a file before its pictures are asked for."""

    file: Path
    frames: int
    height: int
    width: int
    times: NDArray[np.int64] | None  # of each frame, in the stream's own unit; None: the file does not say
    keys: NDArray[np.int64]  # the frames from which decoding can begin


def pyav() -> Any:
    """The module `av`, if it is there."""
    try:
        import av
    except ImportError:
        raise Refusal("Reading videos needs PyAV: pip install 'tacit[video]'.") from None
    return av


def probe(file: Path) -> Video:
    """Count the frames of a file, without decoding more than one of them; `Unreadable` if there is none."""
    av = pyav()
    times, first, frames, keys = [], None, 0, []
    try:
        with _open(file) as container:
            stream = container.streams.video[0]
            for packet in container.demux(stream):
                if first is None:
                    first = next(iter(packet.decode()), None)
                if packet.size:
                    frames += 1
                    times.append(packet.pts)
                    if packet.is_keyframe:
                        keys.append(packet.pts)
    except (av.error.FFmpegError, OSError, ValueError, IndexError) as error:
        raise Unreadable(f"{file} cannot be read as a video: {_reason(error)}.") from error
    if first is None:
        raise Unreadable(f"{file} cannot be read as a video: it holds no picture.")
    known = None not in times and len(set(times)) == frames
    order = np.sort(np.array(times, np.int64)) if known else None
    starts = np.searchsorted(order, np.sort(np.array(keys, np.int64))) if order is not None else np.zeros(1, np.int64)
    return Video(file=file, frames=frames, height=first.height, width=first.width, times=order, keys=starts)


def readable_files(names: list[Path], skipped: list[Skipped], strict: bool) -> dict[int, Video]:
    """The files that can be read, by their number; the others go to `skipped`."""
    pyav()
    places: dict[Path, int] = {}
    for number, name in enumerate(names):
        if (before := places.setdefault(name.resolve(), number)) != number:
            raise Refusal(f"{names[before]} and {name} are the same file: a video belongs to one unit, once.")
    found: dict[int, Video] = {}
    for number, name in enumerate(names):
        try:
            found[number] = probe(name)
        except Unreadable as error:
            if strict:
                raise
            skipped.append(Skipped(name, str(error)))
    if not found:
        raise Refusal(f"None of the {len(names)} video files can be read" + (f": {skipped[0].why}" if skipped else "."))
    return found


def refuse_twins(units: list[list[Path]]) -> None:
    """Two files with the same content in two units would be one person in two units."""
    sizes: dict[int, list[tuple[int, Path]]] = {}
    for unit, files in enumerate(units):
        for file in files:
            sizes.setdefault(file.stat().st_size, []).append((unit, file))
    for alike in sizes.values():
        seen: dict[str, tuple[int, Path]] = {}
        for unit, file in alike if len(alike) > 1 else ():
            other, before = seen.setdefault(digest(file), (unit, file))
            if other != unit:
                raise Refusal(
                    f"{before} and {file} hold the same video but belong to two units: keep one of them, or put "
                    "them into one group."
                )


def frame_shape(videos: list[Video], size: int | tuple[int, int] | None, colour: bool) -> tuple[int, int, int]:
    channels = 3 if colour else 1
    if size is not None:
        height, width = (size, size) if isinstance(size, int) else size
        if min(height, width) < 1:
            raise Refusal(f"The size is {size}, but at least 1 pixel is needed.")
        return height, width, channels
    first = videos[0]
    for video in videos:
        if (video.height, video.width) != (first.height, first.width):
            raise Refusal(
                f"{first.file} is {first.height} x {first.width} and {video.file} {video.height} x {video.width} "
                "pixels: give the size that all are brought to."
            )
    return first.height, first.width, channels


def pictures(video: Video, numbers: NDArray[np.int64], shape: tuple[int, int, int], cache: Cache) -> Pixels:
    """The frames with these numbers, each of `shape` (height, width, channels: 1 is grey, 3 is RGB)."""
    chunks = numbers // CHUNK
    found: dict[int, Pixels] = {}
    missing = []
    for chunk in np.unique(chunks).tolist():
        kept = cache.get((video.file, chunk, shape))
        if kept is None:
            missing.append(chunk)
        else:
            found[chunk] = kept
    for chunk, pixels in _decode(video, missing, shape):
        cache.put((video.file, chunk, shape), pixels)
        found[chunk] = pixels
    chosen = np.empty((len(numbers), *shape), np.uint8)
    for chunk, pixels in found.items():
        here = chunks == chunk
        chosen[here] = pixels[numbers[here] - chunk * CHUNK]
    return chosen


def _decode(video: Video, chunks: Sequence[int], shape: tuple[int, int, int]) -> Iterator[Chunk]:
    if not chunks:
        return
    av = pyav()
    try:
        with _open(video.file) as container:
            for run in _runs(video, chunks):
                yield from _decode_run(video, container, run, shape)
    except (av.error.FFmpegError, OSError, IndexError) as error:
        raise Unreadable(f"{video.file} cannot be read as a video: {_reason(error)}.") from error


def _decode_run(video: Video, container: Any, run: list[int], shape: tuple[int, int, int]) -> Iterator[Chunk]:
    """Decode from a key frame through all chunks of a run. A frame that is damaged shows the one before it."""
    reformatter = pyav().video.reformatter.VideoReformatter()
    height, width, channels = shape

    def picture(frame: Any) -> Pixels:
        changed = reformatter.reformat(frame, width, height, "gray" if channels == 1 else "rgb24")
        pixels: Pixels = changed.to_ndarray().reshape(shape)
        return pixels

    wanted = {number for chunk in run for number in _numbers(video, chunk)}
    final = max(wanted)
    read: dict[int, Pixels] = {}
    last = None
    for number, frame in _frames(video, container, run[0] * CHUNK):
        if number > final:
            break
        last = frame
        if number in wanted:
            read[number] = picture(frame)
    if last is None:
        raise Unreadable(f"{video.file} cannot be read as a video: no frame near number {min(wanted)} can be decoded.")
    for chunk in run:
        there = [number for number in _numbers(video, chunk) if number in read]
        before = read[there[0]] if there else picture(last)
        pixels = np.empty((len(_numbers(video, chunk)), *shape), np.uint8)
        for place, number in enumerate(_numbers(video, chunk)):
            before = pixels[place] = read.get(number, before)
        yield chunk, pixels


def _frames(video: Video, container: Any, first: int) -> Iterator[tuple[int, Any]]:
    """Frames and their numbers, from the last key frame before `first`."""
    stream = container.streams.video[0]
    number = -1
    if video.times is not None and (key := _key(video, first)) > 0:
        container.seek(int(video.times[key]), stream=stream)
        number = key - 1
    for packet in container.demux(stream):
        try:
            decoded = packet.decode()
        except pyav().error.InvalidDataError:
            continue
        for frame in decoded:
            known = video.times is not None and frame.pts is not None
            number = int(np.searchsorted(video.times, frame.pts)) if known else number + 1  # type: ignore[arg-type]
            yield number, frame


def _runs(video: Video, chunks: Sequence[int]) -> list[list[int]]:
    """Split the chunks where it is worth to seek: where a key frame lies between the end of one and the next."""
    runs = [[chunks[0]]]
    for chunk in chunks[1:]:
        if video.times is not None and _key(video, chunk * CHUNK) > (runs[-1][-1] + 1) * CHUNK:
            runs.append([chunk])
        else:
            runs[-1].append(chunk)
    return runs


def _numbers(video: Video, chunk: int) -> range:
    return range(chunk * CHUNK, min((chunk + 1) * CHUNK, video.frames))


def _key(video: Video, number: int) -> int:
    place = int(np.searchsorted(video.keys, number, side="right")) - 1
    return int(video.keys[place]) if place >= 0 else 0


def _open(file: Path) -> Any:
    container = pyav().open(str(file))
    for stream in container.streams.video[:1]:
        stream.codec_context.thread_count = 1  # files are small; threads cost more than they bring
    return container


def _reason(error: Exception) -> str:
    return "it has no video stream" if isinstance(error, IndexError) else getattr(error, "strerror", None) or str(error)
