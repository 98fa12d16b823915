"""Any event tree at all, through a real ledger: it costs no less than nothing, or is refused and not written."""

import math
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from dp_accounting import dp_event
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tacit.privacy import Budget, BudgetExceeded, Ledger, UnsupportedEvent, events
from tacit.privacy._filters import from_units
from tacit.privacy.events import DpEvent

FUZZ = settings(
    derandomize=True,
    deadline=None,
    max_examples=100,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

extreme: list[Any] = [0.0, -0.0, -0.1, -5.0, 1.5, 5e-324, 1e-101, 1e-99, 1e160, 1e308, math.nan, math.inf, -math.inf]
strange: list[Any] = [None, "1", True, 10**400, 1j]
numbers = st.one_of(
    st.floats(0.5, 100.0), st.floats(0.0, 1.0), st.floats(), st.sampled_from(extreme), st.sampled_from(strange)
)
wholes = st.one_of(st.integers(1, 6), st.integers(-3, 9), st.sampled_from([2.5, math.nan, True, "2", 2**40]))

LEAVES = st.one_of(
    st.builds(dp_event.GaussianDpEvent, numbers),
    st.builds(dp_event.LaplaceDpEvent, numbers),
    st.builds(dp_event.DiscreteLaplaceDpEvent, numbers, wholes),
    st.builds(dp_event.RandomizedResponseDpEvent, numbers, wholes),
    st.builds(dp_event.ZCDpEvent, numbers, numbers),
    st.builds(events.NoisyMaxDpEvent, numbers),
    st.builds(events.BallsInBinsDpEvent, numbers, wholes, wholes),
    st.builds(
        events.StreamDpEvent, numbers, wholes, st.sampled_from(["independent", "bandit"]), wholes, wholes, wholes
    ),
    st.just(dp_event.NoOpDpEvent()),
    st.just(dp_event.NonPrivateDpEvent()),
)


def branches(inner: st.SearchStrategy[DpEvent]) -> st.SearchStrategy[DpEvent]:
    few = st.one_of(st.integers(1, 5), st.integers(-2, 3), st.sampled_from([2.5, math.nan, True, "2"]))
    return st.one_of(
        st.builds(dp_event.SelfComposedDpEvent, inner, few),
        st.builds(dp_event.ComposedDpEvent, st.lists(inner, max_size=3)),
        st.builds(dp_event.PoissonSampledDpEvent, numbers, inner),
        st.builds(dp_event.SampledWithoutReplacementDpEvent, wholes, wholes, inner),
        st.builds(dp_event.RepeatAndSelectDpEvent, inner, numbers, numbers),
    )


TREES = st.recursive(LEAVES, branches, max_leaves=5)
SUBJECTS: dict[str, dict[str, Any]] = {
    "gaussian": {"budget": Budget(50.0, 1e-6)},
    "gaussian replace": {"budget": Budget(50.0, 1e-6), "neighbours": "replace-one"},
    "renyi": {"budget": Budget(50.0, 1e-6), "mode": "renyi", "order": 8.0},
    "renyi replace": {"budget": Budget(50.0, 1e-6), "mode": "renyi", "order": 8.0, "neighbours": "replace-one"},
    "pure": {"budget": Budget(50.0, 0.0)},
    "pure zero-out": {"budget": Budget(50.0, 0.0), "neighbours": "zero-out"},
    "open": {"budget": Budget(math.inf, 1e-6)},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@FUZZ
@given(st.lists(TREES, min_size=1, max_size=4))
@pytest.mark.parametrize("name", SUBJECTS)
def test_a_charge_costs_something_or_is_refused_and_leaves_no_trace(
    folder: Path, name: str, trees: list[DpEvent]
) -> None:
    book = Ledger(folder / f"{uuid4().hex}.db")
    book.subject(name, **SUBJECTS[name])
    for event in trees:
        before, head = spent(book, name), book.head
        try:
            receipt = book.charge(name, event, stage="fuzz")
        except (ValueError, BudgetExceeded):  # UnsupportedEvent is a ValueError
            assert book.head == head
            assert spent(book, name) == before
            continue
        cost = book.entries(name)[-1].body["cost"]
        assert cost is None or cost >= 0
        assert spent(book, name) >= before
        book.settle(receipt, receipt.releases)  # all of it was made: nothing comes back
        assert spent(book, name) >= before
        refunds = [entry.body["refund"] for entry in book.entries(name) if entry.kind == "settle"]
        assert all(refund == 0 for refund in refunds)
        assert book.verify() == len(book.entries())
    book.close()


def spent(ledger: Ledger, name: str) -> float:
    return from_units(next(s for s in ledger.subjects() if s.name == name).spent)


@pytest.mark.parametrize(
    "event",
    [
        dp_event.PoissonSampledDpEvent(0.9, dp_event.LaplaceDpEvent(-0.1)),
        dp_event.DiscreteLaplaceDpEvent(-5.0, 1),
        dp_event.DiscreteLaplaceDpEvent(1.0, -5),
        dp_event.RandomizedResponseDpEvent(1.5, 2),
        dp_event.ZCDpEvent(0.0, -1.0),
        dp_event.LaplaceDpEvent(-1.0),
        dp_event.GaussianDpEvent(math.inf),
    ],
    ids=repr,
)
@pytest.mark.parametrize("name", ["pure", "renyi", "gaussian replace", "renyi replace"])
def test_no_event_gives_budget_back(tmp_path: Path, name: str, event: DpEvent) -> None:
    with Ledger(tmp_path / "l.db") as ledger:
        ledger.subject(name, **SUBJECTS[name])
        ledger.charge(name, events.laplace(2.0), stage="x")
        before, head = ledger.spent(name), ledger.head
        with pytest.raises(ValueError, match="got"):
            ledger.charge(name, event, stage="x")
        assert (ledger.spent(name), ledger.head) == (before, head)


def test_a_price_below_zero_is_refused_whatever_formula_it_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tacit.privacy import accounting

    with Ledger(tmp_path / "l.db") as ledger:
        ledger.subject("s", Budget(9.0, 1e-6), mode="renyi", order=8.0)
        for price in (-1e-3, math.nan):
            monkeypatch.setattr(accounting, "renyi", lambda *_, price=price: [price])
            with pytest.raises(UnsupportedEvent, match="no release costs that"):
                ledger.charge("s", events.gaussian(10.0), stage="x")
        monkeypatch.setattr(accounting, "renyi", lambda *_: [1 / 0])
        with pytest.raises(UnsupportedEvent, match="beyond floating point"):
            ledger.charge("s", events.gaussian(10.0), stage="x")
        assert len(ledger.entries()) == 1
