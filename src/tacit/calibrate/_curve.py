"""The gap as a curve over the confidence: a smooth correction of what one temperature leaves, from noisy bins.

After a temperature the confidence c may still be wrong by some delta(c). Sources say, for each of a few bins of c,
the sum of correct - confidence, and what that leaves of a bound of 1 (``GapCells``), from which the number of samples
in a bin follows: a right sample of confidence m adds (1 - m, m), a wrong one (-m, 1 - m), so that for the sums (g, s)
of n samples with confidences near the middle m of their bin n = (g (1 - 2m) + s) / ((1 - m)^2 + m^2).

The prior: delta is a Gaussian process, sigma^2 exp(-(c - c')^2 / (2 l^2)), and a constant whose deviation is what is
known of the gap at the temperature. sigma is one of ``_SIZES``, equally probable beforehand, 0 among them: nothing to
correct. The noise is known, so the answers say how probable each sigma is, and the correction is the mean over them
(Bayesian model averaging). Where there is much noise or little to correct it is near 0, with Platt's bias of the top
logit it shares the smooth part, and with many samples it becomes histogram binning. All of it is post-processing.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SIZES = (0.0, 0.03, 0.06, 0.12)  # what may be left after a temperature: points of confidence / 100
_LENGTH = 0.2  # confidences that are further apart are corrected nearly independently
_LEAST = 0.01  # of the variance of one sample's gap
_EMPTY = 1e-6  # the variance of a bin without samples and without noise


def middles(bins: int) -> Tensor:
    """The middles of equal-width bins of the confidence."""
    return (torch.arange(bins, dtype=torch.float64) + 0.5) / bins


def counts_of(totals: Tensor, samples: float) -> Tensor:
    """The number of units in each bin, ``samples`` in all, from the totals of ``GapCells`` (trials x 2 bins)."""
    bins = totals.shape[1] // 2
    middle, gap, rest = middles(bins), totals[:, :bins], totals[:, bins:]
    counts = ((gap * (1 - 2 * middle) + rest) / ((1 - middle) ** 2 + middle**2)).clamp_min(0.0)
    scaled: Tensor = counts * (samples / counts.sum(dim=1, keepdim=True).clamp_min(1.0))
    return scaled


def corrections(totals: Tensor, *, samples: float, noise: float, constant: float) -> Tensor:
    """What to add to the confidence at the middle of each bin (trials x bins).

    Args:
        totals: The totals of ``GapCells``, trials x 2 bins.
        samples: The number of units in all.
        noise: The standard deviation of the noise in each total.
        constant: The standard deviation of what is known of the gap over all confidences.

    Returns:
        The posterior mean of delta.
    """
    bins = totals.shape[1] // 2
    middle = middles(bins)
    gap, counts = totals[:, :bins], counts_of(totals, samples)
    error = torch.diag_embed(noise**2 + counts * (middle * (1 - middle) + _LEAST) + _EMPTY)
    near = torch.exp(-((middle[:, None] - middle) ** 2) / (2 * _LENGTH**2))
    means, evidence = [], []
    for size in _SIZES:
        prior = constant**2 + size**2 * near
        root = torch.linalg.cholesky(counts[:, :, None] * prior * counts[:, None, :] + error)
        white = torch.linalg.solve_triangular(root, gap[:, :, None], upper=False)
        evidence.append(-white.square().sum(dim=(1, 2)) / 2 - root.diagonal(dim1=1, dim2=2).log().sum(dim=1))
        weighted = counts[:, :, None] * torch.cholesky_solve(gap[:, :, None], root)
        means.append((prior @ weighted)[:, :, 0] if size else torch.zeros_like(gap))
    weight = torch.softmax(torch.stack(evidence), dim=0)
    mean: Tensor = (torch.stack(means) * weight[:, :, None]).sum(dim=0)
    return mean


def corrected(confidence: Tensor, correction: Tensor, classes: int) -> Tensor:
    """Confidences with the correction: linear between the middles, constant beyond the first and the last.

    Above the last middle a positive one falls to 0 at 1, so that no confidence reaches 1 by it; none falls below
    1 / classes.
    """
    bins = len(correction)
    place = (confidence * bins - 0.5).clamp(0, bins - 1)
    left = place.floor().clamp_max(max(bins - 2, 0)).long()
    right = (left + 1).clamp_max(bins - 1)
    part = place - left
    delta = correction[left] * (1 - part) + correction[right] * part
    top = ((1 - confidence) * 2 * bins).clamp(0.0, 1.0)
    delta = torch.where(delta > 0, delta * top, delta)
    return (confidence + delta).clamp(1 / classes, 1.0)
