"""Masks for Flower's SecAgg+ from a cryptographic generator.

Flower 1.41 folds the 32 bytes of a mask's seed into 32 bits and stretches these with a Mersenne Twister
(``secaggplus_utils.pseudo_rand_gen``): trying 2^32 seeds finds a mask, and with it a share. Here the whole seed
keys AES-256 in counter mode. Both sides of the protocol must stretch alike, so this takes the place of Flower's
function in the two modules that call it, for this process; the protocol is Flower's.
"""

from __future__ import annotations

import hashlib
import math
from importlib import import_module
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

_SIDES = (
    "flwr.client.mod.secure_aggregation.secaggplus_mod",
    "flwr.server.workflow.secure_aggregation.secaggplus_workflow",
)
Integers = np.ndarray[Any, np.dtype[np.int64]]


def stretched(seed: bytes, num_range: int, dimensions_list: list[tuple[int, ...]]) -> list[Integers]:
    """Numbers below ``num_range``, a power of two, uniform without the seed; one array per shape."""
    if num_range < 2 or num_range & (num_range - 1):
        raise ValueError("Masks are made for a modulus that is a power of two.")
    sizes = [math.prod(shape) for shape in dimensions_list]
    stream = Cipher(algorithms.AES256(hashlib.sha256(b"tacit secagg mask" + seed).digest()), modes.CTR(bytes(16)))
    drawn = np.frombuffer(stream.encryptor().update(bytes(8 * sum(sizes))), dtype="<u8") & np.uint64(num_range - 1)
    parts = np.split(drawn.astype(np.int64), np.cumsum(sizes)[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, dimensions_list, strict=True)]


def install() -> None:
    """Let both sides of SecAgg+ in this process stretch their masks with ``stretched``."""
    for name in _SIDES:
        module: Any = import_module(name)
        if not hasattr(module, "pseudo_rand_gen"):
            raise ImportError("This version of Flower makes the masks of SecAgg+ in another way than tacit knows.")
        module.pseudo_rand_gen = stretched
