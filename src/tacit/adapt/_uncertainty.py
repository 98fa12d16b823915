"""How unsure a prediction is: the entropy of its probabilities, or of an opinion that may withhold judgement."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

Uncertainty = Callable[[Tensor], Tensor]


def entropy(logits: Tensor) -> Tensor:
    """-sum p log p of each row (paper 1, equation 3).

    Args:
        logits: Rows x classes.

    Returns:
        One number per row.
    """
    return -(logits.softmax(1) * logits.log_softmax(1)).sum(1)


def opinion(logits: Tensor) -> Tensor:
    """The entropy of COME's opinion, with the length of the logits held fixed (Zhang et al., 2024).

    Belief b = e^x / (sum e^x + K) in each class and u = K / (sum e^x + K) in none: a softmax over the logits and one
    more, ln K, so that nothing overflows. Paper 1 prints alpha = e^x with b = (alpha - 1) / S, which is negative for
    every negative logit; alpha = e^x + 1 gives this form. `opinion_as_printed` is the other.

    Args:
        logits: Rows x classes.

    Returns:
        One number per row.
    """
    logits = _of_fixed_length(logits)
    zero_sum = torch.full_like(logits[:, :1], math.log(logits.shape[1]))
    return entropy(torch.cat([logits, zero_sum], 1))


def opinion_as_printed(logits: Tensor) -> Tensor:
    """Paper 1's equation 8 to the letter: b = (e^x - 1) / S, u = K / S, S = sum e^x.

    b log b exists for b > 0 only and u may exceed one: a class with b <= 0 contributes zero, and so does u >= 1.

    Args:
        logits: Rows x classes.

    Returns:
        One number per row.
    """
    logits = _of_fixed_length(logits)
    classes = logits.shape[1]
    log_sum = logits.logsumexp(1, keepdim=True)
    positive = logits > 0
    inside = torch.where(positive, logits, 1.0)  # any number with a harmless derivative
    log_belief = torch.where(positive, inside + torch.log(-torch.expm1(-inside)) - log_sum, -1.0)
    beliefs = torch.where(positive, -log_belief.exp() * log_belief, 0.0).sum(1)
    log_doubt = (math.log(classes) - log_sum.squeeze(1)).clamp(max=0)  # where it is clamped, u log u = 0
    return beliefs - log_doubt.exp() * log_doubt


def _of_fixed_length(logits: Tensor) -> Tensor:
    """The same logits, whose length no gradient may change: x / |x| times |x| as a constant."""
    length = torch.linalg.vector_norm(logits, dim=1, keepdim=True).detach()
    return torch.mul(functional.normalize(logits, dim=1), length)
