"""What a trainable may say of itself, and what is taken for granted of one that says nothing."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tacit import tune
from tacit.privacy import Budget, Ledger, Neighbours
from tacit.tune._trainable import HasUnit, Priced, Sampled, own_unit, sampled_at, score_of, size_of

POINT = tune.Hyperparameters(lr=1.0, steps=3)


def plain(hyperparameters: tune.Hyperparameters, mu: float, receipt: Any) -> None:
    del hyperparameters, mu, receipt


class Full:
    size, unit = 7, "patient"

    def __call__(self, hyperparameters: tune.Hyperparameters, mu: float, receipt: Any) -> None:
        del hyperparameters, mu, receipt

    def score(self, _: Any) -> Tensor:
        return torch.ones(7)

    def event(self, hyperparameters: tune.Hyperparameters, mu: float, neighbours: Neighbours) -> Any: ...

    def sampled(self, hyperparameters: tune.Hyperparameters) -> bool:
        return hyperparameters.steps > 2

    def event_with(self, hyperparameters: tune.Hyperparameters, noise: float) -> Any: ...


def test_a_function_is_a_trainable_that_says_nothing() -> None:
    assert isinstance(plain, tune.Trainable)
    assert not isinstance(plain, Priced)
    assert (size_of(plain, None), score_of(plain, None), own_unit(plain), sampled_at(plain, POINT)) == (
        None,
        None,
        None,
        False,
    )
    assert size_of(plain, 5) == 5
    assert not isinstance(3, tune.Trainable)


def test_an_object_says_more_and_the_caller_has_the_last_word() -> None:
    full = Full()
    assert isinstance(full, Sampled)
    assert isinstance(full, HasUnit)
    assert (size_of(full, None), size_of(full, 9), own_unit(full)) == (7, 9, "patient")
    assert own_unit(full.score) == "patient"  # a method has the units of its object
    found = score_of(full, None)
    assert found is not None
    assert torch.equal(found(None), torch.ones(7))
    assert score_of(full, plain) is plain  # type: ignore[arg-type]
    assert sampled_at(full, POINT)
    assert not sampled_at(full, tune.Hyperparameters(lr=1.0, steps=2))


def test_the_trainable_of_fine_tuning_says_everything() -> None:
    rows = (torch.randn(12, 3), torch.arange(12) % 2)
    found = tune.Finetuning(torch.nn.Linear(3, 2), rows, classes=2, size=12)
    assert isinstance(found, Sampled)
    assert (size_of(found, None), own_unit(found), sampled_at(found, POINT)) == (12, "sample", False)


def test_what_cannot_split_its_units_is_refused_before_any_charge() -> None:
    ledger = Ledger("sqlite://")
    with pytest.raises(ValueError, match="cannot split its people"):
        tune.subset_search(
            plain,
            tune.Space(lr=(0.1, 1.0), steps=(1, 2)),
            Budget(1.0, 1e-5),
            ledger=ledger,
            subject="a",
        )
    assert ledger.entries() == []
