"""Laws that hold for every sequence of charges, and a cost per charge that does not grow."""

from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

from tacit.privacy import Budget, BudgetExceeded, Ledger, Receipt, events

BUDGET = Budget(1.0, 1e-6)
QUIET = settings(derandomize=True, deadline=None, max_examples=25, database=None)

noises = st.sampled_from([8.0, 12.5, 20.0, 33.0, 77.0])
steps = st.integers(1, 6)
charges = st.tuples(st.just("charge"), noises, steps)
settlements = st.tuples(st.just("settle"), st.integers(0, 5), st.integers(0, 6))


def exact(noise: float, times: int) -> Fraction:
    return times / Fraction(noise) ** 2


@QUIET
@given(st.lists(charges | settlements, max_size=14))
def test_any_sequence_stays_within_the_budget_and_verifies(sequence: list[tuple[str, Any, int]]) -> None:
    """The ledger against a model in exact fractions: it accepts what fits, and holds what was not returned."""
    with Ledger("sqlite://") as ledger:
        cap = Fraction(ledger.subject("s", budget=BUDGET).terms.cap)
        spent, written = Fraction(0), 1
        open_: list[tuple[Receipt, float, int]] = []
        for kind, first, times in sequence:
            if kind == "charge":
                after = spent + exact(first, times)
                try:
                    open_.append((ledger.charge("s", events.gaussian(first, times), stage="x"), first, times))
                    assert after <= cap * (1 + Fraction(2, 10**12))
                    spent, written = after, written + 1
                except BudgetExceeded:
                    assert after > cap
            elif open_:
                receipt, noise, reserved = open_.pop(first % len(open_))
                used = min(times, reserved)
                ledger.settle(receipt, used)
                spent, written = spent - exact(noise, reserved - used), written + 1
        guarantee = ledger.spent("s")
        assert guarantee.mu == pytest.approx(float(spent) ** 0.5, rel=1e-9, abs=1e-14)
        assert guarantee.epsilon <= BUDGET.epsilon
        assert ledger.verify() == written


@QUIET
@given(st.lists(st.tuples(noises, steps), min_size=2, max_size=6), st.randoms(use_true_random=False))
@pytest.mark.parametrize("mode", ["gaussian", "renyi"])
def test_the_order_of_charges_does_not_matter(mode: str, parts: list[tuple[float, int]], order: Any) -> None:
    with Ledger("sqlite://") as ledger:
        for name in ("one", "other"):
            ledger.subject(name, budget=Budget(20.0, 1e-6), mode=mode)
            for noise, times in parts:
                ledger.charge(name, events.gaussian(noise, times), stage="x")
            order.shuffle(parts)
        assert ledger.spent("one") == ledger.spent("other")


@QUIET
@given(st.lists(st.tuples(noises, steps), min_size=1, max_size=6))
@pytest.mark.parametrize("mode", ["gaussian", "renyi", "pure"])
def test_more_never_costs_less(mode: str, parts: list[tuple[float, int]]) -> None:
    kind = events.laplace if mode == "pure" else events.gaussian
    with Ledger("sqlite://") as ledger:
        ledger.subject("s", budget=Budget(20.0, 0.0 if mode == "pure" else 1e-6), mode=mode)
        seen = [(ledger.spent("s").epsilon, ledger.total().epsilon, -ledger.remaining("s").epsilon)]
        for noise, times in parts:
            ledger.charge("s", kind(noise, times), stage="x")
            seen.append((ledger.spent("s").epsilon, ledger.total().epsilon, -ledger.remaining("s").epsilon))
        for before, after in pairwise(seen):
            assert all(x <= y for x, y in zip(before, after, strict=True))


def work_of(ledger: Ledger, charge: Callable[[], object]) -> tuple[Counter[str], int]:
    """The statements of one charge, and the rows that it reads."""
    seen: list[tuple[str, Any]] = []

    def note(_conn: Any, _cursor: Any, statement: str, parameters: Any, _context: Any, _many: bool) -> None:
        seen.append((statement, parameters))

    sa.event.listen(ledger._book._engine, "before_cursor_execute", note)
    charge()
    sa.event.remove(ledger._book._engine, "before_cursor_execute", note)
    rows = 0
    with ledger._book._engine.connect() as connection:
        for statement, parameters in seen:
            if statement.startswith("SELECT"):
                assert "SCAN" not in explain(connection, statement, parameters)
                rows += len(connection.exec_driver_sql(statement, parameters).all())
    return Counter(statement for statement, _ in seen), rows


def explain(connection: sa.Connection, statement: str, parameters: Any) -> str:
    return str(connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters).all())


@pytest.mark.parametrize("mode", ["gaussian", "renyi", "plan"])
def test_a_charge_reads_as_much_at_a_thousand_entries_as_at_ten(mode: str) -> None:
    event = events.gaussian(1000.0)
    with Ledger("sqlite://") as ledger:
        if mode == "plan":
            ledger.subject("s", budget=BUDGET, plan=[event] * 1100)
        else:
            ledger.subject("s", budget=BUDGET, mode=mode)
        seen = []
        for entries in (10, 1000):
            while int(ledger.head.split(":")[0]) < entries:
                for _ in range(min(50, entries - int(ledger.head.split(":")[0]))):
                    ledger.charge("s", event, stage="x")
            seen.append(work_of(ledger, lambda: ledger.charge("s", event, stage="x")))
        assert seen[0] == seen[1]
        assert seen[0][1] <= 8
        assert ledger.verify() == 1001
