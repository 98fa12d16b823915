"""The naive view of videos: each clip is a unit of its own."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from tacit.data._cache import fingerprint
from tacit.data._grouped import Groupable
from tacit.data._records import Rows
from tacit.data._videos import Picks, VideoClips


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
                length = videos._length(video)
                count = max(length // videos._span, 1)
                self._picks += [(video, place * length // count) for place in range(count)]
                owner += [unit] * count
        self.owner = torch.tensor(owner)
        self.largest_group = int(self.owner.bincount().max())

    def __len__(self) -> int:
        return len(self._picks)

    def labels(self) -> Tensor:
        return self._source.labels()[self.owner]

    def rows(self, units: Tensor, uniforms: Tensor | None) -> Rows:  # noqa: ARG002 - a clip is always shown as it is
        shown = self._source._show([[self._picks[unit]] for unit in units.tolist()])
        return Rows(self._source._finished(shown), self.labels()[units.cpu()], torch.arange(len(units)))

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
