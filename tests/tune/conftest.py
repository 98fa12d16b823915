"""Shared by the tests of tuning."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # so that tests, and the processes that they start, find `made_up`
