"""Worst-case neighbouring inputs for every mechanism of `privacy.mechanisms`, released through the mechanism itself.

Many coordinates of one release serve as trials: coordinate i is what would leave if the unit put all that it may
contribute there, and the noise of coordinates is independent (`checks` tests that).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tacit.audit._mechanism import Array, Release
from tacit.privacy import Budget, GridSum, Ledger, Neighbours, Receipt, events, mechanisms, sampling
from tacit.privacy.events import DpEvent

_GRID = 2.0**-20
_LONGEST = 64  # steps of a stream whose every release is kept; a longer one is projected as it goes


@dataclass(frozen=True)
class Sum:
    """A synthetic bounded sum: what `mechanisms` takes."""

    sum: dict[str, Tensor]
    bounds: dict[str, float]
    blocks: dict[str, tuple[str, ...]]

    @classmethod
    def of(cls, values: Tensor, bound: float = 1.0) -> Sum:
        return cls({"w": values}, {"w": bound}, {"w": ("w",)})


@contextmanager
def paid(
    event: DpEvent, neighbours: Neighbours | str = Neighbours.ADD_REMOVE, *, seed: int | None = None
) -> Iterator[Receipt]:
    """A live receipt for an event, from a ledger in memory that forbids nothing."""
    with Ledger("sqlite://") as ledger:
        ledger.subject("audit", Budget(math.inf, 1e-5), neighbours=neighbours, plan=[event])
        yield ledger.charge("audit", event, stage="audit", note="synthetic data", seed=seed)


def ends(neighbours: Neighbours | str) -> tuple[float, float]:
    """What a unit adds to a sum, in units of its bound, in the two worlds of a relation."""
    return (-1.0, 1.0) if Neighbours(neighbours) is Neighbours.REPLACE_ONE else (0.0, 1.0)


def gaussian(noise: float, steps: int = 1, *, neighbours: Neighbours | str = Neighbours.ADD_REMOVE) -> Release:
    """`mechanisms.gaussian`, of which one unit moves each of ``steps`` releases, up and down in turns."""

    def release(present: bool, trials: int) -> Array:
        value = ends(neighbours)[present]
        with paid(events.gaussian(noise, steps), neighbours) as receipt:
            columns = [
                mechanisms.gaussian(Sum.of(torch.full((trials,), value * (-1) ** step, dtype=torch.float64)), receipt)
                for step in range(steps)
            ]
        return np.stack([column["w"].numpy() for column in columns], axis=1)

    return release


def gaussian_blocks(
    noise: dict[str, float], bounds: dict[str, float], *, neighbours: Neighbours | str = Neighbours.ADD_REMOVE
) -> Release:
    """`mechanisms.gaussian` with noise of its own for each block, all of which one unit moves at once."""

    def release(present: bool, trials: int) -> Array:
        value = ends(neighbours)[present]
        total = Sum(
            {name: torch.full((trials,), value * bound, dtype=torch.float64) for name, bound in bounds.items()},
            bounds,
            {name: (name,) for name in bounds},
        )
        with paid(events.joint(noise.values()), neighbours) as receipt:
            out = mechanisms.gaussian(total, receipt, noise=noise)
        return np.stack([out[name].numpy() for name in bounds], axis=1)

    return release


def shards(noise: float, parts: int = 3, *, neighbours: Neighbours | str = Neighbours.ADD_REMOVE) -> Release:
    """`mechanisms.GaussianShards`, whose noise is added to each part of the sum by itself."""

    def release(present: bool, trials: int) -> Array:
        total = Sum.of(torch.full((trials,), ends(neighbours)[present], dtype=torch.float64))
        with paid(events.gaussian(noise), neighbours) as receipt:
            made = mechanisms.GaussianShards(total, receipt)
            ((name, drawn),) = made
        pieces = zip(torch.chunk(total.sum[name], parts), torch.chunk(drawn, parts), strict=True)
        return torch.cat([mechanisms.add_shard(value, each, made.grids[name]) for value, each in pieces]).numpy()

    return release


def gaussian_query(noise: float, *, neighbours: Neighbours | str = Neighbours.ADD_REMOVE) -> Release:
    """`mechanisms.gaussian_query`: discrete Gaussian noise."""

    def release(present: bool, trials: int) -> Array:
        with paid(events.gaussian(noise), neighbours) as receipt:
            return mechanisms.gaussian_query(_query(ends(neighbours)[present], trials), receipt).numpy()

    return release


def laplace(noise: float, *, neighbours: Neighbours | str = Neighbours.ADD_REMOVE) -> Release:
    """`mechanisms.laplace`: rounded Laplace noise."""

    def release(present: bool, trials: int) -> Array:
        with paid(events.laplace(noise), neighbours) as receipt:
            return mechanisms.laplace(_query(ends(neighbours)[present], trials), receipt).numpy()

    return release


def shares(kind: str, noise: float, honest: int = 3, *, there: int | None = None) -> Release:
    """The total of what ``there`` parties (by default the honest ones) get from `mechanisms.share`.

    The unit is one of the first party's. Shares of Laplace noise take as long as their grid is fine.
    """
    event, grid = events.shared_noise(kind, noise, honest), 2.0**-3 if kind == "laplace" else _GRID

    def release(present: bool, trials: int) -> Array:
        total = np.zeros(trials)
        for party in range(honest if there is None else there):
            value = round(float(present and not party) / grid)
            query = GridSum(total=(value,) * trials, grid=grid, low=-1.0, high=1.0, l1=1.0, l2=1.0)
            with paid(event) as receipt:
                total += np.array(mechanisms.share(query, receipt), dtype=np.float64)
        return total * grid

    return release


def _query(value: float, trials: int) -> GridSum:
    whole = round(value / _GRID)
    return GridSum(total=(whole,) * trials, grid=_GRID, low=-1.0, high=1.0, l1=1.0, l2=1.0)


def noisy_max(noise: float, *, neighbours: Neighbours | str = Neighbours.ADD_REMOVE) -> Release:
    """`mechanisms.noisy_max` of two scores, of which a unit moves one up and the other down.

    The other scores leave a gap at which the ratio is the largest: that of e^(gap / scale), once the first is behind
    in both worlds.
    """

    def release(present: bool, trials: int) -> Array:
        low, high = ends(neighbours)
        unit = round((high if present else low) / _GRID)
        behind = round(2 * high / _GRID)  # of the first, before the unit comes: it catches up, and no more
        scores = GridSum(total=(unit - behind, -unit), grid=_GRID, low=-1.0, high=1.0)
        with paid(events.repeat(events.noisy_max(noise), trials), neighbours) as receipt:
            return np.array([float(mechanisms.noisy_max(scores, receipt) == 0) for _ in range(trials)])

    return release


def poisson(
    rate: float, noise: float, steps: int = 1, *, neighbours: Neighbours | str = Neighbours.ADD_REMOVE
) -> Release:
    """``steps`` Poisson-subsampled releases of `mechanisms.gaussian`, with the receipt's own draws.

    As many units as trials, each of which puts all that it may contribute into a coordinate of its own: units are drawn
    independently, so every coordinate is one trial of the whole.
    """

    def release(present: bool, trials: int) -> Array:
        value, columns = ends(neighbours)[present], []
        with paid(events.poisson(rate, events.gaussian(noise), steps), neighbours) as receipt:
            for _ in range(steps):
                total = torch.zeros(trials, dtype=torch.float64)
                total[sampling.draw(receipt, trials)] = value
                columns.append(mechanisms.gaussian(Sum.of(total), receipt)["w"].numpy())
        return np.stack(columns, axis=1)

    return release


def without_replacement(
    sample: int, size: int, noise: float, *, neighbours: Neighbours | str = Neighbours.REPLACE_ONE
) -> Release:
    """`mechanisms.gaussian` over a sample of fixed size, a draw a trial; all others are far from the first."""

    def release(present: bool, trials: int) -> Array:
        (low, high), seen = ends(neighbours), np.zeros(trials)
        with paid(events.without_replacement(sample, size, events.gaussian(noise), trials), neighbours) as receipt:
            for trial in range(trials):
                drawn = bool((sampling.draw(receipt, size) == 0).any())
                total = torch.tensor([sample * low + (high - low) * (drawn and present)], dtype=torch.float64)
                seen[trial] = float(mechanisms.gaussian(Sum.of(total), receipt)["w"])
        return seen

    return release


def balls_in_bins(event: events.BallsInBinsDpEvent, *, neighbours: Neighbours | str = Neighbours.ADD_REMOVE) -> Release:
    """``event.steps`` releases of `mechanisms.gaussian` over bins that the receipt fills.

    As many units as trials, each with a coordinate of its own. What is returned is the log-likelihood ratio of all
    steps: of the sums over the rounds of a bin, which are sufficient, log of the mean over bins.
    """

    def release(present: bool, trials: int) -> Array:
        value, sums = ends(neighbours)[present], np.zeros((event.bins, trials))
        rounds = np.bincount(np.arange(event.steps) % event.bins, minlength=event.bins)
        with paid(event, neighbours) as receipt:
            for step in range(event.steps):
                total = torch.zeros(trials, dtype=torch.float64)
                total[sampling.draw(receipt, trials)] = value
                sums[step % event.bins] += mechanisms.gaussian(Sum.of(total), receipt)["w"].numpy()
        return np.asarray(np.logaddexp.reduce((sums - rounds[:, None] / 2) / event.noise_multiplier**2, axis=0))

    return release


def stream(
    event: events.StreamDpEvent,
    *,
    neighbours: Neighbours | str = Neighbours.REPLACE_ONE,
    reset: int | None = None,
) -> Release:
    """A `GaussianStream`, of which a unit takes part in the steps that cost the most.

    ``reset``: a step before which the stream is reset (a new noise block begins, with the old one unfinished).
    """
    strategy = mechanisms.strategy_of(event)
    lengths = [event.steps] * event.blocks
    if reset is not None:
        lengths = [reset, event.steps - reset, *lengths[1:]]
    total = sum(lengths)
    pattern = _worst(strategy.coefficients(), lengths, event.contributions, event.separation)
    weights = _statistic(strategy.coefficients(), lengths, pattern)

    def release(present: bool, trials: int) -> Array:
        value, kept = ends(neighbours)[present], []
        score = np.zeros(trials)
        with paid(event, neighbours) as receipt:
            noisy = mechanisms.GaussianStream(receipt)
            for step in range(total):
                if step == reset:
                    noisy.reset()
                moved = torch.full((trials,), value * pattern[step], dtype=torch.float64)
                column = noisy.release(Sum.of(moved))["w"].numpy()
                score += weights[step] * column
                if total <= _LONGEST:
                    kept.append(column)
        return np.stack([*kept, score], axis=1) if kept else score

    return release


def cyclic_poisson(
    event: events.CyclicPoissonDpEvent, *, neighbours: Neighbours | str = Neighbours.ADD_REMOVE
) -> Release:
    """A `GaussianStream` over units of the first group, which the receipt draws every `separation` steps.

    As many units as trials, each with a coordinate of its own. What is returned is the log-likelihood ratio of all
    steps. C times the releases is C times the sums, plus independent normals, and the columns of C that the unit can
    meet have no row in common; so its projection f on the column c, which has the variance (sigma |c|)^2, is
    sufficient, and the ratio is the product over these columns of 1 - q + q exp((f - |c|^2 / 2) / sigma^2).
    """
    column, bands, rate = mechanisms.strategy_of(event).coefficients(), event.separation, event.sample_rate
    variance = event.noise_multiplier**2 * float(np.square(column).sum())  # the first column is the longest

    def release(present: bool, trials: int) -> Array:
        value, seen = ends(neighbours)[present], []
        with paid(event, neighbours) as receipt:
            noisy = mechanisms.GaussianStream(receipt)
            for step in range(event.steps):
                total = torch.zeros(trials, dtype=torch.float64)
                drawn = sampling.draw(receipt, trials)
                if step % bands == 0:
                    total[drawn] = value
                seen.append(noisy.release(Sum.of(total))["w"].numpy())
        mixed = [sum(column[t - k] * seen[k] for k in range(max(0, t - bands + 1), t + 1)) for t in range(event.steps)]
        ratio = np.zeros(trials)
        for first in range(0, event.steps, bands):
            met = range(first, min(first + bands, event.steps))
            found = sum(column[t - first] * mixed[t] for t in met)
            size = sum(column[t - first] ** 2 for t in met)
            ratio += np.logaddexp(math.log1p(-rate), math.log(rate) + (found - size / 2) / variance)
        return ratio

    return release


def _mixed(column: Array, lengths: list[int], steps: Array) -> Array:
    """C times a sequence, where C is made of blocks of these lengths with this first column."""
    out, start = np.zeros(len(steps)), 0
    for length in lengths:
        part = slice(start, start + length)
        out[part] = np.convolve(column[:length], steps[part])[:length]
        start += length
    return out


def _statistic(column: Array, lengths: list[int], pattern: Array) -> Array:
    """C^T C times the pattern: the likelihood ratio of a unit with this pattern, under the noise C^-1 z."""
    moved, out, start = _mixed(column, lengths, pattern), np.zeros(len(pattern)), 0
    for length in lengths:
        part = moved[start : start + length][::-1]
        out[start : start + length] = np.convolve(column[:length], part)[:length][::-1]
        start += length
    return out


def _worst(column: Array, lengths: list[int], contributions: int, separation: int) -> Array:
    """The steps that cost a unit the most: of the patterns that begin at the start of each block."""
    total = sum(lengths)
    starts = np.cumsum([0, *lengths])[:-1]
    best, cost = np.zeros(total), -1.0
    for first in starts:
        for second in starts:
            if second < first:
                continue
            for split in range(1, contributions + 1):
                pattern = np.zeros(total)
                places = [int(first) + separation * i for i in range(split)]
                after = max(int(second), places[-1] + separation)
                places += [after + separation * i for i in range(contributions - split)]
                pattern[[place for place in places if place < total]] = 1.0
                value = float(np.square(_mixed(column, lengths, pattern)).sum())
                if value > cost:
                    best, cost = pattern, value
    return best
