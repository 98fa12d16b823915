"""What trials print is heard by nobody, also where searches run in several threads."""

import os
import threading

import pytest

from tacit.tune._quiet import quiet


def test_searches_in_two_threads_take_turns(capfd: pytest.CaptureFixture[str]) -> None:
    """The first to leave let the other one's trials be heard, and the other one took the screen away for good."""
    entered, other_entered, left = (threading.Event() for _ in range(3))

    def first() -> None:
        with quiet():
            entered.set()
            other_entered.wait(0.3)
            os.write(1, b"trial of the first\n")
        left.set()

    def second() -> None:
        entered.wait()
        with quiet():
            other_entered.set()
            left.wait(0.3)
            os.write(1, b"trial of the second\n")
            print("a word of the second")

    threads = [threading.Thread(target=target) for target in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.write(1, b"after\n")
    assert capfd.readouterr().out == "after\n"
