"""A dry run before the first charge: a typo in a trainable or a score costs nothing."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import optuna
import pytest
import torch
from made_up import DRY, half, works
from torch import nn

from tacit import ErrorEvent, finetune, tune
from tacit._refusals import Refusal
from tacit.gradients import clipped_sum
from tacit.privacy import Budget, Ledger, Neighbours, Receipt, Unit, events, grid_sum, mechanisms, rehearsal, sampling

BOX = tune.Space(lr=(0.1, 1.0), steps=(2, 30))
ONE = Budget(1.0, 1e-5)
FEATURES = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(60) % 2


def typo(hyperparameters: tune.Hyperparameters, mu: float, receipt: Receipt) -> Any:
    """As people write them."""
    del mu
    for _ in range(hyperparameters.steps):
        mechanisms.gausian(FEATURES, receipt)  # type: ignore[attr-defined]


def wrong_score(_: Any) -> Any:
    return torch.ones(60).meen(patient=4711)  # type: ignore[attr-defined]


def by_optuna(trainable: Any, box: Any, budget: Any, **how: Any) -> Any:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return tune.optuna_search(optuna.create_study(direction="maximize"), trainable, box, budget, trials=2, **how)


SEARCHES: dict[str, Any] = {
    "linear scaling": tune.linear_scaling,
    "random": partial(tune.random_search, trials=2),
    "grid": tune.grid_search,
    "repeat": tune.repeat_and_select,
    "optuna": by_optuna,
    "one run": lambda t, _, b, **how: tune.train(t, tune.Hyperparameters(lr=1.0, steps=2), b, **how),
    "wosm": lambda t, _, b, **how: tune.adam_without_second_moment(t, b, steps=2, size=1000, **how),
}
UNSCORED = ("one run", "wosm")


@pytest.mark.parametrize("name", SEARCHES)
def test_a_typo_in_a_trainable_or_a_score_costs_nothing(name: str) -> None:
    for trainable, score, what in ((typo, half, "trainable"), (works, wrong_score, "score")):
        if what == "score" and name in UNSCORED:
            continue
        ledger, told = Ledger("sqlite://"), list[Any]()
        options: dict[str, Any] = {"ledger": ledger, "subject": "people", "curator": told.append}
        options |= {} if name in UNSCORED else {"score": score, "size": 1000}
        with pytest.raises(Refusal, match=rf"The {what} failed in a dry run at lr .*Nothing was charged") as refused:
            SEARCHES[name](trainable, BOX, ONE, **options)
        assert ledger.entries() == []
        assert [type(event) for event in told] == [ErrorEvent]
        assert ("gausian" if what == "trainable" else "meen") in told[0].details
        assert "gausian" not in str(refused.value)
        assert "meen" not in str(refused.value)


def test_what_is_released_in_a_rehearsal_is_noise_alone() -> None:
    """The mean over 4,000 releases of a sum that is 0 and of one that is a million: 0, to 6 standard deviations."""
    event = events.gaussian(1.0, steps=8000)
    receipt = rehearsal(event, unit=Unit.SAMPLE, neighbours=Neighbours.ADD_REMOVE)
    for rows in (torch.zeros(1_000_000 // 250, 250), torch.ones(1_000_000 // 250, 250)):
        query = grid_sum(rows.flatten(), low=0.0, high=1.0)
        found = [float(mechanisms.gaussian_query(query, receipt)[0]) for _ in range(4000)]
        assert abs(sum(found) / 4000) < 6 / 4000**0.5 * 1.1
    paid = rehearsal(events.gaussian(1.0), unit=Unit.SAMPLE, neighbours=Neighbours.ADD_REMOVE)
    loss = lambda model, batch: 1e6 * (model(batch[0]).flatten() - batch[1])  # noqa: E731
    total = clipped_sum(nn.Linear(4, 1, bias=False), loss, (FEATURES + 5, LABELS.float()), clip=1.0)
    assert float(total.sum["weight"].norm()) > 50
    assert float(mechanisms.gaussian(total, paid)["weight"].norm()) < 12  # chi of 4 degrees: 12 is far beyond 1e-12
    stream = rehearsal(events.stream(1.0, 3), unit=Unit.SAMPLE, neighbours=Neighbours.REPLACE_ONE)
    assert float(mechanisms.GaussianStream(stream).release(total)["weight"].norm()) < 20
    pure = rehearsal(events.laplace(1.0), unit=Unit.SAMPLE, neighbours=Neighbours.ADD_REMOVE)
    many = grid_sum(torch.ones(10_000), low=0.0, high=1.0)
    assert abs(float(mechanisms.laplace(many, pure)[0])) < 100
    two = grid_sum(torch.stack([torch.zeros(500), torch.ones(500)], 1), low=0.0, high=1.0)
    choose = partial(rehearsal, events.noisy_max(0.01), unit=Unit.SAMPLE, neighbours=Neighbours.ADD_REMOVE)
    picked = {mechanisms.noisy_max(two, choose()) for _ in range(40)}
    assert picked == {0, 1}  # by a fair coin; on a real receipt it would be 1, always


def test_a_dry_run_puts_generators_back_and_is_short() -> None:
    seen = []

    def draws(hyperparameters: tune.Hyperparameters, mu: float, receipt: Receipt) -> float:
        seen.append((receipt.stage, hyperparameters.steps, torch.rand(3).tolist()))
        return works(hyperparameters, mu, receipt)

    torch.manual_seed(5)
    expected = torch.rand(3).tolist()
    torch.manual_seed(5)
    point = tune.Hyperparameters(lr=0.1, steps=500)
    tune.train(draws, point, ONE, ledger=Ledger("sqlite://"), subject="people")
    assert [(stage, steps) for stage, steps, _ in seen] == [(DRY, 20), ("tune", 500)]
    assert seen[1][2] == expected


def test_a_trainable_may_compute_in_a_thread_of_its_own() -> None:
    """Its steps waited forever for the dry run, which had the global generators for itself and waited for them."""

    def threaded(hyperparameters: tune.Hyperparameters, mu: float, receipt: Receipt) -> float:
        found: list[float] = []

        def work() -> None:
            with sampling.randomness(receipt):
                torch.rand(3)
            found.append(works(hyperparameters, mu, receipt))

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(5.0)
        return found[0]

    point = tune.Hyperparameters(lr=0.1, steps=5)
    before = torch.get_rng_state()
    tune.train(threaded, point, ONE, ledger=Ledger("sqlite://"), subject="people")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("how", ["DPGD", "DPSGD", "DPFTRL"])
def test_trials_of_finetuning_are_rehearsed(how: str) -> None:
    optimizers: dict[str, Any] = {
        "DPGD": tune.dpgd,
        "DPSGD": lambda p: finetune.DPSGD(batch_size=20, steps=p.steps, lr=p.lr),
        "DPFTRL": lambda p: finetune.DPFTRL(batches=p.steps, lr=p.lr),
    }
    trainable = tune.Finetuning(
        nn.Linear(4, 2), (FEATURES.repeat(20, 1), LABELS.repeat(20)), size=1200, optimizer=optimizers[how]
    )
    space, ledger = tune.Space(lr=(0.1, 1.0), steps=(2, 2)), Ledger("sqlite://")
    options: dict[str, Any] = {"ledger": ledger, "subject": "people", "neighbours": "replace-one"}
    found = tune.random_search(trainable, space, Budget(8.0, 1e-5), trials=2, **options)
    assert found.guarantee.epsilon <= 8.0
    assert len([entry for entry in ledger.entries() if entry.kind == "charge"]) == 4


def test_an_objective_of_an_optuna_user() -> None:
    """Five lines: what `objective(trial)` did, on a receipt."""
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
    rows = FEATURES.repeat(20, 1), LABELS.repeat(20)

    def objective(trial: tune.Hyperparameters, mu: float, receipt: Receipt) -> Any:
        del mu  # the receipt says it
        optimizer = finetune.DPGD(steps=trial.steps, lr=trial.lr, free_step=False)
        return finetune.fit(nn.Linear(4, 2), rows, optimizer=optimizer, delta=1e-5, receipt=receipt, size=1200).model

    right = tune.by_unit(range(1200), lambda model, i: float(model(rows[0][i]).argmax() == rows[1][i]))
    options: dict[str, Any] = {"score": right, "size": 1200, "ledger": Ledger("sqlite://"), "subject": "people"}
    found = tune.optuna_search(study, objective, BOX, Budget(8.0, 1e-5), trials=3, **options)
    assert found.guarantee.epsilon <= 8.0
    assert study.best_params == {"lr": found.hyperparameters.lr, "steps": found.hyperparameters.steps}  # type: ignore[union-attr]
