"""Differential privacy for adapting PyTorch models: fine-tune, tune, adapt at test time, recalibrate, under one budget.

`import tacit` is cheap: packages and names below are loaded when they are first used.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from tacit._deprecation import MovedModules
from tacit._moved import MOVED

if TYPE_CHECKING:
    from tacit import (
        adapt,
        audit,
        calibrate,
        data,
        finetune,
        gradients,
        integrations,
        models,
        pipeline,
        pretrain,
        privacy,
        report,
        tune,
    )
    from tacit._context import PrivacyContext
    from tacit._curator import Curator, CuratorEvent, ErrorEvent, StepEvent, TrialEvent
    from tacit._guard_rails import GuardRailWarning
    from tacit.finetune import make_private
    from tacit.gradients import Engine, clipped_sum
    from tacit.privacy import Budget, BudgetExceeded, Guarantee, Ledger, Neighbours, Receipt, Unit

__version__ = "0.2.0"

_NAMES = {
    **dict.fromkeys(("Budget", "BudgetExceeded", "Guarantee", "Ledger", "Neighbours", "Receipt", "Unit"), "privacy"),
    **dict.fromkeys(("Engine", "clipped_sum"), "gradients"),
    "PrivacyContext": "_context",
    **dict.fromkeys(("Curator", "CuratorEvent", "ErrorEvent", "StepEvent", "TrialEvent"), "_curator"),
    "make_private": "finetune",
    "GuardRailWarning": "_guard_rails",
}
_PACKAGES = frozenset(
    (
        "adapt",
        "audit",
        "calibrate",
        "data",
        "finetune",
        "gradients",
        "integrations",
        "models",
        "pipeline",
        "pretrain",
        "privacy",
        "report",
        "tune",
    )
)

__all__ = [
    "Budget",
    "BudgetExceeded",
    "Curator",
    "CuratorEvent",
    "Engine",
    "ErrorEvent",
    "Guarantee",
    "GuardRailWarning",
    "Ledger",
    "Neighbours",
    "PrivacyContext",
    "Receipt",
    "StepEvent",
    "TrialEvent",
    "Unit",
    "__version__",
    "adapt",
    "audit",
    "calibrate",
    "clipped_sum",
    "data",
    "finetune",
    "gradients",
    "integrations",
    "make_private",
    "models",
    "pipeline",
    "pretrain",
    "privacy",
    "report",
    "tune",
]

MovedModules(MOVED).install()
# Before the first product: see `gradients._rounding`.
os.environ["MKL_CBWR"] = os.environ.get("MKL_CBWR") or "AUTO,STRICT"


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"tacit.{name}")
    if name in _NAMES:
        return getattr(importlib.import_module(f"tacit.{_NAMES[name]}"), name)
    raise AttributeError(f"module 'tacit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
