"""What is done to features before a head is trained on them: rows scaled to one norm, and a mean taken off.

A linear probe on features that share a large mean spends its clip on that mean (Sun et al., 2024); without it the same
noise buys more. Features that are shorter than the clip never reach it, and pay for a sensitivity that they do not use:
scaling each row to one norm is free. A mean is public, or released before training and charged like everything else.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tacit.data import TensorRecords
from tacit.models import head_of
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
        object.__setattr__(self, "noise", float(self.noise))
        object.__setattr__(self, "bound", float(self.bound))

    @property
    def event(self) -> DpEvent:
        return events.gaussian(self.noise, steps=2)

    def release(self, records: TensorRecords, size: int, ledger: Ledger, subject: str, seed: int | None) -> Statistics:
        """Charge, then release the mean and the scale.

        Formal guarantee: a unit adds the mean of its rows' features, shortened to `bound`, to the first sum, and its
        mean distance from the released centre, cut at `bound`, to the second; a row that is not finite adds nothing.
        Both sums get Gaussian noise of `noise` times `bound` and are divided by the public `size`.
        """
        check_unit(records, ledger, subject)
        receipt = ledger.charge(subject, self.event, stage="finetune", note="feature mean and scale", seed=seed)
        centre = self._mean(records, size, receipt)
        distance = self._released(receipt, _per_unit(records, lambda rows: (rows - centre).norm(dim=1, keepdim=True)))
        ledger.settle(receipt)
        scale = float(distance) / size
        return Statistics(mean=centre, scale=max(scale, 1e-3 * self.bound))

    def release_mean(self, records: TensorRecords, size: int, ledger: Ledger, subject: str, seed: int | None) -> Tensor:
        """Charge, then release the mean alone: one release, the first of `release`.

        Formal guarantee: that of the first sum of `release`.
        """
        check_unit(records, ledger, subject)
        receipt = ledger.charge(subject, self.mean_event, stage="finetune", note="feature mean", seed=seed)
        centre = self._mean(records, size, receipt)
        ledger.settle(receipt)
        return centre

    @property
    def mean_event(self) -> DpEvent:
        return events.gaussian(self.noise)

    def _mean(self, records: TensorRecords, size: int, receipt: Receipt) -> Tensor:
        return (self._released(receipt, _per_unit(records, lambda rows: rows)) / size).float()

    def _released(self, receipt: Receipt, values: Tensor) -> Tensor:
        values = torch.where(torch.isfinite(values).all(1, keepdim=True), values, 0.0)
        factor = (self.bound * (1 - 1e-9) / values.norm(dim=1, keepdim=True).clamp_min(1e-300)).clamp_max(1.0)
        total = _Sum({"sum": (values * factor).sum(0)}, {"sum": self.bound}, {"sum": ("sum",)})
        return mechanisms.gaussian(total, receipt)["sum"]


@dataclass(frozen=True, kw_only=True, eq=False)
class RowNorm:
    """Scale the features of each row to one L2 norm, after taking off a centre that is public or paid for.

    A gradient of a linear head is at most sqrt(2) times as long as its row, so that with norm 1 the unit clip is used
    and hardly ever cuts. On by default in `tune.Finetuning`, wherever the head alone is trained on cached features.

    Formal guarantee: a row is changed by public numbers and by itself alone, so no unit's contribution depends on
    another, and the sensitivity stays the clip: free. With a centre of `Standardise` the mean is released first, which
    is charged (one release).

    Args:
        norm: The L2 norm of every row.
        centre: Taken off first: a vector that is public (such as `public_centre` of public rows) or was released; or a
            `Standardise`, whose mean is released and charged before training; None: nothing.

    Raises:
        ValueError: The norm is not above 0, or the centre no vector.
    """

    norm: float = 1.0
    centre: Tensor | Standardise | None = None

    def __post_init__(self) -> None:
        if not 0 < self.norm < math.inf:
            raise ValueError("norm is above 0.")
        if isinstance(self.centre, Tensor) and self.centre.dim() != 1:
            raise ValueError("A centre is one vector, as long as the features of a row.")

    def __repr__(self) -> str:
        centre = self.centre
        if isinstance(centre, Tensor):  # a run is resumed by what its parts print: every digit of it
            digest = hashlib.sha256(centre.detach().cpu().double().numpy().tobytes()).hexdigest()[:16]
            return f"RowNorm(norm={self.norm!r}, centre={digest})"
        return f"RowNorm(norm={self.norm!r}, centre={centre!r})"

    @property
    def paid(self) -> Standardise | None:
        """What has to be released first."""
        return self.centre if isinstance(self.centre, Standardise) else None

    def normalizer(self, centre: Tensor | None = None) -> RowNormalizer:
        """The transform; `centre` takes the place of one that had to be released."""
        public = self.centre if isinstance(self.centre, Tensor) else None
        return RowNormalizer(self.norm, public if centre is None else centre)


class RowNormalizer(nn.Module):
    """Takes a centre off each row and scales what is left to one L2 norm; a row that is the centre stays zero.

    Args:
        norm: The L2 norm of every row.
        centre: Taken off first.
    """

    centre: Tensor | None

    def __init__(self, norm: float, centre: Tensor | None = None) -> None:
        super().__init__()
        self.norm = norm
        self.register_buffer("centre", None if centre is None else centre.detach().float().clone())

    def forward(self, features: Tensor) -> Tensor:
        moved = features if self.centre is None else features - self.centre.to(features)
        length = torch.linalg.vector_norm(moved, dim=-1, keepdim=True, dtype=torch.float64)
        scaled: Tensor = moved * (self.norm / length.clamp_min(1e-30)).to(moved)
        return scaled

    @property
    def no_plain_form(self) -> str:
        """Why a model with this in it is not saved as a plain one, and the way out."""
        centre = "" if self.centre is None else ", centre"
        return (
            "A head on rows of one norm is no layer of the plain model (RowNorm scales rows, and so does "
            "finetune.fit(scheme='linear') without optimizer=): save with format='state_dict' and load into "
            f"finetune.RowNormalizer({self.norm:g}{centre}).before_head(model), or fine-tune with an optimizer of your "
            "own and without RowNorm."
        )

    def apply_to(self, features: Tensor) -> Tensor:
        """The same, of a whole table."""
        if self.centre is not None and features.shape[-1] != len(self.centre):
            raise ValueError(f"The centre has {len(self.centre)} numbers, and the features {features.shape[-1]}.")
        with torch.no_grad():
            return self(features)  # type: ignore[no-any-return]

    def before_head(self, model: nn.Module, head: nn.Linear | None = None) -> nn.Module:
        """The model with this in front of its head; in place, unless the model is nothing but its head."""
        name, found = head_of(model) if head is None else (_name_of(model, head), head)
        whole = nn.Sequential(self, found).eval()
        if not name:
            return whole
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, whole)
        return model


def _name_of(model: nn.Module, head: nn.Module) -> str:
    found: str = next(name for name, part in model.named_modules() if part is head)
    return found


def is_row_normalized(model: nn.Module) -> bool:
    """Whether a model scales the rows that its head sees."""
    return any(isinstance(part, RowNormalizer) for part in model.modules())


def check_unit(records: TensorRecords, ledger: Ledger, subject: str) -> None:
    """Refuse a subject of other units than the data has."""
    known = ledger.get_subject(subject)
    if known is not None and known.terms.unit != records.unit:
        raise ValueError(f"The subject {subject} has the unit {known.terms.unit}, and the data {records.unit}.")


@dataclass(frozen=True, eq=False)
class Statistics:
    """A released centre and scale."""

    mean: Tensor
    scale: float

    def apply_to(self, features: Tensor) -> Tensor:
        return (features - self.mean) / self.scale

    def before_head(self, model: nn.Module, head: nn.Linear | None = None) -> nn.Module:
        """The model whose head was trained on standardised features, as it takes them as they are."""
        self.fold(head_of(model)[1] if head is None else head)
        return model

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


def _per_unit(records: TensorRecords, of_rows: Callable[[Tensor], Tensor]) -> Tensor:
    """The mean over each unit's rows of a function of their features, in float64."""
    rows = records.rows(torch.arange(len(records)), None)
    values = of_rows(rows.inputs).double()
    count = torch.bincount(rows.owner, minlength=len(records)).clamp_min(1)
    total = torch.zeros(len(records), values.shape[1], dtype=torch.float64).index_add_(0, rows.owner, values)
    return total / count[:, None]
