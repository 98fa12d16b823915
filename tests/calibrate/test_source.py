"""A source: what it charges, refuses, stores and survives."""

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tacit.calibrate import (
    Answer,
    BinGaps,
    Count,
    Gap,
    Histogram,
    Loss,
    Price,
    Query,
    Refused,
    Source,
    Statistic,
    Terms,
)
from tacit.privacy import Budget, BudgetExceeded, Ledger, LedgerError, Neighbours
from tacit.privacy.mechanisms import _mechanisms

LOGITS = torch.tensor([[2.0, 0.0, 0.0], [0.0, 3.0, 1.0], [0.5, 0.0, 0.2], [1.0, 1.5, 0.0]])
LABELS = torch.tensor([0, 1, 2, 1])
PURE = Budget(1.0, 0.0)


def source(name: str = "clinic", **options: Any) -> Source:
    return Source(name, **({"logits": LOGITS, "labels": LABELS, "budget": PURE} | options))


def query(name: str = "q", amount: float = 0.25, statistic: Statistic | None = None, noise: str = "laplace") -> Query:
    return Query(id=name, statistic=statistic or Gap(), price=Price(noise=noise, amount=amount))  # type: ignore[arg-type]


def charges(one: Source) -> list[dict[str, Any]]:
    return [entry.body for entry in one.ledger.entries(one.subject) if entry.kind == "charge"]


@pytest.mark.parametrize("neighbours", ["add-remove", "replace-one"])
@pytest.mark.parametrize(
    ("statistic", "removed", "replaced"),
    [(Gap(), 1, 2), (BinGaps(), 1, 2), (Histogram(), 2, 4), (Loss(bound=4.0), 4, 4), (Count(), 1, 1)],
)
def test_laplace_noise_is_exactly_sensitivity_over_epsilon(
    statistic: Statistic, removed: float, replaced: float, neighbours: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    sampler = _mechanisms.dp.m.then_laplace

    def spy(scale: float, **options: Any) -> Any:
        seen.append(scale)
        return sampler(scale=scale, **options)

    monkeypatch.setattr(_mechanisms.dp.m, "then_laplace", spy)
    one = source(neighbours=neighbours)
    answer = one.answer(query(statistic=statistic, amount=0.25))
    expected = (removed if neighbours == "add-remove" else replaced) / 0.25
    assert seen[0] * statistic.grid / 2 == pytest.approx(expected, rel=1e-14)  # drawn in half steps of the grid
    assert answer.scale == pytest.approx(expected, rel=1e-15)
    assert len(answer.values) == statistic.size
    assert one.spent.epsilon == pytest.approx(0.25, rel=1e-12)


@pytest.mark.parametrize("neighbours", list(Neighbours))
def test_gaussian_answers_cost_their_square_root(neighbours: Neighbours) -> None:
    budget = Budget(1.0, 1e-6)
    one = source(budget=budget, neighbours=neighbours)
    for i in range(4):
        answer = one.answer(query(f"q{i}", budget.mu / 2, Gap(), "gaussian"))
        assert answer.scale == pytest.approx(neighbours.factor / (budget.mu / 2), rel=1e-12)
    assert one.spent.mu == pytest.approx(budget.mu, rel=1e-12)
    with pytest.raises(BudgetExceeded):
        one.answer(query("q5", budget.mu / 2, Gap(), "gaussian"))


def test_it_charges_before_it_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    one = source()
    at_the_time = []
    monkeypatch.setattr(Gap, "rows", lambda *_: at_the_time.append(len(charges(one))) or torch.zeros(4, 1))
    one.answer(query())
    assert at_the_time == [1]


def test_a_repeated_query_gets_the_stored_answer_and_is_not_charged() -> None:
    one = source()
    first = one.answer(query())
    assert [one.answer(query()) for _ in range(5)] == [first] * 5
    assert len(charges(one)) == 1
    assert one.answer(query("other")).values != first.values  # fresh noise: equal with probability below 1e-6


def test_another_source_object_on_the_same_ledger_knows_the_answer() -> None:
    ledger = Ledger("sqlite://")
    first = source(ledger=ledger).answer(query())
    assert source(ledger=ledger).answer(query()) == first
    assert source("other", ledger=ledger).answer(query()).source == "other"


def test_the_same_id_for_another_question_is_refused() -> None:
    one = source()
    one.answer(query())
    with pytest.raises(Refused, match="was another question before"):
        one.answer(query(statistic=Gap(temperature=2.0)))
    with pytest.raises(Refused, match="was another question before"):
        one.answer(query(amount=0.5))
    assert len(charges(one)) == 1


def test_what_it_cannot_afford_is_refused_and_costs_nothing() -> None:
    one = source()
    one.answer(query("a", 0.75))
    for _ in range(2):
        with pytest.raises(BudgetExceeded, match="Nothing was charged"):
            one.answer(query("b", 0.5))
    assert one.spent.epsilon == pytest.approx(0.75)
    one.answer(query("b", 0.25))  # the refused id is free to be asked again, more modestly
    assert one.spent.epsilon == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("asked", "message"),
    [(query(noise="gaussian"), "answers with laplace noise"), ("the mean, please", "answers a Query")],
)
def test_questions_of_the_wrong_kind_cost_nothing(asked: Any, message: str) -> None:
    one = source()
    with pytest.raises(Refused, match=message):
        one.answer(asked)
    assert charges(one) == []


