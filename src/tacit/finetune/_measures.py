"""Measures of predictions that need more than a line."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def auroc(scores: Tensor, labels: Tensor) -> float | None:
    """The probability that a positive row scores above a negative one, ties counting half; None without both kinds.

    Args:
        scores: One per row.
        labels: 0 or 1 per row.

    Returns:
        The area under the ROC curve, or None.

    Examples:
        >>> import torch
        >>> from tacit.finetune import auroc
        >>> auroc(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1]))
        0.75
    """
    positive = labels > 0.5
    count, rest = int(positive.sum()), int((~positive).sum())
    if not count or not rest:
        return None
    _, place, ties = torch.unique(scores.double(), return_inverse=True, return_counts=True)
    ranks = torch.cumsum(ties, 0).double() - (ties.double() - 1) / 2  # the mean rank of equal scores
    return float((ranks[place][positive].sum() - count * (count + 1) / 2) / (count * rest))


BINS = 16  # of scores in a private histogram; even, so that 0.5 is between two


def score_histogram(scores: Tensor, labels: Tensor) -> Tensor:
    """Where the scores of each row lie: rows x (labels x negative or positive x bins), of L2 norm at most 1.

    A known label has one entry, 1 / sqrt(labels), in the bin of its score; a score that is no number counts as wrong.
    """
    rows, outputs = scores.shape
    positive = (labels > 0.5).long()
    worst = torch.where(positive.bool(), 0.0, 1.0).to(scores)
    bins = (torch.where(scores.isnan(), worst, scores) * BINS).long().clamp(0, BINS - 1)
    found = torch.zeros(rows, outputs, 2 * BINS, dtype=torch.float64)
    found.scatter_(2, (positive * BINS + bins)[:, :, None], (~labels.isnan()).double()[:, :, None])
    return found.flatten(1) / math.sqrt(outputs)


def scores_of_histogram(total: Tensor, outputs: int) -> dict[str, float]:
    """Mean AUROC and accuracy, in percent, from a noisy sum of `score_histogram`: rows of one bin count as ties.

    The numerator of an AUROC is a sum of products of cells with independent noise, so nothing is cut off before it.
    """
    counts = total.double().view(outputs, 2, BINS) * math.sqrt(outputs)
    negative, positive = counts[:, 0], counts[:, 1]
    below = negative.cumsum(1) - negative / 2
    pairs = negative.sum(1) * positive.sum(1)
    there = (negative.sum(1) > 0) & (positive.sum(1) > 0)
    areas = ((positive * below).sum(1) / pairs)[there].clamp(0, 1)
    right = negative[:, : BINS // 2].sum() + positive[:, BINS // 2 :].sum()
    known = counts.sum()
    return {
        "auroc": 100 * float(areas.mean()) if len(areas) else float("nan"),
        "accuracy": 100 * float((right / known).clamp(0, 1)) if known > 0 else float("nan"),
    }
