"""Shared by the tests of the studies."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small operations: on a busy machine several threads wait for each other
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="No ledger was given")
        yield
    torch.set_num_threads(threads)
