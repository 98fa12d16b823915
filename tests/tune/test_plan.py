"""The split of a total, against the closed forms and the paper's own rows."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tacit.privacy import Budget, Neighbours, epsilon_of, mu_of
from tacit.tune import BudgetTooSmall, plan

ONE = Budget(1.0, 1e-5)


@pytest.mark.parametrize(
    ("first", "second", "final", "whole"),
    [(0.1, 0.2, 0.88, 0.9963), (0.05, 0.1, 0.96, 0.9917), (0.05, 0.2, 0.9, 0.9972), (0.01, 0.05, 0.99, 0.9973)],
)
def test_golden_compositions(first: float, second: float, final: float, whole: float) -> None:
    made = plan(ONE, 3, sweeps=(first, second), final=final, size=10**9, precision=0.1)  # scores that cost nothing
    assert made.guarantee.epsilon == pytest.approx(whole, abs=1e-4)
    by_hand = math.sqrt(3 * mu_of(first, 1e-5) ** 2 + 3 * mu_of(second, 1e-5) ** 2 + mu_of(final, 1e-5) ** 2)
    assert made.mu == pytest.approx(by_hand, rel=1e-9)


def test_the_papers_row_that_is_over_its_claim_is_refused() -> None:
    with pytest.raises(ValueError, match=r"1\.0050, above 1"):
        plan(ONE, 3, sweeps=(0.2, 0.3), final=0.7, size=10**9, precision=0.1)
    assert plan(ONE, 3, sweeps=(0.2, 0.3), size=10**9, precision=0.1).epsilon(plan(ONE).mu_final) <= 1


@settings(deadline=None, max_examples=200)
@given(
    st.floats(0.05, 20),
    st.sampled_from([1e-7, 1e-5, 1e-3]),
    st.integers(1, 8),
    st.lists(st.floats(0.005, 0.4), min_size=1, max_size=4, unique=True),
    st.one_of(st.none(), st.integers(100, 10**7)),
    st.sampled_from(list(Neighbours)),
)
def test_never_above_the_total(
    epsilon: float, delta: float, trials: int, shares: list[float], size: int | None, neighbours: Neighbours
) -> None:
    budget = Budget(epsilon, delta)
    try:
        made = plan(budget, trials, sweeps=sorted(shares), size=size, neighbours=neighbours)
    except ValueError:
        return
    scores = trials * len(shares) * made.mu_score**2
    whole = math.sqrt(trials * sum(mu**2 for mu in made.sweeps) + scores + made.mu_final**2)
    assert whole <= budget.mu
    assert epsilon_of(whole, delta) <= epsilon * (1 + 1e-12)
    assert made.guarantee.epsilon <= epsilon * (1 + 1e-12)
    assert made.mu_final > max(made.sweeps)


def test_scores_get_what_their_precision_needs_and_no_more_than_their_share() -> None:
    made = plan(ONE, 3, size=20_000)
    assert made.score_error == pytest.approx(1.0)  # a point
    assert made.mu_score == pytest.approx(1 / (0.01 * 20_000))
    short = plan(ONE, 3, size=2_000, scores=0.05)
    assert 6 * short.mu_score**2 == pytest.approx(0.05 * ONE.mu**2)
    assert short.score_error is not None
    assert short.score_error > 1
    assert plan(ONE, 3).score_error is None


def test_too_small_says_so_before_anything_is_spent() -> None:
    with pytest.raises(BudgetTooSmall, match=r"off by \d+ points.*Nothing is spent"):
        plan(Budget(0.01, 1e-5), size=2_000)


@pytest.mark.parametrize("sweeps", [(), (0.2, 0.1), (0.0, 0.1), (0.1, 1.0), (0.1, 0.1)])
def test_sweeps_rise(sweeps: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="rising shares"):
        plan(ONE, sweeps=sweeps)


def test_what_cannot_be_planned() -> None:
    with pytest.raises(ValueError, match="finite epsilon"):
        plan(Budget(math.inf, 1e-5))
    with pytest.raises(ValueError, match="finite epsilon"):
        plan(Budget(1.0, 0.0))
    with pytest.raises(ValueError, match="fewer or cheaper"):
        plan(ONE, 40, sweeps=(0.1, 0.2))
    with pytest.raises(ValueError, match="at least 1"):
        plan(ONE, 0)


def test_it_prints_as_a_table() -> None:
    told = str(plan(ONE, 3, size=20_000)).splitlines()
    assert told[0] == "A search within epsilon 1, delta 1e-05"
    assert len({len(line) for line in told[1:]}) == 1
    assert [line.split("  ")[0] for line in told[2:]] == [
        "sweep 1, 3 trials",
        "sweep 2, 3 trials",
        "scores, 6",
        "final run",
        "all together",
    ]
    shares = [share for _, _, _, share in plan(ONE, 3, size=20_000).rows()]
    assert sum(shares[:-1]) == pytest.approx(1)