@pytest.mark.parametrize("durable", [False, True])
def test_a_crash_after_the_charge_stays_charged_and_is_not_answered_again(
    durable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(tmp_path / "clinic.db" if durable else "sqlite://")
    one = source(ledger=ledger)
    with monkeypatch.context() as patch:
        patch.setattr(type(one._book), "finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            one.answer(query())
    again = source(ledger=Ledger(tmp_path / "clinic.db")) if durable else one
    with pytest.raises(Refused, match="it is not answered again"):
        again.answer(query())
    assert again.spent.epsilon == pytest.approx(0.25)
    again.answer(query("new"))
    assert again.spent.epsilon == pytest.approx(0.5)


def test_many_who_ask_the_same_at_once_get_one_answer_for_one_price(tmp_path: Path) -> None:
    one = source(ledger=Ledger(tmp_path / "clinic.db"))

    def ask(_: int) -> Answer | None:
        try:
            return one.answer(query())
        except Refused:
            return None

    with ThreadPoolExecutor(8) as pool:
        answers = set(pool.map(ask, range(8)))
    assert len(answers - {None}) == 1
    assert len(charges(one)) == 1


def test_a_restart_keeps_budget_and_answers(tmp_path: Path) -> None:
    with Ledger(tmp_path / "clinic.db") as ledger:
        first = source(ledger=ledger).answer(query("a", 0.75))
    with Ledger(tmp_path / "clinic.db") as ledger:
        one = source(ledger=ledger)
        assert one.answer(query("a", 0.75)) == first
        with pytest.raises(BudgetExceeded):
            one.answer(query("b", 0.5))
        assert ledger.verify(first.head) == 2


def test_a_subject_of_another_stage_is_shared_if_it_promises_the_same() -> None:
    ledger, budget = Ledger("sqlite://"), Budget(1.0, 1e-6)
    ledger.subject("patients", budget, mode="renyi")
    one = source(ledger=ledger, subject="patients", budget=budget)
    one.answer(query(amount=0.05, noise="gaussian"))
    assert one.terms.mode == "renyi"
    with pytest.raises(LedgerError, match="other terms"):
        source(ledger=ledger, subject="patients", budget=Budget(2.0, 1e-6))


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("statistic", [Gap(), BinGaps(), Histogram(), Loss(), Count()])
def test_empty_and_tiny_sources_answer(rows: int, statistic: Statistic) -> None:
    one = source(logits=LOGITS[:rows], labels=LABELS[:rows], budget=Budget(math.inf, 0.0))
    answer = one.answer(query(amount=math.inf, statistic=statistic))
    assert answer.scale == 0
    if rows == 0:
        assert set(answer.values) == {0.0}


def test_logits_that_are_no_numbers_are_as_if_not_there() -> None:
    bad = LOGITS.clone()
    bad[1, 0], bad[2, 1] = math.nan, math.inf
    free = {"budget": Budget(math.inf, 0.0)}
    there = source(logits=bad, **free).answer(query(amount=math.inf))
    gone = source(logits=LOGITS[[0, 3]], labels=LABELS[[0, 3]], **free).answer(query(amount=math.inf))
    assert there.values == gone.values
    source(logits=torch.full((4, 3), math.nan)).answer(query())


def test_rows_of_one_unit_count_by_their_mean() -> None:
    free = {"budget": Budget(math.inf, 0.0)}
    grouped = source(unit="patient", unit_ids=[5, 5, 5, 5], **free).answer(query(amount=math.inf))
    each = source(**free).answer(query(amount=math.inf))
    assert grouped.values[0] == pytest.approx(each.values[0] / 4, abs=1e-5)


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"unit": "patient"}, "unit='patient' needs to know whose each row is: give unit_ids"),
        ({"unit_ids": [1, 1, 2, 2]}, "more than a sample: say what with unit="),
        ({"unit_ids": [1, 1, 2, 2], "unit": "sample"}, "more than a sample"),
        ({"unit_ids": [1, 1, 2, 2], "units": [1, 1, 2, 2], "unit": "patient"}, "leave units= out"),
    ],
)
def test_nobody_names_a_unit_that_the_rows_do_not_have(named: dict[str, Any], said: str) -> None:
    ledger = Ledger("sqlite://")
    with pytest.raises((ValueError, TypeError), match=said):
        source(ledger=ledger, **named)
    assert ledger.entries() == []


