"""Shared by the tests of calibration."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # so that tests find `network`


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Thousands of small operations: on a busy machine several threads wait for each other, ten times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
