"""Random and grid search: what they find, and that every run and score of theirs is in the ledger."""

from __future__ import annotations

import math
import traceback
from functools import partial
from pathlib import Path

import pytest
import torch
from made_up import Hill, breaks, dies, half, works
from scipy.optimize import brentq
from scipy.stats import norm
from torch import nn

from tacit import tune
from tacit.finetune import DPSGD
from tacit.privacy import Budget, BudgetExceeded, Ledger, Neighbours, guarantee, mu_of
from tacit.privacy.events import compose, from_json, gaussian_noise

BOX = tune.Space(lr=(0.01, 10.0), steps=(1, 20))
ONE = Budget(1.0, 1e-5)


def epsilon(mu: float, delta: float = 1e-5) -> float:
    """The closed form, solved here."""
    return float(
        brentq(lambda e: norm.cdf(-e / mu + mu / 2) - math.exp(e) * norm.cdf(-e / mu - mu / 2) - delta, 0, 100)
    )


def noises(ledger: Ledger, subject: str = "people") -> list[float]:
    """The joint noise multiplier of every charge, in their order."""
    bodies = [entry.body for entry in ledger.entries(subject) if entry.kind == "charge"]
    found = [gaussian_noise(from_json(body["event"])) for body in bodies]
    return [noise for noise in found if noise is not None]


def total(ledger: Ledger, factor: int = 1) -> float:
    return math.sqrt(sum((factor / noise) ** 2 for noise in noises(ledger)))


# One run


def test_one_trial_is_one_run_with_everything() -> None:
    ledger, hill = Ledger("sqlite://"), Hill()
    found = tune.random_search(hill, BOX, ONE, ledger=ledger, subject="people", draw_seed=3)
    assert len(noises(ledger)) == 1
    assert total(ledger) == pytest.approx(mu_of(1.0, 1e-5), rel=1e-8)
    assert total(ledger) <= mu_of(1.0, 1e-5)
    assert found.trials == ()
    assert hill.seen[0][0] == found.hyperparameters
    assert found.guarantee.epsilon == pytest.approx(1.0, rel=1e-7)
    again = tune.random_search(Hill(), BOX, ONE, ledger=Ledger("sqlite://"), subject="people", draw_seed=3)
    assert again.hyperparameters == found.hyperparameters


def test_one_trial_needs_neither_score_nor_size() -> None:
    found = tune.random_search(works, BOX, ONE, ledger=Ledger("sqlite://"), subject="people")
    assert found.model == 0.5


def test_an_error_in_the_only_run_is_raised_without_its_words() -> None:
    ledger, told = Ledger("sqlite://"), []
    with pytest.raises(tune.RunFailed) as failed:
        tune.random_search(
            breaks, BOX, ONE, ledger=ledger, subject="people", curator=lambda event: told.append(event.error)
        )
    assert "patient" not in "".join(traceback.format_exception(failed.value))
    assert told == ["ArithmeticError: patient 17 has a fever"]
    assert total(ledger) == pytest.approx(mu_of(1.0, 1e-5), rel=1e-8)


# Several


@pytest.mark.parametrize("neighbours", list(Neighbours))
@pytest.mark.parametrize("trials", [2, 5])
def test_several_trials_share_the_budget_with_their_scores(trials: int, neighbours: Neighbours) -> None:
    ledger, hill = Ledger("sqlite://"), Hill(size=100_000)
    found = tune.random_search(
        hill, BOX, ONE, ledger=ledger, subject="people", trials=trials, neighbours=neighbours, draw_seed=1
    )
    runs, scores = noises(ledger)[::2], noises(ledger)[1::2]
    assert len(runs) == len(scores) == trials
    mu, factor = mu_of(1.0, 1e-5), neighbours.factor
    assert scores == pytest.approx([factor * 0.01 * 100_000] * trials)  # one point of accuracy
    expected = math.sqrt(mu**2 / trials - (0.01 * 100_000) ** -2)
    assert [factor / noise for noise in runs] == pytest.approx([expected] * trials, rel=1e-8)
    assert mu * (1 - 1e-8) < total(ledger, factor) <= mu
    assert found.guarantee.epsilon <= 1.0
    assert found.final_run_guarantee is not None
    assert found.final_run_guarantee.epsilon == pytest.approx(epsilon(expected), rel=1e-6)


