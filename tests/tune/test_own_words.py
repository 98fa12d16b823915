"""What a trainable raises when it is asked for its price may reveal rows: it is for the curator, whenever that is."""

from __future__ import annotations

import math
import traceback
from functools import partial
from typing import Any

import optuna
import pytest
import torch
from made_up import Steady
from torch import nn

from tacit import tune
from tacit._refusals import Refusal
from tacit.finetune import DPSGD, Optimizer
from tacit.privacy import Budget, Ledger, Neighbours, Receipt, events

BOX = tune.Space(lr=(0.1, 1.0), steps=(21, 42))  # more than a dry run has
TWO = Budget(2.0, 1e-5)
POINT = tune.Hyperparameters(lr=1.0, steps=30)
SECRET = "patient 17 has a fever"


class Fails(Steady):
    """One of its parts raises, with private words, from its call `after` on."""

    part = ""
    after, asked = 1, 0

    def _say(self, part: str) -> None:
        if part == self.part:
            self.asked += 1
            if self.asked >= self.after:
                raise ValueError(SECRET)

    def default(self, mu: float) -> Any:
        del mu
        return POINT

    def event(self, hyperparameters: tune.Hyperparameters, mu: float, neighbours: Neighbours) -> events.DpEvent:
        self._say("event")
        return events.gaussian(neighbours.factor * math.sqrt(hyperparameters.steps) / mu, steps=hyperparameters.steps)

    def sampled(self, hyperparameters: tune.Hyperparameters) -> bool:
        del hyperparameters
        self._say("sampled")
        return False

    def event_with(self, hyperparameters: tune.Hyperparameters, noise: float) -> events.DpEvent:
        return events.gaussian(noise, steps=hyperparameters.steps)


class Subsampled(tune.Finetuning):
    """The same, of Poisson-subsampled batches."""

    part = ""
    after, asked = 1, 0
    _say = Fails._say

    def __init__(self) -> None:
        inputs = torch.randn(400, 4, generator=torch.Generator().manual_seed(0))
        super().__init__(nn.Linear(4, 2), (inputs, (inputs[:, 0] > 0).long()), size=400, optimizer=by_chance)

    def event(self, hyperparameters: tune.Hyperparameters, mu: float, neighbours: Neighbours) -> events.DpEvent:
        self._say("event")  # type: ignore[misc]
        return super().event(hyperparameters, mu, neighbours)

    def sampled(self, hyperparameters: tune.Hyperparameters) -> bool:
        self._say("sampled")  # type: ignore[misc]
        return super().sampled(hyperparameters)

    def event_with(self, hyperparameters: tune.Hyperparameters, noise: float) -> events.DpEvent:
        self._say("event_with")  # type: ignore[misc]
        return super().event_with(hyperparameters, noise)


def by_chance(point: tune.Hyperparameters) -> Optimizer:
    return DPSGD(batch_size=100, steps=point.steps, lr=point.lr)


def by_optuna(trainable: Any, box: Any, budget: Any, **how: Any) -> Any:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return tune.optuna_search(optuna.create_study(direction="maximize"), trainable, box, budget, trials=2, **how)


def in_two(trainable: Any, box: Any, budget: Any, **how: Any) -> Any:
    return tune.subset_search(
        None, box, budget, parts=(Fails(), trainable), search=partial(tune.random_search, trials=2), **how
    )


SEARCHES: dict[str, Any] = {
    "linear": tune.linear_scaling,
    "random": partial(tune.random_search, trials=2, draw_seed=2),
    "grid": partial(tune.grid_search, points=2),
    "default": lambda trainable, _, budget, **how: tune.default_search(trainable, budget, **how),
    "optuna": by_optuna,
    "repeat": partial(tune.repeat_and_select, mean=3.0),
    "dp_hypo": partial(tune.dp_hypo, mean=3.0),
    "subset": in_two,
    "train": lambda trainable, _, budget, **how: tune.train(trainable, POINT, budget, **how),
    "wosm": lambda trainable, _, budget, **how: tune.adam_without_second_moment(trainable, budget, steps=30, **how),
}


