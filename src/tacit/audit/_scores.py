"""What the scores of canaries say: every estimate that people know, from one set of numbers.

Names follow jax-privacy's ``CanaryScoreAuditor``, so that results can be compared.
"""

from __future__ import annotations

import math
import secrets
from typing import Any

import numpy as np
from scipy.stats import rankdata

from tacit.audit._bounds import Errors, epsilon_lower, mu_lower, one_run_epsilon, one_run_mu
from tacit.privacy import epsilon_of

_EPSILON_DELTA = "Delta is at least 0 and below 1; got {:g}."


class CanaryScoreAuditor:
    """Scores of canaries that were in the data and of others that were not; a high score says "in".

    Bounds (``epsilon_clopper_pearson``, ``epsilon_from_gdp``, ``epsilon_one_run``, ``epsilon_one_run_fdp``) hold with
    probability 1 - ``significance``, provided that the threshold does not come from the same scores: it is given, or
    a fixed share of the canaries is guessed. ``epsilon_raw_counts`` and the rest are estimates without confidence.
    """

    def __init__(self, in_canary_scores: Any, out_canary_scores: Any) -> None:
        self._in = np.sort(np.asarray(in_canary_scores, dtype=np.float64).ravel())
        self._out = np.sort(np.asarray(out_canary_scores, dtype=np.float64).ravel())
        if not len(self._in) or not len(self._out):
            raise ValueError("There are no scores: an audit needs canaries that are in, and others that are not.")
        if np.isnan(self._in).any() or np.isnan(self._out).any():
            raise ValueError("A score is not a number.")

    def errors(self, threshold: float) -> Errors:
        """Of the attacker who says "in" above ``threshold``."""
        return Errors(
            false_positives=len(self._out) - int(np.searchsorted(self._out, threshold, side="right")),
            outs=len(self._out),
            false_negatives=int(np.searchsorted(self._in, threshold, side="right")),
            ins=len(self._in),
        )

    def epsilon_clopper_pearson(self, significance: float, delta: float = 0.0, *, threshold: float) -> float:
        """A lower bound on epsilon at ``delta`` from both error rates; canaries are independent runs or coordinates."""
        _check(delta)
        return epsilon_lower(*self.errors(threshold).upper(significance), delta)

    def mu_from_gdp(self, significance: float, *, threshold: float) -> float:
        """A lower bound on mu: nothing with a smaller mu has such error rates."""
        return mu_lower(*self.errors(threshold).upper(significance))

    def epsilon_from_gdp(self, significance: float, delta: float, *, threshold: float) -> float:
        """``mu_from_gdp`` as an epsilon, for mechanisms whose promise is a mu."""
        return epsilon_of(self.mu_from_gdp(significance, threshold=threshold), delta)

    def epsilon_raw_counts(self, min_count: int = 50, delta: float = 0.0) -> float:
        """The best log ratio over all thresholds with at least ``min_count`` errors: an estimate, not a bound."""
        _check(delta)
        found = 0.0
        for threshold in np.unique(np.concatenate([self._in, self._out])):
            errors = self.errors(float(threshold))
            if min(errors.false_positives, errors.false_negatives) >= min_count:
                rates = errors.false_positives / errors.outs, errors.false_negatives / errors.ins
                found = max(found, epsilon_lower(*rates, delta))
        return found

    def guesses(self, share: float = 0.2, *, one_sided: bool = False) -> tuple[int, int, int]:
        """(canaries, guesses, correct) of guessing the top of all scores "in" and the bottom "out".

        ``share`` of the canaries is guessed, half of them "in" and half "out" (``one_sided``: all of them "in").
        """
        if not 0 < share <= 1:
            raise ValueError(f"The share of canaries that are guessed is above 0 and at most 1; got {share:g}.")
        scores = np.concatenate([self._in, self._out])
        labels = np.concatenate([np.ones(len(self._in), bool), np.zeros(len(self._out), bool)])
        # equal scores come in an order that has nothing to do with the labels
        ties = np.random.default_rng(secrets.randbits(128)).permutation(len(scores))
        order = np.lexsort((ties, scores))
        number = max(1, round(share * len(scores) / (1 if one_sided else 2)))
        correct = int(labels[order[-number:]].sum())
        if one_sided:
            return len(scores), number, correct
        number = min(number, len(scores) // 2)
        correct = int(labels[order[-number:]].sum()) + int((~labels[order[:number]]).sum())
        return len(scores), 2 * number, correct

    def epsilon_one_run(
        self, significance: float, delta: float, one_sided: bool = False, *, share: float = 0.2
    ) -> float:
        """A lower bound from the canaries of ONE run (Steinke, Nasr & Jagielski 2023); each was in by a fair coin."""
        _check(delta)
        return one_run_epsilon(*self.guesses(share, one_sided=one_sided), delta, significance)

    def mu_one_run_fdp(self, significance: float, one_sided: bool = False, *, share: float = 0.2) -> float:
        """A lower bound on mu from the canaries of one run (Mahloujifar, Melis & Chaudhuri 2024)."""
        return one_run_mu(*self.guesses(share, one_sided=one_sided), significance)

    def epsilon_one_run_fdp(
        self, significance: float, delta: float, one_sided: bool = False, *, share: float = 0.2
    ) -> float:
        """``mu_one_run_fdp`` as an epsilon, for mechanisms whose promise is a mu."""
        return epsilon_of(self.mu_one_run_fdp(significance, one_sided, share=share), delta)

    def attack_auroc(self) -> float:
        """The probability that a canary that is in scores above one that is not; 0.5 is a blind guess."""
        ranks = rankdata(np.concatenate([self._in, self._out]))[: len(self._in)]
        count = len(self._in)
        return float((ranks.sum() - count * (count + 1) / 2) / (count * len(self._out)))

    def tpr_at_given_fpr(self, fpr: float) -> float:
        """The share of canaries that are found where at most ``fpr`` of the others are mistaken for one."""
        allowed = math.floor(fpr * len(self._out))
        threshold = self._out[-allowed - 1] if allowed < len(self._out) else -math.inf
        return float((self._in > threshold).mean())

    def max_accuracy(self) -> float:
        """The best balanced accuracy over all thresholds: an estimate."""
        thresholds = np.unique(np.concatenate([self._in, self._out]))
        errors = [self.errors(float(t)) for t in thresholds]
        return 1 - min((e.false_positives / e.outs + e.false_negatives / e.ins) / 2 for e in errors)


def _check(delta: float) -> None:
    if not 0 <= delta < 1:
        raise ValueError(_EPSILON_DELTA.format(delta))
