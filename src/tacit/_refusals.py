"""What recipients see when something is wrong, and what only the curator does.

The text of a foreign exception (a data set's, a model's) may hold values of private rows: "patient 4711, scan
corrupt". So foreign code that is given private rows runs inside `attempt`: recipients get a fixed sentence, and the
details go to the function given as `curator=` (an `ErrorEvent`), or nowhere.
"""

from __future__ import annotations

import logging
import os
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from tacit._curator import Curator, ErrorEvent, report_event
from tacit._deprecation import renamed_attributes

T = TypeVar("T")
ENDING = KeyboardInterrupt, SystemExit, GeneratorExit  # what ends a process; all else may be some row's failure
WARNED = "There was a warning while rows were read, or by model or loss. They are used as they came."
_open: list[tuple[int, list[str]]] = []  # the blocks of `recorded_warnings`: whose thread's, and the texts
_shown: list[Any] = [warnings.showwarning]  # what was in its place
_CALL_HANDLERS = logging.Logger.callHandlers
_lock = threading.RLock()
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
_MEMORY = "There was not enough memory to read some rows. Details may reveal rows: see curator=."


class Refusal(ValueError):
    """A sentence of tacit's own for the caller: it contains no value of any row, and no number of rows."""


if not TYPE_CHECKING:
    __getattr__ = renamed_attributes(__name__, {"Problem": "ErrorEvent"})


def attempt(function: Callable[..., T], *args: Any, sentence: str, curator: Curator | None) -> T:
    """What the function returns; if it raises, a `Refusal` with the fixed sentence, and the details to the curator.

    A `Refusal` from inside is passed on; what is about memory (see `of_the_machine`) stays a `MemoryError`, without its
    text: "cannot allocate (4711, 9000000)" is what a broken file says of itself. The foreign exception is neither cause
    nor context of what is raised, so no traceback prints it. Call it outside of any `except` clause. Warnings go to the
    curator alone.
    """
    memory = False
    with recorded_warnings() as texts:
        try:
            return function(*args)
        except (Refusal, *ENDING):
            raise
        except BaseException as error:
            memory = of_the_machine(error)
            event = ErrorEvent(_MEMORY if memory else sentence, text_of(error))
        finally:
            report_warnings(texts, curator)
    report_event(curator, event)
    raise MemoryError(_MEMORY) if memory else Refusal(sentence)


@contextmanager
def recorded_warnings() -> Iterator[list[str]]:
    """The texts of warnings of foreign code that is given private rows: they are shown to no recipient.

    Which warnings there are is decided by the filters as they stand; only where they go is changed. What libraries log
    is kept from their handlers as well (and recorded, if it is a warning or worse). Threads may be in
    such a block at the same time: each has its own warnings, and nothing is shown until the last of them is out. What a
    thread without a block warns of meanwhile (a data set may have some) goes to the block that was opened last.
    """
    entry = threading.get_ident(), list[str]()
    with _lock:
        before, earlier = warnings.showwarning, _shown[0]
        if before is not _keep:
            _shown[:] = [before]
            warnings.showwarning = _keep
        if not _open:
            logging.Logger.callHandlers = _keep_record  # type: ignore[method-assign,assignment]
        _open.append(entry)
    try:
        yield entry[1]
    finally:
        with _lock:
            _open[:] = [each for each in _open if each is not entry]
            if not _open:
                logging.Logger.callHandlers = _CALL_HANDLERS  # type: ignore[method-assign]
            installed = warnings.showwarning is _keep
            if installed and before is not _keep and all(thread == entry[0] for thread, _ in _open):
                warnings.showwarning = before  # also inside of an outer block, where `catch_warnings` is in between
                _shown[:] = [earlier]
            elif installed and not _open:
                warnings.showwarning = _shown[0]


def _keep(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    """In place of `warnings.showwarning` while a block is open."""
    _note(f"{category.__name__}: {message}")


def _keep_record(logger: logging.Logger, record: logging.LogRecord) -> None:
    """In place of `logging.Logger.callHandlers` while a block is open; what tacit logs holds no value of a row."""
    if record.name.partition(".")[0] == "tacit":
        _CALL_HANDLERS(logger, record)
    elif record.levelno >= logging.WARNING:
        try:
            _note(f"{record.levelname} of {record.name}: {record.getMessage()}")
        except Exception:  # arguments that do not fit the message: logging prints such an error and goes on
            _note(f"{record.levelname} of {record.name}")


def _note(text: str) -> None:
    """To the block of this thread that was opened last, or of any thread."""
    mine = [texts for thread, texts in _open if thread == threading.get_ident()] or [texts for _, texts in _open]
    if mine:
        mine[-1].append(text)


def report_warnings(texts: list[str], curator: Curator | None) -> None:
    """Hand the texts of warnings to the curator, each once."""
    for text in dict.fromkeys(texts):
        report_event(curator, ErrorEvent(WARNED, text))


def text_of(error: BaseException) -> str:
    """An exception with its traceback. Private."""
    return "".join(traceback.format_exception(error))


def of_the_machine(error: BaseException) -> bool:
    """Whether an exception is about memory: then it may be the machine's failure, and not a row's.

    Rows are taken in portions whose size is public (`finetune.predictions`), so a large Poisson draw asks for no more
    memory than the rehearsal before the charge did. Values may (a broken file, a model that makes room by an integer of
    a row), so where private rows are read or computed with, it is the machine's failure only if blank rows in their
    place find no memory either (`finetune.reading`).
    """
    import torch  # not above: `tacit --help` needs the sentences, and not torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)
