"""A whole pipeline from one TOML file, on one's own private data: plan, run, resume."""

from tacit.pipeline._budget import DoesNotFit
from tacit.pipeline._canaries import CanaryRun
from tacit.pipeline._demo import demo
from tacit.pipeline._plan import PipelinePlan, PlanLine, plan, planned_ledger
from tacit.pipeline._report import plan_table
from tacit.pipeline._report import write as write_report
from tacit.pipeline._run import PipelineResult, read, run
from tacit.pipeline._schema import Pipeline
from tacit.pipeline._starters import KINDS, starter, write_starter

__all__ = [
    "KINDS",
    "CanaryRun",
    "DoesNotFit",
    "Pipeline",
    "PipelinePlan",
    "PipelineResult",
    "PlanLine",
    "demo",
    "plan",
    "plan_table",
    "planned_ledger",
    "read",
    "run",
    "starter",
    "write_report",
    "write_starter",
]
