"""The only place that draws noise. Every call takes a receipt and refuses one that does not cover it."""

from tacit.privacy.mechanisms._mechanisms import (
    GaussianStream,
    Released,
    check,
    gaussian,
    gaussian_query,
    laplace,
    noisy_max,
    strategy_of,
)

__all__ = ["GaussianStream", "Released", "check", "gaussian", "gaussian_query", "laplace", "noisy_max", "strategy_of"]
