"""Repeat and select: a random number of trials under one receipt, of which only the winner leaves."""

from tacit.privacy.selection._selection import Model, Trial, Trials, best, number_of_trials

__all__ = ["Model", "Trial", "Trials", "best", "number_of_trials"]
