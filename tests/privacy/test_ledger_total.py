"""What one person may lose over all subjects."""

import math
from itertools import chain, combinations

import pytest
from scipy.stats import norm

from tacit.privacy import Budget, Ledger, epsilon_of, events, mu_of
from tacit.privacy._totals import overlapping

BUDGET = Budget(2.0, 1e-6)


def test_an_empty_ledger_promises_everything(ledger: Ledger) -> None:
    assert ledger.total().epsilon == 0
    assert ledger.total().private


def test_subjects_add_up_as_one_mu(ledger: Ledger) -> None:
    for name, noise in {"a": 8.0, "b": 12.0}.items():
        ledger.subject(name, budget=BUDGET)
        ledger.charge(name, events.gaussian(noise), stage="x")
    total, mu = ledger.total(), math.hypot(1 / 8, 1 / 12)
    assert total.mu == pytest.approx(mu, rel=1e-12)
    delta = norm.cdf(mu / 2 - total.epsilon / mu) - math.exp(total.epsilon) * norm.cdf(-mu / 2 - total.epsilon / mu)
    assert delta == pytest.approx(1e-6, rel=1e-7)
    assert "subjects a, b" in str(total)


def test_disjoint_subjects_cost_the_worst_of_them(ledger: Ledger) -> None:
    ledger.subject("a", budget=BUDGET)
    ledger.subject("b", budget=BUDGET, disjoint_from=["a"])
    ledger.subject("c", budget=BUDGET, disjoint_from=["b", "a"])
    for name, noise in {"a": 8.0, "b": 4.0, "c": 6.0}.items():
        ledger.charge(name, events.gaussian(noise), stage="x")
    assert ledger.total().mu == pytest.approx(1 / 4, rel=1e-12)


def test_a_person_is_in_subjects_no_two_of_which_are_disjoint(ledger: Ledger) -> None:
    """a and b overlap with c, not with each other: the total is the worse of {a, c} and {b, c}."""
    ledger.subject("a", budget=BUDGET)
    ledger.subject("b", budget=BUDGET, disjoint_from=["a"])
    ledger.subject("c", budget=BUDGET)
    for name, noise in {"a": 8.0, "b": 5.0, "c": 9.0}.items():
        ledger.charge(name, events.gaussian(noise), stage="x")
    assert ledger.total().mu == pytest.approx(math.hypot(1 / 5, 1 / 9), rel=1e-12)


def test_maximal_sets_are_those_of_brute_force() -> None:
    edges = {"c": ["a"], "d": ["b", "c"], "e": ["a", "d"], "f": ["b"]}
    with Ledger("sqlite://") as ledger:
        for name in "abcdef":
            ledger.subject(name, budget=BUDGET, disjoint_from=edges.get(name, ()))
        found = {frozenset(s.name for s in group) for group in overlapping(ledger.subjects())}
    apart = {frozenset((name, other)) for name, others in edges.items() for other in others}
    subsets = map(frozenset, chain.from_iterable(combinations("abcdef", size) for size in range(1, 7)))
    possible = [s for s in subsets if not any(frozenset(pair) in apart for pair in combinations(s, 2))]
    assert found == {s for s in possible if not any(s < other for other in possible)}


def test_very_many_sets_are_composed_at_once(ledger: Ledger) -> None:
    """Twelve pairs of disjoint subjects are 4,096 sets: everything together is a bound that takes no time."""
    for i in range(12):
        ledger.subject(f"{i}-a", budget=BUDGET)
        ledger.subject(f"{i}-b", budget=BUDGET, disjoint_from=[f"{i}-a"])
    ledger.charge("3-a", events.gaussian(8.0), stage="x")
    ledger.charge("3-b", events.gaussian(8.0), stage="x")
    assert ledger.total().mu == pytest.approx(math.sqrt(2) / 8, rel=1e-12)


def test_mixed_modes_cost_at_least_what_every_subject_does(ledger: Ledger) -> None:
    sampled = events.poisson(0.02, events.gaussian(1.2), 50)
    ledger.subject("gaussian", budget=BUDGET)
    ledger.subject("renyi", budget=BUDGET, mode="renyi", order=16.0, neighbours="zero-out")
    ledger.subject("plan", budget=Budget(2.0, 1e-5), plan=[sampled], unit="patient")
    ledger.subject("pure", budget=Budget(1.0, 0.0), neighbours="replace-one")
    for name, event in {
        "gaussian": events.gaussian(10.0),
        "renyi": events.gaussian(15.0),
        "plan": sampled,
        "pure": events.laplace(20.0),
    }.items():
        before = ledger.total()
        ledger.charge(name, event, stage="x")
        total = ledger.total()
        assert total.epsilon >= before.epsilon
        assert total.delta == 1e-6
        for subject in ledger.subjects():
            spent = ledger.spent(subject)
            assert total.delta <= spent.delta or spent.delta == 0
            assert total.epsilon >= spent.epsilon
    assert total.neighbours is None
    assert "each under its own relation" in str(total)
    # never more than the plain sum at a third of delta each (a pure subject needs none)
    third = 1e-6 / 3
    renyi = 16 / 2 / 15**2 + math.log1p(-1 / 16) - math.log(third * 16) / 15
    plan = ledger.subjects()[1].planned_guarantee(third).epsilon
    assert total.epsilon <= epsilon_of(1 / 10, third) + renyi + plan + 2 / 20 + 1e-9


