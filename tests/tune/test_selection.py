"""The best of k candidates: what the choice costs, and that it is the right one."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from tacit import ErrorEvent, tune
from tacit.privacy import Budget, Ledger, Neighbours, epsilon_of, grid_sum, mechanisms, mu_of
from tacit.privacy.events import from_json, repeat

ONE = Budget(1.0, 1e-6)


def right(share: float, size: int = 5000) -> Tensor:
    return (torch.arange(size) < share * size).double()


def charged(ledger: Ledger, subject: str = "people") -> list[object]:
    return [from_json(entry.body["event"]) for entry in ledger.entries(subject) if entry.kind == "charge"]


@pytest.mark.parametrize("neighbours", list(Neighbours))
def test_all_scores_together_cost_the_budget(neighbours: Neighbours) -> None:
    ledger, shares = Ledger("sqlite://"), [0.2, 0.9, 0.5, 0.6]
    found = tune.noisy_selection(shares, right, ONE, ledger=ledger, subject="people", size=5000, neighbours=neighbours)
    (event,) = charged(ledger)
    assert event.count == 4
    mu = mu_of(1.0, 1e-6)
    assert neighbours.factor * math.sqrt(4) / event.event.noise_multiplier == pytest.approx(mu, rel=1e-8)
    assert found.guarantee.epsilon <= 1.0
    assert (found.candidate, found.index) == (0.9, 1)
    assert found.error == pytest.approx(math.sqrt(4) / mu / 5000, rel=1e-6)
    assert found.scores is not None
    assert list(found.scores) == pytest.approx(shares, abs=8 * found.error)  # false alarm: below 1e-14


def test_scores_are_as_noisy_as_they_say() -> None:
    found = tune.noisy_selection(
        [0.5] * 400, lambda share: torch.full((10,), share), ONE, ledger=Ledger("sqlite://"), subject="p", size=1000
    )
    assert found.scores is not None
    off = (torch.tensor(found.scores, dtype=torch.float64) - 0.005) / found.error
    low, high = stats.chi2.ppf([1e-8, 1 - 1e-8], 400)
    assert low < float((off**2).sum()) < high


def test_the_papers_example() -> None:
    """14 candidates, 750,000 units, one point of accuracy (paper 1, B.5): about nothing, and still on the ledger.

    The paper has 0.0011 for one of them, by the loose formula and with 1/n rounded up to 2e-6.
    """
    ledger = Ledger("sqlite://")
    found = tune.noisy_selection(
        [0.5] * 14,
        right,
        ONE,
        ledger=ledger,
        subject="people",
        size=750_000,
        precision=0.01,
        neighbours="replace-one",
    )
    mu = 1 / (0.01 * 750_000)
    assert found.error == pytest.approx(0.01)
    assert found.guarantee.mu == pytest.approx(math.sqrt(14) * mu)
    assert epsilon_of(mu, 1e-6) < 0.0011
    assert found.guarantee.epsilon == pytest.approx(epsilon_of(math.sqrt(14) * mu, 1e-6), rel=1e-6)


@pytest.mark.parametrize("neighbours", list(Neighbours))
def test_the_choice_alone_costs_pure_epsilon(neighbours: Neighbours) -> None:
    for budget in (ONE, Budget(1.0, 0.0)):
        ledger = Ledger("sqlite://")
        found = tune.noisy_selection(
            [0.2, 0.6, 0.5],
            right,
            budget,
            ledger=ledger,
            subject="people",
            size=5000,
            release="winner",
            neighbours=neighbours,
        )
        (event,) = charged(ledger)
        assert (found.candidate, found.scores) == (0.6, None)  # 500 units apart at a scale of 2: false alarm e^-250
        assert 2 * neighbours.factor / event.noise_multiplier == pytest.approx(1.0, rel=1e-3)
        assert found.guarantee.epsilon <= 1.0
        assert found.error == pytest.approx(2 / 5000, rel=1e-3)


def test_the_choice_on_a_gaussian_subject_is_charged_by_its_dominating_mu() -> None:
    ledger = Ledger("sqlite://")
    ledger.subject("people", ONE)
    found = tune.noisy_selection([0.2, 0.9], right, ONE, ledger=ledger, subject="people", size=5000, release="winner")
    (event,) = charged(ledger)
    pure = 2 / event.noise_multiplier
    assert 2 * stats.norm.ppf(math.exp(pure) / (1 + math.exp(pure))) == pytest.approx(mu_of(1.0, 1e-6), rel=1e-6)
    assert 0.999 < found.guarantee.epsilon <= 1.0


def test_the_choice_audited() -> None:
    """Worst-case neighbours: one unit that speaks for the second candidate and against the first.

    The lower bound on epsilon (Clopper and Pearson, false alarm 1e-7) stays below the claim, and is not idle.
    """
    runs, ledger = 600, Ledger("sqlite://")
    tune.noisy_selection([0.0, 0.0], right, Budget(4.0, 0.0), ledger=ledger, subject="p", size=9, release="winner")
    (event,) = charged(ledger, "p")
    ledger.subject("audit", Budget(1e6, 0.0))
    receipt = ledger.charge("audit", repeat(event, 2 * runs), stage="audit")
    others = torch.tensor([[1.0, 0.0]])
    worlds = [others, torch.cat([others, torch.tensor([[0.0, 1.0]])])]
    second = [sum(mechanisms.noisy_max(grid_sum(w, low=0.0, high=1.0), receipt) for _ in range(runs)) for w in worlds]
    low = stats.beta.ppf(1e-7, second[1], runs - second[1] + 1)
    high = stats.beta.ppf(1 - 1e-7, second[0] + 1, runs - second[0])
    assert 0.5 < math.log(low / high) <= 4.0


def test_a_unit_that_cannot_be_scored_counts_as_zero_and_nobody_else_does(capfd: pytest.CaptureFixture[str]) -> None:
    """1,000 units, 810 of them right: with one that raises, 809 are. Without isolation everybody's score is gone."""

    def one(share: float, unit: int) -> float:
        if unit == 3:
            raise ArithmeticError("patient 17 has a fever")
        return float(unit < 1000 * share)

    score = tune.by_unit(range(1000), one)
    assert score(0.81).sum() == 809
    for release in ("scores", "winner"):
        found = tune.noisy_selection(
            [0.2, 0.81], score, Budget(20.0, 1e-5), ledger=Ledger("sqlite://"), subject="p", size=1000, release=release
        )
        assert found.index == 1
        if found.scores is not None:  # false alarm: 10 standard deviations
            assert abs(found.scores[1] - 0.809) < 10 * found.error
    assert "patient" not in repr(found) + "".join(capfd.readouterr())


