"""Platt scaling of the confidence from one question that has the whole budget.

The accuracy at confidence c is taken to be s(a + b x), where x = log(c / (1 - c)) is the confidence in logits and s its
inverse: an intercept a and a slope b, 0 and 1 for a classifier that is calibrated as it is. Two numbers need little:
sources are asked for the gaps of three wide bins of x, and for what the gaps leave of a bound of 1 in many narrow ones
(``LogitCells``), which costs nothing and says where the confidences are.

A sample of a narrow bin around x is right with probability A = s(a + b x), and adds 1 - c to its wide bin and c to the
narrow one if it is, and -c and 1 - c if not. So n samples add n (A - c) and n h with h = A c + (1 - A)(1 - c) in the
mean, and the gap of a wide bin is the sum over its narrow ones of r S with r = (A - c) / h, where S is what the narrow
one has. Given S, the gap has the variance of the noise, noise^2 (1 + sum r^2), and of the samples,
A (1 - A) (1 - r (2 c - 1))^2 each.

The prior: a and log b are normal and correlated, and with a small probability widely spread; beside them stands
"calibrated as it is", with probability ``_CALIBRATED``. The posterior is summed over a grid of a and log b.

The result is (l a, l log b) with their posterior means and the largest l of 0, 0.1, ..., 1 at which it is improbable
(``_RISK``) that the calibration error grows by more than ``_HARM``: over the posterior, and over the narrow bins in
place of the samples. Where little is known that is a part of the way, and 0 is no change at all.

Formal guarantee: that of the one answer, at its full price; all of this is post-processing of it.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

WIDE = (0.0, 2.0)  # where the wide bins end, in logits of the confidence
NARROW = (-1.0, -0.25, 0.0, 0.25, 0.75, 1.25, 1.75, 2.0, 2.5, 3.25, 4.0, 5.0, 6.5, 8.5)  # and the narrow ones
_MIDDLES = (NARROW[0] - 0.5, *((one + other) / 2 for one, other in pairwise(NARROW)), NARROW[-1] + 1.5)
_CALIBRATED = 0.1  # how probable "calibrated as it is" is beforehand
_NORMALS = (  # of (a, log b): probability, means, deviations, correlation
    (0.8, (-0.1, -0.25), (0.6, 0.45), 0.3),
    (0.2, (0.0, 0.0), (1.5, 0.7), 0.5),
)
_INTERCEPTS, _LOG_SLOPES = (-4.0, 4.0, 65), (-2.0, 1.5, 43)  # the grid
_MISFIT = 0.01  # how far the accuracy of a wide bin may be from the curve
_HARM, _RISK = 0.01, 0.03  # so much more calibration error is harm, and may have this probability
_TOGETHER = 50  # trials that are computed at once
_HIGHEST = 1 - 1e-12  # of a confidence, before its logit is taken


def logit(confidence: Tensor) -> Tensor:
    """The logarithm of its odds, for a confidence of any shape."""
    c = confidence.clamp(1e-12, _HIGHEST)
    return torch.log(c) - torch.log1p(-c)


def platt(confidence: Tensor, intercept: Tensor | float, slope: Tensor | float, classes: int) -> Tensor:
    """The confidence after Platt scaling; none falls below 1 / classes."""
    return torch.sigmoid(intercept + slope * logit(confidence)).clamp_min(1 / classes)


def fit_platt(totals: Tensor, *, noise: float) -> tuple[Tensor, Tensor]:
    """What to make of an answer.

    Args:
        totals: The totals of ``LogitCells`` at T = 1, trials x values.
        noise: The standard deviation of the noise in each of them.

    Returns:
        Intercept and slope, trials x 2; and how far the way to the posterior mean is gone, 0 being not at all.
    """
    parts = [_fitted(part, noise) for part in torch.split(totals, _TOGETHER)]
    return torch.cat([line for line, _ in parts]), torch.cat([gone for _, gone in parts])


def _fitted(totals: Tensor, noise: float) -> tuple[Tensor, Tensor]:
    weight, log_line, accuracy = posterior(totals, noise=noise)
    middle = torch.tensor(_MIDDLES, dtype=torch.float64)
    rest = totals[:, len(WIDE) + 1 :].clamp_min(0.0)
    share = rest / rest.sum(dim=1, keepdim=True).clamp_min(1.0)
    before = share @ (accuracy - torch.sigmoid(middle)).abs().T
    gone = torch.zeros(len(totals), dtype=torch.float64)
    for part in (torch.arange(1, 11, dtype=torch.float64) / 10).tolist():
        line = part * log_line
        claimed = torch.sigmoid(line[:, :1] + line[:, 1:].exp() * middle)
        after = (share[:, None] * (accuracy - claimed[:, None]).abs()).sum(dim=2)
        risk = (weight * (after > before + _HARM)).sum(dim=1)
        gone = torch.where(risk <= _RISK, part, gone)
    gone = torch.where(rest.sum(dim=1) >= 1, gone, 0.0)  # without a sample in any bin, nothing is known about harm
    line = torch.where(gone[:, None] > 0, gone[:, None] * log_line, 0.0)
    return torch.stack([line[:, 0], line[:, 1].exp()], dim=1), gone


def posterior(totals: Tensor, *, noise: float) -> tuple[Tensor, Tensor, Tensor]:
    """The posterior over the grid (trials x places), its means (trials x 2), and the accuracies (places x bins)."""
    middle = torch.tensor(_MIDDLES, dtype=torch.float64)
    wide = torch.bucketize(middle, torch.tensor(WIDE, dtype=torch.float64))
    gaps, rest = totals[:, : len(WIDE) + 1], totals[:, len(WIDE) + 1 :].clamp_min(0.0)
    places, log_prior = _prior()
    claimed = torch.sigmoid(middle)
    accuracy = torch.sigmoid(places[:, :1] + places[:, 1:].exp() * middle)
    share = accuracy * claimed + (1 - accuracy) * (1 - claimed)
    rate = (accuracy - claimed) / share
    each = accuracy * (1 - accuracy) * (1 - rate * (2 * claimed - 1)) ** 2 / share
    score = log_prior.expand(len(totals), -1)
    for place in range(len(WIDE) + 1):
        here = wide == place
        inside, found = rest[:, here], gaps[:, place : place + 1]
        variance = noise**2 * (1 + rate[:, here].square().sum(dim=1)) + inside @ each[:, here].T + 1
        variance = variance + (_MISFIT * (inside @ (1 / share[:, here]).T)) ** 2
        score = score - ((found - inside @ rate[:, here].T) ** 2 / variance + variance.log()) / 2
    weight = torch.softmax(score, dim=1)
    return weight, weight @ places, accuracy


def _prior() -> tuple[Tensor, Tensor]:
    """The grid of (a, log b), whose last place is "calibrated as it is", and its log prior."""
    axes = [torch.linspace(low, high, steps, dtype=torch.float64) for low, high, steps in (_INTERCEPTS, _LOG_SLOPES)]
    places = torch.cartesian_prod(*axes)
    total = torch.zeros(len(places), dtype=torch.float64)
    for probability, means, deviations, correlation in _NORMALS:
        z = (places - torch.tensor(means, dtype=torch.float64)) / torch.tensor(deviations, dtype=torch.float64)
        exponent = z.square().sum(dim=1) - 2 * correlation * z.prod(dim=1)
        total += probability * torch.softmax(-exponent / (2 * (1 - correlation**2)), dim=0)
    log_prior = torch.cat(
        [total.log() + math.log(1 - _CALIBRATED), torch.tensor([math.log(_CALIBRATED)], dtype=torch.float64)]
    )
    return torch.cat([places, torch.zeros(1, 2, dtype=torch.float64)]), log_prior
