"""Contributions of single rows, summed over thousands of choices of rows at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tacit.calibrate._outputs import Outputs, bin_of
from tacit.calibrate._statistics import BinGaps, Histogram, Statistic

CELLS = 2**24  # numbers held at once


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """What each row contributes: numbers (rows x k), and to which value of the statistic each of them goes.

    A row touches one bin of many, so k is 1 or 2 however many bins there are; ``place`` is None where k is the size.
    """

    values: Tensor
    place: Tensor | None
    size: int
    total: Tensor

    @classmethod
    def of(cls, statistic: Statistic, outputs: Outputs, *, on_grid: bool) -> Rows:
        """``on_grid``: in whole steps of the statistic's grid, as a source rounds them."""
        place: Tensor | None = None
        if isinstance(statistic, BinGaps | Histogram):
            confidence = outputs.confidence(statistic.temperature)
            place = bin_of(confidence, statistic.bins)[:, None]
            if isinstance(statistic, BinGaps):
                values = ((outputs.correct - confidence) * outputs.good)[:, None]
            else:
                values = torch.stack([outputs.correct * outputs.good, outputs.good], dim=1)
                place = torch.cat([place, place + statistic.bins], dim=1)
        else:
            values = statistic.contributions(outputs)
        if on_grid:
            values = (values / statistic.grid).round()
        if place is None:
            return cls(values=values, place=None, size=statistic.size, total=values.sum(dim=0))
        total = torch.zeros(statistic.size, dtype=torch.float64)
        total.index_add_(0, place.flatten(), values.flatten())
        return cls(values=values, place=place, size=statistic.size, total=total)

    def over(self, picked: Tensor) -> Tensor:
        """The sums (trials x size) over the rows that each trial picked (trials x samples)."""
        chunk = max(1, CELLS // max(1, picked.shape[1] * self.values.shape[1]))
        return torch.cat([self._over(part) for part in torch.split(picked, chunk)])

    def _over(self, picked: Tensor) -> Tensor:
        if self.place is None:
            return torch.stack([column[picked].sum(dim=1) for column in self.values.T.contiguous()], dim=1)
        sums = torch.zeros(len(picked), self.size, dtype=torch.float64)
        for place, values in zip(self.place.T.contiguous(), self.values.T.contiguous(), strict=True):
            sums.scatter_add_(1, place[picked], values[picked])
        return sums
