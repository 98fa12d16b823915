"""The ledger: what it charges, refuses, returns and reports, against closed forms and dp-accounting used directly."""

import copy
import dataclasses
import math
import os
import pickle
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from scipy.stats import norm

from tacit.privacy import (
    Budget,
    BudgetExceeded,
    Ledger,
    LedgerError,
    OtherTerms,
    Receipt,
    ReceiptError,
    UnsupportedEvent,
    events,
    grid_sum,
    mechanisms,
    mu_of,
)
from tacit.privacy._receipts import consume

BUDGET = Budget(1.0, 1e-6)


def gaussian_delta(epsilon: float, mu: float) -> float:
    """Balle & Wang 2018, theorem 8, as it stands there."""
    return float(norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu))


def release(receipt: Receipt, kind: type = dp_event.GaussianDpEvent) -> None:
    consume(receipt, kind, 1.0)


def rows(ledger: Ledger) -> list[tuple[str, str]]:
    return [(entry.kind, entry.subject) for entry in ledger.entries()]


def test_a_charge_gives_a_live_receipt_and_is_written(ledger: Ledger) -> None:
    ledger.subject("clinic-a", budget=BUDGET, unit="patient", neighbours="replace-one")
    receipt = ledger.charge("clinic-a", events.gaussian(20.0), stage="calibrate", note="mean confidence", bound=2.0)
    assert receipt.live
    assert receipt.private
    assert (receipt.subject, receipt.stage, receipt.note, receipt.bound) == (
        "clinic-a",
        "calibrate",
        "mean confidence",
        2,
    )
    assert (receipt.unit, receipt.neighbours.value, receipt.mode) == ("patient", "replace-one", "gaussian")
    assert receipt.head == ledger.head
    assert rows(ledger) == [("subject", "clinic-a"), ("charge", "clinic-a")]
    assert ledger.entries("clinic-a")[-1].receipt == receipt.id
    assert ledger.entries("nobody") == []
    assert ledger.verify(receipt.head) == 2


def test_gaussian_mode_adds_squares_and_applies_the_relation(ledger: Ledger) -> None:
    for name, factor in {"add-remove": 1, "zero-out": 1, "replace-one": 2}.items():
        ledger.subject(name, budget=BUDGET, neighbours=name)
        ledger.charge(name, events.gaussian(20.0, 3), stage="a")
        ledger.charge(name, events.gaussian(30.0), stage="b")
        spent, mu = ledger.spent(name), factor * math.sqrt(3 / 20**2 + 1 / 30**2)
        assert spent.mu == pytest.approx(mu, rel=1e-12)
        assert gaussian_delta(spent.epsilon, mu) == pytest.approx(1e-6, rel=1e-7)
        assert "mode gaussian" in str(spent)


def test_a_pure_release_enters_the_gaussian_mode_by_its_dominating_mu(ledger: Ledger) -> None:
    ledger.subject("s", budget=BUDGET)
    ledger.charge("s", events.laplace(10.0), stage="query")
    ledger.charge("s", events.noisy_max(40.0), stage="choice")
    mu = math.hypot(*(2 * norm.ppf(1 / (1 + math.exp(-epsilon))) for epsilon in (1 / 10, 2 / 40)))
    assert ledger.spent("s").mu == pytest.approx(mu, rel=1e-9)


def test_renyi_mode_is_dp_accountings_rdp_at_the_fixed_order(ledger: Ledger) -> None:
    subject = ledger.subject("s", budget=Budget(3.0, 1e-6), mode="renyi", order=16.0)
    steps = [events.poisson(0.01, events.gaussian(1.5), 200), events.gaussian(20.0), events.laplace(30.0)]
    theirs = RdpAccountant([16.0])
    for event in steps:
        ledger.charge(subject, event, stage="train")
        theirs.compose(event)
    assert ledger.spent("s").epsilon == pytest.approx(theirs.get_epsilon(1e-6), rel=1e-9)
    assert "RDP at order 16" in str(ledger.spent("s"))


