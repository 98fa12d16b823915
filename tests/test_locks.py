"""Locks after a fork: what other threads of the parent hold stops no child."""

import os
import threading

import pytest

from tacit._locks import ForkSafeLock


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def entered(lock: ForkSafeLock) -> bool:
    """Whether another thread gets in."""
    inside = threading.Event()

    def enter() -> None:
        with lock.held():
            inside.set()

    threading.Thread(target=enter, daemon=True).start()
    return inside.wait(1.0)


def test_one_thread_at_a_time() -> None:
    lock = ForkSafeLock()
    with lock.held():
        with lock.held():
            pass
        assert not entered(lock)
    assert entered(lock)


def test_an_error_gives_it_back() -> None:
    lock = ForkSafeLock()
    with pytest.raises(KeyError), lock.held():
        raise KeyError
    assert entered(lock)


def test_a_child_does_not_wait_for_threads_of_its_parent() -> None:
    lock = ForkSafeLock()
    holds, over = threading.Event(), threading.Event()

    def hold() -> None:
        with lock.held():
            holds.set()
            over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    holds.wait()
    child = os.fork()
    if child == 0:
        os._exit(0 if entered(lock) else 1)
    over.set()
    thread.join()
    assert ended(child) == 0


def test_a_child_that_was_forked_within_leaves_as_it_came() -> None:
    lock = ForkSafeLock()
    child, left = -1, False
    try:
        with lock.held():
            child = os.fork()
        left = True
    finally:
        if child == 0:
            with lock.held():
                os._exit(0 if left and not entered(lock) else 1)
    assert ended(child) == 0
    assert entered(lock)
