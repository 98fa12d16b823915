"""Mistakes in what a trainable says of itself, or in an argument, cost no budget."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import optuna
import pytest
import torch
from made_up import Steady
from torch import Tensor, nn

from tacit import finetune, tune
from tacit._refusals import Refusal
from tacit.privacy import Budget, Ledger, Neighbours, events

BOX = tune.Space(lr=(0.1, 1.0), steps=(2, 4))
TWO = Budget(2.0, 1e-5)
SECRET = "patient 17 has a fever"


def by_optuna(trainable: Any, box: Any, budget: Any, **how: Any) -> Any:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return tune.optuna_search(optuna.create_study(direction="maximize"), trainable, box, budget, trials=2, **how)


SEARCHES: dict[str, Any] = {
    "linear": tune.linear_scaling,
    "random": partial(tune.random_search, trials=3, draw_seed=2),
    "grid": partial(tune.grid_search, points=2),
    "default": lambda trainable, _, budget, **how: tune.default_search(trainable, budget, **how),
    "optuna": by_optuna,
    "repeat": partial(tune.repeat_and_select, mean=3.0),
    "dp_hypo": partial(tune.dp_hypo, mean=3.0),
    "subset": lambda trainable, box, budget, **how: tune.subset_search(
        None, box, budget, parts=(Steady(), trainable), search=partial(tune.random_search, trials=2), **how
    ),
    "train": lambda trainable, _, budget, **how: tune.train(trainable, trainable.default(1.0), budget, **how),
}


# A blind guess


class GuessRaises(Steady):
    @property
    def guess(self) -> float:
        raise ValueError(SECRET)


def test_a_guess_that_fails_costs_nothing_and_its_words_are_the_curators() -> None:
    ledger, told = Ledger("sqlite://"), list[Any]()
    with pytest.raises(Refusal, match=r"`guess` failed\. Nothing was charged") as refused:
        tune.default_search(GuessRaises(), TWO, ledger=ledger, subject="people", curator=told.append)
    assert SECRET not in str(refused.value)
    assert SECRET in told[0].details
    assert ledger.entries() == []


@pytest.mark.parametrize("guess", [math.nan, math.inf, 1.5, -0.1, True, "0.5", abs])
def test_a_guess_is_a_number_from_0_to_1(guess: Any) -> None:
    known, ledger = Steady(), Ledger("sqlite://")
    known.guess = guess  # type: ignore[attr-defined]
    with pytest.raises(Refusal, match=r"a public number from 0 to 1, or None\. Nothing was charged"):
        tune.default_search(known, TWO, ledger=ledger, subject="people")
    assert ledger.entries() == []


# A default


class DefaultFails(Steady):
    """Raises, or has none, for the larger mu of a final run alone."""

    def __init__(self, how: str) -> None:
        self.how = how

    def default(self, mu: float) -> Any:
        found = super().default(mu)
        if self.how == "is a dict":
            return {"lr": 1.0, "steps": 3}
        if self.how == "raises" and mu > 0.3:
            raise ValueError(SECRET)
        return None if self.how == "has none" and mu > 0.3 else found


@pytest.mark.parametrize(
    ("how", "said"),
    [("raises", "`default` failed"), ("has none", "no default of its own"), ("is a dict", "Hyperparameters, not dict")],
)
def test_a_default_is_asked_before_anything_is_charged(how: str, said: str) -> None:
    ledger = Ledger("sqlite://")
    with pytest.raises(ValueError, match=said) as refused:
        tune.default_search(DefaultFails(how), TWO, ledger=ledger, subject="people")
    assert SECRET not in str(refused.value)
    if how != "has none":  # a search by linear scaling goes on without one
        with pytest.raises(Refusal, match=said):
            tune.linear_scaling(DefaultFails(how), BOX, TWO, ledger=ledger, subject="people")
    assert ledger.entries() == []


@pytest.mark.parametrize("search", ["linear", "default"])
def test_a_default_that_is_given_is_of_hyperparameters(search: str) -> None:
    ledger = Ledger("sqlite://")
    with pytest.raises(Refusal, match="Hyperparameters, not dict"):
        SEARCHES[search](Steady(), BOX, TWO, ledger=ledger, subject="people", default={"lr": 1.0, "steps": 3})
    assert ledger.entries() == []


# A price


class Forgetful(Steady):
    """Forgets the root of the number of steps."""

    def event(self, hyperparameters: tune.Hyperparameters, mu: float, neighbours: Neighbours) -> events.DpEvent:
        return events.gaussian(neighbours.factor / mu, steps=hyperparameters.steps)


@pytest.mark.parametrize("neighbours", ["add-remove", "replace-one"])
@pytest.mark.parametrize("search", SEARCHES)
def test_runs_that_cost_more_than_they_may_are_refused_before_the_first(search: str, neighbours: str) -> None:
    ledger = Ledger("sqlite://")
    with pytest.raises(Refusal, match=r"would cost more than that by the trainable's `event`.*Nothing was charged"):
        SEARCHES[search](Forgetful(), BOX, TWO, ledger=ledger, subject="people", neighbours=neighbours)
    assert ledger.entries() == []


class Floor(Steady):
    """Has the price of a large mu at a small one, too: what a dry run at the largest does not see."""

    def event(self, hyperparameters: tune.Hyperparameters, mu: float, neighbours: Neighbours) -> events.DpEvent:
        return events.gaussian(
            neighbours.factor * hyperparameters.steps**0.5 / max(mu, 0.3), steps=hyperparameters.steps
        )


def test_a_trial_that_is_dearer_than_planned_is_not_charged() -> None:
    ledger, told = Ledger("sqlite://"), list[Any]()
    with pytest.raises(tune.RunFailed):
        tune.linear_scaling(Floor(), BOX, TWO, ledger=ledger, subject="people", curator=told.append)
    assert [entry.kind for entry in ledger.entries()].count("charge") == 0
    assert "would cost more" in told[0].error


class Silent(Steady):
    """An event that fails, with private words."""

    def event(self, *_: Any) -> events.DpEvent:
        raise ValueError("patient 17 has a fever")


def test_what_an_event_raises_is_for_the_curator() -> None:
    ledger, told = Ledger("sqlite://"), list[Any]()
    with pytest.raises(Refusal, match=r"The trainable.s `event` failed\. Nothing was charged") as refused:
        tune.default_search(
            Silent(),
            TWO,
            default=tune.Hyperparameters(lr=1.0, steps=2),
            ledger=ledger,
            subject="people",
            curator=told.append,
        )
    assert "fever" not in str(refused.value)
    assert "fever" in told[0].details
    assert ledger.entries() == []


# A score


class Wide(Steady):
    """Scores each class of a unit, where one number per unit is wanted: the first alone would count."""

    def score(self, model: float) -> Tensor:
        return super().score(model)[:, None].expand(-1, 3)


@pytest.mark.parametrize("search", [name for name in SEARCHES if name not in ("train", "subset")])
def test_a_score_has_one_number_per_unit(search: str) -> None:
    ledger, told = Ledger("sqlite://"), list[Any]()
    with pytest.raises(Refusal, match=r"one number per unit.*Nothing was charged"):
        SEARCHES[search](Wide(), BOX, TWO, ledger=ledger, subject="people", curator=told.append)
    assert told == []
    assert ledger.entries() == []


# A scale


def test_a_scale_that_there_is_not_is_refused() -> None:
    ledger = Ledger("sqlite://")
    with pytest.raises(ValueError, match="scale is 'size' or 'keep'; got 'sise'"):
        tune.subset_search(
            None,
            BOX,
            TWO,
            parts=(Steady(), Steady()),
            scale="sise",
            ledger=ledger,
            subject="people",  # type: ignore[arg-type]
        )
    assert ledger.entries() == []


# Whose numbers a score has


def of_whom(unit: str, **more: Any) -> tune.Finetuning:
    rows, labels, owners = torch.randn(400, 4), torch.arange(400) % 2, torch.arange(400) // 4
    data = (rows, labels) if unit == "sample" else (rows, labels, owners)
    return tune.Finetuning(nn.Linear(4, 2), data, unit=unit, size=400 if unit == "sample" else 100, classes=2, **more)


def numbers(count: int, value: float) -> tune.Score:
    return lambda _: torch.full((count,), value)


@pytest.mark.parametrize("search", ["linear", "random", "grid", "default", "optuna", "repeat", "dp_hypo"])
def test_a_score_of_patients_says_so(search: str) -> None:
    trainable, ledger = of_whom("patient"), Ledger("sqlite://")
    ask = partial(SEARCHES[search], trainable, BOX, Budget(20.0, 1e-5), ledger=ledger, subject="people")
    for rows in (numbers(400, 0.5), tune.by_unit(range(400), lambda *_: 0.5)):
        with pytest.raises(ValueError, match=r"one number per patient.*tune\.by_unit\(.*unit='patient'\)"):
            ask(score=rows)
    assert ledger.entries() == []


def test_a_score_that_says_so_is_taken() -> None:
    def score(_: Any) -> Tensor:
        return torch.full((100,), 0.5)

    score.unit = "patient"  # type: ignore[attr-defined]
    for one in (score, partial(score)):
        found = tune.random_search(
            of_whom("patient"), BOX, TWO, trials=2, score=one, ledger=Ledger("sqlite://"), subject="people"
        )
        assert len(found.trials) == 2


@pytest.mark.parametrize(
    ("score", "said"),
    [
        (numbers(1000, 0.5), r"more than twice as many as size= says \(400\)"),
        (numbers(400, 80.0), "a number from 0 to 1 per unit"),
        (lambda _: 0.5, "in a tensor of one dimension"),
        (lambda _: torch.tensor(0.5), "in a tensor of one dimension"),
    ],
)
def test_scores_that_are_plainly_others_are_refused(score: Any, said: str) -> None:
    ledger = Ledger("sqlite://")
    with pytest.raises(Refusal, match=f"{said}.*Nothing was charged"):
        tune.random_search(of_whom("sample"), BOX, TWO, trials=2, score=score, ledger=ledger, subject="people")
    assert ledger.entries() == []


def test_one_odd_number_of_a_score_refuses_nothing() -> None:
    def score(_: Any) -> Tensor:
        return torch.tensor([0.5] * 398 + [math.nan, 7.0])

    found = tune.random_search(
        of_whom("sample"), BOX, TWO, trials=2, score=score, ledger=Ledger("sqlite://"), subject="people"
    )
    assert all(trial.score is not None for trial in found.trials)


def test_an_optimizer_with_steps_of_its_own_is_no_search_over_steps() -> None:
    trainable = of_whom("sample", optimizer=lambda p: finetune.DPSGD(batch_size=40, steps=20, lr=p.lr))
    ask = partial(tune.random_search, trainable, budget=TWO, ledger=Ledger("sqlite://"), subject="people")
    with pytest.raises(ValueError, match=r"makes 20 steps where the search would have 2:.*steps=\(20, 20\)"):
        ask(space=BOX)
    assert ask(space=tune.Space(lr=(0.1, 1.0), steps=(20, 20))).hyperparameters.steps == 20


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"runner": tune.Processes}, r"runner is .*tune\.Processes\(2\)"),
        ({"runner": 2}, r"runner is .*tune\.Processes\(2\)"),
        ({"ledger": "sqlite://"}, r"ledger is a tacit\.Ledger"),
    ],
)
def test_arguments_of_another_type_are_named(more: dict[str, Any], said: str) -> None:
    ledger = Ledger("sqlite://")
    how: dict[str, Any] = {"ledger": ledger, "subject": "people"}
    with pytest.raises(TypeError, match=said):
        tune.random_search(Steady(), BOX, TWO, trials=2, **(how | more))
    assert ledger.get_subject("people") is None
