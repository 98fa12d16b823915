"""Rate limits: a bucket of requests for each name, which fills steadily."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator

from fastapi import Request
from starlette.exceptions import HTTPException

_AT_ONCE = 2  # checks of a whole chain: they take long, and charges are not to wait for them


class RateLimit:
    """At most ``rate`` requests a second for each name, ``burst`` of them at once.

    Names that asked longest ago are forgotten beyond ``most`` of them: a forgotten one has a full bucket again.
    """

    def __init__(self, rate: float, burst: int, *, most: int = 10_000) -> None:
        if not (rate > 0 and burst >= 1):
            raise ValueError("A rate limit is above 0 requests a second, and a burst at least 1.")
        self.rate, self.burst, self.most = rate, burst, most
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._lock = threading.Lock()

    def wait(self, name: str) -> float:
        """0 if one more request is fine now; otherwise the seconds until it is."""
        now = time.monotonic()
        with self._lock:
            left, then = self._left.pop(name, (float(self.burst), now))
            left = min(float(self.burst), left + (now - then) * self.rate)
            fine = left >= 1.0
            self._left[name] = (left - 1.0 if fine else left, now)
            while len(self._left) > self.most:
                self._left.popitem(last=False)
        return 0.0 if fine else (1.0 - left) / self.rate


def new_turns() -> threading.BoundedSemaphore:
    """As many turns as there may be checks of the whole ledger at a time."""
    return threading.BoundedSemaphore(_AT_ONCE)


def in_turn(request: Request) -> Iterator[None]:
    """A dependency of what reads the whole ledger: beyond a few at a time, 429."""
    turns: threading.BoundedSemaphore = request.app.state.turns
    if not turns.acquire(blocking=False):
        raise HTTPException(429, "The whole ledger is being checked by others; ask again.", {"Retry-After": "1"})
    try:
        yield
    finally:
        turns.release()
