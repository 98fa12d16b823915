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
from functools import partial

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from torch import Tensor

_CHUNK = 1 << 17  # pairs of normals at a time: bounded memory, used again and again while it is in cache
_SMALL = 2.0**-13  # radius uniforms at or below it get further bits: one in 8,192
_FURTHER = 1 << 63  # where in a release's counter these begin, one block per pair


class NoiseKey:
    """256 secret bits and the streams that they open. Never printed, pickled or copied."""

    def __init__(self, seed: object | None = None) -> None:
        """A key from the operating system; with ``seed`` a reproducible one, which is not private."""
        self.seeded = seed is not None
        self._key = hashlib.sha256(f"tacit seed {seed!r}".encode()).digest() if self.seeded else secrets.token_bytes(32)

    @classmethod
    def from_secret(cls, secret: str, *, seeded: bool) -> NoiseKey:
        """The key of a ``secret``, to go on with a stream that was saved."""
        key = cls()
        key._key, key.seeded = bytes.fromhex(secret), seeded
        if len(key._key) != 32:
            raise ValueError("This is no noise key: it does not have 256 bits.")
        return key

    def secret(self) -> str:
        """The key itself, for a private file. Anyone who reads it can subtract the noise."""
        return self._key.hex()

    def derived(self, what: str, number: int) -> NoiseKey:
        """A key of its own: HMAC-SHA-256, so that the stream of one reveals nothing about another."""
        derived = hmac.new(self._key, f"tacit {what} {number}".encode(), hashlib.sha256).hexdigest()
        return NoiseKey.from_secret(derived, seeded=self.seeded)

    def normals(self, release: int, count: int) -> Tensor:
        """``count`` independent standard normals (float64, CPU) that belong to this release alone."""
        out = torch.empty(count + count % 2, dtype=torch.float64)
        for start, size, piece in self._pieces(release, count):
            piece(out[2 * start : 2 * (start + size)])
        return out[:count]

    def normals_in_parts(self, release: int, sizes: Sequence[int]) -> Iterator[Tensor]:
        """Bit for bit ``normals(release, sum(sizes))``, one part after the other: memory holds little more than one."""
        pieces, rest = self._pieces(release, sum(sizes)), torch.empty(0, dtype=torch.float64)
        for length in sizes:
            parts = [rest]
            while sum(map(len, parts)) < length:
                _, size, piece = next(pieces)
                parts.append(piece(torch.empty(2 * size, dtype=torch.float64)))
            joined = torch.cat(parts)
            rest = joined[length:].clone()
            yield joined[:length]

    def _pieces(self, release: int, count: int) -> Iterator[tuple[int, int, Callable[[Tensor], Tensor]]]:
        """Some pairs of normals after the other: the first, how many, and what writes them, before the next is asked
        for.
        """
        pairs = (count + 1) // 2
        stream, draw = self._open(release), _Uniforms(2 * min(pairs, _CHUNK))
        for start in range(0, pairs, _CHUNK):
            size = min(_CHUNK, pairs - start)
            uniforms = draw(stream, 2 * size)
            self._refine(uniforms[:size], release, start)
            yield start, size, partial(_box_muller, uniforms[:size], uniforms[size:])

    def uniforms(self, release: int, count: int, purpose: int = 0) -> Tensor:
        """``count`` independent uniforms in (0, 1] (float64, CPU); no normal and no other purpose shares their bits."""
        if not 0 <= purpose < 4 or release >= 1 << 61:
            raise ValueError("There are four purposes, 0 to 3, and releases up to 2^61.")
        return _Uniforms(count)(self._open(release, (1 << 63) + (purpose << 61)), count)

    def _refine(self, uniforms: Tensor, release: int, start: int) -> None:
        """Turn each small (w + 1) 2^-53 into (w + v) 2^-53, where v is a fresh uniform in (0, 1]; in place."""
        small = torch.nonzero(uniforms <= _SMALL).flatten()
        if len(small):
            top = release.to_bytes(8, "big")
            blocks = b"".join(top + (_FURTHER + start + pair).to_bytes(8, "big") for pair in small.tolist())
            drawn = Cipher(algorithms.AES(self._key), modes.ECB()).encryptor().update(blocks)
            words = torch.frombuffer(bytearray(drawn), dtype=torch.int64)[::2].bitwise_right_shift(11)
            v = words.bitwise_and_((1 << 53) - 1).add_(1).double().mul_(2.0**-53)
            uniforms[small] -= (1 - v).mul_(2.0**-53)

    def _open(self, release: int, lane: int = 0) -> CipherContext:
        if not 0 <= release < 1 << 63:
            raise ValueError("A release has a number from 0 up.")
        counter = (lane + release).to_bytes(8, "big") + bytes(8)  # the low half counts AES blocks within the release
        return Cipher(algorithms.AES(self._key), modes.CTR(counter)).encryptor()

    def __repr__(self) -> str:
        return "NoiseKey(seeded: not private)" if self.seeded else "NoiseKey(secret)"

    def __reduce__(self) -> str:
        raise TypeError("A noise key stays in the process that made it: anyone who has it can subtract the noise.")


def _box_muller(radius: Tensor, angle: Tensor, out: Tensor) -> Tensor:
    """Pairs of normals from pairs of uniforms, which are overwritten."""
    radius, angle, size = radius.log_().mul_(-2).sqrt_(), angle.mul_(2 * math.pi), len(radius)
    torch.cos(angle, out=out[:size]).mul_(radius)
    torch.sin(angle, out=out[size:]).mul_(radius)
    return out


class _Uniforms:
    """Memory for up to ``most`` uniforms in (0, 1], 53 bits each; every call writes over the one before."""

    def __init__(self, most: int) -> None:
        self._zeros = bytes(8 * most)
        self._stream = bytearray(8 * most + 16)  # AES may ask for a block more than it writes
        self._words = torch.frombuffer(self._stream, dtype=torch.int64)
        self._values = torch.empty(most, dtype=torch.float64)

    def __call__(self, stream: CipherContext, count: int) -> Tensor:
        stream.update_into(memoryview(self._zeros)[: 8 * count], self._stream)
        words = self._words[:count].bitwise_right_shift_(11).bitwise_and_((1 << 53) - 1).add_(1)
        return self._values[:count].copy_(words).mul_(2.0**-53)
