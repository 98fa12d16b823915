"""Honest confidences from many private sources: noisy statistics, a search, and a calibrated classifier."""

from tacit.calibrate._answers import Refused, reopen
from tacit.calibrate._calibrated import Calibrated, Result
from tacit.calibrate._calibrator import Calibrator, Plan
from tacit.calibrate._files import read_outputs, read_unit_ids
from tacit.calibrate._measures import Reliability, adaptive_ece, brier, classwise_ece, ece, nll, reliability
from tacit.calibrate._methods import (
    ECET,
    METHODS,
    NLLT,
    AccT,
    GapCurve,
    HistogramBinning,
    Method,
    Nothing,
    OneSource,
    Platt,
    Setting,
    SignedGap,
)
from tacit.calibrate._partition import Partition as Partition
from tacit.calibrate._partition import calibrated_probs as calibrated_probs
from tacit.calibrate._partition import partition as partition
from tacit.calibrate._queries import Answer, Price, Query, Shares
from tacit.calibrate._search import Ask, Outcome, Search
from tacit.calibrate._simulation import Forecast, Simulation, Trials, forecast, reference, simulate
from tacit.calibrate._source import TRUSTS as TRUSTS
from tacit.calibrate._source import Source, Terms
from tacit.calibrate._source import Trust as Trust
from tacit.calibrate._statistics import (
    BinGaps,
    Cells,
    Count,
    Gap,
    GapCells,
    GapSlope,
    Histogram,
    LogitCells,
    Loss,
    Statistic,
)
from tacit.calibrate._transport import CalibrationError, InProcess, Refusal, SecureTransport, Summed, Transport

__all__ = [
    "ECET",
    "METHODS",
    "NLLT",
    "AccT",
    "Answer",
    "Ask",
    "BinGaps",
    "Calibrated",
    "CalibrationError",
    "Calibrator",
    "Cells",
    "Count",
    "Forecast",
    "Gap",
    "GapCells",
    "GapCurve",
    "GapSlope",
    "Histogram",
    "HistogramBinning",
    "InProcess",
    "LogitCells",
    "Loss",
    "Method",
    "Nothing",
    "OneSource",
    "Outcome",
    "Plan",
    "Platt",
    "Price",
    "Query",
    "Refusal",
    "Refused",
    "Reliability",
    "Result",
    "Search",
    "SecureTransport",
    "Setting",
    "Shares",
    "SignedGap",
    "Simulation",
    "Source",
    "Statistic",
    "Summed",
    "Terms",
    "Transport",
    "Trials",
    "adaptive_ece",
    "brier",
    "classwise_ece",
    "ece",
    "forecast",
    "nll",
    "read_outputs",
    "read_unit_ids",
    "reference",
    "reliability",
    "reopen",
    "simulate",
]
