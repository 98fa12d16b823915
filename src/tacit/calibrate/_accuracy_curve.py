"""The accuracy as a curve over the confidence, from one question that has the whole budget.

A search for a temperature asks twice or more, and every question takes its part of the budget. Where one noise is for
all sources, a small budget affords more if it is spent at once (``GapCurve(steps=1)``): sources are asked for the gaps
of a few bins of the confidence (``GapCells``) at a public temperature, and the rest is made of that one answer.

The prior: at confidence c the accuracy is m_T(c) + delta(c). m_T(c) is the confidence at temperature T of a prediction
that has c at ``TEMPERATURE``, if the rest of its probability is on ``_RIVALS`` - 1 other classes in equal parts; log T
is normal. delta is a Gaussian process, sigma^2 exp(-(c - c')^2 / (2 l^2)), with sigma one of ``_SIZES``, equally
probable, 0 among them: a temperature is right. Beside all of these stands "calibrated as it is", T = 1 and delta = 0,
with probability ``_CALIBRATED``. The noise is known, so the answer says how probable each of them is, and the accuracy
is the mean over them (Bayesian model averaging). Where "calibrated as it is" is more probable than all others together,
T stays exactly 1.

Formal guarantee: that of the one answer, at its full price; all of this is post-processing of it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tacit.calibrate._curve import counts_of, middles

TEMPERATURE = math.exp(0.4)  # between 1 and what overconfident classifiers need
NODES = 20  # of the curve; it is linear between them
_CALIBRATED = 0.7  # how probable "calibrated as it is" is beforehand
_RIVALS = 4.0  # classes among which the probability is, the predicted one included
_LOG_T = torch.arange(-6, 28, dtype=torch.float64) / 16
_MEAN, _STD = 0.2, 0.5  # of log T
_SIZES = (0.0, 0.03, 0.06, 0.12)  # of delta
_LENGTH = 0.2
_LEAST = 0.01  # of the variance of one sample's gap
_MISFIT = 0.03  # how far m_1 may be from the confidence at T = 1, in the mean of a bin
_EMPTY = 1e-6  # the variance of a bin without samples and without noise


def moved(confidence: Tensor, log_t: Tensor) -> Tensor:
    """m_T(c): temperatures x confidences, from those at ``TEMPERATURE``."""
    c = confidence.clamp(1 / _RIVALS + 1e-4, 1 - 1e-9)
    margin = TEMPERATURE * torch.log(c * (_RIVALS - 1) / (1 - c))
    return 1 / (1 + (_RIVALS - 1) * torch.exp(-margin / log_t.exp()[:, None]))


def accuracy_curve(totals: Tensor, *, samples: float, noise: float) -> tuple[Tensor, Tensor]:
    """The posterior probability of "calibrated as it is", and the posterior mean of the accuracy.

    Args:
        totals: The totals of ``GapCells`` at ``TEMPERATURE``, trials x 2 bins.
        samples: The number of units in all.
        noise: The standard deviation of the noise in each total.

    Returns:
        One probability per trial; the accuracy at the middles of ``NODES`` bins of the confidence, which never falls.
    """
    bins = totals.shape[1] // 2
    middle, fine, gap = middles(bins), middles(NODES), totals[:, :bins]
    counts = counts_of(totals, samples)
    near, near_fine = (torch.exp(-((at[:, None] - middle) ** 2) / (2 * _LENGTH**2)) for at in (middle, fine))
    claimed, claimed_fine = moved(middle, _LOG_T), moved(fine, _LOG_T)
    left = gap[:, None] - counts[:, None] * (claimed - middle)  # trials x temperatures x bins
    error = torch.diag_embed(noise**2 + counts[:, None] * (claimed * (1 - claimed) + _LEAST) + _EMPTY)
    log_prior = torch.log_softmax(-(((_LOG_T - _MEAN) / _STD) ** 2) / 2, dim=0) - math.log(len(_SIZES))
    evidence, means = [], []
    for size in _SIZES:
        prior = counts[:, None, :, None] * (size**2 * near) * counts[:, None, None, :]
        root = torch.linalg.cholesky(prior + error)
        white = torch.linalg.solve_triangular(root, left[..., None], upper=False)
        evidence.append(log_prior - white.square().sum(dim=(2, 3)) / 2 - root.diagonal(dim1=2, dim2=3).log().sum(dim=2))
        weighted = counts[:, None] * torch.cholesky_solve(left[..., None], root)[..., 0]
        means.append(claimed_fine + weighted @ (size**2 * near_fine.T))
    scores, curves = torch.cat(evidence, dim=1), torch.cat(means, dim=1)
    accuracy = (torch.softmax(scores, dim=1)[..., None] * curves).sum(dim=1)
    at_one = torch.zeros(1, dtype=torch.float64)
    as_it_is = moved(middle, at_one)
    variance = noise**2 + counts * (as_it_is * (1 - as_it_is) + _LEAST) + (_MISFIT * counts) ** 2 + _EMPTY
    score = -((gap - counts * (as_it_is - middle)) ** 2 / variance + variance.log()).sum(dim=1) / 2
    odds = math.log(_CALIBRATED / (1 - _CALIBRATED))
    probability = torch.sigmoid(score - torch.logsumexp(scores, dim=1) + odds)
    accuracy = accuracy + probability[:, None] * (moved(fine, at_one) - accuracy)
    return probability, accuracy.cummax(dim=1).values
