"""How much noise each step gets: the shape of the schedule; its scale is solved for by the budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from tacit.privacy import BoundedSum, Receipt, events, mechanisms
from tacit.privacy.events import DpEvent
from tacit.privacy.mechanisms import Released

Release = Callable[[BoundedSum, Mapping[str, float] | None], Released]


class Noise(Protocol):
    """The releases of a run, as an event, and the function that makes them."""

    def event(self, scale: float, *, rate: float, steps: int) -> DpEvent:
        """All steps of a run whose noise multiplier is `scale`."""

    def multiplier(self, scale: float, step: int, steps: int) -> float:
        """The noise multiplier of one step."""

    def releases(self, receipt: Receipt) -> Release:
        """What adds the noise, step by step."""


@dataclass(frozen=True)
class Steady:
    """The same noise at every step, independent from step to step."""

    def event(self, scale: float, *, rate: float, steps: int) -> DpEvent:
        return events.poisson(rate, events.gaussian(scale), steps)

    def multiplier(self, scale: float, step: int, steps: int) -> float:
        del step, steps
        return scale

    def releases(self, receipt: Receipt) -> Release:
        return lambda total, noise: mechanisms.gaussian(total, receipt, noise=noise)
