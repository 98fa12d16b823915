"""Warnings about private rows are shown to nobody, in whatever order the threads that cause them come and go."""

import logging
import threading
import warnings
from collections.abc import Callable, Iterator

import pytest

from tacit._refusals import recorded_warnings


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What recipients would see."""
    found: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", lambda message, *_, **__: found.append(str(message)))
        yield found


def run(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_a_thread_that_leaves_first_does_not_show_what_another_one_warns_of(printed: list[str]) -> None:
    inside, alone = threading.Event(), threading.Event()
    theirs: list[str] = []

    def other() -> None:
        with recorded_warnings() as texts:
            inside.set()
            alone.wait(10)
            warnings.warn("patient 4711", stacklevel=1)
            theirs.extend(texts)

    with recorded_warnings() as mine:
        thread = run(other)
        inside.wait(10)
        warnings.warn("patient 1", stacklevel=1)
    alone.set()
    thread.join()
    warnings.warn("public", stacklevel=1)
    assert (mine, theirs, printed) == (["UserWarning: patient 1"], ["UserWarning: patient 4711"], ["public"])


def test_a_data_sets_own_threads_show_nothing_either(printed: list[str]) -> None:
    with recorded_warnings() as texts:
        run(lambda: warnings.warn("patient 4711", stacklevel=1)).join()
    assert (texts, printed) == (["UserWarning: patient 4711"], [])


def test_blocks_in_blocks_and_recorded_ones_between_them(printed: list[str]) -> None:
    with recorded_warnings() as outer:
        with recorded_warnings() as inner:
            warnings.warn("a", stacklevel=1)
        with warnings.catch_warnings(record=True) as between:
            warnings.simplefilter("always")
            with recorded_warnings() as deep:
                warnings.warn("b", stacklevel=1)
            warnings.warn("c", stacklevel=1)
        warnings.warn("d", stacklevel=1)
    warnings.warn("public", stacklevel=1)
    assert [[text.split()[1] for text in texts] for texts in (inner, deep, outer)] == [["a"], ["b"], ["d"]]
    assert [str(each.message) for each in between] == ["c"]
    assert printed == ["public"]


def test_what_libraries_log_about_rows_goes_the_same_way(caplog: pytest.LogCaptureFixture) -> None:
    library, own = logging.getLogger("somelib.decoder"), logging.getLogger("tacit.serve")
    with recorded_warnings() as outer:
        with recorded_warnings() as texts:
            library.warning("row %d is odd", 4711)
            library.info("row %d", 4711)
            library.error("row %d %d", 4711)
        own.warning("a fixed sentence")
        library.warning("row 4712 is odd")
    library.warning("public")
    assert texts == ["WARNING of somelib.decoder: row 4711 is odd", "ERROR of somelib.decoder"]
    assert outer == ["WARNING of somelib.decoder: row 4712 is odd"]
    assert [record.getMessage() for record in caplog.records] == ["a fixed sentence", "public"]