def test_gaussian_and_pure_subjects_take_the_better_of_two_bounds(ledger: Ledger) -> None:
    ledger.subject("g", budget=BUDGET)
    ledger.subject("p", budget=Budget(1.0, 0.0))
    ledger.charge("g", events.gaussian(10.0), stage="x")
    ledger.charge("p", events.laplace(2.0), stage="x")
    dominating = 2 * norm.ppf(1 / (1 + math.exp(-1 / 2)))
    expected = min(epsilon_of(math.hypot(1 / 10, dominating), 1e-6), epsilon_of(1 / 10, 1e-6) + 1 / 2)
    assert ledger.total().epsilon == pytest.approx(expected, rel=1e-9)


def test_pure_subjects_add_up_without_any_delta(ledger: Ledger) -> None:
    for name in "ab":
        ledger.subject(name, budget=Budget(1.0, 0.0))
        ledger.charge(name, events.laplace(4.0), stage="x")
    assert (ledger.total().epsilon, ledger.total().delta) == (pytest.approx(0.5, rel=1e-12), 0)


def test_a_delta_can_be_asked_for(ledger: Ledger) -> None:
    ledger.subject("s", budget=BUDGET, mode="renyi")
    ledger.charge("s", events.gaussian(8.0), stage="x")
    assert ledger.total(1e-9).epsilon > ledger.total().epsilon > ledger.total(1e-4).epsilon
    for delta in (0.0, 1.0, -1.0):
        with pytest.raises(ValueError, match=r"(?i)delta"):
            ledger.total(delta)


def test_a_seeded_subject_marks_the_total_even_where_it_is_not_the_worst(ledger: Ledger) -> None:
    ledger.subject("a", budget=BUDGET)
    ledger.subject("b", budget=BUDGET, disjoint_from=["a"])
    ledger.charge("a", events.gaussian(5.0), stage="x")
    ledger.charge("b", events.gaussian(50.0), stage="x", seed=1)
    assert str(ledger.total()).startswith("seeded: not private")


def test_what_the_budgets_promise_is_never_below_what_was_spent(ledger_url: str) -> None:
    with Ledger(ledger_url) as ledger:
        ledger.subject("a", Budget(1.0, 1e-6))
        ledger.subject("b", Budget(2.0, 1e-6), neighbours="replace-one")
        ledger.charge("a", events.gaussian(50.0), stage="test")
        spent, promised = ledger.total(), ledger.total(promised=True)
        assert spent.mu == pytest.approx(1 / 50)
        assert promised.mu == pytest.approx(math.hypot(mu_of(1.0, 1e-6), mu_of(2.0, 1e-6)), rel=1e-9)
        assert "their budgets together hold" in str(spent)


@pytest.mark.parametrize("apart", [[], ["a"]])
def test_a_total_over_several_units_lists_them_all(ledger: Ledger, apart: list[str]) -> None:
    """Also where the subjects are disjoint and the worst of them is of one unit."""
    ledger.subject("a", BUDGET, unit="sample")
    ledger.subject("b", BUDGET, unit="patient", neighbours="zero-out", disjoint_from=apart)
    ledger.charge("a", events.gaussian(8.0), stage="x")
    ledger.charge("b", events.gaussian(9.0), stage="x")
    total = ledger.total()
    assert total.unit == "patient or sample"
    assert total.neighbours is None
    assert "(a: one sample, b: one patient)" in str(total)
    assert total.mu == pytest.approx(1 / 8 if apart else math.hypot(1 / 8, 1 / 9), rel=1e-12)


def test_disjoint_under_replace_one_says_what_it_rests_on(ledger: Ledger) -> None:
    ledger.subject("a", BUDGET)
    ledger.subject("b", BUDGET, disjoint_from=["a"])
    ledger.charge("a", events.gaussian(8.0), stage="x")
    assert "does not depend on the replaced values" not in str(ledger.total())
    ledger.subject("c", BUDGET, neighbours="replace-one", disjoint_from=["a"])
    assert "c and a count as disjoint: under replace-one that holds only if" in str(ledger.total())
    assert "b and a" not in str(ledger.total())
