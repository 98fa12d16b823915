"""Streams of shifted pictures: who comes when, under which shift. Described as data, made when asked for.

Every base picture comes once, under one shift. That is what lets a private adapter treat a stream in which each person
sends one picture as a single release. With `reuse`, a picture may come again under another shift: for simulations on
public data, in which each occurrence stands for another person.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import ceil
from typing import Literal, get_args

import torch
from torch import Tensor

from tacit.data import shifts as makers
from tacit.data.shifts._dice import generator

Setting = Literal["episodic", "continual", "mixed"]
CLEAN = "clean"


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Rows that arrive together.

    Args:
        images: Float32 in [0, 1], N x C x H x W.
        labels: For scoring only: an adapter does not see them.
        shifts: Of each row.
        rows: Which base picture each row is.
        first: The first batch of a part: where `episodic` resets the model.
    """

    images: Tensor  # float32 in [0, 1], N x C x H x W
    labels: Tensor  # for scoring only: an adapter does not see them
    shifts: tuple[str, ...]  # of each row
    rows: Tensor  # which base picture each row is
    first: bool  # the first batch of a part: where `episodic` resets the model

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, kw_only=True, eq=False)
class Stream:
    """Parts of `per_shift` pictures, one for each entry of `shifts` and in that order.

    `episodic` and `continual` have the same batches: the consumer of an episodic stream goes back to the source model
    at every batch with `first`. `mixed` is one part, in which the rows of all shifts are shuffled.

    Args:
        images: The base pictures.
        labels: Their classes.
        shifts: The names of the shifts, in order.
        severity: 1 to 5.
        setting: "episodic", "continual" or "mixed".
        per_shift: Pictures of each part.
        seed: Of the order and the corruptions.
        strengths: Whose; see `shifts.corrupt`.
        reuse: Each part is drawn from all pictures, so that a picture may come under several shifts, once under each.
    """

    images: Tensor = field(repr=False)
    labels: Tensor = field(repr=False)
    shifts: tuple[str, ...]
    severity: int
    setting: Setting
    per_shift: int
    seed: int
    strengths: makers.Strengths = "clothes"
    reuse: bool = False
    _parts: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.shifts) * self.per_shift

    def __str__(self) -> str:
        """One sentence: the setting, the order of the shifts, how many pictures of each."""
        order = (" + " if self.setting == "mixed" else " -> ").join(self.shifts)
        return f"{self.setting}, severity {self.severity}, {self.per_shift} pictures each, seed {self.seed}: {order}"

    @cached_property
    def rows(self) -> Tensor:
        """The base pictures, one line per part: a seeded permutation; with `reuse`, one permutation for each part."""
        if self.reuse:
            dice = (generator(f"{self.seed} deal {part}") for part in range(len(self.shifts)))
            return torch.stack([torch.randperm(len(self.images), generator=die)[: self.per_shift] for die in dice])
        order = torch.randperm(len(self.images), generator=generator(f"{self.seed} deal"))[: len(self)]
        return order.view(len(self.shifts), self.per_shift)

    def steps(self, size: int) -> int:
        """How many batches there are of this size; the last one of a part may be smaller."""
        _check_size(size)
        if self.setting == "mixed":
            return ceil(len(self) / size)
        return len(self.shifts) * ceil(self.per_shift / size)

    def batches(self, size: int) -> Iterator[Batch]:
        """The stream in batches that never straddle two parts; a second call gives the same again."""
        _check_size(size)
        return self._mixed(size) if self.setting == "mixed" else self._in_order(size)

    def _in_order(self, size: int) -> Iterator[Batch]:
        for part, name in enumerate(self.shifts):
            for start in range(0, self.per_shift, size):
                rows = self.rows[part, start : start + size]
                images = self._part(part)[start : start + size]
                yield self._batch(images, rows, (name,) * len(rows), first=start == 0)

    def _mixed(self, size: int) -> Iterator[Batch]:
        images = torch.cat([self._part(part) for part in range(len(self.shifts))])
        names = [name for name in self.shifts for _ in range(self.per_shift)]
        order = torch.randperm(len(self), generator=generator(f"{self.seed} mix"))
        for start in range(0, len(self), size):
            places = order[start : start + size]
            chosen = tuple(names[place] for place in places.tolist())
            yield self._batch(images[places], self.rows.flatten()[places], chosen, first=start == 0)

    def _batch(self, images: Tensor, rows: Tensor, names: tuple[str, ...], *, first: bool) -> Batch:
        # copies all: what a consumer does to its batch must not reach the next pass
        values = images.float() / 255 if images.dtype == torch.uint8 else images.to(torch.float32, copy=True)
        return Batch(images=values, labels=self.labels[rows], shifts=names, rows=rows.clone(), first=first)

    def _part(self, part: int) -> Tensor:
        """The pictures of a part under its shift: made once and kept, in the dtype of the base pictures."""
        if part not in self._parts:
            clean, name = self.images[self.rows[part]], self.shifts[part]
            # the part is in the seed, so that a shift that comes back comes back with other noise
            seed = self.seed + (part << 64)
            shifted = partial(makers.corrupt, seed=seed, strengths=self.strengths)
            self._parts[part] = clean if name == CLEAN else shifted(clean, name, self.severity)
        return self._parts[part]


