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
)
from tacit.privacy.mechanisms._shards import GaussianShards, add_shard
from tacit.privacy.mechanisms._shares import share
from tacit.privacy.mechanisms._strategies import check_strategy, strategy_of

__all__ = [
    "GaussianShards",
    "GaussianStream",
    "Released",
    "add_shard",
    "check",
    "check_strategy",
    "gaussian",
    "gaussian_query",
    "laplace",
    "noisy_max",
    "prepare",
    "share",
    "strategy_of",
]
