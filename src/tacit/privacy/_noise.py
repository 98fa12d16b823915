"""Where private randomness comes from: a keyed stream, never torch's or numpy's generators.

A key of 256 bits from the operating system drives AES-256 in counter mode; the position (which release, how far into
it) is the counter, so noise is never drawn twice for two different releases of one key. Uniforms have 53 bits;
Box–Muller and everything after it are float64. torch's CPU generator would keep 32 bits of its seed, and one release
of a few known coordinates would give it away.

The radius of Box–Muller is sqrt(-2 log u). With u = k 2^-53 the far normals would lie on circles that are 1/(k radius)
apart: at k < 2^20 that is visible on a grid of 2^-20, and which circles can be hit reveals the sum. So a small u gets
53 further bits, from a part of the counter of its own, and circles are nowhere further apart than 2^-42 but in the
innermost 2^-13 (2^-28 down to a radius of 2^-24).
"""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from numpy.typing import NDArray
from torch import Tensor

from tacit.privacy import _kernels

_CHUNK = 1 << 17  # pairs of normals at a time: bounded memory, used again and again while it is in cache
_SMALL = 2.0**-13  # radius uniforms at or below it get further bits: one in 8,192
_BLOCK = 2  # numbers in a block of AES, which may ask for one more than it writes
_FURTHER = 1 << 63  # where in a release's counter these begin, one block per pair


