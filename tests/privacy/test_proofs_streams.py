"""The stream theorem of docs/proofs.md on random adaptive paths: who takes part, with what, and when to reset.

In rotated coordinates step t is a Gaussian release of mu_t = |(M D)_t| / (s B sigma), and the mu_t^2 of a path add up
to at most f^2/sigma^2. Both halves are checked: the likelihood ratio of a path is that of these releases, and the sum.
"""

import math

import numpy as np
import pytest
import torch
from scipy.linalg import toeplitz
from scipy.stats import multivariate_normal

from tacit.privacy import Budget, Ledger, correlated, events
from tacit.privacy.correlated import Strategy
from tacit.privacy.mechanisms import GaussianStream

STRATEGIES = [
    correlated.independent(12),
    correlated.square_root(12),
    correlated.banded(12, 4),
    correlated.buffered(12, 3),
]


def matrix(strategy: Strategy, steps: int, starts: list[int]) -> np.ndarray:
    """M for so many steps, cut into blocks that begin at the given steps."""
    column = strategy.coefficients()
    whole = np.tril(toeplitz(np.pad(column, (0, max(0, steps - len(column))))[:steps]))
    for start in starts:
        whole[start:, :start] = 0.0
    return whole


def path(strategy: Strategy, k: int, b: int, blocks: int, factor: int, random: np.random.Generator) -> tuple:
    """What a unit changes (steps x 3, in units of the clip), and where blocks begin. A coin decides, which stands for
    any rule that looks at earlier releases."""
    steps = strategy.horizon * blocks
    starts = [0] + [t for t in range(1, steps) if t % strategy.horizon == 0 or random.uniform() < 0.1]
    difference, times, last = np.zeros((steps, 3)), 0, -b
    same = random.normal(size=3)
    for t in range(steps):
        if times < k and t - last >= b and random.uniform() < 0.6:
            way = same if random.uniform() < 0.7 else random.normal(size=3)
            difference[t] = factor * random.choice([1.0, random.uniform()]) * way / np.linalg.norm(way)
            times, last = times + 1, t
    return difference, starts


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
@pytest.mark.parametrize(("k", "b", "blocks"), [(1, 1, 1), (1, 1, 3), (3, 1, 1), (3, 4, 1), (4, 2, 2)])
@pytest.mark.parametrize("factor", [1, 2])
def test_the_mu_squared_of_every_path_add_up_to_no_more_than_was_charged(
    strategy: Strategy, k: int, b: int, blocks: int, factor: int
) -> None:
    random = np.random.default_rng(k * 100 + b * 10 + blocks)
    s, most = strategy.sensitivity(k, b, blocks), 0.0
    for _ in range(300):
        difference, starts = path(strategy, k, b, blocks, factor, random)
        mus = np.linalg.norm(matrix(strategy, len(difference), starts) @ difference, axis=1) / s  # at sigma = 1
        most = max(most, float(mus @ mus))
        assert mus @ mus <= factor**2 * (1 + 1e-12)
    worst = np.zeros((strategy.horizon * blocks, 3))
    if blocks == 1:  # attained: all contributions alike, as early and as near as they may be
        for place in range(0, min(k * b, strategy.horizon), b):
            worst[place, 0] = factor
        mus = np.linalg.norm(matrix(strategy, strategy.horizon, []) @ worst, axis=1) / s
        assert mus @ mus == pytest.approx(factor**2, rel=1e-9)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
def test_the_loss_of_a_path_is_that_of_gaussian_releases_in_rotated_coordinates(strategy: Strategy) -> None:
    """An adaptive stream of one number a step, in two worlds: the joint density of its noise against the sum of the
    losses mu_t xi_t + mu_t^2/2 of the rotated steps."""
    random, n, sigma = np.random.default_rng(7), 12, 1.3
    m = matrix(strategy, n, [])
    inverse = np.linalg.inv(m)
    scale = sigma * strategy.sensitivity(3, 1)

    def sums(past: list[float], t: int, world: int) -> float:
        """What both worlds would send next: it depends on all that was released."""
        base = math.sin(sum((i + 1) * y for i, y in enumerate(past)))
        takes = sum(math.cos(5 * y) > 0 for y in past) % 2 == 0 and t < 6
        return base + (math.tanh(sum(past)) if takes and world else 0.0)

    released: list[float] = []
    noise = scale * inverse @ random.normal(size=n)
    for t in range(n):
        released.append(sums(released, t, 1) + noise[t])
    means = [np.array([sums(released[:t], t, world) for t in range(n)]) for world in (1, 0)]
    covariance = scale**2 * inverse @ inverse.T
    y = np.array(released)
    direct = np.subtract(*(multivariate_normal.logpdf(y, mean, covariance) for mean in means))
    mu = m @ (means[0] - means[1]) / scale
    xi = m @ (y - means[0]) / scale
    assert direct == pytest.approx(float(mu @ xi + mu @ mu / 2), rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("strategy", ["independent", "full", "banded:4", "buffered:3"])
def test_the_stream_adds_the_noise_that_the_theorem_speaks_of(strategy: str) -> None:
    """s sigma B M^-1 w, with clips and splits that change from step to step, up to the rounding to a grid."""
    ledger = Ledger("sqlite://")
    ledger.subject("s", Budget(50.0, 1e-5), neighbours="zero-out")
    event = events.stream(2.0, 8, strategy=strategy, contributions=2, separation=3)
    receipt = ledger.charge("s", event, stage="test", seed=5)
    assert receipt._key is not None
    drawn = torch.stack([receipt._key.normals(t, 5) for t in range(8)]).numpy()
    stream = GaussianStream(receipt)
    inverse = np.linalg.inv(matrix(stream.strategy, 8, []))
    clips = [1.0, 0.5, 2.0, 2.0, 0.1, 1.0, 3.0, 1.0]
    for t, clip in enumerate(clips):
        total = _Sum({"a": torch.zeros(4, dtype=torch.float64), "n": torch.zeros(1, dtype=torch.float64)}, clip)
        found = stream.release(total, noise={"a": 2.5, "n": 10.0 / 3})
        expected = stream.sensitivity * (inverse @ drawn)[t]
        np.testing.assert_allclose(found["a"].numpy(), 2.5 * clip * expected[:4], rtol=2e-4, atol=1e-4 * clip)
        np.testing.assert_allclose(found["n"].numpy(), 10 / 3 * 0.5 * expected[4:], rtol=2e-4, atol=1e-4)


class _Sum:
    def __init__(self, sums: dict[str, torch.Tensor], clip: float) -> None:
        self.sum, self.bounds, self.blocks = sums, {"a": clip, "n": 0.5}, {"a": ("a",), "n": ("n",)}
