"""One total from the answers of many sources, of which some may lie.

A plain sum is at the mercy of its largest term. But the noise of an answer is known exactly, and how far samples
scatter is known well enough, so the total can be estimated as a location instead: an answer of a source of n units is

    x = n mu + N(0, n v) + noise,

and mu is where the score of all answers together is zero. What is made of answers is post-processing: it costs nothing.

The score
---------
With s^2 = n v and Laplace noise of scale b, the density of a residual r = x - n mu is a constant times A + B, with
A = e^(-r/b) Phi(r/s - s/b) and B = e^(r/b) Phi(-r/s - s/b). Both have the same derivative besides -A/b and B/b (the two
products of exponential and normal density are the same function of r), so that the score is

    psi(r) = -f'(r) / f(r) = tanh((log A - log B) / 2) / b,

odd, increasing and below 1/b: no answer counts for more than that, however large it is. For Gaussian noise of deviation
b the density is N(0, s^2 + b^2) and its score r / (s^2 + b^2) has no bound. So every score is cut at ``_CUT`` times
sqrt(E psi^2): for Gaussian noise that is Huber's estimator (95 % efficient where all are honest, and the best there is
against a given share of arbitrary answers), for Laplace noise it changes nothing unless the noise is small beside s.

Sources of different sizes: d/dmu of log f(x - n mu) is n psi(r), so mu solves sum_i w_i psi_i(x_i - n_i mu) = 0 with
w_i = n_i. A size is a claim as well, so w_i is at most ``_LARGEST`` times the median size. With K = E[psi psi_cut] (=
E[psi_cut'], by parts) and V = E[psi_cut^2], the estimate has variance sum w^2 V / (sum w n K)^2; without the cut and
with equal sizes that is 1 / (S n^2 E psi^2).

What noise cannot explain, and no difference between honest sources of up to ``_APART`` of the largest contribution per
unit, has no weight at all in a second pass: honest noise is taken for a lie with a probability below ``_RARE``.

All answers of a source together
--------------------------------
A bounded score still counts a lie that is within the noise as much as the noise. But a source that lies does so in more
than one of its answers, and noise is seldom large in all of them. So with the questions that were asked so far, what a
source says is judged as a whole: D = sum of -log(f(r) / f(0)) over all its values. Of an honest source every term is
exponential under Laplace noise and half a chi-square under Gaussian noise, and so nearly a gamma variable between the
two; D is compared with the gamma variable of its mean and variance, and a source that is in the last ``_TRIMMED`` of it
does not count: the maximum of a trimmed likelihood. Residuals of honest sources are symmetric, so that this costs a
little variance and no bias. Where even the median source is further off than that (sources that are unlike each other),
all limits grow in proportion. A lie has to be small, or in few answers, to count at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from scipy.special import gammainc, gammaincinv, ndtri
from torch import Tensor

from tacit.calibrate._statistics import Noise, Statistic

_CUT = 1.345  # standard deviations: Huber's choice, 95 % efficient under Gaussian noise
_LARGEST = 10.0  # times the median size: the most that a source counts for
_STEPS = 60  # of the search for the root; it ends earlier
_FINE = 4001  # points of the integrals
_APART = 0.25  # of the largest contribution: honest sources may differ from each other by so much, per unit
_RARE = 1e-9  # the probability that honest noise alone passes for a lie
_TRIMMED = 0.05  # of the honest sources do not count, those whose answers are least probable together
_FEW = 10  # sources: of fewer, the others say too little about one
_ROUNDS = 2  # of trimming


@dataclass(frozen=True, kw_only=True, eq=False)
class Total:
    """A total over all units, per trial and value.

    Args:
        value: The estimate, trials x values.
        far: Whether an answer is so far from it that it was left out, trials x sources x values.
    """

    value: Tensor
    far: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Answers:
    """What the sources said to one question.

    Args:
        values: With noise, trials x sources x values.
        sizes: The number of units of each source, as far as it is known; 0 for one that did not answer.
        statistic: What they were asked.
        noise: "laplace" or "gaussian".
        scale: Of the noise of one answer: the Laplace scale, or the standard deviation.
        spread: The variance of one unit's contribution, for each value; by default the statistic's guess.
    """

    values: Tensor
    sizes: Tensor
    statistic: Statistic
    noise: Noise
    scale: float
    spread: Sequence[float] | None = None

    @cached_property
    def counted(self) -> Tensor:
        return self.sizes.double().clamp_min(0.0)

    @cached_property
    def weight(self) -> Tensor:
        """How much each source counts; all zero where there is no noise to hide behind, or no other source."""
        there = self.counted[self.counted > 0]
        if self.scale == 0 or not len(there):
            return torch.zeros_like(self.counted)
        return self.counted.clamp_max(_LARGEST * float(there.median()))

    @cached_property
    def scores(self) -> list[_Score]:
        spread = self.spread or self.statistic.spread
        return [_Score.of(self.counted, variance, self.noise, self.scale) for variance in spread]

    @cached_property
    def alone(self) -> tuple[Tensor, Tensor]:
        """The mean of a unit (trials x values) by these answers alone, and which of them are too far from it."""
        largest = max(abs(self.statistic.low), self.statistic.high)
        means, far = [], []
        for column, score in zip(self.values.unbind(dim=2), self.scores, strict=True):
            mean = _root(column, self.counted, self.weight.expand_as(column), score)
            allowed = _APART * largest * self.counted + 7 * score.std + tail(_RARE, self.noise, self.scale)
            off = (column - self.counted * mean[:, None]).abs() > allowed
            again = off.any(dim=1) & ~off.all(dim=1)
            if again.any():
                mean[again] = _root(column[again], self.counted, self.weight * ~off[again], score)
            means.append(mean)
            far.append(off & (self.counted > 0))
        return torch.stack(means, dim=1), torch.stack(far, dim=2)

    def again(self, means: Tensor, counts: Tensor) -> Tensor:
        """The means once more, without the sources that do not count (trials x sources)."""
        found = []
        for place, score in enumerate(self.scores):
            weight = self.weight * counts * ~self.alone[1][:, :, place]
            some = (weight > 0).any(dim=1)
            mean = means[:, place].clone()
            if some.any():
                mean[some] = _root(self.values[some, :, place], self.counted, weight[some], score, mean[some])
            found.append(mean)
        return torch.stack(found, dim=1)

    def distance(self, means: Tensor) -> Tensor:
        """-log(f(r) / f(0)) of each source, over all values (trials x sources); 0 for one that did not answer."""
        total_ = torch.zeros(self.values.shape[:2], dtype=torch.float64)
        for place, score in enumerate(self.scores):
            residual = self.values[:, :, place] - self.counted * means[:, place, None]
            total_ += torch.where(self.counted > 0, score.distance(residual), 0.0)
        return total_

    def summed(self, means: Tensor) -> Total:
        return Total(value=means * self.counted.sum(), far=self.alone[1])


def totals(asked: Sequence[Answers]) -> list[Total]:
    """The total over all units, of each question, from what the same sources said to all of them.

    Args:
        asked: The answers to one question after the other, the same sources in the same order.

    Returns:
        The estimates, and which answers are too far from them to count.
    """
    plain = [bool((one.weight == 0).all()) for one in asked]
    noisy = [one for one, without in zip(asked, plain, strict=True) if not without]
    means = [one.alone[0] for one in noisy]
    limit, middle = _limits(noisy) if noisy else (torch.zeros(0), torch.zeros(0))
    if int((limit > 0).sum()) >= _FEW:
        for _ in range(_ROUNDS):
            distance = torch.stack([one.distance(mean) for one, mean in zip(noisy, means, strict=True)]).sum(dim=0)
            unlike = (distance / middle)[:, limit > 0].median(dim=1, keepdim=True).values.clamp_min(1.0)
            counts = distance <= limit * unlike
            means = [one.again(mean, counts) for one, mean in zip(noisy, means, strict=True)]
    found = iter([one.summed(mean) for one, mean in zip(noisy, means, strict=True)])
    return [
        Total(value=one.values.sum(dim=1), far=torch.zeros_like(one.values, dtype=torch.bool))
        if without
        else next(found)
        for one, without in zip(asked, plain, strict=True)
    ]


def _limits(asked: Sequence[Answers]) -> tuple[Tensor, Tensor]:
    """What the distance of an honest source passes with probability ``_TRIMMED``, and its median."""
    mean, variance = torch.zeros_like(asked[0].counted), torch.zeros_like(asked[0].counted)
    for one in asked:
        for score in one.scores:
            mean += torch.where(one.counted > 0, score.far_mean, 0.0)
            variance += torch.where(one.counted > 0, score.far_variance, 0.0)
    shape, unit = mean**2 / variance.clamp_min(1e-300), variance / mean.clamp_min(1e-300)
    limit, middle = (torch.from_numpy(gammaincinv(shape.numpy(), q)) * unit for q in (1 - _TRIMMED, 0.5))
    silent = mean == 0
    return limit.masked_fill(silent, 0.0), middle.masked_fill(silent, 1.0)


def total(
    answers: Tensor,
    sizes: Tensor,
    statistic: Statistic,
    *,
    noise: Noise,
    scale: float,
    spread: Sequence[float] | None = None,
) -> Total:
    """The total over all units from the answers to one question alone: ``totals`` of one."""
    one = Answers(values=answers, sizes=sizes, statistic=statistic, noise=noise, scale=scale, spread=spread)
    return totals([one])[0]


def tail(probability: float, noise: Noise, scale: float) -> float:
    """What noise of this scale passes with this probability, on either side."""
    return scale * (-math.log(probability) if noise == "laplace" else float(-ndtri(probability / 2)))


def deviation(sizes: Tensor, variance: float, *, noise: Noise, scale: float, values: int = 1) -> float:
    """The standard deviation of the estimate of a total, of noise and samples together, where all are honest.

    Args:
        sizes: The number of units of each source.
        variance: Of one unit's contribution.
        noise: "laplace" or "gaussian".
        scale: Of the noise of one answer.
        values: How many values of a source are judged together.

    Returns:
        The standard deviation.
    """
    counted = sizes.double().clamp_min(0.0)
    mass, there = float(counted.sum()), counted[counted > 0]
    if scale == 0 or not len(there):
        each = scale * math.sqrt(len(sizes) * (2 if noise == "laplace" else 1))
        return math.hypot(each, math.sqrt(mass * variance))
    weight, score = counted.clamp_max(_LARGEST * float(there.median())), _Score.of(counted, variance, noise, scale)
    slope, square = score.slope, score.square
    if len(there) >= _FEW:
        kept = torch.tensor([_kept(float(s) / scale, noise, values) for s in score.std], dtype=torch.float64)
        slope, square = slope * kept[:, 0], square * kept[:, 1]
    return mass * math.sqrt(float((weight**2 * square).sum())) / float((weight * counted * slope).sum())


def shrunk(counts: Tensor, *, noise: Noise, scale: float) -> Tensor:
    """The sizes of sources from noisy counts: each is drawn to the middle as far as noise explains the difference."""
    middle = float(counts.median().clamp_min(0.0))
    low, high = torch.quantile(counts, torch.tensor([0.16, 0.84], dtype=counts.dtype)).tolist()
    spread = (high - low) / 2  # of a normal distribution, its standard deviation
    own = (2 if noise == "laplace" else 1) * scale**2
    kept = max(0.0, 1 - own / spread**2) if spread > 0 else 0.0
    return (middle + kept * (counts - middle)).clamp(0.0, _LARGEST * max(middle, 1.0))


@dataclass(frozen=True, eq=False)
class _Score:
    """The cut score of each source, with E[psi psi_cut], E[psi_cut^2] and two moments of -log(f / f(0))."""

    std: Tensor  # s, one per source
    noise: Noise
    scale: float
    cut: Tensor
    slope: Tensor
    square: Tensor
    far_mean: Tensor
    far_variance: Tensor

    @staticmethod
    def of(sizes: Tensor, variance: float, noise: Noise, scale: float) -> _Score:
        std = (sizes * variance).sqrt().clamp_min(1e-6 * scale)
        levels, place = torch.unique(std, return_inverse=True)
        facts = torch.tensor([_facts(level / scale, noise) for level in levels.tolist()], dtype=torch.float64)[place]
        cut, slope, square = facts[:, 0] / scale, facts[:, 1] / scale**2, facts[:, 2] / scale**2
        return _Score(std, noise, scale, cut, slope, square, facts[:, 3], facts[:, 4])

    def __call__(self, residual: Tensor) -> Tensor:
        return torch.clamp(
            _psi(residual / self.scale, self.std / self.scale, self.noise) / self.scale, -self.cut, self.cut
        )

    def distance(self, residual: Tensor) -> Tensor:
        return _distance(residual / self.scale, self.std / self.scale, self.noise)


def _psi(r: Tensor, s: Tensor, noise: Noise) -> Tensor:
    """The score in units of the noise's scale (b = 1)."""
    if noise == "gaussian":
        return r / (s**2 + 1)
    log_a = torch.special.log_ndtr(r / s - s) - r
    log_b = torch.special.log_ndtr(-r / s - s) + r
    return torch.tanh((log_a - log_b) / 2)


