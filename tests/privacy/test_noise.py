"""The keyed stream: its layout bit for bit, its distribution, and that nothing else has a say in it.

Statistical tests run on fresh keys; each has a false-alarm probability below 1e-7.
"""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import stats

from tacit.privacy import _noise as noise
from tacit.privacy._noise import NoiseKey

ALARM = 1e-7


def keystream(key: bytes, top: int, blocks: int) -> bytes:
    """AES in counter mode, spelled out: encrypt (top, 0), (top, 1), ... one block each."""
    cipher = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    return b"".join(cipher.update(top.to_bytes(8, "big") + i.to_bytes(8, "big")) for i in range(blocks))


def expected_uniforms(stream: bytes) -> list[float]:
    words = [int.from_bytes(stream[i : i + 8], "little") for i in range(0, len(stream), 8)]
    return [((word >> 11) + 1) / 2**53 for word in words]


# Layout


@pytest.mark.parametrize("release", [0, 1, 12_345, 2**63 - 1])
def test_normals_are_box_muller_of_the_counter_stream(release: int) -> None:
    key = NoiseKey("layout")
    u = expected_uniforms(keystream(key._key, release, 50))
    radius = [math.sqrt(-2 * math.log(x)) for x in u[:50]]
    expected = [f(2 * math.pi * x) * r for f in (math.cos, math.sin) for r, x in zip(radius, u[50:], strict=True)]
    np.testing.assert_allclose(key.normals(release, 100).numpy(), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("release", [0, 7])
def test_uniforms_have_a_lane_of_their_own(release: int) -> None:
    key = NoiseKey("layout")
    expected = expected_uniforms(keystream(key._key, 2**63 + release, 10))
    assert key.uniforms(release, 19).tolist() == expected[:19]  # exactly
    assert set(expected).isdisjoint(expected_uniforms(keystream(key._key, release, 10)))


def test_uniforms_lie_in_the_half_open_interval_with_53_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        def update_into(self, data: memoryview, out: bytearray) -> None:
            out[: len(data)] = (bytes(8) + b"\xff" * 8 + (1 << 11).to_bytes(8, "little") + b"\xff\x07" + bytes(6))[
                : len(data)
            ]

    monkeypatch.setattr(NoiseKey, "_open", lambda *_: Stream())
    key = NoiseKey()
    assert key.uniforms(0, 4).tolist() == [2.0**-53, 1.0, 2.0**-52, 2.0**-53]
    assert torch.isfinite(key.normals(0, 4)).all()
    assert key.normals(0, 4).abs().max() <= math.sqrt(2 * 106 * math.log(2)) + 1e-12


def test_a_small_radius_has_further_bits_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """(w + v) / 2^53 with v from block 2^63 + pair of the same release, for w + 1 up to 2^40 and for no larger one."""
    firsts = [0, 1, 12_345, 2**40 - 1, 2**40, 2**52]  # the words w of six pairs
    angles = [2**51 + 99] * 6

    class Stream:
        def update_into(self, data: memoryview, out: bytearray) -> None:
            out[: len(data)] = b"".join((word << 11).to_bytes(8, "little") for word in firsts + angles)

    key = NoiseKey("further bits")
    monkeypatch.setattr(NoiseKey, "_open", lambda *_: Stream())
    cipher = Cipher(algorithms.AES(key._key), modes.ECB()).encryptor()
    expected = []
    for pair, word in enumerate(firsts):
        block = cipher.update((9).to_bytes(8, "big") + (2**63 + pair).to_bytes(8, "big"))
        v = (int.from_bytes(block[:8], "little") >> 11) + 1
        exact = word * 2**53 + v if word < 2**40 else (word + 1) * 2**53  # of 2^-106
        expected.append(math.sqrt(2 * (106 * math.log(2) - math.log(exact))))
    found = key.normals(9, 12).view(2, 6)
    np.testing.assert_allclose(torch.hypot(found[0], found[1]).numpy(), expected, rtol=1e-13)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 999, 1000])
def test_any_count(count: int) -> None:
    key = NoiseKey()
    assert key.normals(3, count).shape == (count,)
    assert key.uniforms(3, count).shape == (count,)
    assert key.normals(3, count).dtype == key.uniforms(3, count).dtype == torch.float64