def test_plan_mode_is_dp_accountings_pld(ledger: Ledger) -> None:
    sampled, single = events.poisson(0.02, events.gaussian(1.2), 100), events.laplace(5.0)
    ledger.subject("s", budget=Budget(2.0, 1e-5), plan=[sampled, single, single])
    theirs = PLDAccountant()
    for event in (single, sampled):  # not in the plan's order
        ledger.charge("s", event, stage="train")
        theirs.compose(event)
    assert ledger.spent("s").epsilon == pytest.approx(theirs.get_epsilon(1e-5), rel=2e-3)
    assert ledger.remaining("s").planned == 1
    assert "mode plan" in str(ledger.spent("s"))


def test_pure_mode_adds_epsilons(ledger: Ledger) -> None:
    ledger.subject("s", budget=Budget(1.0, 0.0), neighbours="replace-one")
    ledger.charge("s", events.laplace(10.0, 2), stage="a")
    ledger.charge("s", events.noisy_max(20.0), stage="b")
    spent = ledger.spent("s")
    assert (spent.epsilon, spent.delta) == (pytest.approx(2 * 2 / 10 + 2 * 2 / 20, rel=1e-12), 0)
    assert ledger.remaining("s").epsilon == pytest.approx(0.4, rel=1e-12)
    assert str(ledger.remaining("s")) == "epsilon 0.4"


def test_too_much_is_refused_with_what_is_left_and_changes_nothing(ledger: Ledger) -> None:
    ledger.subject("s", budget=BUDGET, neighbours="replace-one")
    ledger.charge("s", events.gaussian(40.0), stage="a")
    before = (ledger.head, ledger.spent("s"), ledger.verify())
    with pytest.raises(BudgetExceeded, match="s cannot afford this") as refusal:
        ledger.charge("s", events.gaussian(1.0), stage="b")
    assert (ledger.head, ledger.spent("s"), ledger.verify()) == before
    left = refusal.value.remaining
    assert left == ledger.remaining("s")
    assert left is not None
    assert left.mu == pytest.approx(math.sqrt(mu_of(1.0, 1e-6) ** 2 - (2 / 40) ** 2), rel=1e-12)
    assert left.noise_multiplier == pytest.approx(2 / left.mu, rel=1e-12)
    assert gaussian_delta(left.epsilon, left.mu) == pytest.approx(1e-6, rel=1e-6)


@pytest.mark.parametrize("mode", ["gaussian", "renyi"])
def test_what_remains_can_be_spent_and_then_nothing_remains(ledger: Ledger, mode: str) -> None:
    ledger.subject("s", budget=BUDGET, mode=mode)
    ledger.charge("s", events.gaussian(9.0), stage="a")
    noise = ledger.remaining("s").noise_multiplier
    assert noise is not None
    with pytest.raises(BudgetExceeded):
        ledger.charge("s", events.gaussian(noise * (1 - 1e-9)), stage="b")
    ledger.charge("s", events.gaussian(noise * (1 + 1e-12)), stage="b")
    assert ledger.remaining("s").mu == pytest.approx(0, abs=1e-6)
    assert ledger.spent("s").epsilon <= 1.0
    assert ledger.spent("s").epsilon == pytest.approx(1.0, rel=1e-9)


@pytest.mark.parametrize("parts", [1, 3, 7, 10, 49])
@pytest.mark.parametrize("mode", ["gaussian", "renyi", "pure"])
def test_a_budget_in_equal_parts_pays_for_all_of_them_and_no_more(mode: str, parts: int) -> None:
    with Ledger("sqlite://") as ledger:
        budget = Budget(0.7, 0.0) if mode == "pure" else Budget(0.7, 1e-5)
        subject = ledger.subject("s", budget=budget, mode=mode, order=20.0 if mode == "renyi" else None)
        part = {
            "gaussian": lambda: events.gaussian(math.sqrt(parts) / mu_of(0.7, 1e-5)),
            "renyi": lambda: events.gaussian(math.sqrt(20.0 * parts / 2 / subject.terms.cap)),
            "pure": lambda: events.laplace(parts / 0.7),
        }[mode]()
        for _ in range(parts):
            ledger.charge("s", part, stage="part")
        with pytest.raises(BudgetExceeded):
            ledger.charge("s", part, stage="one more")
        assert ledger.spent("s").epsilon <= 0.7
        assert ledger.spent("s").epsilon == pytest.approx(0.7, rel=1e-9)
        assert ledger.verify() == 1 + parts