def texts(search: str, trainable: Any, box: tune.Space, budget: Budget) -> str:
    """What a recipient sees of a search, however it ends; a search that is refused has charged nothing."""
    ledger, told = Ledger("sqlite://"), list[Any]()
    try:
        found = SEARCHES[search](trainable, box, budget, ledger=ledger, subject="people", curator=told.append)
    except Refusal as refused:
        assert not [entry for entry in ledger.entries() if entry.kind == "charge"]
        assert SECRET in told[-1].details
        return "".join(traceback.format_exception(refused))
    except tune.RunFailed as failed:
        return "".join(traceback.format_exception(failed)) + repr(failed.result)
    return repr(found) + repr(found.decisions)


@pytest.mark.parametrize("part", ["event", "sampled"])
@pytest.mark.parametrize("search", SEARCHES)
def test_no_recipient_reads_what_a_price_raises(search: str, part: str) -> None:
    for after in range(1, 12):
        trainable = Fails()
        trainable.part, trainable.after = part, after
        assert SECRET not in texts(search, trainable, BOX, TWO)


@pytest.mark.parametrize("part", ["event", "sampled", "event_with"])
@pytest.mark.parametrize("search", ["linear", "random", "grid", "repeat", "train"])
def test_no_recipient_reads_what_the_price_of_sampled_runs_raises(search: str, part: str) -> None:
    for after in (1, 2, 3, 5, 8):
        trainable = Subsampled()
        trainable.part, trainable.after = part, after
        assert SECRET not in texts(search, trainable, tune.Space(lr=(0.1, 1.0), steps=(4, 4)), Budget(8.0, 1e-5))


@pytest.mark.parametrize("part", ["event", "sampled"])
def test_a_final_run_for_the_rest_that_has_no_price_leaves_what_the_search_found(part: str) -> None:
    """The search was paid for by then."""
    whole, trainable = Fails(), Fails()
    whole.part = trainable.part = part
    whole.after = 10**6
    in_two(whole, BOX, TWO, ledger=Ledger("sqlite://"), subject="people")
    trainable.after, ledger = whole.asked - (1 if part == "sampled" else 0), Ledger("sqlite://")
    with pytest.raises(tune.RunFailed, match="does not say what its final run releases") as failed:
        in_two(trainable, BOX, TWO, ledger=ledger, subject="people")
    assert failed.value.result is not None
    assert len(failed.value.result.trials) == 2
    assert SECRET not in "".join(traceback.format_exception(failed.value))
    assert ledger.get_subject("people, the rest") is None


class Panic(BaseException):
    """As compiled extensions raise it: no `Exception`."""


class PanicsLater(Steady):
    """Has no price in a trial, once the search is paid for."""

    paid = False

    def __call__(self, hyperparameters: tune.Hyperparameters, mu: float, receipt: Receipt) -> float:
        self.paid = True  # the dry run is the last before the charge
        return super().__call__(hyperparameters, mu, receipt)

    def event(self, hyperparameters: tune.Hyperparameters, mu: float, neighbours: Neighbours) -> events.DpEvent:
        if self.paid:
            raise Panic(SECRET)
        return events.gaussian(neighbours.factor * math.sqrt(hyperparameters.steps) / mu, steps=hyperparameters.steps)


def test_a_trial_of_a_secret_number_that_has_no_price_loses_whatever_it_raises() -> None:
    told: list[Any] = []
    with pytest.raises(tune.RunFailed, match="No trial has won") as failed:
        tune.repeat_and_select(
            PanicsLater(), BOX, TWO, mean=3.0, ledger=Ledger("sqlite://"), subject="people", curator=told.append
        )
    assert SECRET not in "".join(traceback.format_exception(failed.value))
    assert SECRET in told[0].error
