"""Shared by the tests of the models."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "gradients"))  # so that tests find its `oracle`
sys.path.insert(0, str(Path(__file__).parent.parent / "data"))  # and its `words`


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
