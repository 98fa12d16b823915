"""The data of a fine-tuning study: private units, a public split to tune on, and what is held out of both."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from studies import loaders
from studies.finetune.arms import Arm
from studies.multi_clip.motions import PRIVATE, PUBLIC, Motions, write_motions
from tacit.data import Records, TensorRecords, Texts, VideoClips, clips_as_units, shifts, sst2
from tacit.finetune import Classes, Labels, NextToken, Task
from tacit.models import tokenizer_of

Split = Literal["private", "tuning", "held_out", "test"]


@dataclass(frozen=True, kw_only=True)
class Data:
    """Which rows. `kind`: images (.npz with images and labels, or a split of Fashion-MNIST), features (.npz with
    train_features, train_labels, test_features, test_labels), motions (real video files, made from the package), clips
    (.npz with SPLIT_features, videos x clips x numbers, and SPLIT_labels for each split), texts (.tsv with sentence
    and label, as SST-2 has them), or messages (the same, without labels: `messages` sentences in a row are one
    person's, and the next token is what is learnt).

    The first `private` units of the training part are private; the next `tuning` and `held_out` ones are declared
    public: constants are chosen by training on the former and trying on the latter. `shifts`: also try on so many test
    images under each of the 15 shifts.
    """

    kind: Literal["images", "features", "motions", "clips", "texts", "messages"]
    train: str = ""
    test: str = ""
    private: int
    tuning: int = 0
    held_out: int = 0
    tested: int = 1000
    classes: int
    labels: bool = False  # several labels per row, scored by AUROC
    shifts: int = 0
    severity: int = 3
    shifted: str = ""  # features under shifts: one array per shift, and labels
    frames: int = 8
    stride: int = 2
    tried: int = 8  # clips over which a video is tried
    motions: Motions = field(default_factory=Motions)
    tokens: str = ""  # the model whose tokenizer is used
    longest: int = 64  # tokens
    messages: int = 4
    folder: Path = field(default=Path(), compare=False)  # where videos are

    @property
    def unit(self) -> str:
        return {"motions": "video", "clips": "video", "messages": "user"}.get(self.kind, "sample")

    @property
    def measure(self) -> str:
        """The score that constants are chosen by."""
        return "perplexity" if self.kind == "messages" else self.task.measure

    @property
    def task(self) -> Task:
        if self.kind == "messages":
            return NextToken(self.classes)
        return Labels(self.classes) if self.labels else Classes(self.classes)

    def records(self, split: Split, arm: Arm) -> Records:
        """The units of a split as an arm sees them in training."""
        if self.kind == "motions":
            videos = videos_of(self, split, arm.clips if split in ("private", "tuning") else self.tried)
            naive = arm.level == "clip" and split in ("private", "tuning")
            return clips_as_units(videos) if naive else videos
        if self.kind == "clips":
            return _clips(self, split, arm.clips if split in ("private", "tuning") else None)
        if self.kind in ("texts", "messages"):
            return _texts(self, split)
        inputs, labels = _rows(self, split)
        augmented = arm.augment > 1 and split in ("private", "tuning")
        return TensorRecords(inputs, labels, augment=arm.augment if augmented else None)

    def plain(self, split: Split) -> TensorRecords:
        """The texts or images of a split, none augmented."""
        return _texts(self, split) if self.kind == "texts" else TensorRecords(*_rows(self, split))

    def under_shifts(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Test rows under each shift; empty if none were asked for."""
        return _shifted(self) if self.shifts or self.shifted else {}


def public_videos(data: Data, folder: Path, videos: int, motions: Motions) -> VideoClips:
    """Videos of other motions, from images that nobody else uses: for pretraining."""
    home = write_motions(folder / "public", videos=videos, classes=PUBLIC, seed=1, split="seen", motions=motions)
    return VideoClips.folder(home, clips=data.tried, frames=data.frames, stride=data.stride, colour=False)


def make_videos(data: Data, folder: Path) -> None:
    """Write the video files of every split that are not there yet."""
    for place, split in enumerate(("private", "tuning", "held_out", "test")):
        count = data.tested if split == "test" else getattr(data, split)
        if count:
            write_motions(
                folder / split,
                videos=count,
                classes=PRIVATE[: data.classes],
                seed=10 + place,
                split="test" if split == "test" else "unseen",
                motions=data.motions,
            )


@lru_cache(maxsize=8)
def videos_of(data: Data, split: Split, clips: int) -> VideoClips:
    """The videos of a split, so many clips of each."""
    return VideoClips.folder(data.folder / split, clips=clips, frames=data.frames, stride=data.stride, colour=False)


@lru_cache(maxsize=16)
def _clips(data: Data, split: Split, clips: int | None) -> TensorRecords:
    """So many clips of each video at a time, or all, scored by their mean."""
    found = loaders.arrays(data.train, f"{split}_features", f"{split}_labels")
    rows, labels = found[f"{split}_features"].float(), found[f"{split}_labels"].long()
    if len(rows) != (data.tested if split == "test" else getattr(data, split)):
        raise ValueError(f"{data.train} has {len(rows)} videos for the {split} part, and the recipe another number.")
    each = rows.shape[1]
    owners = torch.arange(len(rows)).repeat_interleave(each)
    table = TensorRecords(rows.flatten(0, 1), labels[owners], owners, unit="video", rows_each=clips)
    table.scored_by = "unit"
    return table


@lru_cache(maxsize=8)
def _texts(data: Data, split: Split) -> Texts:
    texts, labels = sst2(data.test if split == "test" else data.train)
    rows = _slice(data, split, len(texts))
    tokenizer = tokenizer_of(data.tokens)
    if data.kind == "texts":
        return Texts(tokenizer, texts[rows], labels[rows], max_length=data.longest, bucket=8)
    owners = torch.arange(rows.stop - rows.start) // data.messages
    return Texts(tokenizer, texts[rows], None, owners, max_length=data.longest)


def _slice(data: Data, split: Split, there: int) -> slice:
    """Where the rows of a split are; in messages, every person has several."""
    each = data.messages if data.kind == "messages" else 1
    starts = {"private": 0, "tuning": data.private, "held_out": data.private + data.tuning, "test": 0}
    counts = {"private": data.private, "tuning": data.tuning, "held_out": data.held_out, "test": data.tested}
    rows = slice(each * starts[split], each * (starts[split] + counts[split]))
    if there < rows.stop:
        raise ValueError(f"There are {there} rows, too few for the {split} part of the study.")
    return rows


@lru_cache(maxsize=4)
def _rows(data: Data, split: Split) -> tuple[Tensor, Tensor]:
    inputs, labels = _part(data, "test" if split == "test" else "train")
    rows = _slice(data, split, len(labels))
    return inputs[rows], labels[rows]


@lru_cache(maxsize=2)
def _part(data: Data, part: Literal["train", "test"]) -> tuple[Tensor, Tensor]:
    name = data.train if part == "train" else data.test
    if data.kind == "features":
        inputs, labels = loaders.features(name or data.train, part)
        return inputs, labels.float().view(len(labels), -1) if data.labels else labels.long().flatten()
    images, labels = loaders.images(name)
    return images.float() / 255, labels


@lru_cache(maxsize=2)
def _shifted(data: Data) -> dict[str, tuple[Tensor, Tensor]]:
    if data.shifted:
        found = loaders.arrays(data.shifted)
        labels = found.pop("labels").long()
        return {name: (features, labels) for name, features in found.items()}
    images, labels = _rows(data, "test")
    few = (255 * images[: data.shifts]).round().to(torch.uint8)
    return {
        name: (shifts.corrupt(few, name, data.severity, seed=0).float() / 255, labels[: data.shifts])
        for name in shifts.TEST
    }
