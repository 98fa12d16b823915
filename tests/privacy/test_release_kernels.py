"""The compiled passes of a release have the bits of the lines of torch that they stand for, at every odd number."""

import math
import struct

import numpy as np
import pytest
import torch
from torch import Tensor

from tacit.privacy import _grids as grids
from tacit.privacy import _kernels as kernels
from tacit.privacy._grids import Grid
from tacit.privacy._noise import NoiseKey

compiled = pytest.mark.skipif(kernels._library() is None, reason="no C compiler")
ODD = [0.0, -0.0, 0.5, -0.5, 1.5, 2.5, -2.5, 0.49999999999999994, math.inf, -math.inf, math.nan, 5e-324, -5e-324]
ODD += [2.0**52 + 0.5, 2.0**53, -(2.0**53), 1e300, -1e300, 1e-300, math.nextafter(0.5, 1), math.nextafter(-0.5, -1)]


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_library", lambda: None)


def bits(values: Tensor) -> list[bytes]:
    return [struct.pack("<d", value) for value in values.flatten().tolist()]


@compiled
@pytest.mark.parametrize("step", [1.0, 2.0**-30, 2.0**40])
def test_sum_and_noise_on_the_grid_have_torchs_bits(step: float) -> None:
    grid = Grid(step, 37.123 * step)
    generator = torch.Generator().manual_seed(0)
    values = torch.cat([torch.tensor(ODD), torch.randn(40_000 - len(ODD), generator=generator) * 50]).double() * step
    noise = torch.randn(40_000, dtype=torch.float64, generator=generator)
    noise[: len(ODD)], noise[100:120] = 0.0, -0.0
    noise[200 : 200 + len(ODD)] = torch.tensor([x if math.isfinite(x) and abs(x) < 1e9 else 0.0 for x in ODD])
    values[200:400] = 0.0
    found = kernels.grid_add(values, noise, grid.std / grid.step, grid.step)
    assert found is not None
    assert bits(found) == bits(grids.in_torch(values, noise.clone(), grid))
    assert bits(found) == bits(grids.add(values, noise.clone(), grid))
    assert not [x for x in found.tolist() if x == 0 and math.copysign(1, x) < 0]  # zero has one sign


@compiled
def test_what_does_not_suit_is_left_to_torch() -> None:
    values, noise = torch.randn(6, 4).double(), torch.randn(24).double()
    assert kernels.grid_add(values.float(), noise, 1.0, 1.0) is None
    assert kernels.grid_add(values.mT, noise, 1.0, 1.0) is None
    assert kernels.grid_add(values, noise[:-1], 1.0, 1.0) is None
    grid = Grid(2.0**-20, 3.0)
    for odd in (values.mT, values.float(), values[:, ::2], values[:0]):
        fresh = noise[: odd.numel()].view(odd.shape)
        assert bits(grids.add(odd, fresh.clone(), grid)) == bits(grids.in_torch(odd, fresh.clone(), grid))


WORDS = [0, 1, (1 << 11) - 1, 1 << 11, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 0x0123456789ABCDEF, 1 << 52, 1 << 53]


def test_words_become_the_uniforms_of_53_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [math.ldexp((word >> 11) + 1, -53) for word in WORDS]
    for _ in range(2):  # compiled, then by torch
        memory = torch.from_numpy(np.array(WORDS, dtype="<u8").view("<f8"))
        assert kernels.to_uniforms(memory).tolist() == expected
        monkeypatch.setattr(kernels, "_library", lambda: None)


def draws(key: NoiseKey) -> list[Tensor]:
    parts = key.normals_in_parts(5, [3, 0, 200_001, 100_000])
    return [key.normals(1, 300_001), key.normals(2, 7), key.uniforms(3, 100_001, 2), torch.cat(list(parts))]


def test_noise_is_the_same_without_kernels(request: pytest.FixtureRequest) -> None:
    with_kernels = draws(NoiseKey("twin"))
    request.getfixturevalue("without_kernels")
    for mine, other in zip(with_kernels, draws(NoiseKey("twin")), strict=True):
        assert torch.equal(mine, other)
    assert torch.equal(with_kernels[3], NoiseKey("twin").normals(5, 300_004))


def test_words_are_those_of_the_uniforms() -> None:
    key = NoiseKey("words")
    assert ((key.words(641).astype(float) + 1) * 2.0**-53).tolist() == key.uniforms(0, 641).tolist()
