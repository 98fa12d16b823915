"""What trials print is heard by nobody, also where searches run in several threads."""

import os
import threading

import pytest

from tacit.tune._quiet import quiet


def test_of_searches_in_two_threads_no_trial_is_heard(capfd: pytest.CaptureFixture[str]) -> None:
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


def test_a_trial_may_search_in_a_thread_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    """It waited forever for the search that waited for it."""
    over = threading.Event()

    def inner() -> None:
        with quiet():
            os.write(1, b"trial of the inner search\n")
        os.write(1, b"between its trials\n")
        over.set()

    with quiet():
        threading.Thread(target=inner, daemon=True).start()
        assert over.wait(5.0)
        os.write(1, b"trial of the outer search\n")
    os.write(1, b"after\n")
    assert capfd.readouterr().out == "after\n"


def test_everything_is_put_back_where_silence_fails(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(level: int) -> None:
        raise OSError(level)

    monkeypatch.setattr("logging.disable", full)
    with pytest.raises(OSError, match="50"), quiet():
        pass
    monkeypatch.undo()
    os.write(1, b"heard\n")
    print("and this")
    assert capfd.readouterr().out == "heard\nand this\n"