def test_scores_take_at_most_their_share() -> None:
    ledger = Ledger("sqlite://")
    tune.random_search(Hill(size=500), BOX, Budget(2.0, 1e-5), ledger=ledger, subject="people", trials=4, scores=0.2)
    mu = mu_of(2.0, 1e-5)
    assert sum(noise**-2 for noise in noises(ledger)[1::2]) == pytest.approx(0.2 * mu**2)
    assert total(ledger) <= mu


def test_the_best_released_score_wins_and_its_model_is_the_result() -> None:
    hill = Hill(size=100_000)
    found = tune.random_search(hill, BOX, ONE, ledger=Ledger("sqlite://"), subject="people", trials=6, draw_seed=2)
    scores = [trial.score for trial in found.trials]
    winner = found.trials[scores.index(max(scores))]
    assert found.hyperparameters == winner.hyperparameters
    assert hill.score(found.model).mean() == pytest.approx(winner.score, abs=0.06)  # six standard deviations
    assert all(trial.model is None for trial in found.trials)


def test_trials_that_fail_stay_charged_and_keep_their_words(capfd: pytest.CaptureFixture[str]) -> None:
    ledger, told = Ledger("sqlite://"), []
    with pytest.raises(tune.RunFailed, match=r"All 3 trials failed\. What was run stays charged; the rest") as failed:
        tune.random_search(
            breaks,
            BOX,
            ONE,
            ledger=ledger,
            subject="people",
            trials=12,
            score=half,
            size=10_000,
            curator=lambda event: told.append(event.error),
        )
    found = failed.value.result
    assert found is not None
    assert (found.model, found.hyperparameters) == (None, None)
    assert found.decisions == ("No trial gave a score: there is no model.",)
    assert total(ledger) == pytest.approx(mu_of(1.0, 1e-5) / 2, rel=1e-8)  # 3 of 12 equal parts of mu^2
    assert told == ["ArithmeticError: patient 17 has a fever"] * 3
    assert "patient" not in str(failed.value) + repr(found) + str(ledger.entries()) + "".join(capfd.readouterr())


def test_a_budget_too_small_is_refused_before_anything_is_spent() -> None:
    ledger = Ledger("sqlite://")
    for search in (partial(tune.random_search, trials=3), partial(tune.grid_search, points=2)):
        with pytest.raises(tune.BudgetTooSmall, match="too small for a search over 100 units"):
            search(works, BOX, Budget(0.1, 1e-5), ledger=ledger, subject="people", score=half, size=100)
    assert ledger.entries() == []


def test_a_killed_trial_stays_charged_and_the_best_model_comes_back_from_its_process(tmp_path: Path) -> None:
    ledger = Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    box = tune.Space(lr=(0.01, 1.0), steps=(2, 2))
    found = tune.grid_search(
        dies,
        box,
        ONE,
        ledger=ledger,
        subject="people",
        points=2,
        score=half,
        size=10_000,
        runner=tune.Processes(workers=2),
    )
    assert [trial.failed for trial in found.trials] == [False, True]
    assert found.model == 0.5
    assert len(noises(ledger)) == 4
    assert total(ledger) == pytest.approx(mu_of(1.0, 1e-5), rel=1e-8)
    ledger.close()


# The grid


def test_a_grid_within_a_budget_divides_it() -> None:
    ledger, hill = Ledger("sqlite://"), Hill(size=100_000)
    found = tune.grid_search(hill, BOX, ONE, ledger=ledger, subject="people", points=3)
    assert [point for point, _ in hill.seen] == list(BOX.grid(3))
    mu = mu_of(1.0, 1e-5)
    assert 1 / noises(ledger)[0] == pytest.approx(mu / 3, rel=1e-3)  # nine points
    assert mu * (1 - 1e-8) < total(ledger) <= mu
    assert found.guarantee.epsilon <= 1.0