def test_the_renyi_cap_is_dp_accountings_epsilon(ledger: Ledger) -> None:
    subject = ledger.subject("s", budget=Budget(2.0, 1e-6), mode="renyi")
    noise = math.sqrt(subject.terms.order / 2 / subject.terms.cap)
    theirs = RdpAccountant([subject.terms.order]).compose(events.gaussian(noise))
    assert theirs.get_epsilon(1e-6) == pytest.approx(2.0, rel=1e-9)


@pytest.mark.parametrize(
    ("budget", "relation", "event", "sentence"),
    [
        (Budget(1.0, 0.0), "add-remove", events.gaussian(50.0), "no pure epsilon"),
        (
            BUDGET,
            "add-remove",
            events.poisson(0.01, events.gaussian(5.0)),
            "give the subject the renyi or the plan mode",
        ),
        (BUDGET, "add-remove", events.stream(50.0, 100), "replace-one or zero-out"),
    ],
)
def test_events_that_a_mode_cannot_bound_are_refused(
    ledger: Ledger, budget: Budget, relation: str, event: events.DpEvent, sentence: str
) -> None:
    ledger.subject("s", budget=budget, neighbours=relation)
    with pytest.raises(UnsupportedEvent, match=sentence):
        ledger.charge("s", event, stage="x")
    assert rows(ledger) == [("subject", "s")]


def test_a_stream_costs_one_release_where_the_relation_allows_it(ledger: Ledger) -> None:
    ledger.subject("s", budget=BUDGET, neighbours="zero-out")
    receipt = ledger.charge("s", events.stream(10.0, 500), stage="adapt")
    assert receipt.releases == 500
    assert ledger.spent("s").mu == pytest.approx(1 / 10, rel=1e-12)


def test_modes_orders_and_plans_must_match_the_budget(ledger: Ledger) -> None:
    with pytest.raises(ValueError, match="go together"):
        ledger.subject("s", budget=Budget(1.0, 0.0), mode="gaussian")
    with pytest.raises(ValueError, match="go together"):
        ledger.subject("s", budget=BUDGET, mode="pure")
    with pytest.raises(ValueError, match="needs an order"):
        ledger.subject("s", budget=BUDGET, order=4.0)
    with pytest.raises(ValueError, match="needs the plan"):
        ledger.subject("s", budget=BUDGET, mode="plan")
    with pytest.raises(ValueError, match="Unknown composition mode"):
        ledger.subject("s", budget=BUDGET, mode="magic")
    with pytest.raises(ValueError, match="choose a higher one"):
        ledger.subject("s", budget=BUDGET, mode="renyi", order=1.5)
    assert ledger.subjects() == []


def test_a_plan_takes_its_events_in_any_order_and_no_others(ledger: Ledger) -> None:
    plan = [events.gaussian(8.0), events.gaussian(9.0), events.gaussian(9.0)]
    ledger.subject("s", budget=BUDGET, plan=plan)
    for event in reversed(plan):
        ledger.charge("s", event, stage="x")
    assert ledger.spent("s").mu == pytest.approx(math.sqrt(1 / 64 + 2 / 81), rel=1e-12)
    for event in (events.gaussian(9.0), events.gaussian(1000.0)):
        with pytest.raises(
            BudgetExceeded, match=r"^The budget of s is spent: .* plan=\); .* Nothing was charged\.$"
        ) as refusal:
            ledger.charge("s", event, stage="x")
        assert refusal.value.remaining is not None
        assert refusal.value.remaining.planned == 0
    assert ledger.verify() == 4


def test_a_plan_with_entries_left_says_how_many(ledger: Ledger) -> None:
    ledger.subject("s", budget=BUDGET, plan=[events.gaussian(8.0), events.gaussian(9.0)])
    with pytest.raises(
        BudgetExceeded, match="not, or no longer, in the plan of s; what is left is 2 entries of the plan"
    ):
        ledger.charge("s", events.gaussian(7.0), stage="x")
    ledger.charge("s", events.gaussian(8.0), stage="x")
    with pytest.raises(BudgetExceeded, match="what is left is 1 entry of the plan"):
        ledger.charge("s", events.gaussian(8.0), stage="x")