def _distance(r: Tensor, s: Tensor, noise: Noise) -> Tensor:
    """-log(f(r) / f(0)) in units of the noise's scale (b = 1)."""
    if noise == "gaussian":
        return r**2 / (2 * (s**2 + 1))
    log_a = torch.special.log_ndtr(r / s - s) - r
    log_b = torch.special.log_ndtr(-r / s - s) + r
    highest: Tensor = torch.special.log_ndtr(-s) + math.log(2)
    return highest - torch.logaddexp(log_a, log_b)


def _integrand(s: float, noise: Noise) -> tuple[Tensor, Tensor, Tensor, float]:
    """Weights of the trapezoidal rule for the density at b = 1, -log(f / f(0)), the score, and its cut."""
    std = torch.tensor(s, dtype=torch.float64)
    r = torch.linspace(-1, 1, _FINE, dtype=torch.float64) * (40 + 12 * s)
    far, psi = _distance(r, std, noise), _psi(r, std, noise)
    density = torch.exp(-far)
    density = density / density.sum()
    return density, far, psi, _CUT * float((density * psi**2).sum().sqrt())


@lru_cache(maxsize=4096)
def _facts(s: float, noise: Noise) -> tuple[float, float, float, float, float]:
    """The cut, E[psi psi_cut], E[psi_cut^2], and mean and variance of -log(f / f(0)), at b = 1."""
    density, far, psi, cut = _integrand(s, noise)
    clipped = psi.clamp(-cut, cut)
    mean = float((density * far).sum())
    variance = float((density * (far - mean) ** 2).sum())
    return cut, float((density * psi * clipped).sum()), float((density * clipped**2).sum()), mean, variance


