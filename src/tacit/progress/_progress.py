"""How far long work is, and what it has spent: a bar on a terminal or in a notebook, a few plain lines elsewhere."""

from __future__ import annotations

import html
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console

from tacit.recipes import Progress as Report

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_EVERY = 10.0  # seconds between plain lines about the same thing
_BLINK = 0.2  # seconds between updates in a notebook


class Bar:
    """How far a run is: a bar on a terminal or in a notebook, a few plain lines on stderr elsewhere."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._bar: Progress | None = None
        self._cell: Any = None  # what a notebook shows, if there is one
        self._task: TaskID | None = None
        self._what = ""
        self._said = -math.inf
        self._spent = ""

    def __call__(self, what: str, done: int, total: int, *, spent: tuple[float, float] | None = None) -> None:
        self._spent = budget_text(spent) if spent is not None else self._spent
        if self._bar is not None:
            self._show(self._bar, what, done, total)
        elif self._cell is not None:
            if what != self._what or done >= total or time.monotonic() - self._said >= _BLINK:
                self._cell.update(_markup(what, done, total, self._spent))
                self._said = time.monotonic()
        elif what != self._what or done >= total or time.monotonic() - self._said >= _EVERY:
            text = f"{what}: {done} of {total}" + (f"; {self._spent}" if self._spent else "")
            print(text, file=sys.stderr)
            self._said = time.monotonic()
        self._what = what

    def _show(self, bar: Progress, what: str, done: int, total: int) -> None:
        if self._task is None or what != self._what:
            if self._task is not None:
                bar.remove_task(self._task)
            self._task = bar.add_task(what, total=total, spent="")
        bar.update(self._task, completed=done, total=total, spent=self._spent)

    def __enter__(self) -> Bar:
        self._cell = _notebook_cell()
        if self._cell is None and self._console.is_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[spent]}", style="bold", markup=False),
                console=self._console,
                transient=True,
            )
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._cell is not None:
            self._cell.update(_Html(f"<p>{html.escape(self._spent)}</p>" if self._spent else ""))


class _Html:
    """Something that a notebook shows as HTML; elsewhere it is its text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def _repr_html_(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return ""


def _markup(what: str, done: int, total: int, spent: str) -> _Html:
    said = f"{what}: {done:,} of {total:,}" + (f"; {spent}" if spent else "")
    return _Html(f'<progress value="{done}" max="{max(total, 1)}"></progress> {html.escape(said)}')


def _notebook_cell() -> Any:
    """A place in the output of a notebook's cell that can be shown anew; None outside of a notebook."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or "IPKernelApp" not in shell.config:  # a terminal's IPython has no kernel
        return None
    return ipython.display.display(_Html(""), display_id=True)


@contextmanager
def shown(progress: Report | bool) -> Iterator[Report | None]:
    """The function to report to: a bar of our own if `progress` is True, nothing if it is False."""
    if isinstance(progress, bool):
        if not progress:
            yield None
            return
        with Bar() as bar:
            yield bar
        return
    yield progress


def budget_text(spent: tuple[float, float]) -> str:
    """What was spent of what may be, never rounded below the truth."""
    from tacit.privacy import round_up

    used, whole = spent
    if math.isinf(used) or math.isinf(whole):
        return "not private"
    return f"privacy spent: eps {round_up(used, 3)} of {whole:g}"
