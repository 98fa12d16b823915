"""Lower bounds on epsilon and mu from what an attacker got right, each with its confidence.

An attacker says "in" or "out" about many independent trials. If the mechanism keeps its promise, no attacker is right
too often; so how often this one was right bounds the promise from below, up to the chance that it was lucky
(``significance``, one minus the confidence).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import stats
from scipy.special import ndtr, ndtri

Lower = Callable[[float, float], float]  # (false positive rate, false negative rate) -> lower bound


@dataclass(frozen=True, kw_only=True)
class Errors:
    """How often an attacker took "out" for "in" and "in" for "out"."""

    false_positives: int
    outs: int
    false_negatives: int
    ins: int

    def __post_init__(self) -> None:
        if not (0 <= self.false_positives <= self.outs and 0 <= self.false_negatives <= self.ins):
            raise ValueError("Errors are counted out of all trials: 0 <= errors <= trials, for either world.")

    def upper(self, significance: float) -> tuple[float, float]:
        """Both error rates are at most this, jointly, but for a probability of ``significance``."""
        half = significance / 2
        return (
            upper_rate(self.false_positives, self.outs, half),
            upper_rate(self.false_negatives, self.ins, half),
        )


def upper_rate(count: int, trials: int, significance: float) -> float:
    """The Clopper–Pearson upper bound of a rate of which ``count`` of ``trials`` were seen."""
    check_significance(significance)
    if count >= trials:
        return 1.0
    return float(stats.beta.isf(significance, count + 1, trials - count))


def epsilon_lower(false_positive: float, false_negative: float, delta: float) -> float:
    """The epsilon that these error rates rule out everything below of, at ``delta`` (Kairouz et al. 2015, theorem 2.1).

    (epsilon, delta)-DP implies 1 - FNR <= e^epsilon FPR + delta, and the same with the two rates exchanged.
    """
    found = 0.0
    for one, other in ((false_positive, false_negative), (false_negative, false_positive)):
        gain = 1 - other - delta
        if gain > 0:
            found = max(found, math.log(gain / one) if one > 0 else math.inf)
    return found


def mu_lower(false_positive: float, false_negative: float) -> float:
    """mu-GDP implies Phi^-1(1 - FPR) - Phi^-1(FNR) <= mu (Dong, Roth & Su 2022, theorem 2.13)."""
    if false_positive >= 1 or false_negative >= 1:
        return 0.0
    return max(0.0, -float(ndtri(false_positive)) - float(ndtri(false_negative)))


def one_run_p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """How likely so many correct guesses are at most, if one run is (epsilon, delta)-DP.

    Steinke, Nasr & Jagielski 2023, theorem 5.2: with W ~ Binomial(guesses, e^eps/(1 + e^eps)), the probability is at
    most P[W >= v] + 2 m delta max_i P[v > W >= v - i] / i.
    """
    if not 0 <= correct <= guesses <= canaries:
        raise ValueError("0 <= correct <= guesses <= canaries.")
    right = 1 / (1 + math.exp(-epsilon))
    tail = float(stats.binom.sf(correct - 1, guesses, right))
    if delta == 0 or correct == 0:
        return min(1.0, tail)
    below = np.cumsum(stats.binom.pmf(np.arange(correct - 1, -1, -1), guesses, right))
    worst = float(np.max(below / np.arange(1, correct + 1)))
    return min(1.0, tail + 2 * canaries * delta * worst)


def one_run_epsilon(canaries: int, guesses: int, correct: int, delta: float, significance: float) -> float:
    """The largest epsilon that one run with so many correct guesses rules out, at this significance."""
    check_significance(significance)
    return _largest(lambda epsilon: one_run_p_value(canaries, guesses, correct, epsilon, delta) < significance)


def one_run_mu(canaries: int, guesses: int, correct: int, significance: float) -> float:
    """The largest mu such that one run is not mu-GDP, by the f-DP analysis (Mahloujifar, Melis & Chaudhuri 2024).

    It knows the whole trade-off curve instead of one point of it, so it is tighter than (epsilon, delta) for a
    Gaussian; what it says about epsilon holds for mechanisms whose promise is a mu.
    """
    check_significance(significance)
    return _largest(lambda mu: fdp_rejects(canaries, guesses, correct, mu, significance))


def fdp_rejects(canaries: int, guesses: int, correct: int, mu: float, significance: float) -> bool:
    """Whether so many correct guesses contradict mu-GDP (algorithm 3 of the paper, alphabet of size two).

    h[i] and r[i] bound, going down from i = correct, what the tail beyond i can weigh if the tail at ``correct`` weighs
    ``significance``; a mechanism that keeps its promise has r[0] + h[0] <= guesses / canaries.
    """
    if not 0 <= correct <= guesses <= canaries:
        raise ValueError("0 <= correct <= guesses <= canaries.")
    share = guesses / canaries
    r, h = significance * correct / canaries, significance * (guesses - correct) / canaries
    for i in range(correct - 1, -1, -1):
        up = max(h, float(ndtr(ndtri(min(r, 1.0)) - mu)))
        r += i / (guesses - i) * (up - h)
        h = up
        if r + h > share:
            return True
    return r + h > share


def check_significance(significance: float) -> None:
    if not 0 < significance < 1:
        raise ValueError(f"Significance is a probability above 0 and below 1; got {significance:g}.")


def _largest(rejected: Callable[[float], bool]) -> float:
    """The largest parameter that is rejected, where all below it are; 0 if none is."""
    low, high = 0.0, 1.0
    if not rejected(1e-9):
        return 0.0
    while rejected(high):
        low, high = high, 2 * high
        if high > 1e4:
            return math.inf
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if rejected(middle) else (low, middle)
    return low