def test_crumbs_of_a_budget_are_nothing(ledger: Ledger) -> None:
    """A ten-millionth of mu^2 is left: a release of it would need three thousand times the noise."""
    ledger.subject("s", budget=BUDGET)
    ledger.charge("s", events.gaussian(1 / (BUDGET.mu * math.sqrt(1 - 1e-7))), stage="x")
    assert str(ledger.remaining("s")) == "nothing"
    with pytest.raises(
        BudgetExceeded, match=r"budget is spent, with nothing left\. .* \(Ledger\.subject\); .* charged\.$"
    ):
        ledger.charge("s", events.gaussian(9.0), stage="x")


def test_a_plan_is_the_same_whatever_the_order_it_is_written_in(ledger: Ledger) -> None:
    plan = [events.gaussian(8.0), events.gaussian(9.0), events.gaussian(8.0)]
    ledger.subject("s", budget=BUDGET, plan=plan)
    ledger.subject("s", budget=BUDGET, plan=sorted(plan, key=repr))
    assert len(ledger.entries()) == 1


def test_a_plan_refunds_nothing(ledger: Ledger) -> None:
    event = events.gaussian(10.0, 4)
    ledger.subject("s", budget=BUDGET, plan=[event])
    receipt = ledger.charge("s", event, stage="x")
    before = ledger.spent("s")
    ledger.settle(receipt, 1)
    assert ledger.spent("s") == before
    assert ledger.remaining("s").planned == 0
    assert not receipt.live


def test_a_plan_above_the_budget_is_refused_when_it_is_declared(ledger: Ledger) -> None:
    with pytest.raises(BudgetExceeded, match="The plan of s costs epsilon"):
        ledger.subject("s", budget=BUDGET, plan=[events.gaussian(1.0)])
    assert ledger.subjects() == []


def test_settling_returns_exactly_what_was_not_used(ledger: Ledger) -> None:
    event = events.poisson(0.01, events.gaussian(2.0))
    for name in ("exactly", "stopped"):
        ledger.subject(name, budget=BUDGET, mode="renyi", order=16.0)
    ledger.charge("exactly", events.repeat(event, 30), stage="x")
    receipt = ledger.charge("stopped", events.repeat(event, 70), stage="x")
    ledger.settle(receipt, 30)
    assert not receipt.live
    exactly, stopped = ledger.subjects()
    assert stopped.spent == exactly.spent
    assert ledger.verify() == 5


def test_settling_all_returns_nothing_and_settling_none_returns_all(ledger: Ledger) -> None:
    ledger.subject("s", budget=BUDGET)
    for used in (5, 0):
        ledger.settle(ledger.charge("s", events.gaussian(20.0, 5), stage="x"), used)
        assert ledger.spent("s").mu == pytest.approx(math.sqrt(5) / 20, rel=1e-12)


def test_settling_never_goes_below_what_was_released(ledger: Ledger) -> None:
    ledger.subject("s", budget=BUDGET)
    receipt = ledger.charge("s", events.gaussian(10.0, 5), stage="x")
    release(receipt)
    release(receipt)
    for wrong in (0, 1, 6):
        with pytest.raises(LedgerError, match=f"released 2 of 5: {wrong} cannot be right"):
            ledger.settle(receipt, wrong)
    assert receipt.live
    ledger.settle(receipt, 2)
    assert ledger.spent("s").mu == pytest.approx(math.sqrt(2) / 10, rel=1e-12)
    with pytest.raises(LedgerError, match="closed"):
        ledger.settle(receipt, 2)
    with pytest.raises(ReceiptError, match="settled"):
        release(receipt)
    assert ledger.verify() == 3


@pytest.mark.parametrize("used", [2.5, 3.0, math.nan, math.inf, -1, True, "3", [3]])
def test_settling_takes_whole_numbers_and_a_wrong_one_closes_nothing(ledger: Ledger, used: object) -> None:
    ledger.subject("s", budget=BUDGET)
    receipt = ledger.charge("s", events.gaussian(10.0, 5), stage="x")
    with pytest.raises(LedgerError, match="cannot be right"):
        ledger.settle(receipt, used)  # type: ignore[arg-type]
    assert receipt.live
    assert rows(ledger) == [("subject", "s"), ("charge", "s")]
    ledger.settle(receipt, np.int64(2))  # the refund is not lost
    assert ledger.spent("s").mu == pytest.approx(math.sqrt(2) / 10, rel=1e-12)
    assert ledger.verify() == 3


