"""The clips of videos as a table: what a linear probe computes features of, once each."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from tacit._refusals import Refusal
from tacit.data._records import Rows
from tacit.data._tensor_records import TensorRecords

if TYPE_CHECKING:
    from tacit.data._videos import VideoClips


class ClipTable(TensorRecords):
    """All clips of videos that will ever be shown; each of a unit's k parts of time has `places` of them.

    Training shows one of each part, drawn as `VideoClips` draws it and then moved to the nearest of the places; an
    evaluation shows the middle ones, which are those of `VideoClips`. Clips that begin at the same frame are one row.

    Args:
        videos: The videos, whose unit these rows have.
        places: Clips of a part; odd, so that one is in the middle.
    """

    scored_by: Literal["row", "unit"] = "unit"
    varies = True

    def __init__(self, videos: VideoClips, places: int) -> None:
        if places < 1 or not places % 2:
            raise Refusal(f"A part of a video has an odd number of places, not {places}.")
        if videos.augmented:
            raise Refusal("Clips that are shown in changing views have no features to keep: leave augment= out.")
        self.inputs: Any = _Clips(videos)
        self.unit = videos.unit
        self._videos, self._places = videos, places
        each = (np.arange(videos.clips)[:, None] + (np.arange(places) + 0.5) / places).ravel() / videos.clips
        starts, where = [0], []
        for unit in range(len(videos)):
            rows: dict[tuple[int, int], int] = {}
            picks = videos._picks(unit, each)
            where.append([rows.setdefault((id(video), begin), starts[-1] + len(rows)) for video, begin in picks])
            self.inputs.picks += list({(id(pick[0]), pick[1]): pick for pick in picks}.values())
            starts.append(starts[-1] + len(rows))
        self._where = torch.tensor(where).view(len(videos), videos.clips, places)  # the row of each place
        self._labels = videos.labels().repeat_interleave(torch.tensor([end - start for start, end in pairwise(starts)]))
        self._views, self._copies, self._members, self._ids = None, 1, None, videos.unit_ids

    @property
    def draws(self) -> bool:
        return False

    @property
    def uniforms(self) -> int:
        return self._videos.clips

    @property
    def most_rows(self) -> int:
        return self._videos.clips

    def __len__(self) -> int:
        return len(self._where)

    def rows(self, units: Tensor, uniforms: Tensor | None) -> Rows:
        """`clips` rows of each unit."""
        if uniforms is None:
            chosen = self._where[units, :, self._places // 2]
        else:
            inside = ((1 - uniforms.double().cpu()) * self._places).long().clamp(0, self._places - 1)
            chosen = self._where[units].gather(2, inside[:, :, None])[:, :, 0]
        index = chosen.flatten()
        owner = torch.arange(len(units)).repeat_interleave(self._videos.clips)
        return Rows(self.read(index), self._labels[index], owner)

    def read(self, index: Tensor) -> Any:
        """The clips, or what took their place, by their number."""
        return self.inputs[index] if isinstance(self.inputs, Tensor) else self.inputs.together(index.tolist())

    def fingerprint(self) -> str:
        return f"{self._videos.fingerprint()} {self._places}"


class _Clips:
    """A data set of single clips."""

    def __init__(self, videos: VideoClips) -> None:
        self.videos = videos
        self.picks: list[Any] = []

    def __len__(self) -> int:
        return len(self.picks)

    def together(self, numbers: list[int]) -> Tensor:
        return self.videos._finished(self.videos._show([[self.picks[number] for number in numbers]]))
