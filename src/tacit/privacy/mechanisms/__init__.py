"""The only place that draws noise. Every call takes a receipt and refuses one that does not cover it."""

from tacit.privacy.mechanisms._mechanisms import (
    GaussianStream,
    Released,
    check,
    gaussian,
    gaussian_query,
    laplace,
    noisy_max,
    prepare,
    strategy_of,
)
from tacit.privacy.mechanisms._shards import GaussianShards, add_shard
from tacit.privacy.mechanisms._shares import share

__all__ = [
    "GaussianShards",
    "GaussianStream",
    "Released",
    "add_shard",
    "check",
    "gaussian",
    "gaussian_query",
    "laplace",
    "noisy_max",
    "prepare",
    "share",
    "strategy_of",
]