def test_settling_keeps_what_was_released_out_of_order(ledger: Ledger) -> None:
    """The cheap Gaussians come first in the tree, but the dear Laplace query is what was released."""
    ledger.subject("s", budget=BUDGET)
    receipt = ledger.charge("s", events.compose([events.gaussian(1000.0, 3), events.laplace(10.0)]), stage="x")
    release(receipt, dp_event.LaplaceDpEvent)
    ledger.settle(receipt, 1)
    assert ledger.spent("s").mu == pytest.approx(2 * norm.ppf(1 / (1 + math.exp(-1 / 10))), rel=1e-9)


def test_a_receipt_is_settled_in_the_ledger_that_charged_it(ledger: Ledger) -> None:
    ledger.subject("s", budget=BUDGET)
    with Ledger("sqlite://") as other:
        other.subject("s", budget=BUDGET)
        receipt = other.charge("s", events.gaussian(10.0), stage="x")
        with pytest.raises(LedgerError, match="no receipt"):
            ledger.settle(receipt, 0)
        assert receipt.live
        other.settle(receipt, 0)
    assert ledger.verify() == 1


def test_a_stream_costs_the_same_from_its_first_step_on(ledger: Ledger) -> None:
    ledger.subject("s", budget=BUDGET, neighbours="zero-out")
    ledger.settle(ledger.charge("s", events.stream(10.0, 500), stage="x"), 1)
    assert ledger.spent("s").mu == pytest.approx(1 / 10, rel=1e-12)
    ledger.settle(ledger.charge("s", events.stream(10.0, 500), stage="x"), 0)
    assert ledger.spent("s").mu == pytest.approx(1 / 10, rel=1e-12)


def test_a_receipt_read_back_states_the_same_and_releases_nothing(ledger_url: str) -> None:
    with Ledger(ledger_url) as ledger:
        ledger.subject("s", budget=BUDGET, unit="user", neighbours="replace-one")
        original = ledger.charge("s", events.laplace(50.0, 2), stage="query", note="how many", bound=1.0)
    with Ledger(ledger_url, create=False) as ledger:
        again = ledger.receipt(original.id)
        for field in dataclasses.fields(Receipt):
            if not field.name.startswith("_"):
                assert getattr(again, field.name) == getattr(original, field.name), field.name
        assert not again.live
        with pytest.raises(ReceiptError, match="releases nothing here"):
            mechanisms.laplace(grid_sum(torch.ones(5), low=0.0, high=1.0), again)
        with pytest.raises(LedgerError, match="stays spent"):
            ledger.settle(again, 0)
        with pytest.raises(LedgerError, match="no receipt 'none'"):
            ledger.receipt("none")
        assert ledger.verify(again.head) == 2


def test_only_the_original_receipt_is_live() -> None:
    with Ledger("sqlite://") as ledger:
        ledger.subject("s", budget=BUDGET)
        receipt = ledger.charge("s", events.gaussian(10.0, 2), stage="x")
        release(receipt)
        assert copy.copy(receipt) is receipt
        assert copy.deepcopy(receipt) is receipt
        for dead in (pickle.loads(pickle.dumps(receipt)), dataclasses.replace(receipt, note="mine")):
            assert (dead.id, dead.event, dead.live) == (receipt.id, receipt.event, False)
            with pytest.raises(ReceiptError, match="releases nothing here"):
                release(dead)
        assert (receipt.live, receipt.used) == (True, 1)


def test_a_receipt_is_not_live_in_a_forked_child(ledger: Ledger) -> None:
    ledger.subject("s", budget=BUDGET)
    receipt = ledger.charge("s", events.gaussian(10.0), stage="x")
    child = os.fork()
    if child == 0:
        os._exit(1 if receipt.live else 0)
    assert os.waitpid(child, 0)[1] == 0
    assert receipt.live


def test_threads_never_share_a_release() -> None:
    with Ledger("sqlite://") as ledger:
        ledger.subject("s", budget=Budget(10.0, 1e-6))
        receipt = ledger.charge("s", events.gaussian(100.0, 2000), stage="x")
        numbers: list[int] = []

        def work() -> None:
            for _ in range(250):
                numbers.append(consume(receipt, dp_event.GaussianDpEvent, 1.0)[1])

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(numbers) == list(range(2000))


