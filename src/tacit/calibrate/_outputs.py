"""A classifier's outputs and their labels: read, checked, and brought into the one form that everything else uses.

Outputs are given as ``logits=`` or as ``probs=``, never guessed. Probabilities become logits by their logarithm. One
column of probabilities is that of the second of two classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FLOOR = 1e-12  # of a probability that is shared out again
_SMALLEST = 2.3e-308  # of a probability, before its logarithm: what is given counts as it is, zero nearly so
_LOWEST = -1e5  # of a logit below its row's largest: e^(-1e5 / T) is 0 for every temperature that may be asked


@dataclass(frozen=True, eq=False)
class Outputs:
    """One row per sample. Private: nothing of it is ever printed."""

    shifted: Tensor  # logits less the largest of their row (float64)
    of_label: Tensor  # the entry of ``shifted`` at the label
    correct: Tensor  # 1 where the (first) largest logit is the label's, else 0
    good: Tensor  # 1, and 0 where a logit was not a finite number: such a row contributes zero to everything

    @classmethod
    def of(cls, *, logits: Any = None, probs: Any = None, labels: Any, allow_bad: bool = True) -> Outputs:
        """Outputs and labels after all checks. ``allow_bad``: rows that are not finite numbers stay, as zeros."""
        scores = read(logits=logits, probs=probs, allow_bad=allow_bad)
        classes = check_labels(labels, scores)
        good = torch.isfinite(scores).all(dim=1)
        scores = torch.where(good[:, None], scores, 0.0)
        largest = scores.max(dim=1, keepdim=True)
        shifted = (scores - largest.values).clamp_min(_LOWEST)
        of_label = shifted.gather(1, classes[:, None])[:, 0]
        correct = (largest.indices[:, 0] == classes).double()
        return cls(shifted, of_label, correct, good.double())

    def __len__(self) -> int:
        return len(self.correct)

    def __repr__(self) -> str:
        return f"Outputs(private, {self.classes} classes)"

    @property
    def classes(self) -> int:
        return self.shifted.shape[1]

    def take(self, rows: Tensor) -> Outputs:
        """These rows, in this order."""
        return Outputs(self.shifted[rows], self.of_label[rows], self.correct[rows], self.good[rows])

    def confidence(self, temperature: float | Tensor) -> Tensor:
        """The largest probability of each row at a temperature (or at one temperature per row)."""
        return 1 / torch.exp(self.shifted / _column(temperature)).sum(dim=1)

    def loss(self, temperature: float | Tensor) -> Tensor:
        """The negative log likelihood of each label."""
        scaled = self.shifted / _column(temperature)
        return torch.logsumexp(scaled, dim=1) - self.of_label / temperature

    def slope(self, temperature: float | Tensor) -> Tensor:
        """By how much each confidence falls per unit of log T: p_max * sum_j p_j (z_max - z_j) / T, never negative."""
        scaled = self.shifted / _column(temperature)
        weights = torch.exp(scaled)
        total = weights.sum(dim=1)
        return -(weights * scaled).sum(dim=1) / total**2


def bin_of(confidence: Tensor, bins: int) -> Tensor:
    """The equal-width bin of each confidence; bin i is (i/bins, (i+1)/bins], and 0 is in the first."""
    edges = torch.arange(1, bins, dtype=torch.float64) / bins
    return torch.bucketize(confidence, edges)


def read(*, logits: Any = None, probs: Any = None, allow_bad: bool = False) -> Tensor:
    """Logits as float64 from whichever of the two was given."""
    if (logits is None) == (probs is None):
        raise ValueError("Give the classifier's outputs as logits= or as probs=: one of the two.")
    name = "logits" if probs is None else "probs"
    raw = torch.as_tensor(logits if probs is None else probs).detach().cpu()
    if probs is not None and raw.is_floating_point() and (raw.dim() == 1 or (raw.dim() == 2 and raw.shape[1] == 1)):
        raw = torch.stack([1 - raw.flatten(), raw.flatten()], dim=1)
    if raw.dim() != 2 or raw.shape[1] < 2:
        raise ValueError(f"{name} have one row per sample and at least two classes; got {raw.dim()} dimensions.")
    if raw.is_complex() or raw.dtype == torch.bool or (probs is not None and not raw.is_floating_point()):
        raise ValueError(f"{name} are floating-point numbers; got {raw.dtype}.")
    values = raw.double()
    finite = torch.isfinite(values).all(dim=1)
    if not allow_bad and not finite.all():
        raise ValueError(f"{name} contain values that are not finite numbers.")
    slack = (
        1e-2 if raw.is_floating_point() and raw.element_size() < 4 else 1e-3
    )  # half precision rounds a hundred classes by that much
    kept = values[finite]
    like_probs = (kept.sum(dim=1) - 1).abs().le(slack) & kept.ge(0).all(dim=1)
    if probs is None:
        if len(kept) and like_probs.all():
            raise ValueError(
                "These look like probabilities: pass them as probs= (every row is non-negative and sums to 1)."
            )
        return values
    if not (like_probs & kept.le(1 + slack).all(dim=1)).all():
        raise ValueError("Every row of probs lies within [0, 1] and sums to 1; pass unnormalised scores as logits=.")
    return values.clamp_min(_SMALLEST).log()


def check_labels(labels: Any, scores: Tensor) -> Tensor:
    """Labels as int64, one per row, each a class of the scores."""
    classes = torch.as_tensor(labels).detach().cpu()
    if classes.dim() != 1 or len(classes) != len(scores):
        raise ValueError("labels are one class per row, in one dimension: as many as there are rows.")
    if classes.is_floating_point() or classes.is_complex() or classes.dtype == torch.bool:
        raise ValueError(f"labels are whole numbers, 0 for the first class; got {classes.dtype}.")
    if len(classes) and not (int(classes.min()) >= 0 and int(classes.max()) < scores.shape[1]):
        raise ValueError(f"labels lie between 0 and {scores.shape[1] - 1}, the last of {scores.shape[1]} classes.")
    return classes.long()


def _column(temperature: float | Tensor) -> float | Tensor:
    return temperature[:, None] if isinstance(temperature, Tensor) else temperature