@lru_cache(maxsize=4096)
def _kept(s: float, noise: Noise, values: int) -> tuple[float, float]:
    """What trimming leaves of E[psi psi_cut] and of E[psi_cut^2], where so many values like this one are judged."""
    density, far, psi, cut = _integrand(s, noise)
    mean = float((density * far).sum())
    variance = float((density * (far - mean) ** 2).sum())
    shape, unit = mean**2 / variance, variance / mean
    left = (float(gammaincinv(values * shape, 1 - _TRIMMED)) * unit - far).clamp_min(0.0)
    others = (values - 1) * shape
    stays = torch.from_numpy(gammainc(others, left.numpy() / unit)) if others else torch.ones_like(left)
    density, clipped = density * stays * (left > 0), psi.clamp(-cut, cut)
    whole, square = _facts(s, noise)[1:3]
    return float((density * psi * clipped).sum()) / whole, float((density * clipped**2).sum()) / square


def _root(answers: Tensor, sizes: Tensor, weight: Tensor, score: _Score, start: Tensor | None = None) -> Tensor:
    """Where the weighted scores add up to zero, for each trial: scoring steps, halving where they leave the bracket.

    The sum falls as mu rises, so its zero lies between the smallest and the largest mean of a source.
    """
    real = (weight > 0) & (sizes > 0)
    means = torch.where(real, answers / sizes.clamp_min(1e-300), math.nan)
    below, above = (torch.where(real, means, end).aminmax(dim=1) for end in (math.inf, -math.inf))
    low, high = below.min, above.max
    mean = means.nanmedian(dim=1).values if start is None else torch.minimum(torch.maximum(start, low), high)
    slope = (weight * sizes * score.slope).sum(dim=1)
    near = 1e-4 * (weight**2 * score.square).sum(dim=1).sqrt() / slope
    for _ in range(_STEPS):
        push = (weight * score(answers - sizes * mean[:, None])).sum(dim=1)
        low, high = torch.where(push > 0, mean, low), torch.where(push < 0, mean, high)
        new = mean + push / slope
        new = torch.where((new >= low) & (new <= high), new, (low + high) / 2)
        moved, mean = (new - mean).abs(), new
        if bool((moved < near).all()):
            break
    return mean
