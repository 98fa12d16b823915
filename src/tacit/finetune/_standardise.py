"""Private statistics of features: a mean and one scale, released before training and charged like everything else.

A linear probe on features that share a large mean spends its clip on that mean (Sun et al., 2024); without it the same
noise buys more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tacit.data import Table
from tacit.privacy import Ledger, Receipt, events, mechanisms
from tacit.privacy.events import DpEvent


@dataclass(frozen=True, kw_only=True)
class Standardise:
    """Subtract the mean feature and divide by the typical distance from it, both released with noise.

    `noise`: the noise multiplier of each of the two releases. `bound`: no unit's mean feature counts as longer than
    this, and no distance as more; choose it from public data, or by what the backbone's last normaliser allows for.

    Args:
        noise: The noise multiplier of each of the two releases.
        bound: The L2 bound of a unit's mean feature, and of a distance.
    """

    noise: float
    bound: float

    def __post_init__(self) -> None:
        if not (0 < self.noise < math.inf and 0 < self.bound < math.inf):
            raise ValueError("noise and bound are above 0.")

    @property
    def event(self) -> DpEvent:
        return events.gaussian(self.noise, steps=2)

    def release(self, records: Table, size: int, ledger: Ledger, subject: str, seed: int | None) -> Statistics:
        """Charge, then theme.

        Formal guarantee: a unit adds the mean of its rows' features, shortened to `bound`, to the first sum, and its
        mean distance from the released centre, cut at `bound`, to the second; a row that is not finite adds nothing.
        Both sums get Gaussian noise of `noise` times `bound` and are divided by the public `size`.
        """
        known = ledger.get_subject(subject)
        if known is not None and known.terms.unit != records.unit:
            raise ValueError(f"The subject {subject} has the unit {known.terms.unit}, and the data {records.unit}.")
        receipt = ledger.charge(subject, self.event, stage="finetune", note="feature mean and scale", seed=seed)
        mean = self._released(receipt, _per_unit(records, lambda rows: rows)) / size
        centre = mean.float()
        distance = self._released(receipt, _per_unit(records, lambda rows: (rows - centre).norm(dim=1, keepdim=True)))
        ledger.settle(receipt)
        scale = float(distance) / size
        return Statistics(mean=centre, scale=max(scale, 1e-3 * self.bound))

    def _released(self, receipt: Receipt, values: Tensor) -> Tensor:
        values = torch.where(torch.isfinite(values).all(1, keepdim=True), values, 0.0)
        factor = (self.bound * (1 - 1e-9) / values.norm(dim=1, keepdim=True).clamp_min(1e-300)).clamp_max(1.0)
        total = _Sum({"sum": (values * factor).sum(0)}, {"sum": self.bound}, {"sum": ("sum",)})
        return mechanisms.gaussian(total, receipt)["sum"]


@dataclass(frozen=True, eq=False)
class Statistics:
    """A released centre and scale."""

    mean: Tensor
    scale: float

    def apply(self, features: Tensor) -> Tensor:
        return (features - self.mean) / self.scale

    def fold(self, head: nn.Linear) -> None:
        """Change a head that was trained on standardised features into one that takes them as they are."""
        with torch.no_grad():
            head.weight.div_(self.scale)
            shift = head.weight @ self.mean.to(head.weight)
            if head.bias is None:
                head.bias = nn.Parameter(-shift)
            else:
                head.bias.sub_(shift)


@dataclass(frozen=True)
class _Sum:
    sum: dict[str, Tensor]
    bounds: dict[str, float]
    blocks: dict[str, tuple[str, ...]]


def _per_unit(records: Table, of_rows: Callable[[Tensor], Tensor]) -> Tensor:
    """The mean over each unit's rows of a function of their features, in float64."""
    rows = records.rows(torch.arange(len(records)), None)
    values = of_rows(rows.inputs).double()
    count = torch.bincount(rows.owner, minlength=len(records)).clamp_min(1)
    total = torch.zeros(len(records), values.shape[1], dtype=torch.float64).index_add_(0, rows.owner, values)
    return total / count[:, None]