class NoiseKey:
    """256 secret bits and the streams that they open. Never printed, pickled or copied."""

    def __init__(self, seed: object | None = None) -> None:
        """A key from the operating system; with ``seed`` a reproducible one, which is not private."""
        self.seeded = seed is not None
        self._key = hashlib.sha256(f"tacit seed {seed!r}".encode()).digest() if self.seeded else secrets.token_bytes(32)
        self._early: tuple[int, Tensor] | None = None

    @classmethod
    def from_secret(cls, secret: str, *, seeded: bool) -> NoiseKey:
        """The key of a ``secret``, to go on with a stream that was saved."""
        return cls._of(bytes.fromhex(secret), seeded)

    @classmethod
    def _of(cls, secret: bytes, seeded: bool) -> NoiseKey:
        if len(secret) != 32:
            raise ValueError("This is no noise key: it does not have 256 bits.")
        key = cls.__new__(cls)
        key._key, key.seeded, key._early = secret, seeded, None
        return key

    def secret(self) -> str:
        """The key itself, for a private file. Anyone who reads it can subtract the noise."""
        return self._key.hex()

    def derived(self, what: str, number: int) -> NoiseKey:
        """A key of its own: HMAC-SHA-256, so that the stream of one reveals nothing about another."""
        return NoiseKey._of(hmac.digest(self._key, f"tacit {what} {number}".encode(), "sha256"), self.seeded)

    def normals(self, release: int, count: int) -> Tensor:
        """``count`` independent standard normals (float64, CPU) that belong to this release alone."""
        early, self._early = self._early, None  # handed out once: whoever has them may change them in place
        if early is not None and early[0] == release and len(early[1]) == count:
            return early[1]
        out = torch.empty(count + count % 2 + _BLOCK, dtype=torch.float64)
        for start, size, piece in self._pieces(release, count):
            piece(out[2 * start : 2 * (start + size) + _BLOCK])
        return out[:count]

    def prepare(self, release: int, count: int) -> None:
        """Draw ``normals(release, count)`` now, for the next call, which has the same bits with or without this."""
        self._early = release, self.normals(release, count)

    def normals_in_parts(self, release: int, sizes: Sequence[int]) -> Iterator[Tensor]:
        """Bit for bit ``normals(release, sum(sizes))``, one part after the other: memory holds little more than one."""
        pieces, rest = self._pieces(release, sum(sizes)), torch.empty(0, dtype=torch.float64)
        for length in sizes:
            parts = [rest]
            while sum(map(len, parts)) < length:
                _, size, piece = next(pieces)
                parts.append(piece(torch.empty(2 * size + _BLOCK, dtype=torch.float64)))
            joined = torch.cat(parts)
            rest = joined[length:].clone()
            yield joined[:length]

    def _pieces(self, release: int, count: int) -> Iterator[tuple[int, int, Callable[[Tensor], Tensor]]]:
        """Some pairs of normals after the other: the first, how many, and what writes them, before the next is asked
        for: into memory for them and a block of AES more, of which nothing is kept.
        """
        pairs = (count + 1) // 2
        stream = self._open(release)
        for start in range(0, pairs, _CHUNK):
            yield start, min(_CHUNK, pairs - start), partial(self._write, stream, release, start)

    def _write(self, stream: CipherContext, release: int, start: int, out: Tensor) -> Tensor:
        uniforms = _uniforms(stream, out)
        size = len(uniforms) // 2
        self._refine(uniforms[:size], release, start)
        return _box_muller(uniforms)

    def uniforms(self, release: int, count: int, purpose: int = 0) -> Tensor:
        """``count`` independent uniforms in (0, 1] (float64, CPU); no normal and no other purpose shares their bits."""
        if not 0 <= purpose < 4 or release >= 1 << 61:
            raise ValueError("There are four purposes, 0 to 3, and releases up to 2^61.")
        stream = self._open(release, (1 << 63) + (purpose << 61))
        return _uniforms(stream, torch.empty(count + _BLOCK, dtype=torch.float64))

    def words(self, count: int) -> NDArray[np.uint64]:
        """The 53 bits each that ``uniforms(0, count)`` are made of: (word + 1) 2^-53."""
        drawn = np.empty(count + _BLOCK, dtype="<u8")
        self._open(0, 1 << 63).update_into(bytes(8 * count), drawn.view("B").data)
        return drawn[:count] >> np.uint64(11)

    def _refine(self, uniforms: Tensor, release: int, start: int) -> None:
        """Turn each small (w + 1) 2^-53 into (w + v) 2^-53, where v is a fresh uniform in (0, 1]; in place."""
        values = uniforms.numpy()
        small = (values <= _SMALL).nonzero()[0].tolist()
        if small:
            top = release.to_bytes(8, "big")
            blocks = b"".join(top + (_FURTHER + start + pair).to_bytes(8, "big") for pair in small)
            drawn = Cipher(algorithms.AES(self._key), modes.ECB()).encryptor().update(blocks)
            for place, pair in enumerate(small):
                v = ((int.from_bytes(drawn[16 * place : 16 * place + 8], "little") >> 11) + 1) * 2.0**-53
                values[pair] -= (1 - v) * 2.0**-53

    def _open(self, release: int, lane: int = 0) -> CipherContext:
        if not 0 <= release < 1 << 63:
            raise ValueError("A release has a number from 0 up.")
        counter = (lane + release).to_bytes(8, "big") + bytes(8)  # the low half counts AES blocks within the release
        return Cipher(algorithms.AES(self._key), modes.CTR(counter)).encryptor()

    def __repr__(self) -> str:
        return "NoiseKey(seeded: not private)" if self.seeded else "NoiseKey(secret)"

    def __reduce__(self) -> str:
        raise TypeError("A noise key stays in the process that made it: anyone who has it can subtract the noise.")


def _box_muller(uniforms: Tensor) -> Tensor:
    """Pairs of normals, radius times cosine and then radius times sine, in place of radius and angle uniforms."""
    size = len(uniforms) // 2
    radius, angle = uniforms[:size].log_().mul_(-2).sqrt_(), uniforms[size:].mul_(2 * math.pi)
    cosines = angle.cos().mul_(radius)
    angle.sin_().mul_(radius)
    radius.copy_(cosines)
    return uniforms


def _uniforms(stream: CipherContext, out: Tensor) -> Tensor:
    """The next uniforms in (0, 1], 53 bits each, in all of this memory (float64) but its last ``_BLOCK`` numbers."""
    count = len(out) - _BLOCK
    zeros = _zeros()[: 8 * count] if count <= 2 * _CHUNK else bytes(8 * count)
    stream.update_into(zeros, out.numpy().view("B").data)
    return _kernels.to_uniforms(out[:count])


@cache
def _zeros() -> memoryview:
    """What a counter stream is added to: nothing secret, so it is kept from one release to the next."""
    return memoryview(bytes(16 * _CHUNK))
