"""Honest confidences from many private sources: noisy statistics, a search, and a calibrated classifier."""

from tacit.calibrate.answers import Refused
from tacit.calibrate.calibrated import Calibrated, Result
from tacit.calibrate.calibrator import Calibrator, Plan
from tacit.calibrate.files import read_outputs
from tacit.calibrate.measures import Reliability, adaptive_ece, brier, classwise_ece, ece, nll, reliability
from tacit.calibrate.methods import (
    ECET,
    METHODS,
    NLLT,
    AccT,
    HistogramBinning,
    Method,
    Nothing,
    OneSource,
    Setting,
    SignedGap,
)
from tacit.calibrate.queries import Answer, Price, Query
from tacit.calibrate.search import Ask, Outcome, Search
from tacit.calibrate.simulation import Forecast, Simulation, Trials, forecast, simulate
from tacit.calibrate.source import Source, Terms
from tacit.calibrate.statistics import BinGaps, Count, Gap, GapSlope, Histogram, Loss, Statistic
from tacit.calibrate.transport import CalibrationError, InProcess, Refusal, Transport

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
    "Count",
    "Forecast",
    "Gap",
    "GapSlope",
    "Histogram",
    "HistogramBinning",
    "InProcess",
    "Loss",
    "Method",
    "Nothing",
    "OneSource",
    "Outcome",
    "Plan",
    "Price",
    "Query",
    "Refusal",
    "Refused",
    "Reliability",
    "Result",
    "Search",
    "Setting",
    "SignedGap",
    "Simulation",
    "Source",
    "Statistic",
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
    "reliability",
    "simulate",
]
