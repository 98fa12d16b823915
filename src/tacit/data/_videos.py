"""Clips of real video files, by the video or the person that they show.

`VideoClips` shows a selected unit as k clips (Multi-Clip): the gradients of the clips are averaged inside the unit and
clipped once, so that k clips cost what one costs. `clips_as_units` is the naive view for comparison, in which each clip
counts as a person of its own; what it costs a video is `largest_group` times that, by group privacy.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tacit._deprecation import renamed_argument
from tacit._refusals import Refusal
from tacit.data import _video_layouts as video_layouts
from tacit.data._cache import Cache, Pixels, digest, fingerprint
from tacit.data._grouped import Groupable, named
from tacit.data._records import Rows
from tacit.data._video_files import Skipped, Video, frame_shape, pictures, readable_files, refuse_twins

VIDEO = "video"
Picks = list[tuple[Video, int]]  # a file and the frame at which a clip begins


class VideoClips(Groupable):
    """Video files as units of k clips: `clips` of `frames` frames each, `stride` frames apart.

    A unit is a "video": a file, or all files with the same entry in `groups` (a source video). Where groups are more
    than that, `unit` says what ("patient"); files of one unit have one label here, and `group_by` puts videos with
    different labels together. All places at which a
    clip can begin, over the files of the unit one after the other, are cut into k equal parts, and each clip begins at
    random in its own part, so that clips differ and longer files are shown more; an evaluation takes the middle of each
    part. There are always k clips: where there are fewer places, clips repeat, and a clip that runs past the end
    repeats the last frame.

    Inputs are float32 in [0, 1], rows x frames x channels x height x width, squeezed to `size` (a number, or height and
    width); without it all files must have one size. Decoded frames stay in `memory` bytes.

    A file that cannot be read is left out and listed in `skipped`, or, if `strict`, an error. One that breaks later
    makes the rows of its unit NaN, so that the unit contributes nothing to a clipped sum.

    Args:
        files: The video files.
        labels: One class per file.
        clips: Clips of a unit in one step, k.
        frames: Frames of a clip.
        stride: Frames between two of them.
        size: The side, or height and width, that frames are resized to; None: all files have one size.
        colour: RGB instead of grey.
        groups: One id per file; files with the same id are one unit.
        unit: What a group is.
        classes: Names of the classes.
        memory: Bytes of decoded frames that are kept.
        strict: A file that cannot be read is an error instead of skipped.
    """

    scored_by: Literal["unit"] = "unit"

    def __init__(
        self,
        files: Sequence[str | Path],
        labels: Sequence[int] | Tensor,
        *,
        clips: int = 8,
        frames: int = 8,
        stride: int = 2,
        size: int | tuple[int, int] | None = None,
        colour: bool = False,
        groups: Sequence[int | str] | Tensor | None = None,
        unit: str = VIDEO,
        classes: Sequence[str] = (),
        memory: int = 1_000_000_000,
        strict: bool = False,
    ) -> None:
        for name, number in (("clips", clips), ("frames", frames), ("stride", stride)):
            if number < 1:
                raise Refusal(f"{name} is {number}, but at least 1 is needed.")
        if named(unit) != VIDEO and groups is None:
            raise Refusal(f"A file is a video: for unit={unit!r} give groups, whose each file is, or use group_by.")
        self.unit = unit
        targets = torch.as_tensor(labels)
        names = [Path(file) for file in files]
        given = [str(name) for name in names] if groups is None else groups
        owners = [owner.item() if isinstance(owner, Tensor) else owner for owner in given]  # tensors are no keys
        if not len(names) == len(targets) == len(owners):
            raise Refusal("The numbers of files, labels and groups differ: one each is needed.")
        self.clips, self.frames, self.stride = clips, frames, stride
        self.classes = tuple(classes)
        self.skipped: list[Skipped] = []
        members: dict[Any, list[int]] = {}
        readable = readable_files(names, self.skipped, strict)
        for number in readable:
            members.setdefault(owners[number], []).append(number)
        refuse_twins([[readable[number].file for number in member] for member in members.values()])
        for member in members.values():
            for other in member[1:]:
                if not torch.equal(targets[member[0]], targets[other]):
                    raise Refusal(f"{names[member[0]]} and {names[other]} are of one group but have different labels.")
        self._ids = list(members)
        self._videos = [[readable[number] for number in member] for member in members.values()]
        self._labels = targets[[member[0] for member in members.values()]]
        if self.classes and not 0 <= int(self._labels.min()) <= int(self._labels.max()) < len(self.classes):
            raise Refusal(f"The labels must be from 0 to {len(self.classes) - 1}, as there are so many classes.")
        self._shape = frame_shape(list(readable.values()), size, colour)
        self._cache = Cache(memory)
        self._broken: set[Path] = set()

    @classmethod
    def folder(cls, root: str | Path, **options: Any) -> VideoClips:
        """`root/CLASS/FILE`; a unit is a file. `options` are those of `VideoClips`."""
        return cls._listed(video_layouts.folder(root), options)

    @classmethod
    def ucf101(
        cls,
        root: str | Path,
        split_file: str | Path,
        class_index: str | Path | None = None,
        *,
        unit: Literal["group", "video"] | None = None,
        units: Literal["group", "video"] | None = None,
        **options: Any,
    ) -> VideoClips:
        """UCF-101: the videos `root/CLASS/v_CLASS_g01_c01.avi` that a split file such as `trainlist01.txt` names.

        The clips of one group (g01) are cut from one source video and show the same people: they are one unit, unless
        `unit="video"`. Labels count from 0, in the order of `class_index` (by default `classInd.txt` beside the split
        file; without it, the sorted folders of `root`).
        """
        unit = renamed_argument("units", units, "unit", unit, where="VideoClips.ucf101")
        return cls._listed(video_layouts.ucf101(root, split_file, class_index, unit or "group"), options)

    @classmethod
    def hmdb51(
        cls,
        root: str | Path,
        split_folder: str | Path,
        split: int = 1,
        part: Literal["train", "test"] = "train",
        **options: Any,
    ) -> VideoClips:
        """HMDB-51: the videos `root/CLASS/NAME.avi` that `CLASS_test_split1.txt` and so on give to a part.

        A unit is a file: the set does not say which files show the same people.
        """
        return cls._listed(video_layouts.hmdb51(root, split_folder, split, part), options)

    @classmethod
    def _listed(cls, listing: video_layouts.Listing, options: dict[str, Any]) -> VideoClips:
        return cls(listing.files, listing.labels, classes=listing.classes, **{"groups": listing.groups} | options)

    @property
    def unit_ids(self) -> list[Any]:
        """The group of each unit, or the path of its file as given."""
        return self._ids

    @property
    def uniforms(self) -> int:
        return self.clips

    @property
    def most_rows(self) -> int:
        return self.clips

    def __len__(self) -> int:
        return len(self._videos)

    def labels(self) -> Tensor:
        return self._labels.clone()

    def rows(self, units: Tensor, uniforms: Tensor | None) -> Rows:
        """`clips` rows of each unit; `uniforms` has `clips` columns."""
        if uniforms is not None and uniforms.shape != (len(units), self.clips):
            raise Refusal(f"The uniforms are {tuple(uniforms.shape)}, but {(len(units), self.clips)} are needed.")
        inside = np.full((len(units), self.clips), 0.5) if uniforms is None else 1 - uniforms.double().cpu().numpy()
        places = (np.arange(self.clips) + inside) / self.clips  # in [0, 1), each in its own k-th
        picks = [self._picks(unit, place) for unit, place in zip(units.tolist(), places, strict=True)]
        owner = torch.arange(len(units)).repeat_interleave(self.clips)
        return Rows(self._show(picks), self._labels[units.cpu()][owner], owner)

    def fingerprint(self) -> str:
        settings = (self.clips, self.frames, self.stride, self._shape)
        contents = [[digest(video.file) for video in unit] for unit in self._videos]
        return fingerprint([settings, contents, self._labels.tolist()])

    @property
    def _span(self) -> int:
        """How many frames there are from the first to the last frame of a clip."""
        return (self.frames - 1) * self.stride + 1

    def _picks(self, unit: int, places: NDArray[np.float64]) -> Picks:
        """The clips at these places, from 0 to 1, among all clips that the files of the unit have."""
        videos = self._videos[unit]
        ends = np.cumsum([max(video.frames - self._span + 1, 1) for video in videos])
        chosen = np.minimum((places * ends[-1]).astype(np.int64), ends[-1] - 1)
        which = np.searchsorted(ends, chosen, side="right")
        begins = chosen - np.concatenate([[0], ends])[which]
        return [(videos[place], begin) for place, begin in zip(which.tolist(), begins.tolist(), strict=True)]

    def _show(self, picks: list[Picks]) -> Tensor:
        """The clips of each unit, one below the other; NaN for all of a unit of which one cannot be read."""
        height, width, channels = self._shape
        rows = [len(pick) for pick in picks]
        shown = torch.empty(sum(rows), self.frames, channels, height, width)
        first = 0
        for pick, count in zip(picks, rows, strict=True):
            here = shown[first : first + count]
            try:
                pixels = torch.from_numpy(self._unit(pick)).permute(0, 1, 4, 2, 3)
                torch.div(pixels, 255, out=here)
            except Exception:  # after a charge nothing about one unit may be told by an error, whatever it is
                here.fill_(torch.nan)
                self._broken |= {video.file for video, _ in pick}
            first += count
        return shown

    def _unit(self, picks: Picks) -> Pixels:
        pixels = np.empty((len(picks), self.frames, *self._shape), np.uint8)
        for video in {id(video): video for video, _ in picks}.values():
            here = [place for place, (other, _) in enumerate(picks) if other is video]
            begins = np.array([picks[place][1] for place in here])
            numbers = begins[:, None] + self.stride * np.arange(self.frames)
            flat = pictures(video, np.minimum(numbers, video.frames - 1).ravel(), self._shape, self._cache)
            pixels[here] = flat.reshape(len(here), self.frames, *self._shape)
        return pixels


class ClipUnits(Groupable):
    """Each clip is a unit: see `clips_as_units`."""

    unit = "clip"
    scored_by: Literal["row"] = "row"
    uniforms = 0
    most_rows = 1

    def __init__(self, videos: VideoClips) -> None:
        self._source = videos
        self._picks: Picks = []
        owner: list[int] = []
        for unit, files in enumerate(videos._videos):
            for video in files:
                count = max(video.frames // videos._span, 1)
                self._picks += [(video, place * video.frames // count) for place in range(count)]
                owner += [unit] * count
        self.owner = torch.tensor(owner)
        self.largest_group = int(self.owner.bincount().max())

    def __len__(self) -> int:
        return len(self._picks)

    def labels(self) -> Tensor:
        return self._source.labels()[self.owner]

    def rows(self, units: Tensor, uniforms: Tensor | None) -> Rows:  # noqa: ARG002 - a clip is always shown as it is
        shown = self._source._show([[self._picks[unit]] for unit in units.tolist()])
        return Rows(shown, self.labels()[units.cpu()], torch.arange(len(units)))

    def fingerprint(self) -> str:
        return fingerprint(["clips as units", self._source.fingerprint()])


def clips_as_units(videos: VideoClips) -> ClipUnits:
    """The naive view: each of the clips that fit into a video side by side, at even distances, is a unit of its own.

    A guarantee for such a unit says nothing about a video: a video, or a group, is up to `largest_group` of them (and
    `owner` says whose each is), and by group privacy its epsilon is that much larger, its delta even more.

    Args:
        videos: The videos.

    Returns:
        Records whose unit is the clip.
    """
    return ClipUnits(videos)
