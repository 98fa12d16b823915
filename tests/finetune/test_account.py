"""Noise and epsilon of runs against dp-accounting's own PLD and closed forms."""

import math
from typing import Any

import dp_accounting
import pytest
from by_hand import net, people
from dp_accounting.pld import PLDAccountant
from scipy.stats import norm

from tacit.finetune import DPGD, DPSGD, Optimizer, fit, plan
from tacit.finetune._account import Meter, Promise, open_account
from tacit.privacy import Budget, Ledger, Mode, Neighbours, Unit, events

DELTA = 1e-5


def independent(rate: float, sigma: float, steps: int, delta: float = DELTA) -> float:
    """Epsilon by dp-accounting, asked directly."""
    step = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
    accountant = PLDAccountant(value_discretization_interval=1e-3)
    return float(accountant.compose(dp_accounting.SelfComposedDpEvent(step, steps)).get_epsilon(delta))


def delta_of(epsilon: float, mu: float) -> float:
    return float(norm.cdf(-epsilon / mu + mu / 2) - math.exp(epsilon) * norm.cdf(-epsilon / mu - mu / 2))


def sigma_of(event: Any) -> float:
    return float(next(events.leaves(event))[0].event.noise_multiplier)


@pytest.mark.parametrize(("batch", "size", "steps", "epsilon"), [(32, 1000, 200, 2.0), (100, 500, 30, 8.0)])
def test_dpsgd_meets_its_budget_by_another_accountant(batch: int, size: int, steps: int, epsilon: float) -> None:
    sigma = sigma_of(plan(DPSGD(batch_size=batch, steps=steps), epsilon=epsilon, delta=DELTA, size=size))
    found = independent(batch / size, sigma, steps)
    assert 0.985 * epsilon <= found <= epsilon * (1 + 5e-3)  # a discretisation of 1e-3 over so many steps


def test_dpgd_is_exactly_one_gaussian() -> None:
    """The number of the paper on full-batch tuning: 100 steps, epsilon 0.01, delta 1e-5 need sigma 2437.9."""
    ((leaf, times),) = events.leaves(plan(DPGD(steps=100), epsilon=0.01, delta=1e-5, size=1000))
    assert times == 100
    assert leaf.noise_multiplier == pytest.approx(2437.9, abs=0.05)
    assert delta_of(0.01, math.sqrt(100) / leaf.noise_multiplier) == pytest.approx(1e-5, rel=1e-3)


def test_replacing_costs_twice_the_noise() -> None:
    alone, other = (
        next(events.leaves(plan(DPGD(steps=10), epsilon=1.0, delta=DELTA, size=50, neighbours=relation)))[0]
        for relation in ("add-remove", "replace-one")
    )
    assert other.noise_multiplier == pytest.approx(2 * alone.noise_multiplier, rel=1e-3)


def test_what_fit_charges_is_what_it_promises(ledger: Ledger) -> None:
    fitted = fit(
        net(), people(), optimizer=DPGD(steps=7), epsilon=1.5, delta=DELTA, size=20, scheme="full", ledger=ledger
    )
    assert delta_of(1.5, math.sqrt(7) / fitted.noise_multiplier) == pytest.approx(DELTA, rel=1e-3)
    assert fitted.guarantee.epsilon == pytest.approx(1.5, rel=1e-4)
    assert fitted.guarantee.epsilon <= 1.5 * (1 + 1e-9)
    charge = next(entry for entry in ledger.entries() if entry.kind == "charge")
    assert charge.body["event"]["count"] == 7
    assert charge.body["event"]["event"]["noise_multiplier"] == fitted.noise_multiplier


@pytest.mark.parametrize("optimizer", [DPSGD(batch_size=20, steps=40), DPGD(steps=40)])
@pytest.mark.parametrize("stops", [False, True])
def test_the_meter_is_never_below_the_truth_nor_above_the_budget(optimizer: Optimizer, stops: bool) -> None:
    budget = Budget(3.0, DELTA)
    promise = Promise(budget=budget, unit=Unit.SAMPLE, neighbours=Neighbours.ADD_REMOVE, size=200, stops=stops)
    account = open_account(optimizer, promise, Ledger("sqlite://"), None)
    meter = Meter(optimizer, account)
    seen = [meter(t) for t in range(41)]
    assert seen[0] == 0
    assert seen == sorted(seen)
    assert seen[-1] <= 3.0
    rate = optimizer.sampler.rate(200)
    for t in (1, 10, 40):
        if rate < 1:
            assert seen[t] >= 0.995 * independent(rate, account.scale, t)
        else:
            assert delta_of(seen[t], math.sqrt(t) / account.scale) == pytest.approx(DELTA, rel=1e-3)


def test_the_meter_says_the_whole_budget_where_it_knows_no_quick_bound() -> None:
    promise = Promise(budget=Budget(3.0, DELTA), unit=Unit.SAMPLE, neighbours=Neighbours.REPLACE_ONE, size=200)
    optimizer = DPSGD(batch_size=20, steps=4)
    meter = Meter(optimizer, open_account(optimizer, promise, Ledger("sqlite://"), None))
    assert [meter(t) for t in (0, 1, 4)] == [0.0, 3.0, 3.0]


@pytest.mark.parametrize(
    ("optimizer", "stops", "mode"),
    [
        (DPSGD(batch_size=20, steps=40), False, Mode.PLAN),
        (DPSGD(batch_size=20, steps=40), True, Mode.RENYI),
        (DPGD(steps=40), False, Mode.GAUSSIAN),
        (DPGD(steps=40), True, Mode.GAUSSIAN),
    ],
)
def test_a_new_subject_is_declared_in_the_mode_that_suits(
    optimizer: Optimizer, stops: bool, mode: Mode, ledger: Ledger
) -> None:
    promise = Promise(
        budget=Budget(3.0, DELTA), unit=Unit.SAMPLE, neighbours=Neighbours.ADD_REMOVE, size=200, stops=stops
    )
    account = open_account(optimizer, promise, ledger, "clinic")
    (subject,) = ledger.subjects()
    assert subject.terms.mode is mode
    account.charge("finetune", "")
    assert ledger.spent("clinic").epsilon <= 3.0 * (1 + 1e-9)
    if optimizer.sampler.rate(200) < 1:
        assert independent(0.1, account.scale, 40) <= 3.0 * (1 + 5e-3)


def test_a_subject_of_other_people_is_refused(ledger: Ledger) -> None:
    ledger.subject("clinic", Budget(3.0, DELTA), unit="patient")
    call: dict[str, Any] = {"optimizer": DPGD(steps=2), "epsilon": 1.0, "delta": DELTA, "size": 20, "scheme": "full"}
    with pytest.raises(ValueError, match=r"to a patient under .* a sample under"):
        fit(net(), people(), ledger=ledger, subject="clinic", **call)
    assert len(ledger.entries()) == 1
