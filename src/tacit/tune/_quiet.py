"""Discards what a trial prints, warns or logs: all of it would reveal how many trials there were."""

from __future__ import annotations

import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import TextIO

_turn = threading.RLock()


def _forked() -> None:
    global _turn
    _turn = threading.RLock()  # a thread that had it is not in a child


os.register_at_fork(after_in_child=_forked)


@contextmanager
def quiet() -> Iterator[None]:
    """Nothing is printed, warned or logged: not by other languages and not by processes that are started, either.

    What is printed to is the process's, so of several threads one is within at a time: the first to leave would let the
    others' trials be heard.
    """
    with _turn, ExitStack() as stack:
        before = logging.root.manager.disable
        nowhere = stack.enter_context(open(os.devnull, "w"))
        for number, stream in ((1, sys.__stdout__), (2, sys.__stderr__)):
            _divert(number, stream, nowhere, stack)
        stack.enter_context(redirect_stdout(nowhere))
        stack.enter_context(redirect_stderr(nowhere))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(before)


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
