"""A whole pipeline from one TOML file, on one's own private data: plan, run, resume."""

from tacit.pipeline._budget import DoesNotFit
from tacit.pipeline._plan import Line, Plan, plan, planned_ledger
from tacit.pipeline._report import plan_table
from tacit.pipeline._report import write as write_report
from tacit.pipeline._run import Outcome, read, run
from tacit.pipeline._schema import Pipeline
from tacit.pipeline._starters import KINDS, starter, write_starter

__all__ = [
    "KINDS",
    "DoesNotFit",
    "Line",
    "Outcome",
    "Pipeline",
    "Plan",
    "plan",
    "plan_table",
    "planned_ledger",
    "read",
    "run",
    "starter",
    "write_report",
    "write_starter",
]
