"""Shared by the tests of the gradient engine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))  # so that tests find `oracle`

settings.register_profile(
    "gradients", max_examples=12, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)
settings.load_profile("gradients")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
