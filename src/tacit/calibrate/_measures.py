"""How honest a classifier's confidences are: calibration errors, proper scores, and the data of a reliability diagram.

Every measure takes ``logits=`` or ``probs=`` and ``labels=``. They are exact, so on private data they are for the
curator alone; a number that leaves is asked for through a ``Source``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tacit.calibrate._outputs import bin_of, check_labels, read


@dataclass(frozen=True, kw_only=True)
class Reliability:
    """The bins of a reliability diagram: what was claimed, what was right, how often; empty bins hold nan.

    Args:
        edges: Of the bins.
        counts: Per bin.
        confidence: Mean, per bin.
        accuracy: Per bin.
        ece: Over all bins.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    confidence: tuple[float, ...]
    accuracy: tuple[float, ...]
    ece: float


def reliability(*, logits: Any = None, probs: Any = None, labels: Any, bins: int = 15) -> Reliability:
    """Mean confidence and accuracy in equal-width bins of the confidence.

    Args:
        logits: Logits, rows x classes; or give `probs`.
        probs: Probabilities, rows x classes.
        labels: The true class of each row.
        bins: The number of bins.

    Returns:
        The bins.
    """
    check_bins(bins)
    probabilities, classes = _inputs(logits, probs, labels)
    top = probabilities.max(dim=1)
    place = bin_of(top.values, bins)
    counts = torch.bincount(place, minlength=bins)
    claimed = torch.bincount(place, top.values, minlength=bins)
    right = torch.bincount(place, (top.indices == classes).double(), minlength=bins)
    return Reliability(
        edges=tuple(i / bins for i in range(bins + 1)),
        counts=tuple(counts.tolist()),
        confidence=tuple((claimed / counts).tolist()),
        accuracy=tuple((right / counts).tolist()),
        ece=float((right - claimed).abs().sum()) / len(classes),
    )


def ece(*, logits: Any = None, probs: Any = None, labels: Any, bins: int = 15) -> float:
    """Expected calibration error in equal-width bins: sum over bins of |sum of (correct - confidence)| / n.

    Args:
        logits: Logits, rows x classes; or give `probs`.
        probs: Probabilities, rows x classes.
        labels: The true class of each row.
        bins: The number of bins.

    Returns:
        Between 0 and 1. Exact, for public data: it is not noised.

    Examples:
        >>> import torch
        >>> from tacit.calibrate import ece
        >>> probs = torch.tensor([[0.9, 0.1]] * 10)
        >>> round(ece(probs=probs, labels=torch.tensor([0] * 7 + [1] * 3)), 3)  # 90 % sure, 70 % right
        0.2
    """
    return reliability(logits=logits, probs=probs, labels=labels, bins=bins).ece


def adaptive_ece(*, logits: Any = None, probs: Any = None, labels: Any, bins: int = 15) -> float:
    """Expected calibration error in bins of equal mass (sizes differ by at most one; ties stay in their order).

    Args:
        logits: Logits, rows x classes; or give `probs`.
        probs: Probabilities, rows x classes.
        labels: The true class of each row.
        bins: The number of bins.

    Returns:
        Between 0 and 1.
    """
    check_bins(bins)
    probabilities, classes = _inputs(logits, probs, labels)
    top = probabilities.max(dim=1)
    order = torch.argsort(top.values, stable=True)
    gaps = ((top.indices == classes).double() - top.values)[order]
    return sum(float(part.sum().abs()) for part in torch.tensor_split(gaps, bins)) / len(gaps)


def classwise_ece(*, logits: Any = None, probs: Any = None, labels: Any, bins: int = 15) -> float:
    """The binned calibration error of each class's own probability, averaged over the classes.

    Args:
        logits: Logits, rows x classes; or give `probs`.
        probs: Probabilities, rows x classes.
        labels: The true class of each row.
        bins: The number of bins.

    Returns:
        Between 0 and 1.
    """
    check_bins(bins)
    probabilities, classes = _inputs(logits, probs, labels)
    size = probabilities.shape[1]
    gaps = torch.nn.functional.one_hot(classes, size).double() - probabilities
    place = bin_of(probabilities, bins) + bins * torch.arange(size)
    sums = torch.bincount(place.flatten(), gaps.flatten(), minlength=bins * size)
    return float(sums.abs().sum()) / len(classes) / size


def brier(*, logits: Any = None, probs: Any = None, labels: Any) -> float:
    """The mean squared distance between the probabilities and the truth, summed over classes (0 to 2).

    Args:
        logits: Logits, rows x classes; or give `probs`.
        probs: Probabilities, rows x classes.
        labels: The true class of each row.

    Returns:
        Between 0 and 2.
    """
    probabilities, classes = _inputs(logits, probs, labels)
    truth = torch.nn.functional.one_hot(classes, probabilities.shape[1])
    return float((probabilities - truth).square().sum(dim=1).mean())


def nll(*, logits: Any = None, probs: Any = None, labels: Any) -> float:
    """The mean negative log likelihood of the labels, in nats.

    Args:
        logits: Logits, rows x classes; or give `probs`.
        probs: Probabilities, rows x classes.
        labels: The true class of each row.

    Returns:
        In nats.
    """
    probabilities, classes = _inputs(logits, probs, labels, log=True)
    return float(-probabilities.gather(1, classes[:, None]).mean())


def check_bins(bins: int) -> None:
    if not isinstance(bins, int) or isinstance(bins, bool) or not 1 <= bins <= 1000:
        raise ValueError(f"The number of bins is whole and between 1 and 1000; got {bins!r}.")


def _inputs(logits: Any, probs: Any, labels: Any, *, log: bool = False) -> tuple[Tensor, Tensor]:
    scores = read(logits=logits, probs=probs)
    classes = check_labels(labels, scores)
    if not len(classes):
        raise ValueError("There are no samples to measure.")
    normalised = torch.log_softmax(scores, dim=1)
    return normalised if log else normalised.exp(), classes