def test_an_infinite_budget_is_labelled_not_private(ledger: Ledger) -> None:
    for name, mode in (("g", "gaussian"), ("r", "renyi")):
        ledger.subject(name, budget=Budget(math.inf, 1e-6), mode=mode)
        ledger.charge(name, events.gaussian(0.0), stage="clip only")
        ledger.charge(name, events.gaussian(1.0), stage="noisy as well")
        assert str(ledger.spent(name)).startswith("not private")
        assert ledger.spent(name).epsilon == math.inf
    ledger.subject("plan", budget=Budget(math.inf, 1e-6), plan=[events.gaussian(0.0)])
    ledger.charge("plan", events.gaussian(0.0), stage="clip only")
    assert str(ledger.spent("plan")).startswith("not private")
    assert str(ledger.total()).startswith("not private")
    assert ledger.verify() == 8


def test_no_noise_does_not_fit_a_finite_budget(ledger: Ledger) -> None:
    ledger.subject("s", budget=BUDGET)
    with pytest.raises(BudgetExceeded):
        ledger.charge("s", events.gaussian(0.0), stage="x")


def test_seeded_noise_is_marked_everywhere(ledger: Ledger) -> None:
    for name, mode in (("a", "gaussian"), ("b", "renyi")):
        ledger.subject(name, budget=BUDGET, mode=mode)
    ledger.subject("c", budget=BUDGET, plan=[events.gaussian(20.0)])
    ledger.subject("d", budget=Budget(1.0, 0.0))
    for name in "abc":
        assert "seeded" not in str(ledger.spent(name))
        receipt = ledger.charge(name, events.gaussian(20.0), stage="x", seed=7)
        assert "seeded: not private" in str(receipt)
        assert "seeded: not private" in str(ledger.receipt(receipt.id))
        assert not receipt.private
    ledger.charge("d", events.laplace(20.0), stage="x", seed=7)
    ledger.charge("a", events.gaussian(20.0), stage="unseeded")
    for name in "abcd":
        assert str(ledger.spent(name)).startswith("seeded: not private")
        assert not ledger.spent(name).private
    assert str(ledger.total()).startswith("seeded: not private")
    assert ledger.verify() == 9


def test_declaring_again_changes_nothing_or_is_refused(ledger: Ledger) -> None:
    ledger.subject("s", budget=BUDGET, unit="patient", mode="renyi")
    ledger.charge("s", events.gaussian(50.0), stage="x")
    again = ledger.subject("s", budget=BUDGET, unit="patient", mode="renyi")
    assert again.charges == 1
    for other in ({"budget": Budget(2.0, 1e-6)}, {"unit": "user"}, {"neighbours": "zero-out"}, {"mode": "gaussian"}):
        with pytest.raises(LedgerError, match="exists with other terms"):
            ledger.subject("s", **({"budget": BUDGET, "unit": "patient", "mode": "renyi"} | other))
    assert ledger.verify() == 2


def test_opening_declares_once_or_checks_who_is_protected(ledger: Ledger) -> None:
    assert ledger.get_subject("s") is None
    asked = {"unit": "patient", "neighbours": "zero-out"}
    opened = ledger.open_subject("s", BUDGET, mode="renyi", order=32.0, **asked)
    assert opened == ledger.subject("s", BUDGET, mode="renyi", order=32.0, **asked)
    ledger.charge("s", events.gaussian(50.0), stage="x")
    shared = ledger.open_subject("s", Budget(0.1, 1e-6), **asked)  # its own budget and mode stay
    assert (shared.terms, shared.charges) == (opened.terms, 1)
    assert shared == ledger.get_subject("s")
    for other in ({"unit": "user"}, {"neighbours": "replace-one"}):
        with pytest.raises(OtherTerms, match=r"s promises something to a patient under zero-out.*must agree") as wrong:
            ledger.open_subject("s", BUDGET, **(asked | other))
        assert isinstance(wrong.value, LedgerError)
        assert isinstance(wrong.value, ValueError)
    assert ledger.verify() == 2


