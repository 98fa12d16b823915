"""Measures of predictions that need more than a line."""

from __future__ import annotations

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
