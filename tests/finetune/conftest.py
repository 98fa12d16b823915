"""Shared by the tests of fine-tuning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tacit.finetune import account
from tacit.privacy import Ledger

sys.path.insert(0, str(Path(__file__).parent))  # so that tests find `by_hand`
sys.path.insert(0, str(Path(__file__).parent.parent / "data"))  # and `words`


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="No ledger was given")
        yield


_known: dict[str, float] = {}
_solve = account._scale


def _once(*args: Any, **options: Any) -> float:
    """The same question about noise is answered once: that is what takes long here."""
    question = repr((args, options))
    if question not in _known:
        _known[question] = _solve(*args, **options)
    return _known[question]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(account, "_scale", _once)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as opened:
        yield opened
