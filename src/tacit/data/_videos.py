"""Clips of real video files, by the video or the person that they show.

`VideoClips` shows a selected unit as k clips (Multi-Clip): the gradients of the clips are averaged inside the unit and
clipped once, so that k clips cost what one costs.
"""

from __future__ import annotations

import math
import warnings
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
from tacit.data._cache import Cache, Pixels, fingerprint
from tacit.data._clip_table import ClipTable
from tacit.data._grouped import Groupable, named
from tacit.data._image_files import ImageShape
from tacit.data._records import Rows
from tacit.data._saved_index import SavedIndex
from tacit.data._video_files import Look, Skipped, frame_shape, pictures, readable_files, refuse_twins
from tacit.data._video_index import Numbers, Video
from tacit.data._video_overview import overview, remarks
from tacit.data._views import Augment, FlipAndShift

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

    Frames are those of the file in the order in which they are shown, upright. With `fps` a video is brought to that
    many frames a second first, so that `stride / fps` is a time; without it, a file whose frames lie at uneven
    distances is brought to its own mean rate.

    Inputs are float32, rows x frames x channels x height x width (`layout="CT"`: rows x channels x frames x ...), in
    [0, 1] or, with `mean` and `std`, normalized. Frames keep their proportions: the shorter side is resized, and the
    middle is kept (`crop`). Decoded frames stay in `memory` bytes.

    A file that cannot be read is left out and listed in `skipped`, or, if `strict`, an error. One that is gone, or not
    what it was, when its clips are asked for, raises; training then leaves its unit out of the step, or, where steps
    may be replayed, stops.

    Args:
        files: The video files.
        labels: One class per file.
        clips: Clips of a unit in one step, k.
        frames: Frames of a clip.
        stride: Frames between two of them.
        fps: Frames a second that every video is brought to; None: as it is.
        size: The side, or height and width, of the frames; None: all files have one size.
        crop: The share of the shorter side that is kept, around the middle; None squeezes frames to `size`.
        colour: RGB; False: one grey channel.
        mean: Per channel, of values in [0, 1]: taken from them.
        std: Per channel: what they are then divided by.
        shape: What a model takes, instead of size, crop, colour, mean and std: `ImageShape.of(model)`.
        layout: "TC": frames before channels; "CT": channels before frames.
        augment: The number of views of every clip in training, all of them rows of its unit.
        views: How views are made of clips in [0, 1] (default: flips and shifts); what it does is decided by the random
            numbers that it is given.
        groups: One id per file; files with the same id are one unit.
        unit: What a group is.
        classes: Names of the classes.
        memory: Bytes of decoded frames that are kept.
        index: A file, for its owner alone, that keeps what was found out about the files (frames, times, digests), so
            that the next start looks at names, sizes and times only; None: every file is looked at.
        cached_clips: The least number of different clips of a unit that a linear probe computes features of.
        strict: A file that cannot be read is an error instead of skipped.
        unknown: Files that lie beside these and are no videos by their names; they are listed in `skipped`.

    Warns:
        UserWarning: Files were left out, classes are empty or have a single video. It names no number of videos.
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
        fps: float | None = None,
        size: int | tuple[int, int] | None = None,
        crop: float | None = 1.0,
        colour: bool = True,
        mean: Sequence[float] = (0.0,),
        std: Sequence[float] = (1.0,),
        shape: ImageShape | None = None,
        layout: Literal["TC", "CT"] = "TC",
        augment: int | None = None,
        views: Augment | None = None,
        groups: Sequence[int | str] | Tensor | None = None,
        unit: str = VIDEO,
        classes: Sequence[str] = (),
        memory: int = 1_000_000_000,
        index: str | Path | None = None,
        cached_clips: int = 16,
        strict: bool = False,
        unknown: Sequence[Path] = (),
    ) -> None:
        for name, number in (
            ("clips", clips),
            ("frames", frames),
            ("stride", stride),
            ("augment", augment),
            ("cached_clips", cached_clips),
        ):
            if number is not None and number < 1:
                raise Refusal(f"{name} is {number}, but at least 1 is needed.")
        if fps is not None and not 0 < fps < math.inf:
            raise Refusal(f"fps is {fps}, but a rate is above 0.")
        if layout not in ("TC", "CT"):
            raise Refusal(f"layout is {layout!r}: frames before channels is 'TC', channels before frames 'CT'.")
        if views is not None and augment is None:
            augment = 1
        if named(unit) != VIDEO and groups is None:
            raise Refusal(f"A file is a video: for unit={unit!r} give groups, one for each file, or use group_by.")
        self.unit = unit
        targets = torch.as_tensor(labels)
        names = [Path(file) for file in files]
        given = [str(name) for name in names] if groups is None else groups
        owners = [owner.item() if isinstance(owner, Tensor) else owner for owner in given]  # tensors are no keys
        if not len(names) == len(targets) == len(owners):
            raise Refusal("The numbers of files, labels and groups differ: one each is needed.")
        self.clips, self.frames, self.stride, self.cached_clips = clips, frames, stride, cached_clips
        self.classes = tuple(classes)
        self.skipped = [Skipped(file, "its ending is not that of a video") for file in unknown]
        members: dict[Any, list[int]] = {}
        self._index = SavedIndex(index)
        readable = readable_files(names, self.skipped, strict, self._index)
        for number in readable:
            members.setdefault(owners[number], []).append(number)
        refuse_twins([[readable[number].file for number in member] for member in members.values()], self._index)
        self._index.save()
        for member in members.values():
            for other in member[1:]:
                if not torch.equal(targets[member[0]], targets[other]):
                    raise Refusal(f"{names[member[0]]} and {names[other]} are of one group but have different labels.")
        self._ids = list(members)
        self._videos = [[readable[number] for number in member] for member in members.values()]
        self._labels = targets[[member[0] for member in members.values()]]
        if self.classes and not 0 <= int(self._labels.min()) <= int(self._labels.max()) < len(self.classes):
            raise Refusal(f"The labels must be from 0 to {len(self.classes) - 1}, as there are so many classes.")
        if shape is None:
            height, width = frame_shape(list(readable.values()), size)
            crop = None if size is None else crop
            shape = ImageShape(
                channels=3 if colour else 1,
                height=height,
                width=width,
                mean=tuple(mean),
                std=tuple(std),
                crop=crop or 1.0,
                resampling="bilinear",
            )
        else:
            crop = shape.crop
        self.shape, self.fps, self.layout = shape, fps, layout
        self._look = Look(
            height=shape.height, width=shape.width, channels=shape.channels, crop=crop, resampling=shape.resampling
        )
        self._views = (views or FlipAndShift()) if augment is not None else None
        self._copies = augment or 1
        self._resampled = {video.file: video.resampled(fps) for unit in self._videos for video in unit}
        self._cache = Cache(memory)
        for remark in remarks(self._counts(), skipped=bool(self.skipped)):
            warnings.warn(remark, stacklevel=2)

    @property
    def empty_classes(self) -> list[str]:
        """Classes without a video. Private."""
        return self._classes_with(0)

    @property
    def single_classes(self) -> list[str]:
        """Classes with one video. Private."""
        return self._classes_with(1)

    def overview(self, *, public: bool = False) -> str:
        """What to know before training: the unit, the classes, and what is odd about files or classes.

        Args:
            public: The videos are public: the number of each class is reported, too.

        Returns:
            Some lines of text.
        """
        counts = self._counts()
        said = remarks(counts, skipped=bool(self.skipped))
        return overview(self.unit, self._names(), counts if public else None, said)

    def _counts(self) -> list[int]:
        if self._labels.is_floating_point() or self._labels.dim() != 1 or int(self._labels.min()) < 0:
            return []  # no classes
        return torch.bincount(self._labels, minlength=len(self.classes)).tolist()

    def _names(self) -> list[str]:
        return list(self.classes) or [str(number) for number in range(len(self._counts()))]

    def _classes_with(self, videos: int) -> list[str]:
        return [name for name, count in zip(self._names(), self._counts(), strict=True) if count == videos]

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
        given = {"groups": listing.groups, "classes": listing.classes, "unknown": listing.unknown} | options
        return cls(listing.files, listing.labels, **given)

    @property
    def unit_ids(self) -> list[Any]:
        """The group of each unit, or the path of its file as given."""
        return self._ids

    @property
    def draws(self) -> bool:
        """Whether reading rows may draw from global generators: views of one's own might."""
        return bool(getattr(self._views, "draws", not isinstance(self._views, FlipAndShift | None)))

    @property
    def uniforms(self) -> int:
        return self.clips * (1 if self._views is None else 1 + self._copies * self._views.uniforms)

    @property
    def most_rows(self) -> int:
        return self.clips * self._copies

    def __len__(self) -> int:
        return len(self._videos)

    def labels(self) -> Tensor:
        return self._labels.clone()

    def rows(self, units: Tensor, uniforms: Tensor | None) -> Rows:
        """The clips of each unit, or the views of these; `uniforms` has `self.uniforms` columns.

        Raises:
            Changed: A file is gone, or is not what it was.
        """
        if uniforms is not None and uniforms.shape != (len(units), self.uniforms):
            raise Refusal(f"The uniforms are {tuple(uniforms.shape)}, but {(len(units), self.uniforms)} are needed.")
        inside = np.full((len(units), self.clips), 0.5)
        if uniforms is not None:
            inside = 1 - uniforms[:, : self.clips].double().cpu().numpy()
        places = (np.arange(self.clips) + inside) / self.clips  # in [0, 1), each in its own k-th
        picks = [self._picks(unit, place) for unit, place in zip(units.tolist(), places, strict=True)]
        shown, each = self._show(picks), self.clips
        if uniforms is not None and self._views is not None:
            each *= self._copies
            drawn = uniforms[:, self.clips :].reshape(-1, self._views.uniforms)
            shown = self._views(shown.repeat_interleave(self._copies, 0), drawn)
        owner = torch.arange(len(units)).repeat_interleave(each)
        return Rows(self._finished(shown), self._labels[units.cpu()][owner], owner)

    @property
    def augmented(self) -> bool:
        return self._views is not None

    def as_table(self, *, training: bool) -> ClipTable:
        """The clips that a linear probe computes features of, as rows with these units.

        Args:
            training: `cached_clips` of each unit, or a few more; otherwise those of an evaluation alone.

        Returns:
            A table of clips.
        """
        places = math.ceil(self.cached_clips / self.clips) if training else 1
        return ClipTable(self, places + (places + 1) % 2)

    def __getstate__(self) -> dict[str, Any]:
        """Without decoded frames: another process has its own."""
        return self.__dict__ | {"_cache": Cache(self._cache.memory)}

    def fingerprint(self) -> str:
        """Over settings, labels and the content of every file; it raises if one cannot be read, or has changed."""
        settings = (
            self.clips,
            self.cached_clips,
            self.frames,
            self.stride,
            self.fps,
            self.shape,
            self._look,
            self.layout,
        )
        views = (self._copies, self._views)
        contents = [[self._index.digest(video.file) for video in unit] for unit in self._videos]
        self._index.save()
        for unit in self._videos:
            for video in unit:
                video.check()
        return fingerprint([settings, views, contents, self._labels.tolist()])

    @property
    def _span(self) -> int:
        """How many frames there are from the first to the last frame of a clip."""
        return (self.frames - 1) * self.stride + 1

    def _length(self, video: Video) -> int:
        """Its frames, after resampling."""
        resampled = self._resampled[video.file]
        return video.frames if resampled is None else len(resampled)

    def _picks(self, unit: int, places: NDArray[np.float64]) -> Picks:
        """The clips at these places, from 0 to 1, among all clips that the files of the unit have."""
        videos = self._videos[unit]
        ends = np.cumsum([max(self._length(video) - self._span + 1, 1) for video in videos])
        chosen = np.minimum((places * ends[-1]).astype(np.int64), ends[-1] - 1)
        which = np.searchsorted(ends, chosen, side="right")
        begins = chosen - np.concatenate([[0], ends])[which]
        return [(videos[place], begin) for place, begin in zip(which.tolist(), begins.tolist(), strict=True)]

    def _show(self, picks: list[Picks]) -> Tensor:
        """The clips of each unit in [0, 1], one below the other, frames before channels."""
        height, width, channels = self._look.shape
        rows = [len(pick) for pick in picks]
        shown = torch.empty(sum(rows), self.frames, channels, height, width)
        first = 0
        for pick, count in zip(picks, rows, strict=True):
            pixels = torch.from_numpy(self._unit(pick)).permute(0, 1, 4, 2, 3)
            torch.div(pixels, 255, out=shown[first : first + count])
            first += count
        return shown

    def _finished(self, shown: Tensor) -> Tensor:
        """Normalized, and laid out as the model takes it."""
        if self.shape.mean != (0.0,) or self.shape.std != (1.0,):
            mean, std = (torch.tensor(part).view(1, 1, -1, 1, 1) for part in (self.shape.mean, self.shape.std))
            shown = (shown - mean) / std
        return shown if self.layout == "TC" else shown.transpose(1, 2).contiguous()

    def _unit(self, picks: Picks) -> Pixels:
        pixels = np.empty((len(picks), self.frames, *self._look.shape), np.uint8)
        for video in {id(video): video for video, _ in picks}.values():
            here = [place for place, (other, _) in enumerate(picks) if other is video]
            begins = np.array([picks[place][1] for place in here])
            places = np.minimum(begins[:, None] + self.stride * np.arange(self.frames), self._length(video) - 1).ravel()
            resampled: Numbers | None = self._resampled[video.file]
            numbers = places if resampled is None else resampled[places]
            flat = pictures(video, numbers, self._look, self._cache)
            pixels[here] = flat.reshape(len(here), self.frames, *self._look.shape)
        return pixels