def test_chunks_follow_each_other_in_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    key = NoiseKey("chunks")
    u = expected_uniforms(keystream(key._key, 5, 20))
    monkeypatch.setattr(noise, "_CHUNK", 8)
    expected: list[float] = []
    for start, size in [(0, 8), (8, 8), (16, 4)]:
        part = u[2 * start : 2 * (start + size)]
        pairs = list(zip(part[:size], part[size:], strict=True))
        expected += [math.sqrt(-2 * math.log(a)) * f(2 * math.pi * b) for f in (math.cos, math.sin) for a, b in pairs]
    np.testing.assert_allclose(key.normals(5, 39).numpy(), expected[:39], rtol=1e-12, atol=1e-14)


def test_the_real_chunk_boundary_neither_repeats_nor_skips() -> None:
    count = 2 * noise._CHUNK + 1001
    values = NoiseKey().normals(0, count)
    assert values.shape == (count,)
    assert len(torch.unique(values)) >= count - 3  # of 53 bits: four collisions have probability below 1e-20
    assert stats.kstest(values[-1001:].numpy(), "norm").pvalue > ALARM


# Reproducibility


def test_seeded_keys_reproduce_bit_for_bit_and_say_so() -> None:
    a, b = NoiseKey((7, "clinic", 1)), NoiseKey((7, "clinic", 1))
    assert torch.equal(a.normals(4, 1001), b.normals(4, 1001))
    assert torch.equal(a.normals(4, 1001), a.normals(4, 1001))
    assert a.seeded
    assert "not private" in repr(a)
    assert not torch.equal(a.normals(4, 1001), NoiseKey((7, "clinic", 2)).normals(4, 1001))
    assert NoiseKey(0).seeded


def test_secret_keys_differ() -> None:
    assert not NoiseKey().seeded
    assert not torch.equal(NoiseKey().normals(0, 10), NoiseKey().normals(0, 10))


def test_releases_share_no_noise() -> None:
    key = NoiseKey()
    values = torch.cat([key.normals(release, 2000) for release in (*range(20), 2**32, 2**62)])
    assert len(torch.unique(values)) >= len(values) - 3


@pytest.mark.parametrize("release", [-1, 2**63])
def test_releases_are_numbered(release: int) -> None:
    with pytest.raises(ValueError, match="from 0 up"):
        NoiseKey().normals(release, 1)


def test_global_generators_neither_matter_nor_move() -> None:
    key = NoiseKey("global")
    torch.manual_seed(1)
    np.random.seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    first = key.normals(0, 100)
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])
    torch.manual_seed(2)
    np.random.seed(2)
    assert torch.equal(first, key.normals(0, 100))
    secret = []
    for _ in range(2):
        torch.manual_seed(3)
        secret.append(NoiseKey().normals(0, 10))
    assert not torch.equal(*secret)


# Secrecy


def test_keys_are_never_printed_pickled_or_copied() -> None:
    key = NoiseKey()
    assert key._key.hex() not in repr(key) + str(key)
    assert repr(key) == "NoiseKey(secret)"
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="stays in the process"):
            attempt(key)


# Distribution


def test_normals_are_normal() -> None:
    x = NoiseKey().normals(0, 400_001).numpy()
    assert stats.kstest(x, "norm").pvalue > ALARM
    n = len(x)
    for power, mean, variance in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)]:  # CLT; the tails of x^4 are why 8
        assert abs((x**power).mean() - mean) < 8 * math.sqrt(variance / n)
    for level in (2.0, 3.0, 4.0):
        assert stats.binomtest(int((np.abs(x) > level).sum()), n, 2 * stats.norm.sf(level)).pvalue > ALARM


def test_uniforms_are_uniform_in_every_bit() -> None:
    u = NoiseKey().uniforms(0, 200_000)
    assert stats.kstest(u.numpy(), "uniform").pvalue > ALARM
    words = (u * 2.0**53).to(torch.int64) - 1
    for bit in range(53):
        ones = int(((words >> bit) & 1).sum())
        assert stats.binomtest(ones, len(u)).pvalue > ALARM / 53


def test_the_two_halves_of_a_pair_and_neighbouring_releases_are_independent() -> None:
    key = NoiseKey()
    a, b = key.normals(0, 200_000).numpy(), key.normals(1, 200_000).numpy()
    pairs = [(a, b), (a[:100_000], a[100_000:]), (a[:-1], a[1:]), (a**2, b**2), (a[:100_000] ** 2, a[100_000:] ** 2)]
    for x, y in pairs:  # the second is the cosines against the sines of the same angles
        assert stats.pearsonr(x, y).pvalue > ALARM
    assert stats.kstest((a + b) / math.sqrt(2), "norm").pvalue > ALARM
