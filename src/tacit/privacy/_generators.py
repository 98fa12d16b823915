"""Global random generators, for what a model draws itself while a private sum is computed. Nothing is drawn here."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from tacit._locks import ForkSafeLock
from tacit.privacy._noise import NoiseKey
from tacit.privacy._receipts import Receipt, upcoming

_WORDS, _FIRST = 624, 24  # of the Mersenne twister in torch's CPU state, and the byte where they begin
_turn = ForkSafeLock()


@contextmanager
def randomness(receipt: Receipt) -> Iterator[None]:
    """For the computation of the next release's sum: global generators that go by the receipt's key, put back after.

    A model in training mode draws for itself (dropout, stochastic depth), by position in the batch. Where every unit
    behind a missing unit gets their neighbour's mask, a sum moves by far more than one contribution, unless the masks
    are secret: then they are as likely for every unit, and one unit more or less changes a sum by what it adds.

    Formal guarantee: within, torch's generators (on the CPU all 19,968 bits of the state, since a seed keeps 32),
    numpy's and Python's are secret and independent of every draw, noise and other release. The same release computed
    again, after a crash, draws the same. The generators are the process's, so threads that compute within take turns.
    Not covered: generators that a model holds itself, and a thread of one's own that draws from the global ones.

    Args:
        receipt: A live receipt; its next release is the one computed within.
    """
    _, number, key = upcoming(receipt)
    with _by(key.derived("model", number)):
        yield


@contextmanager
def fresh_randomness() -> Iterator[None]:
    """The same for what is computed of private rows without a receipt, and only once: scores, outputs of a model.

    Torch's generator starts from the same number in every process, so what a model draws by position is known to all.

    Formal guarantee: that of ``randomness``, but the generators go by a key that is not kept: nothing can be replayed.
    """
    with _by(NoiseKey()):
        yield


@contextmanager
def reading_randomness(secret: str | None = None) -> Iterator[None]:
    """For reading rows: what transforms of other libraries draw from the global generators, wherever rows are read.

    Formal guarantee: that of ``randomness``. A portion's generators go by a secret of its own, so its rows are the same
    in this process or in another, read in time or ahead of it, and again when a step is replayed.

    Args:
        secret: From ``reading_key``; None: a fresh key that is not kept, for rows that are read only once.
    """
    with _by(NoiseKey() if secret is None else NoiseKey.from_secret(secret, seeded=False)):
        yield


@contextmanager
def restored_generators() -> Iterator[None]:
    """For code of others that releases on receipts of its own, in whatever threads: global generators are put back.

    Nothing is secret within, and no thread waits but for those that compute by a key when this begins and ends: their
    state would be kept, and put back for everybody.
    """
    kept = ExitStack()
    with _turn.held():
        kept.enter_context(_put_back())
    try:
        yield
    finally:
        with _turn.held():
            kept.close()


@contextmanager
def _by(key: NoiseKey) -> Iterator[None]:
    with _turn.held(), _states_of(key):  # two at once would put a secret state back for everybody
        yield


@contextmanager
def _states_of(key: NoiseKey) -> Iterator[None]:
    drawn = key.words(_WORDS + 16)
    words = drawn.astype(np.int64) & 0xFFFFFFFF
    with _put_back() as seed:
        seed(int(drawn[-1]))
        state = torch.get_rng_state()
        state[_FIRST : _FIRST + 8 * _WORDS].numpy().view(np.int64)[:] = words[:_WORDS]
        torch.set_rng_state(state)
        np.random.seed(words[_WORDS:])
        random.seed(":".join(map(str, words[_WORDS:].tolist())))
        yield


@contextmanager
def _put_back() -> Iterator[Callable[[int], Any]]:
    """All generators as they were, after; what seeds torch's, within."""
    numpy_state, python_state = np.random.get_state(), random.getstate()
    with _torch_put_back() as seed:
        try:
            yield seed
        finally:
            np.random.set_state(numpy_state)
            random.setstate(python_state)


@contextmanager
def _torch_put_back() -> Iterator[Callable[[int], Any]]:
    """Torch's generators as they were, after; what seeds all of them, within."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    apple = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
    accelerated = bool(devices) or apple is not None or torch.accelerator.is_available()
    if not accelerated:  # seeding every device, the first time, notes a stack trace for each that is not there: 2 ms
        state = torch.get_rng_state()
        try:
            yield torch.default_generator.manual_seed
        finally:
            torch.set_rng_state(state)
        return
    with torch.random.fork_rng(devices):
        try:
            yield torch.manual_seed
        finally:
            if apple is not None:
                torch.mps.set_rng_state(apple)
