"""Frames of video files, decoded with PyAV (the extra `video`): only those that are asked for.

Frames are numbered in the order in which they are shown. They are decoded in chunks of `CHUNK`, each from the last key
frame before it. What a frame looks like is decided by the file's content and its number alone, also where the file is
damaged, so that a step which is replayed shows the same pictures; a file that is gone, or not what it was, raises.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tacit._refusals import Refusal
from tacit.data._cache import Cache, Pixels
from tacit.data._file_state import Changed
from tacit.data._saved_index import SavedIndex
from tacit.data._video_index import Numbers, Unreadable, Video, frames_of, opened, pyav

CHUNK = 64
Chunk = tuple[int, Pixels]  # its number and its frames


class Skipped(NamedTuple):
    """A file that could not be read, and why. For the curator."""

    file: Path
    why: str


@dataclass(frozen=True, kw_only=True)
class Look:
    """What frames are brought to. `crop`: None squeezes; else the shorter side becomes side / crop, then the middle."""

    height: int
    width: int
    channels: int  # 1 is grey, 3 is RGB
    crop: float | None = None
    resampling: str = "bilinear"

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.height, self.width, self.channels

    @property
    def _filter(self) -> dict[str, str]:
        return {"interpolation": {"nearest": "POINT"}.get(self.resampling, self.resampling.upper())}

    def picture(self, frame: Any, turn: int, reformatter: Any) -> Pixels:
        """The pixels of a decoded frame, upright."""
        high, wide = (frame.width, frame.height) if turn % 2 else (frame.height, frame.width)
        tall, broad = self.height, self.width
        if self.crop is not None:
            scale = max(self.height / high, self.width / wide) / self.crop
            tall, broad = max(round(high * scale), self.height), max(round(wide * scale), self.width)
        before = (tall, broad) if turn % 2 else (broad, tall)  # width and height as they are decoded
        changed = reformatter.reformat(frame, *before, "gray" if self.channels == 1 else "rgb24", **self._filter)
        pixels = changed.to_ndarray().reshape(before[1], before[0], self.channels)
        upright = np.rot90(pixels, turn)
        top, left = (tall - self.height) // 2, (broad - self.width) // 2
        cut: Pixels = upright[top : top + self.height, left : left + self.width]
        return cut


def readable_files(names: list[Path], skipped: list[Skipped], strict: bool, index: SavedIndex) -> dict[int, Video]:
    """The files that can be read, by their number; the others go to `skipped`."""
    pyav()
    places: dict[Path, int] = {}
    for number, name in enumerate(names):
        if (before := places.setdefault(name.resolve(), number)) != number:
            raise Refusal(f"{names[before]} and {name} are the same file: a video belongs to one unit, once.")
    found: dict[int, Video] = {}
    for number, name in enumerate(names):
        try:
            found[number] = index.video(name)
        except Unreadable as error:
            if strict:
                raise
            skipped.append(Skipped(name, str(error)))
    if not found:
        raise Refusal(f"None of the {len(names)} video files can be read" + (f": {skipped[0].why}" if skipped else "."))
    return found


def refuse_twins(units: list[list[Path]], index: SavedIndex) -> None:
    """Two files with the same content in two units would be one person in two units."""
    sizes: dict[int, list[tuple[int, Path]]] = {}
    for unit, files in enumerate(units):
        for file in files:
            sizes.setdefault(file.stat().st_size, []).append((unit, file))
    for alike in sizes.values():
        seen: dict[str, tuple[int, Path]] = {}
        for unit, file in alike if len(alike) > 1 else ():
            other, before = seen.setdefault(index.digest(file), (unit, file))
            if other != unit:
                raise Refusal(
                    f"{before} and {file} hold the same video but belong to two units: keep one of them, or put "
                    "them into one group."
                )


def frame_shape(videos: list[Video], size: int | tuple[int, int] | None) -> tuple[int, int]:
    """Height and width that all frames are brought to."""
    if size is not None:
        height, width = (size, size) if isinstance(size, int) else size
        if min(height, width) < 1:
            raise Refusal(f"The size is {size}, but at least 1 pixel is needed.")
        return height, width
    first = videos[0]
    for video in videos:
        if (video.height, video.width) != (first.height, first.width):
            raise Refusal(
                f"{first.file} is {first.height} x {first.width} and {video.file} {video.height} x {video.width} "
                "pixels: give the size that all are brought to."
            )
    return first.height, first.width


def pictures(video: Video, numbers: Numbers, look: Look, cache: Cache) -> Pixels:
    """The frames with these numbers, each of the look's shape.

    Raises:
        Changed: The file is gone, cannot be read, or is not what it was when it was probed.
    """
    chunks = numbers // CHUNK
    found: dict[int, Pixels] = {}
    missing = []
    for chunk in np.unique(chunks).tolist():
        kept = cache.get((video.file, chunk, look))
        if kept is None:
            missing.append(chunk)
        else:
            found[chunk] = kept
    for chunk, pixels in _decode(video, missing, look):
        cache.put((video.file, chunk, look), pixels)
        found[chunk] = pixels
    chosen = np.empty((len(numbers), *look.shape), np.uint8)
    for chunk, pixels in found.items():
        here = chunks == chunk
        chosen[here] = pixels[numbers[here] - chunk * CHUNK]
    return chosen


def _decode(video: Video, chunks: Sequence[int], look: Look) -> list[Chunk]:
    """The frames of some chunks; the file is looked at before and after, so that no other file's are taken for them."""
    if not chunks:
        return []
    av = pyav()
    video.check()
    found: list[Chunk] = []
    for key, run in groupby(chunks, lambda chunk: _key(video, chunk * CHUNK)):
        try:
            found += _decode_run(video, key, list(run), look)
        except (av.error.FFmpegError, OSError, Unreadable) as error:
            raise Changed("A data file cannot be read any more.") from error
    video.check()
    return found