def test_a_subject_of_another_unit_does_not_pay() -> None:
    ledger = Ledger("sqlite://")
    ledger.subject("clinic", PURE, unit="patient")
    before = ledger.entries()
    with pytest.raises(LedgerError):
        source(ledger=ledger)
    with pytest.raises(LedgerError):
        source(ledger=ledger, unit="user", unit_ids=range(4))
    assert ledger.entries() == before
    assert source(ledger=ledger, unit="patient", unit_ids=range(4)).terms.grouped


def test_ids_are_integers_or_strings_and_the_earlier_name_warns() -> None:
    free = {"budget": Budget(math.inf, 0.0), "unit": "patient"}
    names = source(unit_ids=["ann", "bob", "ann", "ann"], **free).answer(query(amount=math.inf))
    with pytest.warns(DeprecationWarning, match="units=…. is now unit_ids=…"):
        numbers = source(units=torch.tensor([0, 1, 0, 0]), **free)
    assert numbers.answer(query(amount=math.inf)).values == names.values


def test_terms_say_what_is_public_and_nothing_else() -> None:
    assert source().terms.size is None  # under add-remove the number of samples is private
    assert source(neighbours="replace-one").terms.size == 4
    assert source(neighbours="replace-one", unit="patient", unit_ids=[1, 1, 2, 2]).terms.size == 2
    one = source(size=100)
    one.answer(query(amount=0.25))
    terms = one.terms
    assert (terms.size, terms.left, terms.mode, terms.durable) == (100, 0.75, "pure", False)
    assert Terms.from_json(json.loads(json.dumps(terms.to_json()))) == terms
    assert terms.affords(Price(noise="laplace", amount=0.25), 3)
    assert not terms.affords(Price(noise="laplace", amount=0.25), 4)
    free = source(budget=Budget(math.inf, 0.0)).terms
    assert Terms.from_json(json.loads(json.dumps(free.to_json()))) == free


def test_laplace_noise_on_an_approximate_budget() -> None:
    budget = Budget(1.0, 1e-6)
    one = source(budget=budget, noise="laplace")
    times = 0
    while one.terms.affords(Price(noise="laplace", amount=0.05), 1):
        one.answer(query(f"q{times}", 0.05))
        times += 1
    with pytest.raises(BudgetExceeded):
        one.answer(query("last", 0.05))
    assert times >= 4


def test_seeded_sources_say_so() -> None:
    answers = [source(seed=1).answer(query()) for _ in range(2)]
    assert answers[0].values == answers[1].values
    assert answers[0].seeded
    assert Answer.from_json(json.loads(json.dumps(answers[0].to_json()))) == answers[0]


