"""What is known of a video file before its pictures are asked for: how many frames, when each is shown, where to begin.

MP4 and Matroska files of common codecs say when each frame is shown, so their frames are known without decoding them.
All others (AVI says it wrongly where frames are reordered) are decoded once from end to end, and frames count as they
come out of the decoder. A saved index (`Index`) keeps what was found, by a file's size and times.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tacit._refusals import Refusal
from tacit.data._file_state import State, check_state, state_of

CONTAINERS = {"mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm"}
CODECS = {"h264", "hevc", "mpeg4", "mjpeg", "vp9", "av1", "libdav1d", "libaom-av1"}  # a packet is a frame
ATTACHED = 1024  # the disposition of a cover picture (AV_DISPOSITION_ATTACHED_PIC)
RATE = 25.0  # where a file does not say
CONFIRMED = 16  # frames that are decoded to see that they come out as the container says
Numbers = NDArray[np.int64]


class Unreadable(ValueError):
    """A file that gives no picture."""


@dataclass(frozen=True, kw_only=True)
class Video:
    """A file, its frames in the order in which they are shown, and where decoding can begin.

    `stamped`: frames are identified by their times; otherwise they count from a key frame on.
    """

    file: Path
    state: State
    frames: int
    height: int  # upright
    width: int
    turn: int  # quarter turns, counterclockwise, that bring a decoded frame upright
    rate: float  # frames per second, on average
    tick: float  # seconds
    times: Numbers | None  # of each frame, in ticks; None: the file does not say
    stamped: bool
    keys: Numbers  # the frames from which decoding can begin, ascending, 0 first
    seeks: Numbers  # where to seek to for each of them, in ticks

    @property
    def seconds(self) -> NDArray[np.float64]:
        """When each frame is shown, from the first on."""
        if self.times is None:
            return np.arange(self.frames) / self.rate
        found: NDArray[np.float64] = (self.times - self.times[0]) * self.tick
        return found

    def check(self) -> None:
        """Refuse a file that is not what it was."""
        check_state(self.file, self.state)

    def resampled(self, fps: float | None) -> Numbers | None:
        """Which frame is shown at each of a row of times at even distances; None: the frames as they are.

        `fps` of them a second; without it as many as there are frames, if these lie at uneven distances.
        """
        seconds = self.seconds
        typical = float(np.median(np.diff(seconds))) if self.frames > 1 else 1 / self.rate
        whole = float(seconds[-1]) + typical
        if fps is None:
            even = whole / self.frames
            if np.abs(seconds - even * np.arange(self.frames)).max() <= even / 2:
                return None
            count = self.frames
        else:
            even = 1 / fps
            count = max(1, round(whole * fps))
        looked_at = even * np.arange(count) + 0.25 * min(even, typical)  # stamps are rounded, mostly to milliseconds
        return np.maximum(np.searchsorted(seconds, looked_at, side="right") - 1, 0).astype(np.int64)


def pyav() -> Any:
    """The module `av`, if it is there."""
    try:
        import av
    except ImportError:
        raise Refusal("Reading videos needs PyAV: pip install 'tacit[video]'.") from None
    return av


@contextmanager
def opened(file: Path) -> Iterator[tuple[Any, Any]]:
    """The container and its video stream; metadata may be in any encoding. `Unreadable` where there is none."""
    with pyav().open(str(file), metadata_errors="ignore") as container:
        stream = container.streams.best("video")
        if stream is None or int(stream.disposition) & ATTACHED:
            raise Unreadable(f"{file} cannot be read as a video: it has no video stream.")
        stream.codec_context.thread_count = 1  # files are small; threads cost more than they bring
        yield container, stream


def probe(file: Path) -> Video:
    """Look at a file: its packets where they tell everything, else all of its frames; `Unreadable` if there is none."""
    av = pyav()
    try:
        state = state_of(file)
        return _by_stamps(file, state) or _by_counting(file, state)
    except (av.error.FFmpegError, OSError, ValueError, IndexError) as error:
        if isinstance(error, Unreadable):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise Unreadable(f"{file} cannot be read as a video: {reason}.") from error


def _by_stamps(file: Path, state: State) -> Video | None:
    """From the times of the packets; None where these cannot be relied on."""
    stamps: list[int] = []
    keys: list[int] = []
    seen: list[Any] = []
    with opened(file) as (container, stream):
        if container.format.name not in CONTAINERS or stream.codec_context.name not in CODECS:
            return None
        for packet in container.demux(stream):
            if len(seen) < CONFIRMED:
                seen += packet.decode()
            if not packet.size:
                continue
            if packet.pts is None or packet.is_discard or packet.is_corrupt:
                return None
            stamps.append(packet.pts)
            if packet.is_keyframe:
                keys.append(packet.pts)
        tick = float(stream.time_base)
        rate = float(stream.average_rate or RATE)
    times = np.sort(np.array(stamps, np.int64))
    starts = np.sort(np.array(keys, np.int64))
    first = [frame.pts for frame in seen[:CONFIRMED]]
    if not first or len(np.unique(times)) != len(times) or first != times[: len(first)].tolist():
        return None
    if not len(starts) or starts[0] != times[0]:
        return None
    return Video(
        file=file,
        state=state,
        frames=len(times),
        **_upright(seen[0]),
        rate=rate,
        tick=tick,
        times=times,
        stamped=True,
        keys=np.searchsorted(times, starts).astype(np.int64),
        seeks=starts,
    )


def _by_counting(file: Path, state: State) -> Video:
    """From all frames as the decoder gives them."""
    stamps: list[int | None] = []
    keys: list[int] = []
    seeks: list[int | None] = []
    first, damaged = None, False
    with opened(file) as (container, stream):
        for packet in container.demux(stream):
            if packet.size and packet.is_keyframe:
                seeks.append(packet.dts)
            decoded, whole = frames_of(packet)
            damaged |= not whole
            for frame in decoded:
                first = first or frame
                if frame.key_frame:
                    keys.append(len(stamps))
                stamps.append(frame.pts)
        tick, rate = float(stream.time_base), float(stream.average_rate or RATE)
    if first is None:
        raise Unreadable(f"{file} cannot be read as a video: it holds no picture.")
    known = [stamp for stamp in stamps if stamp is not None]
    times = np.array(known, np.int64) if len(known) == len(stamps) and bool((np.diff(known) > 0).all()) else None
    begins = [seek for seek in seeks if seek is not None]
    sure = not damaged and len(begins) == len(keys) and keys[:1] == [0] and bool((np.diff(begins) > 0).all())
    return Video(
        file=file,
        state=state,
        frames=len(stamps),
        **_upright(first),
        rate=rate,
        tick=tick,
        times=times,
        stamped=False,
        keys=np.array(keys if sure else [0], np.int64),  # damaged: from the start, or frames would count differently
        seeks=np.array(begins if sure else [0], np.int64),
    )


def frames_of(packet: Any) -> tuple[list[Any], bool]:
    """What a packet decodes to, and whether it was sound."""
    try:
        return packet.decode(), not packet.is_corrupt
    except pyav().error.InvalidDataError:
        return [], False


def _upright(frame: Any) -> dict[str, int]:
    """Height, width and turn from a frame and its display matrix (phones film lying down)."""
    turn = round(frame.rotation / 90) % 4
    high, wide = (frame.width, frame.height) if turn % 2 else (frame.height, frame.width)
    return {"height": high, "width": wide, "turn": turn}