def _decode_run(video: Video, key: int, run: list[int], look: Look) -> Iterator[Chunk]:
    """Decode from a key frame through all chunks that begin after it.

    A frame that is damaged shows the one before it; where there is none, the next of its chunk, or else black.
    """
    reformatter = pyav().video.reformatter.VideoReformatter()
    wanted = {chunk: range(chunk * CHUNK, min((chunk + 1) * CHUNK, video.frames)) for chunk in run}
    starts, final = {numbers[0]: chunk for chunk, numbers in wanted.items()}, wanted[run[-1]][-1]
    read: dict[int, Pixels] = {}
    before: dict[int, Any] = {}  # for each chunk, the last frame that was shown before it
    last = None
    passed = key

    def reached(number: int) -> None:
        nonlocal passed
        for begun in [chunk for start, chunk in starts.items() if passed <= start <= number]:
            before[begun] = last
        passed = number + 1

    for number, frame in _frames(video, key):
        if number > final:
            break
        if number < key:
            continue
        reached(number)
        last = frame
        if any(number in numbers for numbers in wanted.values()):
            read[number] = look.picture(frame, video.turn, reformatter)
    reached(final)
    for chunk, numbers in wanted.items():
        there = [number for number in numbers if number in read]
        earlier = before[chunk]
        if earlier is not None and (not there or there[0] != numbers[0]):
            shown = look.picture(earlier, video.turn, reformatter)
        else:
            shown = read[there[0]] if there else np.zeros(look.shape, np.uint8)
        pixels = np.empty((len(numbers), *look.shape), np.uint8)
        for place, number in enumerate(numbers):
            shown = pixels[place] = read.get(number, shown)
        yield chunk, pixels


def _frames(video: Video, key: int) -> Iterator[tuple[int, Any]]:
    """Frames and their numbers, from a key frame on; from the start where seeking does not lead to that frame."""
    place = int(np.searchsorted(video.keys, key))
    for target in (place, place - 1) if place else ():  # some containers come out behind what they are asked for
        with opened(video.file) as (container, stream):
            container.seek(int(video.seeks[target]), stream=stream)
            found = _numbered(video, container, stream, place)
            first = next((one for one in found if one[0] >= key), None)
            if first is not None and first[0] == key:
                yield first
                yield from found
                return
    with opened(video.file) as (container, stream):
        yield from _numbered(video, container, stream, 0)


def _numbered(video: Video, container: Any, stream: Any, place: int) -> Iterator[tuple[int, Any]]:
    return _stamped(video, container, stream) if video.stamped else _counted(video, container, stream, place)


def _stamped(video: Video, container: Any, stream: Any) -> Iterator[tuple[int, Any]]:
    assert video.times is not None
    for packet in container.demux(stream):
        for frame in frames_of(packet)[0]:
            number = -1 if frame.pts is None else int(np.searchsorted(video.times, frame.pts))
            if 0 <= number < video.frames and video.times[number] == frame.pts:
                yield number, frame


def _counted(video: Video, container: Any, stream: Any, place: int) -> Iterator[tuple[int, Any]]:
    """Frames as they come out, from the key frame with that place on; what comes before it is not given to the decoder.

    Frames that are shown before the key frame, but stored behind it, come out first: they are passed over.
    """
    number, begun, fed = int(video.keys[place]), place == 0, place == 0
    for packet in container.demux(stream):
        fed = fed or (packet.is_keyframe and packet.dts == video.seeks[place])
        if not fed:
            continue
        for frame in frames_of(packet)[0]:
            begun = begun or bool(frame.key_frame)
            if begun:
                yield number, frame
                number += 1


def _key(video: Video, number: int) -> int:
    return int(video.keys[max(int(np.searchsorted(video.keys, number, side="right")) - 1, 0)])
