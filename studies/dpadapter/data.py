"""The data of a study of pretraining: a public part to learn from first, and a part that plays the private one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import torch

from studies import loaders
from studies.loaders import Rows

Split = Literal["public", "public_test", "private", "tuning", "held_out", "test"]


@dataclass(frozen=True, kw_only=True)
class Data:
    """Which rows play which part.

    `kind`: "embedded" (Fashion-MNIST, in the package) or "images" (files .npz with `images` and `labels`). What is
    public and what is private:

    - embedded with `public_classes`: these are public, the other classes private;
    - images with `private_train`: all of `train` is public, all of `private_train` private;
    - otherwise both come from one distribution: nine tenths of the training rows are public, the last tenth private.

    Public rows are the first `public` ones of theirs. Of the private part, the first `private` rows are trained on, the
    next `tuning` and `held_out` are for the choice of a learning rate: trained on the former, tried on the latter.
    `tested` rows of each test set are tried.
    """

    kind: Literal["embedded", "images"]
    train: str = ""
    test: str = ""
    private_train: str = ""
    private_test: str = ""
    public_classes: tuple[int, ...] = ()
    public: int
    private: int
    tuning: int = 0
    held_out: int = 0
    tested: int = 1000

    def __post_init__(self) -> None:
        if self.kind == "embedded" and (self.train or self.test or self.private_train or self.private_test):
            raise ValueError("embedded data has no files: say kind = 'images' to use them")
        if self.kind == "images" and (self.public_classes or not (self.train and self.test)):
            raise ValueError("images come from the files train and test, and are not split by classes")
        if bool(self.private_train) != bool(self.private_test):
            raise ValueError("private_train and private_test go together")
        if len(set(self.public_classes)) != len(self.public_classes) or len(self.public_classes) in (9, 10):
            raise ValueError("public_classes are different ones, and leave at least two for the private part")

    def rows(self, split: Split) -> Rows:
        """The rows of a part: images in [0, 1] and labels from 0 on."""
        pools = _pools(self)
        starts = {"tuning": self.private, "held_out": self.private + self.tuning}
        counts = {"public_test": self.tested, "test": self.tested}
        whole = {"public": pools.public, "public_test": pools.public_test, "test": pools.private_test}
        images, labels = whole.get(split, pools.private)
        start = starts.get(split, 0)
        stop = start + counts.get(split, getattr(self, split, 0))
        if len(labels) < stop:
            raise ValueError(f"There are {len(labels)} rows, too few for the {split} part of the study.")
        return images[start:stop].float() / 255, labels[start:stop]

    @property
    def public_labels(self) -> int:
        """The number of public classes."""
        return int(_pools(self).public[1].max()) + 1

    @property
    def private_labels(self) -> int:
        """The number of private classes."""
        return int(_pools(self).private[1].max()) + 1


class _Pools(NamedTuple):
    public: Rows
    public_test: Rows
    private: Rows
    private_test: Rows


@lru_cache(maxsize=2)
def _pools(data: Data) -> _Pools:
    train, test = _read(data, "train"), _read(data, "test")
    if data.private_train:
        return _Pools(train, test, loaders.images(data.private_train), loaders.images(data.private_test))
    if data.public_classes:
        rest = tuple(sorted(set(train[1].tolist()) - set(data.public_classes)))
        chosen = data.public_classes
        return _Pools(_of(train, chosen), _of(test, chosen), _of(train, rest), _of(test, rest))
    cut = len(train[1]) * 9 // 10
    return _Pools((train[0][:cut], train[1][:cut]), test, (train[0][cut:], train[1][cut:]), test)


def _read(data: Data, part: Literal["train", "test"]) -> Rows:
    return loaders.images(part if data.kind == "embedded" else getattr(data, part))


def _of(rows: Rows, classes: tuple[int, ...]) -> Rows:
    """The rows of some classes, numbered anew in this order."""
    images, labels = rows
    number = torch.full((int(labels.max()) + 1,), -1)
    number[list(classes)] = torch.arange(len(classes))
    kept = number[labels] >= 0
    return images[kept], number[labels[kept]]
