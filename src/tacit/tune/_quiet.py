"""Discards what a trial prints, warns or logs: all of it would reveal how many trials there were."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import TextIO

from tacit._locks import ForkSafeLock

_inside: list[ExitStack] = []  # for each that is within `quiet`, in whatever thread: what the last one puts back
_deciding = ForkSafeLock()


@contextmanager
def quiet() -> Iterator[None]:
    """Nothing is printed, warned or logged: not by other languages and not by processes that are started, either.

    What is printed to is the process's: of several threads within, the last one to leave puts back what the first has
    found, so that no trial of any is heard. None waits for another, which might be a trial that has started it.
    """
    with _deciding.held():
        _inside.append(_inside[0] if _inside else _silence())
    try:
        yield
    finally:
        with _deciding.held():
            before = _inside.pop()
            if not _inside:
                before.close()


def _silence() -> ExitStack:
    """From now on nothing is heard; closing what is returned puts everything back."""
    with ExitStack() as stack:
        nowhere = stack.enter_context(open(os.devnull, "w"))
        for number, stream in ((1, sys.__stdout__), (2, sys.__stderr__)):
            _divert(number, stream, nowhere, stack)
        stack.enter_context(redirect_stdout(nowhere))
        stack.enter_context(redirect_stderr(nowhere))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        before = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        stack.callback(logging.disable, before)
        return stack.pop_all()


def _divert(number: int, stream: TextIO | None, nowhere: TextIO, stack: ExitStack) -> None:
    """Send a file descriptor nowhere until the stack unwinds; one that is closed is left alone."""

    def flush() -> None:
        with suppress(OSError, ValueError):
            if stream is not None:
                stream.flush()

    try:
        kept = os.dup(number)
    except OSError:
        return
    stack.callback(os.close, kept)
    flush()
    os.dup2(nowhere.fileno(), number)
    stack.callback(os.dup2, kept, number)
    stack.callback(flush)  # first of the three: what is still in a buffer goes nowhere as well
