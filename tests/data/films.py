"""Small real video files in which each frame shows its number, in every kind that is read."""

import struct
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from torch import Tensor

REORDERED = {"crf": "4", "g": "30", "bf": "3", "b-adapt": "0", "sc_threshold": "0"}  # three B-frames, always
FINE = {"qmin": "1", "qmax": "1"}
KINDS: dict[str, tuple[str, str, dict[str, str]]] = {  # name -> ending, codec, options
    "h264-b-avi": ("avi", "libx264", REORDERED),
    "mpeg4-b-avi": ("avi", "mpeg4", FINE | {"bf": "2", "g": "12"}),
    "mpeg4-avi": ("avi", "mpeg4", FINE),
    "h264-b-mp4": ("mp4", "libx264", REORDERED),
    "mpeg4-mp4": ("mp4", "mpeg4", FINE),
    "h264-b-open-mp4": ("mp4", "libx264", REORDERED | {"x264-params": "open-gop=1"}),
    "h264-b-open-avi": ("avi", "libx264", REORDERED | {"x264-params": "open-gop=1"}),
    "h264-b-mov": ("mov", "libx264", REORDERED),
    "h264-b-mkv": ("mkv", "libx264", REORDERED),
    "h264-b-ts": ("ts", "libx264", REORDERED),
    "h264-b-flv": ("flv", "libx264", REORDERED),
    "flv": ("flv", "flv", FINE),
    "wmv": ("wmv", "wmv2", FINE),
    "mpg": ("mpg", "mpeg2video", FINE | {"bf": "2", "g": "12"}),
    "vp8-webm": ("webm", "libvpx", {"crf": "4", "b:v": "2M", "auto-alt-ref": "1", "lag-in-frames": "16", "g": "40"}),
    "vp9-webm": ("webm", "libvpx-vp9", {"crf": "4", "b:v": "0", "g": "40"}),
    "gif": ("gif", "gif", {}),
}


def picture(number: int, height: int, width: int) -> np.ndarray:
    """Two digits to the base 15: the left half and the right half."""
    pixels = np.full((height, width), 20 + 14 * (number % 15), np.uint8)
    pixels[:, width // 2 :] = 20 + 14 * (number // 15)
    return pixels


def number_of(pixels: np.ndarray) -> int:
    """The number of a picture of grey levels."""
    half = pixels.shape[-1] // 2
    sides = pixels[..., 1 : half - 1], pixels[..., half + 1 : -1]
    low, high = (round((float(side.mean()) - 20) / 14) for side in sides)
    return 15 * high + low


def numbers(clips: Tensor) -> list[list[int]]:
    """Which frames the clips show; frames before channels."""
    return [[number_of(frame[0].numpy() * 255) for frame in clip] for clip in clips]


def write(
    file: Path,
    frames: int,
    *,
    codec: str = "mpeg4",
    options: dict[str, str] | None = None,
    height: int = 16,
    width: int = 16,
    milliseconds: Sequence[int] | None = None,
    turned: int = 0,
    title: str = "",
) -> Path:
    """A film; `milliseconds`: when each frame is shown; `turned`: degrees of the display matrix."""
    file.parent.mkdir(parents=True, exist_ok=True)
    quality = options if options is not None else {"crf": "4", "g": "30"} if codec == "libx264" else FINE
    with av.open(str(file), "w") as container:
        if title:
            container.metadata["title"] = title
        stream = container.add_stream(codec, rate=25, options=quality)
        stream.width, stream.height = width, height
        if milliseconds is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        stream.pix_fmt = "rgb8" if codec == "gif" else "yuv420p"
        if turned:
            stream.set_display_rotation(turned)
        for number in range(frames):
            frame = av.VideoFrame.from_ndarray(picture(number, height, width), format="gray")
            if milliseconds is not None:
                frame.pts, frame.time_base = milliseconds[number], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file


def of_kind(folder: Path, kind: str, frames: int) -> Path:
    ending, codec, options = KINDS[kind]
    side = 32 if codec == "mpeg2video" else 16  # it has no smaller ones
    return write(folder / f"{kind}.{ending}", frames, codec=codec, options=options, height=side, width=side)


def sound_only(file: Path) -> Path:
    """A second of silence, with no picture."""
    with av.open(str(file), "w") as container:
        stream = container.add_stream("aac", rate=8000, layout="mono")
        for start in range(0, 8000, 1000):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1000), np.float32), format="fltp", layout="mono")
            frame.sample_rate, frame.pts = 8000, start
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file


def turned_by_a_phone(file: Path) -> None:
    """Write the matrix of a phone held upright (a quarter turn clockwise) into the track header of an mp4 file."""
    content = bytearray(file.read_bytes())
    header = content.find(b"tkhd") + 4
    assert content[header] == 0, "a version with short times"
    matrix = header + 4 + 5 * 4 + 8 + 8
    content[matrix : matrix + 36] = struct.pack(">9i", 0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30)
    file.write_bytes(content)