def test_a_grid_of_full_runs_says_what_it_really_cost() -> None:
    """Nine runs of epsilon 1 are no search of epsilon 1."""
    ledger, each = Ledger("sqlite://"), mu_of(1.0, 1e-5)
    found = tune.grid_search(Hill(size=100_000), BOX, each=ONE, ledger=ledger, subject="people", points=3)
    expected = math.sqrt(9 * (each**2 + (0.01 * 100_000) ** -2))
    assert total(ledger) == pytest.approx(expected)
    assert found.guarantee.epsilon == pytest.approx(epsilon(expected), rel=1e-6)
    assert found.guarantee.epsilon > 3.2
    assert found.final_run_guarantee is not None
    assert found.final_run_guarantee.epsilon == pytest.approx(1.0)


def test_a_subject_that_cannot_afford_all_runs_pays_for_none() -> None:
    ledger = Ledger("sqlite://")
    with pytest.raises(BudgetExceeded, match=r"cannot afford 9 runs and their scores: they cost epsilon 3\.4"):
        tune.grid_search(
            Hill(), BOX, Budget(3.0, 1e-5), each=ONE, ledger=ledger, subject="people", points=3, precision=0.05
        )
    assert noises(ledger) == []
    tune.grid_search(Hill(), BOX, Budget(3.6, 1e-5), each=ONE, ledger=ledger, subject="others", points=3)
    with pytest.raises(BudgetExceeded, match="Nothing was charged"):
        tune.random_search(Hill(), BOX, ONE, ledger=ledger, subject="others", trials=2)


def test_what_is_missing_is_asked_for() -> None:
    ledger = Ledger("sqlite://")
    for search in (partial(tune.random_search, trials=2), tune.grid_search):
        with pytest.raises(ValueError, match="Give score="):
            search(works, BOX, ONE, ledger=ledger, subject="people", size=100)
        with pytest.raises(ValueError, match="Give size="):
            search(works, BOX, ONE, ledger=ledger, subject="people", score=half)
        with pytest.raises(ValueError, match="finite epsilon and a delta above 0"):
            search(Hill(), BOX, Budget(1.0, 0.0), ledger=ledger, subject="people")
    with pytest.raises(ValueError, match="Give budget="):
        tune.grid_search(Hill(), BOX, ledger=ledger, subject="people")
    with pytest.raises(ValueError, match="trials must be whole"):
        tune.random_search(Hill(), BOX, ONE, ledger=ledger, subject="people", trials=0)
    assert ledger.entries() == []


# Poisson-subsampled batches


def sampled(size: int = 400) -> tune.Finetuning:
    torch.manual_seed(0)
    inputs = torch.randn(size, 4)
    model = nn.Sequential(nn.Identity(), nn.Linear(4, 2))
    return tune.Finetuning(
        model,
        (inputs, (inputs[:, 0] > 0).long()),
        size=size,
        optimizer=lambda point: DPSGD(lr=point.lr, steps=point.steps, batch_size=100),
    )


@pytest.mark.parametrize("trials", [1, 2])
def test_sampled_runs_are_all_declared_and_composed_by_pld(trials: int) -> None:
    ledger = Ledger("sqlite://")
    budget = Budget(2.0, 1e-5)
    box = tune.Space(lr=(0.1, 1.0), steps=(3, 6))
    found = tune.random_search(sampled(), box, budget, ledger=ledger, subject="people", trials=trials, draw_seed=0)
    charged = [from_json(entry.body["event"]) for entry in ledger.entries("people") if entry.kind == "charge"]
    assert len(charged) == (1 if trials == 1 else 2 * trials)
    whole = guarantee(compose(charged), delta=1e-5)
    assert whole.epsilon == pytest.approx(found.guarantee.epsilon, rel=1e-6)
    assert 1.98 < whole.epsilon <= 2.0
    assert found.model is not None
