"""Whom a search promises something to: the units of its trainable, and nobody else."""

from typing import Any

import pytest
import torch
from made_up import Hill
from test_leaks import BOX, EIGHT, SEARCHES, charges, probe, rows
from torch import Tensor

from tacit import tune
from tacit.finetune import Classes
from tacit.privacy import Budget, Ledger
from tacit.tune._search import unit_of

ONE = Budget(1.0, 1e-5)


class Owned(Hill):
    """A trainable that says its units by a plain string."""

    unit = "patient"


def owned() -> tune.Finetuning:
    inputs, labels = rows()
    ids = [f"patient {i // 4}" for i in range(400)]
    return tune.Finetuning(probe(), (inputs, labels), unit="patient", unit_ids=ids, classes=3, size=100)


@pytest.mark.parametrize("search", SEARCHES)
def test_a_search_takes_the_unit_of_its_trainable(search: str) -> None:
    ledger = Ledger("sqlite://")
    options: dict[str, Any] = {"mean": 1.0} if search in ("repeat", "subset") else {}
    found = SEARCHES[search](owned(), BOX, EIGHT, ledger=ledger, subject="people", **options)
    assert found.guarantee.unit == "patient"
    assert {str(subject.terms.unit) for subject in ledger.subjects()} == {"patient"}


@pytest.mark.parametrize("unit", ["sample", "user"])
def test_a_plain_string_says_it_as_well(unit: str) -> None:
    ledger = Ledger("sqlite://")
    with pytest.raises(ValueError, match="of the kind 'patient'"):
        tune.random_search(Owned(), BOX, ONE, ledger=ledger, subject="people", unit=unit)
    assert charges(ledger) == 0
    assert ledger.subjects() == []


def test_a_trainable_that_says_nothing_has_samples() -> None:
    """Nothing bounds what a patient adds to it, so nobody may promise that."""
    ledger = Ledger("sqlite://")
    with pytest.raises(ValueError, match="does not say what its units are"):
        tune.random_search(Hill(), BOX, ONE, ledger=ledger, subject="people", unit="patient")
    assert charges(ledger) == 0
    assert tune.random_search(Hill(), BOX, ONE, ledger=ledger, subject="people").guarantee.unit == "sample"


def test_a_score_of_other_units_is_refused() -> None:
    ledger = Ledger("sqlite://")
    score = tune.by_unit(range(400), lambda model, unit: 0.5, unit="sample")  # noqa: ARG005
    for search in ("random", "several", "repeat"):
        options = {"trials": 3} if search == "random" else {}
        with pytest.raises(ValueError, match="The units of this score are of the kind 'sample'"):
            tune_with(search, ledger, score=score, **options)
    assert charges(ledger) == 0


def tune_with(search: str, ledger: Ledger, **options: Any) -> Any:
    return SEARCHES[search](owned(), BOX, EIGHT, ledger=ledger, subject="people", **options)


def half(candidate: float) -> Tensor:
    return torch.full((100,), candidate)


def test_a_choice_is_for_the_units_of_the_score() -> None:
    ledger, options = Ledger("sqlite://"), {"subject": "people", "size": 100}
    score = tune.by_unit(range(100), lambda candidate, _: candidate, unit="patient")
    for named, wanted in (("sample", score), ("patient", half), ("user", owned().score)):
        with pytest.raises(ValueError, match=r"give unit='patient'|does not say what its units are"):
            tune.noisy_selection([0.1, 0.9], wanted, ONE, ledger=ledger, unit=named, **options)  # type: ignore[arg-type]
    assert ledger.subjects() == []
    chosen = tune.noisy_selection([0.1, 0.9], score, ONE, ledger=ledger, **options)  # type: ignore[arg-type]
    assert chosen.guarantee.unit == "patient"
    ledger.subject("rows", ONE)
    with pytest.raises(ValueError, match="the terms must agree"):
        tune.noisy_selection([0.1, 0.9], score, ONE, ledger=ledger, subject="rows", size=100)
    assert charges(ledger) == 1


def test_a_method_speaks_for_its_trainable() -> None:
    assert unit_of(owned().score, None) == "patient"
    assert unit_of(half, None) == "sample"


class Ranked(Classes):
    """How sure a row is, as a rank among the others."""

    def confidence(self, probs: Tensor, labels: Tensor) -> Tensor:
        mine = probs.gather(1, labels[:, None])[:, 0].double()
        return mine.argsort().argsort().double() / len(mine)


def test_a_trial_is_not_scored_by_its_company() -> None:
    with pytest.raises(ValueError, match="number i must be computed from row i alone"):
        tune.Finetuning(probe(), rows(), task=Ranked(3), size=400)
    tune.Finetuning(probe(), rows(), task=Ranked(3), size=400, measure="accuracy")


@pytest.mark.parametrize("named", [{"unit": "patient"}, {"unit_ids": list(range(400))}])
def test_a_trainable_names_no_unit_that_its_data_do_not_have(named: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"whose each row is|say what with unit="):
        tune.Finetuning(probe(), rows(), classes=3, size=400, **named)