def test_from_a_model_and_its_data() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.9))
    inputs = torch.randn(4, 3)
    options: dict[str, Any] = {"budget": Budget(math.inf, 0.0)}
    batches = [(inputs[:3], LABELS[:3]), (inputs[3:], LABELS[3:])]
    one = Source.from_model("clinic", model, batches, **options)
    assert model.training  # as it was
    logits = model[0](inputs)
    assert (
        one.answer(query(amount=math.inf)).values
        == source(logits=logits, **options).answer(query(amount=math.inf)).values
    )
    with pytest.raises(ValueError, match="no batches"):
        Source.from_model("clinic", model, [], **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise": "gaussian"}, "delta above 0"),
        ({"noise": "uniform"}, "one of laplace, gaussian"),
        ({"logits": torch.softmax(LOGITS, 1)}, "look like probabilities"),
        ({"labels": torch.tensor([0, 1, 2, 3])}, "between 0 and 2"),
        ({"unit_ids": [1, 2], "unit": "patient"}, "one integer or string per row"),
        ({"size": -1}, "whole number"),
    ],
)
def test_wrong_sources_are_refused_before_anything_is_charged(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        source(**options)


def test_nothing_private_is_printed() -> None:
    one = source()
    assert "2." not in repr(one)
    assert "4" not in repr(one._outputs)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"values": "many"}, "list of numbers"),
        ({"values": [1.0]}, "names its query"),
        ({"values": [1.0], "query": "q", "source": "s", "receipt": "r", "head": "h"}, "This is no Answer"),
        ({"value": 1}, "no field 'value'"),
        ("garbage", "named fields"),
    ],
)
def test_garbage_is_no_answer(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Answer.from_json(data)
    with pytest.raises(ValueError, match=r"\."):
        Terms.from_json(data)
    whole = source().terms.to_json()
    for change in ({"size": "many"}, {"left": "much"}, {"neighbours": "next door"}, {"noise": "loud"}):
        with pytest.raises(ValueError, match=r"\."):
            Terms.from_json(whole | change)


def test_a_row_on_which_the_classifier_raises_contributes_zero() -> None:
    """The other rows' logits are what they are without it, to the last bit; only the curator is informed."""
    torch.manual_seed(0)
    inputs, labels = torch.randn(6, 4), torch.arange(6) % 3
    linear, heard = torch.nn.Linear(4, 3), []

    class Picky(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if bool((x == -7).all(1).any()):
                raise ArithmeticError("patient 4711, too low")
            return linear(x)  # type: ignore[no-any-return]

    odd = inputs.clone()
    odd[2] = -7.0
    whole = Source.from_model("a", linear, [(inputs, labels)], budget=Budget(1.0, 0.0))
    found = Source.from_model("a", Picky(), [(odd, labels)], budget=Budget(1.0, 0.0), curator=heard.append)
    others = torch.arange(6) != 2
    assert torch.equal(found._outputs.shifted[others], whole._outputs.shifted[others])
    assert found._outputs.good.tolist() == [1, 1, 0, 1, 1, 1]
    assert ["patient 4711" in event.details for event in heard] == [True]


def test_batches_that_cannot_be_read_tell_nobody_whose() -> None:
    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield torch.randn(2, 4), torch.arange(2)
        raise OSError("patient 4711, scan corrupt")

    with pytest.raises(ValueError, match="Nothing was charged") as error:
        Source.from_model("a", torch.nn.Linear(4, 3), batches(), budget=Budget(1.0, 0.0))
    assert error.value.__context__ is None
    assert error.value.__cause__ is None


def test_who_else_is_there_decides_no_near_tie() -> None:
    """Two logits that are one sum in two orders: kernels round rows beyond a multiple of 16 otherwise."""

    class NearTies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body, self.head, self.order = nn.Linear(64, 256), nn.Linear(256, 1), torch.randperm(256)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.tanh(self.body(x))
            other = nn.functional.linear(h[:, self.order], self.head.weight[:, self.order], self.head.bias)
            return 1e5 * torch.cat([self.head(h), other], 1)

    model, options = NearTies(), {"budget": Budget(math.inf, 0.0)}
    for seed in range(20):
        rows = torch.randn(1, 64, generator=torch.Generator().manual_seed(seed)).expand(5, 64)
        answers = [
            Source.from_model("clinic", model, [(rows[:n], torch.zeros(n, dtype=torch.long))], **options)
            .answer(query(amount=math.inf))
            .values[0]
            for n in (5, 4, 3)
        ]
        assert abs(answers[0] - answers[1]) <= 1
        assert abs(answers[1] - answers[2]) <= 1
