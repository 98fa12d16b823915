"""Contributions of single rows, summed over thousands of choices of rows at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tacit.calibrate._outputs import Outputs, bin_of
from tacit.calibrate._statistics import BinGaps, Cells, GapCells, Histogram, LogitCells, Statistic

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
        if isinstance(statistic, BinGaps | Cells | GapCells | Histogram):
            confidence = outputs.confidence(statistic.temperature)
            place = bin_of(confidence, statistic.bins)[:, None]
            if isinstance(statistic, BinGaps):
                values = ((outputs.correct - confidence) * outputs.good)[:, None]
            elif isinstance(statistic, GapCells):
                values = statistic.pairs(outputs, confidence) * outputs.good[:, None]
                place = torch.cat([place, place + statistic.bins], dim=1)
            elif isinstance(statistic, Cells):
                values, place = outputs.good[:, None], place + statistic.bins * (1 - outputs.correct.long()[:, None])
            else:
                values = torch.stack([outputs.correct * outputs.good, outputs.good], dim=1)
                place = torch.cat([place, place + statistic.bins], dim=1)
        elif isinstance(statistic, LogitCells):
            values, place = statistic.pairs(outputs, outputs.confidence(statistic.temperature))
            values = values * outputs.good[:, None]
        else:
            values = statistic.contributions(outputs)
        if on_grid:
            values = (values / statistic.grid).round()
        if place is None:
            return cls(values=values, place=None, size=statistic.size, total=values.sum(dim=0))
        total = torch.zeros(statistic.size, dtype=torch.float64)
        total.index_add_(0, place.flatten(), values.flatten())
        return cls(values=values, place=place, size=statistic.size, total=total)

    def over(self, picked: Tensor, whose: Tensor | None = None) -> Tensor:
        """The sums (trials x size) over the rows that each trial picked (trials x samples).

        With ``whose``, the source of each place: the sums of each source (trials x sources x size).
        """
        chunk = max(1, CELLS // max(1, picked.shape[1] * self.values.shape[1]))
        return torch.cat([self._over(part, whose) for part in torch.split(picked, chunk)])

    def _over(self, picked: Tensor, whose: Tensor | None) -> Tensor:
        if self.place is None:
            return torch.stack([gathered(column[picked], whose) for column in self.values.T.contiguous()], dim=-1)
        sources = 1 if whose is None else int(whose[-1]) + 1
        sums = torch.zeros(len(picked), sources * self.size, dtype=torch.float64)
        first = 0 if whose is None else whose * self.size
        for place, values in zip(self.place.T.contiguous(), self.values.T.contiguous(), strict=True):
            sums.scatter_add_(1, place[picked] + first, values[picked])
        return sums if whose is None else sums.view(len(picked), sources, self.size)


def gathered(values: Tensor, whose: Tensor | None) -> Tensor:
    """Sums along the second dimension: of everything, or of each source."""
    if whose is None:
        return values.sum(dim=1)
    sums = torch.zeros(len(values), int(whose[-1]) + 1, *values.shape[2:], dtype=values.dtype)
    return sums.index_add_(1, whose, values)
