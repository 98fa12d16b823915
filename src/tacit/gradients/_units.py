"""Privacy units: which rows of a batch belong to the same person."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tacit.gradients._kernels import in_lines


@dataclass(frozen=True)
class Bucket:
    """Units with equally many rows, so that their rows stack without padding."""

    units: Tensor  # (n,) positions of these units
    rows: Tensor  # (n, k) the rows of each


class Units:
    """The rows of a batch, grouped: unit `of_row[i]` owns row i."""

    def __init__(self, of_row: Tensor, count: int) -> None:
        self.of_row = of_row
        self.count = count

    @classmethod
    def singletons(cls, rows: int, device: torch.device) -> Units:
        """Every row is a unit of its own."""
        units = cls(torch.arange(rows, device=device), rows)
        units.__dict__["trivial"] = True
        return units

    @classmethod
    def from_labels(cls, labels: Tensor) -> Units:
        """Units in the order of their labels, which may be any integers in any order."""
        _, of_row = torch.unique(labels, return_inverse=True)
        return cls(of_row, int(of_row.max()) + 1 if of_row.numel() else 0)

    def part(self, rows: Tensor) -> Units:
        """The units of some of the rows; none of them may have rows elsewhere."""
        if self.trivial:
            return Units.singletons(rows.numel(), rows.device)
        return Units.from_labels(self.of_row[rows])

    @cached_property
    def trivial(self) -> bool:
        """Whether unit i is row i."""
        return self.rows == self.count and bool(
            (self.of_row == torch.arange(self.rows, device=self.of_row.device)).all()
        )

    @property
    def rows(self) -> int:
        return int(self.of_row.shape[0])

    @cached_property
    def sizes(self) -> Tensor:
        """How many rows each unit has."""
        return torch.bincount(self.of_row, minlength=self.count)

    @cached_property
    def blocks(self) -> int | None:
        """k if every unit is k consecutive rows in order: then grouping is a view, not a copy."""
        if self.count == 0 or self.rows % self.count:
            return None
        k = self.rows // self.count
        order = torch.arange(self.rows, device=self.of_row.device) // k
        return k if bool((self.of_row == order).all()) else None

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """Units by their number of rows."""
        order = torch.argsort(self.of_row, stable=True)
        starts = torch.cumsum(self.sizes, 0) - self.sizes
        found = []
        for size in torch.unique(self.sizes).tolist():
            members = torch.nonzero(self.sizes == size).flatten()
            offsets = torch.arange(size, device=order.device)
            found.append(Bucket(members, order[starts[members, None] + offsets]))
        return tuple(found)

    def stacks(self, *tensors: Tensor) -> list[tuple[Tensor | None, tuple[Tensor, ...]]]:
        """For each bucket: its units (None for all, in order) and the (n, k * positions, ...) rows of every tensor.

        A unit's rows and their positions become one long sequence, which is what ghost norms need. Its last dimension
        lies in lines, whether it is a view or a copy (see `in_lines`).
        """
        k = 1 if self.trivial else self.blocks
        if k is not None:
            return [(None, tuple(in_lines(_join(split_rows(t, k))) for t in tensors))]
        return [(b.units, tuple(in_lines(_join(t[b.rows])) for t in tensors)) for b in self.buckets]

    def mean(self, values: Tensor) -> Tensor:
        """The mean over each unit's rows: (rows, ...) -> (units, ...).

        A unit's rows are added one after another, in the batch's order, whatever other units have: reductions of torch
        add in an order that depends on the shape, and where rows cancel, the rounding is as large as what is left.
        """
        if self.trivial:
            return values
        if self.blocks is not None:
            return _mean_in_order(split_rows(values, self.blocks))
        found = values.new_empty((self.count, *values.shape[1:]))
        for bucket in self.buckets:
            found[bucket.units] = _mean_in_order(values[bucket.rows])
        return found

    def to_rows(self, per_unit: Tensor) -> Tensor:
        """A weight per unit of its mean gradient, as a weight per row: w_unit / rows_unit."""
        if self.trivial:
            return per_unit
        return (per_unit / self.sizes)[self.of_row]


def _mean_in_order(stacked: Tensor) -> Tensor:
    """(n, k, ...) -> (n, ...)."""
    total = stacked[:, 0].clone()
    for row in range(1, stacked.shape[1]):
        total += stacked[:, row]
    return total.div_(stacked.shape[1])


def _join(stacked: Tensor) -> Tensor:
    """(n, k, L, ...) -> (n, k * L, ...)."""
    return stacked.flatten(1, 2)


def split_rows(values: Tensor, each: int) -> Tensor:
    """(n * each, ...) -> (n, each, ...)."""
    return values.reshape(-1, each, *values.shape[1:])