def corrupted(
    images: Tensor,
    labels: Tensor,
    *,
    shifts: Sequence[str] = makers.TEST,
    severity: int = 3,
    setting: Setting = "continual",
    per_shift: int = 1000,
    seed: int = 0,
    strengths: makers.Strengths = "clothes",
    reuse: bool = False,
) -> Stream:
    """A stream in which disjoint parts of the pictures come under one shift after another, in the order given.

    A seeded permutation assigns `per_shift` images to each shift; `"clean"` leaves its part as it is. What can be
    wrong is found here, before a batch is made.

    Args:
        images: The base pictures, as `shifts.corrupt` takes them.
        labels: Their classes, for scoring.
        shifts: Names of shifts, or "clean", in order.
        severity: 1 to 5.
        setting: "episodic", "continual" or "mixed".
        per_shift: Pictures of each part.
        seed: Of the permutation and of the corruptions.
        strengths: Whose: "clothes", "imagenet-c" or "cifar-c"; see `shifts.corrupt`.
        reuse: Draw each part from all pictures, so that a picture may come under several shifts, once under each. For
            simulations on public data: the guarantee of an adapter is then that of a stream in which each occurrence
            is another person's, since a person who sends several pictures needs `DP(contributions=...)`.

    Returns:
        The stream.

    Raises:
        ValueError: Too few pictures, or an unknown shift, setting, severity or grade.
    """
    _check(images, labels, shifts, severity, setting, per_shift, strengths, reuse)
    return Stream(
        images=images,
        labels=labels,
        shifts=tuple(shifts),
        severity=severity,
        setting=setting,
        per_shift=per_shift,
        seed=seed,
        strengths=strengths,
        reuse=reuse,
    )


def _check(
    images: Tensor,
    labels: Tensor,
    shifts: Sequence[str],
    severity: int,
    setting: str,
    per_shift: int,
    strengths: str,
    reuse: bool,
) -> None:
    if isinstance(shifts, str) or not shifts:
        raise ValueError("`shifts` is a sequence of names with at least one of them.")
    for name in shifts:
        makers.check(makers.TEST[0] if name == CLEAN else name, severity, strengths)
    makers.check_images(images)
    if setting not in get_args(Setting):
        raise ValueError(f"There is no setting {setting!r}: choose one of {', '.join(get_args(Setting))}.")
    if len(labels) != len(images):
        raise ValueError(f"There are {len(images)} pictures but {len(labels)} labels.")
    if per_shift < 1:
        raise ValueError(f"`per_shift` is {per_shift}: every shift needs at least one picture.")
    if reuse and per_shift > len(images):
        raise ValueError(
            f"A picture comes once under a shift: {per_shift} of them are more than the {len(images)} given."
        )
    needed = len(shifts) * per_shift
    if not reuse and needed > len(images):
        raise ValueError(
            f"{len(shifts)} shifts of {per_shift} pictures need {needed} of them, as each comes once, but there are "
            f"{len(images)}: give more, or set `per_shift` to {len(images) // len(shifts)} or less."
        )


def _check_size(size: int) -> None:
    if size < 1:
        raise ValueError(f"A batch has at least one row, not {size}.")
