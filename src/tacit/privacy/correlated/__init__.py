"""Correlated noise for a stream: each step takes back part of the noise of the steps before it."""

from tacit.privacy.correlated._correlated import Mixer, Strategy, Vector
from tacit.privacy.correlated._designs import (
    banded,
    buffered,
    by_name,
    independent,
    running_sum_rms,
    square_root,
    toeplitz,
)

__all__ = [
    "Mixer",
    "Strategy",
    "Vector",
    "banded",
    "buffered",
    "by_name",
    "independent",
    "running_sum_rms",
    "square_root",
    "toeplitz",
]
