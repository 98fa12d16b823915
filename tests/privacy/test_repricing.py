"""A ledger of an earlier version, whose prices were others: what was too low counts at today's price, and is named."""

import math
from collections.abc import Callable

import pytest
from dp_accounting import dp_event

from tacit.privacy import (
    Budget,
    BudgetExceeded,
    Ledger,
    LedgerDamaged,
    Neighbours,
    PricedTooLow,
    Receipt,
    _repricing,
    events,
)
from tacit.privacy import _book as book_module
from tacit.privacy._filters import Terms, from_units

ORDER, XI, RHO = 10.0, 0.05, 0.01
EVENT = dp_event.ZCDpEvent(xi=XI, rho=RHO)
OLD = 2 * XI + 4 * RHO * ORDER  # two steps of xi each
TODAY = XI * (1 + 2 * ORDER / (2 * ORDER - 1)) + 4 * RHO * ORDER  # Bun & Steinke 2016, lemma 5.2
BUDGET = Budget(5.0, 1e-6)


def epsilon_of(divergence: float) -> float:
    """Canonne, Kamath & Steinke 2020, proposition 12."""
    return divergence + math.log1p(-1 / ORDER) - math.log(BUDGET.delta * ORDER) / (ORDER - 1)


Charge = Callable[..., Receipt]


@pytest.fixture
def earlier(monkeypatch: pytest.MonkeyPatch) -> Charge:
    """Charge as an earlier version did, at its own price and without a word on the version of the prices."""

    def charge(ledger: Ledger, price: float, event: dp_event.DpEvent = EVENT, prices: int | None = None) -> Receipt:
        with monkeypatch.context() as then, Ledger(ledger.url) as old:
            then.setattr(Terms, "cost", lambda *_: price)
            then.setattr(book_module, "PRICES", prices)
            receipt = old.charge("clinic", event, stage="old")
        _repricing._price.cache_clear()
        return receipt

    return charge


def opened(url: str, budget: Budget = BUDGET) -> Ledger:
    ledger = Ledger(url)
    ledger.subject("clinic", budget, neighbours=Neighbours.REPLACE_ONE, mode="renyi", order=ORDER)
    return ledger


def test_an_old_price_that_was_too_low_is_named_and_not_called_tampering(sqlite_url: str, earlier: Charge) -> None:
    ledger = opened(sqlite_url)
    earlier(ledger, OLD)
    earlier(ledger, OLD)
    ledger.charge("clinic", EVENT, stage="new")
    with pytest.warns(PricedTooLow, match=r"Entry 2 on clinic was priced by an earlier version.*Entry 3 on clinic"):
        assert ledger.verify() == 4
    low = ledger.underpriced()
    assert [each.seq for each in low] == [2, 3]
    assert [each.missing for each in low] == pytest.approx([TODAY - OLD] * 2)
    ledger.close()
    for again in (ledger, Ledger(sqlite_url)):  # one that has read the rows before, and one that has not
        for found in (again.spent("clinic"), again.total()):
            assert found.epsilon == pytest.approx(epsilon_of(3 * TODAY), rel=1e-9)
            assert "2 charge(s) on clinic were priced too low by an earlier version" in " ".join(found.notes)
    assert from_units(ledger.subjects()[0].spent) == pytest.approx(2 * OLD + TODAY)  # the record stays


def test_an_old_price_above_todays_is_fine_and_counts(
    sqlite_url: str, earlier: Charge, recwarn: pytest.WarningsRecorder
) -> None:
    ledger = opened(sqlite_url)
    earlier(ledger, 2 * TODAY)
    assert ledger.verify() == 2
    assert ledger.underpriced() == []
    assert not recwarn.list
    assert ledger.spent("clinic").epsilon == pytest.approx(epsilon_of(2 * TODAY), rel=1e-9)