def test_what_is_no_number_counts_as_zero() -> None:
    odd = {0: math.nan, 1: "fever", 2: None, 3: torch.ones(2), 4: 1.0}
    assert tune.by_unit(list(odd), lambda _, unit: odd[unit])(None).nan_to_num().tolist() == [0, 0, 0, 0, 1]


def test_memory_is_the_machines_matter() -> None:
    def one(_: float, __: int) -> float:
        raise MemoryError

    with pytest.raises(MemoryError):
        tune.by_unit(range(3), one)(0.5)


def test_a_unit_that_asks_for_all_memory_counts_as_zero() -> None:
    def one(_: float, unit: int) -> float:
        if unit == 1:
            raise MemoryError("Unable to allocate 4711 TiB")
        return 1.0

    assert tune.by_unit(range(3), one)(0.5).tolist() == [1, 0, 1]


@pytest.mark.parametrize("what", ["raises", "two dimensions"])
def test_a_score_that_fails_as_a_whole_is_refused_before_the_charge(what: str) -> None:
    heard: list[ErrorEvent] = []

    def score(share: float) -> Tensor:
        if what == "raises":
            raise ArithmeticError("patient 17 has a fever")
        return torch.full((5000, 2), share)

    ledger = Ledger("sqlite://")
    with pytest.raises(ValueError, match="Nothing was charged") as error:
        tune.noisy_selection([0.9, 0.4], score, ONE, ledger=ledger, subject="p", size=5000, curator=heard.append)
    assert ledger.entries() == []
    assert error.value.__cause__ is None
    assert error.value.__context__ is None
    assert "patient" not in str(error.value)
    assert ["patient 17 has a fever" in problem.details for problem in heard] == [True] * (what == "raises")
    assert "patient" not in repr(heard)


def test_what_cannot_be_is_refused_before_anything_is_charged() -> None:
    ledger = Ledger("sqlite://")
    ledger.subject("patients", ONE, unit="patient")
    for candidates, more, words in (
        ([], {}, "at least one candidate"),
        ([1.0], {"release": "all"}, "'scores' or 'winner'"),
        ([1.0], {"release": "winner", "precision": 0.1}, "of released scores"),
        ([1.0], {"precision": 2.0}, "between 0 and 1"),
        ([1.0], {"budget": Budget(1.0, 0.0)}, "delta above 0"),
        ([1.0], {"budget": Budget(math.inf, 1e-5), "release": "winner"}, "finite epsilon"),
        ([1.0], {"subject": "patients"}, "the terms must agree"),
    ):
        how = {"budget": ONE, "subject": "people"} | more
        with pytest.raises(ValueError, match=words):
            tune.noisy_selection(candidates, right, how.pop("budget"), ledger=ledger, size=10, **how)
    assert [entry.kind for entry in ledger.entries()] == ["subject"]
