"""Randomness, as far as docs/proofs.md assumes it: what the finite support of Box–Muller shows on a public grid."""

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tacit.privacy import _noise as noise
from tacit.privacy._noise import NoiseKey

GRID = 2.0**-28  # of a standard deviation: no release lies on a finer one
PAIRS = 4000


def on_a_circle(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether a circle of radius sqrt(-2 log(k 2^-53)), k whole, meets the grid cell around a point (in grid steps)."""
    near = np.hypot(np.maximum(abs(x) - 0.5, 0), np.maximum(abs(y) - 0.5, 0)) * GRID
    far = np.hypot(abs(x) + 0.5, abs(y) + 0.5) * GRID
    return np.floor(2.0**53 * np.exp(-(near**2) / 2)) >= np.ceil(2.0**53 * np.exp(-(far**2) / 2))


def far_pairs(monkeypatch: pytest.MonkeyPatch) -> NDArray[np.float64]:
    """Pairs of normals on the grid (in steps), given that their radius words are below 2^20: a probability of 2^-33."""
    words = [int.from_bytes(np.random.default_rng(i).bytes(8), "big") >> 44 for i in range(PAIRS)]  # 20 bits
    angles = [int.from_bytes(np.random.default_rng(10**6 + i).bytes(8), "big") >> 11 for i in range(PAIRS)]

    class Stream:
        def update_into(self, data: memoryview, out: bytearray) -> None:
            out[: len(data)] = b"".join((word << 11).to_bytes(8, "little") for word in words + angles)

    monkeypatch.setattr(NoiseKey, "_open", lambda *_: Stream())
    return np.round(NoiseKey().normals(0, 2 * PAIRS).view(2, PAIRS).numpy() / GRID)


def test_far_normals_lie_on_no_circles_that_a_grid_resolves(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a radius of 53 bits every such pair lies on one of the circles, and a pair that was shifted by another sum
    hardly ever does: certainty. With further bits a pair meets a circle as often as any point near it.

    At a radius of 6.5 to 8.6 a cell meets a circle with a probability below 2^20 2^-28 10: some 150 pairs of 4,000.
    """
    x, y = far_pairs(monkeypatch)
    hits, chance = on_a_circle(x, y).sum(), on_a_circle(x + 1000, y + 2000).sum()
    assert chance < 400
    assert hits < 400  # before: all 4,000


def test_without_further_bits_they_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above sees what it is for."""
    monkeypatch.setattr(noise, "_SMALL", 0.0)
    assert on_a_circle(*far_pairs(monkeypatch)).all()


def test_circles_are_closer_than_a_cell_but_for_a_probability_below_1e_14() -> None:
    """The distance to the next radius is 1/(k r) where u = k 2^-53 has no further bits, and float64's own spacing of u,
    2^-53/r, where it has, down to u = 2^-106."""
    k = np.geomspace(2.0**40, 2.0**53 * (1 - 1e-12), 100_000)
    radius = np.sqrt(-2 * np.log(k * 2.0**-53))
    apart = 1 / (k * radius)
    assert apart[radius > 2.0**-13].max() < GRID / 2**11
    assert apart[radius > 2.0**-24].max() < GRID
    assert 2.0**-53 / math.sqrt(2 * 13 * math.log(2)) < GRID / 2**25  # the refined ones
    assert -math.expm1(-(2.0**-48) / 2) + 2.0**-106 < 1e-14  # P(radius < 2^-24), and what lies beyond the last circle


def test_counters_never_meet() -> None:
    """Noise, its further bits and the four purposes of uniforms read disjoint parts of one counter."""
    key = NoiseKey("counters")
    seen = [key.normals(3, 4000), *(key.uniforms(3, 4000, purpose) for purpose in range(4)), key.normals(4, 4000)]
    everything = torch.cat(seen)
    assert len(torch.unique(everything)) == len(everything)
    with pytest.raises(ValueError, match="purposes"):
        key.uniforms(1 << 61, 1)