@pytest.mark.parametrize("price", [OLD, 2 * TODAY])
def test_this_versions_own_charges_have_this_versions_price(sqlite_url: str, earlier: Charge, price: float) -> None:
    """Whoever edits a price and chains everything again is found where the entry says which prices it had."""
    ledger = opened(sqlite_url)
    earlier(ledger, price, prices=book_module.PRICES)
    with pytest.raises(LedgerDamaged, match="another price"):
        ledger.verify()


def test_what_was_charged_too_low_leaves_less(sqlite_url: str, earlier: Charge) -> None:
    fits = Budget(epsilon_of(2 * OLD + TODAY) * (1 + 1e-9), BUDGET.delta)
    ledger = opened(sqlite_url, fits)
    earlier(ledger, OLD)
    earlier(ledger, OLD)
    left = ledger.remaining("clinic").mu
    assert left is not None
    assert left**2 * ORDER / 2 == pytest.approx(2 * OLD + TODAY - 2 * TODAY, rel=1e-6)
    with pytest.raises(BudgetExceeded):  # it would fit at the recorded prices
        ledger.charge("clinic", EVENT, stage="new")
    assert ledger.spent("clinic").epsilon == pytest.approx(epsilon_of(2 * TODAY), rel=1e-9)


def test_one_that_fits_at_todays_prices_is_charged(sqlite_url: str, earlier: Charge) -> None:
    ledger = opened(sqlite_url, Budget(epsilon_of(3 * TODAY) * (1 + 1e-9), BUDGET.delta))
    earlier(ledger, OLD)
    earlier(ledger, OLD)
    ledger.charge("clinic", EVENT, stage="new")
    assert ledger.spent("clinic").epsilon == pytest.approx(epsilon_of(3 * TODAY), rel=1e-9)


def test_what_passed_the_cap_already_is_said(sqlite_url: str, earlier: Charge) -> None:
    budget = Budget(epsilon_of(2 * OLD) * (1 + 1e-9), BUDGET.delta)
    ledger = opened(sqlite_url, budget)
    earlier(ledger, OLD)
    earlier(ledger, OLD)
    assert ledger.spent("clinic", promised=True).epsilon > budget.epsilon


def test_nothing_is_missing_from_a_charge_on_which_nothing_was_released(sqlite_url: str, earlier: Charge) -> None:
    ledger = Ledger(sqlite_url)
    ledger.subject("clinic", Budget(1.0, 1e-6))
    unused, used = (earlier(ledger, 1e-4, events.gaussian(50.0)) for _ in range(2))
    ledger.settle(unused, 0)
    ledger.settle(used, 1)
    mu = ledger.spent("clinic").mu
    assert mu is not None
    assert mu**2 == pytest.approx(50.0**-2)


PINNED = [  # what an event costs in version 1 of the prices: a change raises PRICES together with this table
    ("gaussian", None, "add-remove", events.gaussian(4.0, steps=3), 3 / 16),
    ("gaussian", None, "replace-one", events.gaussian(4.0), 4 / 16),
    ("gaussian", None, "zero-out", events.gaussian(4.0), 1 / 16),
    ("renyi", 20.0, "add-remove", events.gaussian(4.0), 20 / 32),
    ("renyi", 20.0, "replace-one", events.gaussian(4.0), 4 * 20 / 32),
    ("renyi", 20.0, "replace-one", EVENT, XI * (1 + 40 / 39) + 4 * RHO * 20),
    ("pure", None, "add-remove", events.laplace(5.0), 0.2),
    ("pure", None, "replace-one", events.laplace(5.0), 0.4),
]


@pytest.mark.parametrize(("mode", "order", "relation", "event", "price"), PINNED)
def test_prices_change_with_their_version(
    mode: str, order: float | None, relation: str, event: dp_event.DpEvent, price: float
) -> None:
    assert book_module.PRICES == 1
    budget = Budget(50.0, 0.0 if mode == "pure" else 1e-6)
    subject = Ledger("sqlite://").subject("s", budget, neighbours=relation, mode=mode, order=order)
    assert subject.terms.cost(event) == pytest.approx(price, rel=1e-12)
