"""The tasks of a tuning study: features of rows declared public, and how a linear probe of them is trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from studies import loaders

Part = Literal["train", "test"]


@dataclass(frozen=True, kw_only=True)
class Task:
    """Features of a file (.npz with train_features, train_labels, test_features, test_labels) and their classes.

    The first `private` rows of the training part play the private data; models are tried on the first `tested` rows of
    the test part.
    """

    title: str = field(compare=False)
    file: str
    private: int
    tested: int
    classes: int

    def __post_init__(self) -> None:
        if min(self.private, self.tested) < 1 or self.classes < 2:
            raise ValueError("A task has private rows, rows to try models on, and at least two classes.")

    def rows(self, part: Part) -> tuple[Tensor, Tensor]:
        features, labels = loaders.features(self.file, part)
        wanted = self.private if part == "train" else self.tested
        if len(labels) < wanted:
            raise ValueError(f"{self.file} has {len(labels):,} rows in its {part} part; the study wants {wanted:,}.")
        return features[:wanted], labels[:wanted].long().flatten()
