"""The bounds against brute force and closed forms."""

import math

import numpy as np
import pytest
from scipy import stats

from tacit.audit import CanaryScoreAuditor
from tacit.audit._bounds import (
    Errors,
    epsilon_lower,
    fdp_rejects,
    mu_lower,
    one_run_epsilon,
    one_run_mu,
    one_run_p_value,
    upper_rate,
)


@pytest.mark.parametrize(("count", "trials"), [(0, 10), (3, 10), (10, 10), (70, 1000)])
def test_a_rate_above_the_bound_shows_so_few_with_exactly_the_significance(count: int, trials: int) -> None:
    bound = upper_rate(count, trials, 1e-3)
    if count == trials:
        assert bound == 1
    else:
        assert stats.binom.cdf(count, trials, bound) == pytest.approx(1e-3, rel=1e-6)


def test_mu_of_the_errors_of_a_gaussian_is_its_mu() -> None:
    for mu in (0.5, 1.0, 3.0):
        for threshold in (-1.0, 0.3, 2.0):
            assert mu_lower(stats.norm.sf(threshold), stats.norm.cdf(threshold - mu)) == pytest.approx(mu)
    assert mu_lower(0.6, 0.6) == 0


def test_epsilon_of_the_errors_of_randomized_response_is_its_epsilon() -> None:
    wrong = 1 / (1 + math.e**2)
    assert epsilon_lower(wrong, wrong, 0.0) == pytest.approx(2.0)
    assert epsilon_lower(0.01, 0.3, 0.1) == pytest.approx(math.log(0.6 / 0.01))
    assert epsilon_lower(0.3, 0.01, 0.1) == pytest.approx(math.log(0.6 / 0.01))


def test_errors_are_out_of_all_trials() -> None:
    with pytest.raises(ValueError, match="Errors are counted"):
        Errors(false_positives=3, outs=2, false_negatives=0, ins=1)


def test_one_run_without_delta_is_the_tail_of_the_binomial() -> None:
    for epsilon in (0.0, 1.0, 3.0):
        right = math.exp(epsilon) / (1 + math.exp(epsilon))
        expected = sum(math.comb(20, k) * right**k * (1 - right) ** (20 - k) for k in range(18, 21))
        assert one_run_p_value(100, 20, 18, epsilon, 0.0) == pytest.approx(expected)


def test_one_run_adds_what_delta_may_do() -> None:
    """Theorem 5.2 by brute force over i."""
    right, m, r, v, delta = 1 / (1 + math.exp(-1)), 50, 30, 24, 1e-4
    law = [math.comb(r, k) * right**k * (1 - right) ** (r - k) for k in range(r + 1)]
    extra = max(2 / i * sum(law[v - i : v]) for i in range(1, v + 1))
    assert one_run_p_value(m, r, v, 1.0, delta) == pytest.approx(sum(law[v:]) + m * delta * extra)


def test_the_bound_of_one_run_is_where_the_p_value_crosses() -> None:
    found = one_run_epsilon(1000, 200, 190, 0.0, 1e-3)
    assert one_run_p_value(1000, 200, 190, found, 0.0) == pytest.approx(1e-3, rel=1e-3)
    assert one_run_epsilon(1000, 200, 100, 0.0, 1e-3) == 0


def test_fdp_never_rejects_the_truth_and_is_tighter_than_epsilon() -> None:
    """400 runs of 500 canaries at significance 1e-3: more than 9 rejections have a probability below 1e-7."""
    chance, rejected, m = np.random.default_rng(0), 0, 500
    for _ in range(400):
        coins = chance.integers(0, 2, m).astype(bool)
        scores = chance.normal(1.5 * coins, 1.0)
        rejected += fdp_rejects(*CanaryScoreAuditor(scores[coins], scores[~coins]).guesses(0.2), 1.5, 1e-3)
    assert rejected <= 9
    assert one_run_mu(5000, 1000, 1000, 1e-6) > one_run_mu(5000, 1000, 900, 1e-6) > 0.2


def test_fdp_of_all_guesses_is_no_looser_than_hoeffding_allows() -> None:
    """Without abstention, at most 2 Phi(mu/2) - 1 of advantage: what is rejected lies below what was planted."""
    coins = np.random.default_rng(1).integers(0, 2, 4000).astype(bool)
    scores = np.random.default_rng(2).normal(3.0 * coins, 1.0)
    found = one_run_mu(*CanaryScoreAuditor(scores[coins], scores[~coins]).guesses(1.0), 1e-6)
    assert 0.3 < found < 3.0


class TestCanaryScoreAuditor:
    @pytest.fixture
    def auditor(self) -> CanaryScoreAuditor:
        chance = np.random.default_rng(3)
        return CanaryScoreAuditor(chance.normal(1.0, 1.0, 50_000), chance.normal(0.0, 1.0, 50_000))

    def test_area_under_the_curve(self, auditor: CanaryScoreAuditor) -> None:
        assert auditor.attack_auroc() == pytest.approx(stats.norm.cdf(1 / math.sqrt(2)), abs=0.01)
        assert CanaryScoreAuditor([1, 1], [1, 1]).attack_auroc() == 0.5

    def test_found_at_a_false_positive_rate(self, auditor: CanaryScoreAuditor) -> None:
        assert auditor.tpr_at_given_fpr(0.01) == pytest.approx(stats.norm.sf(stats.norm.isf(0.01) - 1), abs=0.02)
        assert CanaryScoreAuditor([3, 1], [2, 0]).tpr_at_given_fpr(0.0) == 0.5
        assert CanaryScoreAuditor([3, 1], [2, 0]).tpr_at_given_fpr(1.0) == 1.0

    def test_bounds_lie_below_the_truth_and_near_it(self, auditor: CanaryScoreAuditor) -> None:
        assert 0.9 < auditor.mu_from_gdp(1e-6, threshold=0.5) <= 1.0
        assert auditor.epsilon_clopper_pearson(1e-6, 1e-5, threshold=1.5) < 4.38
        assert auditor.epsilon_from_gdp(1e-6, 1e-5, threshold=0.5) <= 4.38
        assert auditor.epsilon_raw_counts() > auditor.epsilon_clopper_pearson(1e-6, threshold=1.5) > 0.5
        assert 0.1 < auditor.mu_one_run_fdp(1e-6) < 1.0
        assert auditor.epsilon_one_run(0.05, 1e-9) < auditor.epsilon_one_run_fdp(0.05, 1e-9)
        assert auditor.max_accuracy() == pytest.approx(stats.norm.cdf(0.5), abs=0.01)

    def test_equal_scores_tell_nothing(self) -> None:
        """Ties are broken without the labels: guesses of equal scores are right half of the time (6 sigma)."""
        right = sum(CanaryScoreAuditor(np.zeros(100), np.zeros(100)).guesses(0.5)[2] for _ in range(100))
        assert abs(right - 5000) < 6 * math.sqrt(10_000 / 4)

    def test_nonsense_is_refused(self) -> None:
        with pytest.raises(ValueError, match="no scores"):
            CanaryScoreAuditor([], [1.0])
        with pytest.raises(ValueError, match="not a number"):
            CanaryScoreAuditor([math.nan], [1.0])
        with pytest.raises(ValueError, match="share"):
            CanaryScoreAuditor([1.0], [1.0]).guesses(0.0)
