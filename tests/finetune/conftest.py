"""Shared by the tests of fine-tuning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tacit.privacy import Ledger

sys.path.insert(0, str(Path(__file__).parent))  # so that tests find `by_hand`
sys.path.insert(0, str(Path(__file__).parent.parent / "data"))  # and `words`


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="No ledger was given")
        yield


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as opened:
        yield opened
