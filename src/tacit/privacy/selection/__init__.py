"""Repeat and select: a random number of trials under one receipt, of which only the winner leaves."""

from tacit._deprecation import renamed_attributes
from tacit.privacy.selection._selection import Model, SelectionTrial, SelectionTrials, best, number_of_trials

__all__ = ["Model", "SelectionTrial", "SelectionTrials", "best", "number_of_trials"]

__getattr__ = renamed_attributes(__name__, {"Trial": "SelectionTrial", "Trials": "SelectionTrials"})
