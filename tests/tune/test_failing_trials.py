"""Trials and final runs that fail: what they leave to others, and what a curator's own mistake changes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from made_up import DRY, Steady

from tacit import tune
from tacit.privacy import Budget, Ledger, Receipt
from tacit.privacy.events import from_json, gaussian_noise
from tacit.tune._trials import Job

BOX = tune.Space(lr=(0.1, 1.0), steps=(2, 4))
TWO = Budget(2.0, 1e-5)
SECRET = "patient 17 has a fever"

SEARCHES: dict[str, Any] = {
    "random": partial(tune.random_search, trials=3, draw_seed=2),
    "grid": partial(tune.grid_search, points=2),
    "repeat": partial(tune.repeat_and_select, mean=30.0),
    "dp_hypo": partial(tune.dp_hypo, mean=30.0),
}


def charged(ledger: Ledger) -> list[float]:
    """The mu of every charge."""
    bodies = [entry.body for entry in ledger.entries() if entry.kind == "charge"]
    noises = [gaussian_noise(from_json(body["event"])) for body in bodies]
    return [1 / noise for noise in noises if noise is not None]


# A curator


class FailsAbove(Steady):
    """Its runs fail from a learning rate on."""

    most = math.inf

    def __call__(self, hyperparameters: tune.Hyperparameters, mu: float, receipt: Receipt) -> float:
        found = super().__call__(hyperparameters, mu, receipt)
        if receipt.stage != DRY and hyperparameters.lr > self.most:
            raise ValueError(SECRET)
        return found


def mistaken(event: Any) -> Any:
    """A trial's event has `error`, and no `details`: this is found out only when a trial fails."""
    return event.details if event.error else None


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("most", [math.inf, 0.5])
def test_a_curator_that_raises_at_a_trial_that_fails_changes_nothing(search: str, most: float) -> None:
    trainable, ledger = FailsAbove(), Ledger("sqlite://")
    trainable.most = most
    options: dict[str, Any] = {"ledger": ledger, "subject": "people", "curator": mistaken, "seed": 4}
    found = SEARCHES[search](trainable, BOX, TWO, **options)
    assert found.model == 0.7


def test_a_curator_that_raises_at_a_final_run_that_fails_is_ignored() -> None:
    trainable = FailsAbove()
    trainable.most = 0.5
    with pytest.raises(tune.RunFailed, match="stays charged"):
        tune.train(trainable, trainable.default(1.0), TWO, ledger=Ledger("sqlite://"), subject="a", curator=mistaken)


# What a search from the default does with trials that fail


class Ahead:
    """A runner of one's own that charges for all its jobs before it hands any back, those first that failed."""

    def __call__(self, jobs: Sequence[Job], ledger: Ledger) -> Any:
        done = [(number, *job.run(ledger)) for number, job in enumerate(jobs)]
        yield from sorted(done, key=lambda one: not one[1].failed)


def test_a_final_run_is_not_given_what_trials_that_were_stopped_have_spent() -> None:
    """Three fail, and three more have been charged by then."""
    trainable, ledger = FailsAbove(), Ledger("sqlite://")
    trainable.most = 1.0
    factors = (0.25, 0.5, 0.75, 2.0, 3.0, 4.0)
    found = tune.default_search(
        trainable, TWO, ledger=ledger, subject="people", factors=factors, share=0.1, runner=Ahead()
    )
    assert found.model == 0.7
    assert found.decisions == ("No other trial than the default's has a score: the default is used.",)
    assert len(charged(ledger)) == 2 * 7 + 1
    assert math.sqrt(sum(mu**2 for mu in charged(ledger))) == pytest.approx(TWO.mu, rel=1e-6)
    assert found.guarantee.epsilon <= 2.0


class LastFails(Steady):
    def __call__(self, hyperparameters: tune.Hyperparameters, mu: float, receipt: Receipt) -> float:
        found = super().__call__(hyperparameters, mu, receipt)
        if receipt.note == "final run":
            raise ValueError(SECRET)
        return found


def test_a_final_run_from_the_default_that_fails_leaves_what_the_trials_found() -> None:
    with pytest.raises(tune.RunFailed, match=r"The final run failed\.") as failed:
        tune.default_search(LastFails(), TWO, ledger=Ledger("sqlite://"), subject="people")
    found = failed.value.result
    assert found is not None
    assert (len(found.trials), found.model) == (3, None)
    assert found.decisions[-1] == "The final run failed: there is no model."
    assert SECRET not in str(failed.value) + repr(found)
