"""What only the curator may see: the events that a function given as `curator=` receives.

The curator runs tacit beside the private data. Every stage calls the same function with one event:

    def watch(event: CuratorEvent) -> None:
        match event:
            case StepEvent():
                print(event.stage, event.step, event.clipped_sum.private)
            case TrialEvent():
                print(event.trial, event.error)
            case ErrorEvent():
                print(event.details)

    finetune.fit(..., curator=watch)

Keep what it prints beside the data: none of it is private.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tacit._deprecation import warn_renamed

if TYPE_CHECKING:
    from tacit.privacy import BoundedSum
    from tacit.tune import Trial


@dataclass(frozen=True)
class StepEvent:
    """A step of `finetune.fit` or of an adapter, before its noise is added. A curator that raises on it is ignored.

    Args:
        stage: "finetune" or "adapt".
        step: The number of the step, from 0.
        clipped_sum: What the noise will be added to, with `.sum`, `.bounds` and, for gradients, `.private`: norms,
            clip factors and the number of rows that are not finite.
    """

    stage: str
    step: int
    clipped_sum: BoundedSum = field(repr=False)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Attributes of the sum, which is what adapters gave to a curator before 0.3."""
            if name not in ("sum", "bounds", "blocks", "private"):
                raise AttributeError(f"StepEvent has no attribute {name!r}")
            warn_renamed(f"adapt: curator(total), total.{name}", f"curator(event), event.clipped_sum.{name}")
            return getattr(self.clipped_sum, name)


@dataclass(frozen=True)
class TrialEvent:
    """A trial of a search of `tune`, or a final run that failed. A curator that raises on it is ignored.

    Args:
        trial: Its hyperparameters, budget and released score.
        error: What went wrong, with the text of foreign exceptions; empty if nothing did.
    """

    trial: Trial
    error: str = field(repr=False)

    def __str__(self) -> str:
        """All of it, for the curator alone."""
        return f"{self.trial}" + (f"\n{self.error}" if self.error else "")


@dataclass(frozen=True)
class ErrorEvent:
    """Something went wrong with private rows, in any stage.

    Args:
        sentence: What recipients see of it, or what was done about it.
        details: Private: the foreign exception with its traceback.
    """

    sentence: str
    details: str = field(repr=False)

    def __str__(self) -> str:
        """All of it, for the curator alone."""
        return f"{self.sentence}\n{self.details}"


CuratorEvent = StepEvent | TrialEvent | ErrorEvent
Curator = Callable[[Any], object]  # of a CuratorEvent, or of those that its stage sends; what it returns is ignored


def report_event(curator: Curator | None, event: CuratorEvent) -> None:
    """Give the curator a step, an error about private rows, or a trial that may have failed because of them.

    Formal guarantee: whether this is called, or with what, depends on rows, possibly after a charge, so a curator that
    raises an `Exception` (one that expects steps only, say) is ignored: no row decides an error. What ends a process,
    such as `KeyboardInterrupt`, is passed on.
    """
    if curator is not None:
        with contextlib.suppress(Exception):
            curator(event)


def as_curator(curator: Any, where: str) -> Curator | None:
    """The function to call with events; the forms of 0.2 are served with a warning until 0.4.

    Those were `curator(step, total)` in `finetune`, `curator(trial, error)` in `tune`, each recognized by its two
    arguments, and a method `error(problem)` of the curator. Adapters called `curator(total)`: see `StepEvent`.

    Raises:
        TypeError: It cannot be called.
    """
    if curator is None:
        return None
    error = getattr(curator, "error", None)
    if not callable(curator) and error is None:
        raise TypeError(f"{where}: curator is a function of one event (tacit.Curator), not {type(curator).__name__}.")
    events = "curator(event) with a tacit.StepEvent, TrialEvent or ErrorEvent"
    pair = callable(curator) and _takes_two(curator)
    if pair:
        warn_renamed(f"{where}(curator=…) with two arguments", events, stacklevel=4)
    if error is not None:
        warn_renamed(f"{where}(curator=…) with a method error", events, stacklevel=4)
    return _Earlier(curator if callable(curator) else None, pair, error) if pair or error is not None else curator


@dataclass(frozen=True)
class _Earlier:
    """Calls a curator as 0.2 did."""

    call: Callable[..., object] | None
    pair: bool
    report: Callable[[ErrorEvent], object] | None

    def __call__(self, event: CuratorEvent) -> None:
        if isinstance(event, ErrorEvent):
            if self.report is not None:
                self.report(event)
        elif self.call is None:
            return
        elif not self.pair:
            self.call(event)
        elif isinstance(event, StepEvent):
            self.call(event.step, event.clipped_sum)
        else:
            self.call(event.trial, event.error)


def _takes_two(function: Callable[..., object]) -> bool:
    """Whether two arguments have to be given, or any number may be; `print` is given one."""
    if inspect.isbuiltin(function):
        return False
    try:
        arguments = inspect.signature(function).parameters.values()
    except ValueError:  # some functions of other languages have none
        return False
    if any(each.kind is each.VAR_POSITIONAL for each in arguments):
        return True
    places = [each for each in arguments if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    return sum(each.default is each.empty for each in places) >= 2
