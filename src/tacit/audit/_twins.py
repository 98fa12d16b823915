"""Mechanisms that are wrong on purpose, each beside the claim that it would be sold with.

An audit that does not catch them is no audit: tests and `make audit` run them all. Noise is drawn from the right
mechanism wherever the mistake lies elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from tacit.audit import _releases as releases
from tacit.audit._findings import Claim
from tacit.audit._mechanism import Array, Release
from tacit.audit._releases import Sum, paid
from tacit.gradients import clipped_sum
from tacit.privacy import events, mechanisms

_NOISE, _ROWS = 1.0, 4  # of the noise multiplier; rows of one unit, where it has several


@dataclass(frozen=True)
class Twin:
    """A broken release, the right one if there is one to compare with, and the claim that both are sold with."""

    name: str
    broken: Release
    claim: Claim
    right: Release | None = None


def _noised(sums: Callable[[bool], float], noise: float = _NOISE) -> Release:
    """Sums of one number, released as they are with the noise of a sum whose bound is 1."""

    def release(present: bool, trials: int) -> Array:
        value = torch.full((trials,), sums(present), dtype=torch.float64)
        with paid(events.gaussian(noise)) as receipt:
            return mechanisms.gaussian(Sum.of(value), receipt)["w"].numpy()

    return release


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).flatten()  # type: ignore[no-any-return]


def _line() -> nn.Linear:
    """A line through zero: the gradient of a row is the row."""
    return nn.Linear(1, 1, bias=False).double()


def _clipped(rows: list[float], units: list[int] | None = None) -> float:
    """The real clipped sum of these rows, clip 1; a unit that is not there leaves zero."""
    if not rows:
        return 0.0
    ids = None if units is None else torch.tensor(units)
    found = clipped_sum(_line(), _loss, torch.tensor(rows, dtype=torch.float64)[:, None], clip=1.0, unit_ids=ids)
    return float(found.sum["weight"])


def no_clipping() -> Twin:
    right = _noised(lambda there: _clipped([5.0] if there else []))
    return Twin("no clipping", _noised(lambda there: 5.0 * there), Claim(mu=1 / _NOISE), right)


def clip_after_mean() -> Twin:
    """The mean over four rows, clipped: one large row decides where it points."""
    others = [1.0, 1.0, 1.0]

    def broken(there: bool) -> float:
        rows = [*others, -100.0] if there else others
        return max(-1.0, min(1.0, sum(rows) / len(rows)))

    def right(there: bool) -> float:
        return _clipped([*others, -100.0] if there else others)

    scaled = _NOISE / 4  # of the noise of a mean over four, in units of the clip
    return Twin("clip after the mean", _noised(broken, scaled), Claim(mu=1 / _NOISE), _noised(right))


def noise_halved() -> Twin:
    return Twin(
        "noise halved", releases.gaussian(_NOISE / 2), Claim.of(events.gaussian(_NOISE)), releases.gaussian(_NOISE)
    )


def noise_reused() -> Twin:
    """Two releases with the same noise: their difference has none."""

    def broken(present: bool, trials: int) -> Array:
        with paid(events.gaussian(_NOISE)) as receipt:
            noise = mechanisms.gaussian(Sum.of(torch.zeros(trials, dtype=torch.float64)), receipt)["w"].numpy()
        return np.stack([noise + present, noise - present], axis=1)

    return Twin("noise reused", broken, Claim.of(events.gaussian(_NOISE, 2)), releases.gaussian(_NOISE, 2))


def key_reused() -> Twin:
    """A run that resumes with its old key on data that changed: the same step, the same noise, another sum."""

    def broken(present: bool, trials: int) -> Array:
        out = []
        for value in (0.5, 0.5 + present):  # before the kill, and after it
            with paid(events.gaussian(_NOISE), seed=7) as receipt:
                total = Sum.of(torch.full((trials,), value, dtype=torch.float64))
                out.append(mechanisms.gaussian(total, receipt)["w"].numpy())
        return np.stack(out, axis=1)

    return Twin("key reused after resume", broken, Claim.of(events.gaussian(_NOISE, 2)), releases.gaussian(_NOISE, 2))


def wrong_rate() -> Twin:
    event = events.poisson(0.25, events.gaussian(0.5))
    claim = Claim.of(event, delta=0.1)  # where rates differ the most: near the total variation
    return Twin("wrong rate", releases.poisson(0.5, 0.5), claim, releases.poisson(0.25, 0.5))


def shuffled() -> Twin:
    """Batches of a shuffled epoch, priced as Poisson draws: each unit takes part exactly once."""
    noise = 0.4
    event = events.poisson(0.5, events.gaussian(noise), 2)
    source = np.random.default_rng(1)  # of the order alone, which is no secret of a test

    def broken(present: bool, trials: int) -> Array:
        step = source.integers(0, 2, trials)
        moved = np.stack([step == 0, step == 1], axis=1) * float(present)
        with paid(events.gaussian(noise, 2)) as receipt:
            columns = [
                mechanisms.gaussian(Sum.of(torch.from_numpy(moved[:, i].copy())), receipt)["w"].numpy()
                for i in range(2)
            ]
        return np.stack(columns, axis=1)

    def likely(release: Release) -> Release:
        """The likelihood ratio of a unit that comes once, in either step."""
        return lambda present, trials: np.logaddexp.reduce(release(present, trials) / noise**2, axis=1)

    right = releases.poisson(0.5, noise, 2)
    return Twin("shuffled instead of Poisson", likely(broken), Claim.of(event, delta=0.5), likely(right))


def data_dependent_denominator() -> Twin:
    """The mean over the rows that are there instead of a fixed number: one row moves the share of every other."""
    others = [1.0] * 9

    def broken(there: bool) -> float:
        rows = [*others, -1.0] if there else others
        return 10 * _clipped(rows) / len(rows)  # in units of 1/10, the share of one row of ten

    def right(there: bool) -> float:
        return _clipped([*others, -1.0] if there else others)

    return Twin("data-dependent denominator", _noised(broken), Claim(mu=1 / _NOISE), _noised(right))


def live_batchnorm() -> Twin:
    """Statistics of the batch: one row changes the gradient of every other before it is clipped."""
    weights = torch.ones(1, dtype=torch.float64, requires_grad=True)

    def broken(there: bool) -> float:
        rows = torch.tensor([1.0, 1.1, 0.9, 1.05] + ([-50.0] if there else [1.0]), dtype=torch.float64)
        normal = (rows - rows.mean()) / rows.std() + 1.0
        gradients = [torch.autograd.grad(w, weights, retain_graph=True)[0] for w in normal * weights]
        signs = torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0])
        return float(sum(float(s) * float(g.clamp(-1, 1)) for g, s in zip(gradients, signs, strict=True)))

    return Twin("live BatchNorm", _noised(broken), Claim(mu=1 / _NOISE))


def unit_counted_twice() -> Twin:
    """A person with two rows, each clipped by itself."""
    right = _noised(lambda there: _clipped([5.0, 5.0], [0, 0]) if there else 0.0)
    broken = _noised(lambda there: _clipped([5.0, 5.0]) if there else 0.0)
    return Twin("a unit counted twice", broken, Claim(mu=1 / _NOISE), right)


def one_query_more() -> Twin:
    """K + 2 noisy answers at the price of K + 1 (the recalibration paper's search), K = 1."""
    return Twin(
        "one query more than was charged",
        releases.gaussian(_NOISE, 3),
        Claim.of(events.gaussian(_NOISE, 2)),
        releases.gaussian(_NOISE, 2),
    )


def unnoised_selection() -> Twin:
    """The best of two by their exact scores."""

    def broken(present: bool, trials: int) -> Array:
        return np.full(trials, float(present))

    return Twin("selection without noise", broken, Claim.of(events.noisy_max(_NOISE)), releases.noisy_max(_NOISE))


def clips_sold_as_videos() -> Twin:
    """A video of four clips, each clipped and noised as a unit of its own."""
    ids, rows = [0] * _ROWS, [5.0] * _ROWS
    right = _noised(lambda there: _clipped(rows, ids) if there else 0.0)
    broken = _noised(lambda there: _clipped(rows) if there else 0.0)
    return Twin("clip-level noise sold as video-level", broken, Claim(mu=1 / _NOISE), right)


def shares_missing() -> Twin:
    """One noise in three shares, of which one comes: parties that collude were counted as honest."""
    claim = Claim.of(events.shared_noise("gaussian", 0.5, 3))
    return Twin("shares missing", releases.shares("gaussian", 0.5, there=1), claim, releases.shares("gaussian", 0.5))


TWINS: tuple[Callable[[], Twin], ...] = (
    no_clipping,
    clip_after_mean,
    noise_halved,
    noise_reused,
    key_reused,
    wrong_rate,
    shuffled,
    data_dependent_denominator,
    live_batchnorm,
    unit_counted_twice,
    one_query_more,
    unnoised_selection,
    clips_sold_as_videos,
    shares_missing,
)
