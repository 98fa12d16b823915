"""Random draws that belong to one image: its own generator, whatever else is in the batch."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

import torch
from torch import Tensor


class Dice:
    """One seeded generator per image. The global generator is never read, and drawing is done on the CPU.

    The draws of the image at position i depend on the seed, the name of the shift and i, and on nothing else: neither
    on the severity, so that severities of one seed differ in strength alone, nor on the other images of the batch.
    """

    def __init__(self, seed: int, name: str, images: Tensor) -> None:
        self._device = images.device
        self._generators = [generator(f"{seed} {name} {row}") for row in range(len(images))]

    def normal(self, *shape: int) -> Tensor:
        """Standard normal draws, N x shape."""
        return self._stack(lambda own: torch.randn(shape, generator=own, dtype=torch.float32, device="cpu"))

    def uniform(self, *shape: int) -> Tensor:
        """Uniform draws from [0, 1), N x shape."""
        return self._stack(lambda own: torch.rand(shape, generator=own, dtype=torch.float32, device="cpu"))

    def poisson(self, rates: Tensor) -> Tensor:
        """One Poisson count for every entry of N x ... rates."""
        pairs = zip(rates.cpu(), self._generators, strict=True)
        return torch.stack([torch.poisson(rate, generator=own) for rate, own in pairs]).to(self._device)

    def _stack(self, draw: Callable[[torch.Generator], Tensor]) -> Tensor:
        return torch.stack([draw(own) for own in self._generators]).to(self._device)


def generator(text: str) -> torch.Generator:
    """A fresh generator whose seed is a digest of the text."""
    digest = blake2b(text.encode(), digest_size=4).digest()  # torch's CPU generator keeps 32 bits of a seed
    return torch.Generator().manual_seed(int.from_bytes(digest, "big"))
