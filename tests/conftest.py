"""What holds for every test."""

import pytest

from tacit import _deprecation


@pytest.fixture(autouse=True)
def _nothing_was_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """A renamed argument warns once per process; in each test it is the first time."""
    monkeypatch.setattr(_deprecation, "_warned", set())