def test_who_is_declared_at_the_same_moment_is_opened(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may declare the subject between the look and the declaration."""
    ledger.subject("s", BUDGET, unit="patient")
    stands = ledger.get_subject("s")
    monkeypatch.setattr(ledger, "get_subject", lambda _: None)
    assert ledger.open_subject("s", Budget(2.0, 1e-6), unit="patient", neighbours="add-remove") == stands
    with pytest.raises(OtherTerms, match="must agree"):
        ledger.open_subject("s", BUDGET, unit="sample", neighbours="add-remove")
    assert ledger.verify() == 1


def test_unknown_subjects_are_named(ledger: Ledger) -> None:
    for ask in (ledger.spent, ledger.remaining, lambda s: ledger.charge(s, events.gaussian(9.0), stage="x")):
        with pytest.raises(LedgerError, match="no subject 'ghost'"):
            ask("ghost")
    with pytest.raises(LedgerError, match="disjoint from ghost, which is not in the ledger"):
        ledger.subject("s", budget=BUDGET, disjoint_from=["ghost"])
    assert ledger.entries() == []


@pytest.mark.parametrize("name", ["", "x" * 201, "two\nlines", "\ud800"])
def test_names_are_printable_and_short(name: str) -> None:
    with Ledger("sqlite://") as ledger, pytest.raises(ValueError, match="printable name"):
        ledger.subject(name, budget=BUDGET)


@pytest.mark.parametrize(
    "name", ["cafe\u0301", "clinic ", " clinic", "  ", "a  b", "clinic\ufe0f", "cli\u034fnic", "clinic\u3164", "\u2800"]
)
def test_names_that_look_alike_are_one_subject(name: str) -> None:
    """Each would have had a budget of its own; a ledger of before that has such a subject still serves it."""
    with Ledger("sqlite://") as ledger:
        with pytest.raises(ValueError, match="look the same"):
            ledger.subject(name, Budget(1.0, 1e-6))
        assert not ledger.entries()
        with pytest.MonkeyPatch.context() as before:
            before.setattr("tacit.privacy._totals.check_new_name", lambda _: None)
            ledger.subject(name, Budget(1.0, 1e-6))
        assert ledger.subject(name, Budget(1.0, 1e-6)).name == name


def test_any_text_can_be_a_name_or_a_note(ledger: Ledger) -> None:
    name, note = "Klinik Süd 'a'; -- \"%s\" :x 医院", "line\nbreak \x00 \ud800 %(x)s"
    ledger.subject(name, budget=BUDGET)
    receipt = ledger.charge(name, events.gaussian(50.0), stage="x", note=note)
    assert ledger.receipt(receipt.id).note == note
    assert ledger.verify(receipt.head) == 2


@pytest.mark.parametrize("bound", [0.0, -1.0, math.inf, math.nan])
def test_bounds_are_positive_and_finite(bound: float) -> None:
    with Ledger("sqlite://") as ledger:
        ledger.subject("s", budget=BUDGET)
        with pytest.raises(ValueError, match="above 0 and finite"):
            ledger.charge("s", events.gaussian(50.0), stage="x", bound=bound)


def test_an_event_that_releases_nothing_is_refused() -> None:
    with Ledger("sqlite://") as ledger:
        ledger.subject("s", budget=BUDGET)
        with pytest.raises(ValueError, match="nothing to charge"):
            ledger.charge("s", events.compose([]), stage="x")


def test_a_plain_path_is_a_file(tmp_path: Path) -> None:
    with Ledger(tmp_path / "book.db") as first:
        first.subject("a", Budget(1.0, 1e-6))
    with Ledger(str(tmp_path / "book.db"), create=False) as again:
        assert [s.name for s in again.subjects()] == ["a"]


def test_settling_by_default_keeps_what_was_released(tmp_path: Path) -> None:
    with Ledger(tmp_path / "book.db") as ledger:
        ledger.subject("a", Budget(1.0, 1e-6))
        ledger.settle(ledger.charge("a", events.gaussian(100.0, steps=10), stage="test"))
        assert ledger.spent("a").epsilon == 0


def test_a_spent_budget_reads_as_spent(tmp_path: Path) -> None:
    with Ledger(tmp_path / "book.db") as ledger:
        ledger.subject("a", Budget(1.0, 1e-6))
        sigma = ledger.remaining("a").noise_multiplier
        assert sigma is not None
        ledger.charge("a", events.gaussian(sigma * (1 + 1e-14)), stage="test")
        assert str(ledger.remaining("a")) == "nothing"
