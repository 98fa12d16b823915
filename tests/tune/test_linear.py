"""Linear scaling as a whole: what it finds, what it costs, what it does when things go wrong."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from made_up import Hill, breaks, dies, half, works

from tacit import tune
from tacit.privacy import Budget, BudgetExceeded, Ledger, Mode, Neighbours, Receipt, epsilon_of, mu_of
from tacit.privacy.events import from_json, gaussian_noise
from tacit.tune import _trials as trials

BOX = tune.Space(lr=(0.01, 10.0), steps=(1, 50))
ONE = Budget(1.0, 1e-5)


def spent(ledger: Ledger, subject: str) -> float:
    """Mu of all charges, from the ledger's own rows."""
    bodies = [entry.body for entry in ledger.entries(subject) if entry.kind == "charge"]
    noises = [gaussian_noise(from_json(body["event"])) for body in bodies]
    return math.sqrt(sum(z**-2 for z in noises if z is not None))


@pytest.mark.parametrize("draw_seed", range(5))
def test_a_known_line_is_recovered(draw_seed: int) -> None:
    hill = Hill(slope=40.0, offset=2.0, size=100_000)
    found = tune.linear_scaling(
        hill,
        tune.Space(lr=(0.5, 2.0), steps=(4, 30)),
        ONE,
        ledger=Ledger("sqlite://"),
        subject="people",
        plan=tune.plan(ONE, 4, sweeps=(0.1, 0.4), size=100_000),
        draw_seed=draw_seed,
    )
    target = found.plan.epsilon(found.plan.mu_final)
    # four trials in a box of 2 to 60 are a factor of 2.3 apart, and the line goes on for as far again
    assert abs(math.log(found.line.r(target) / (40.0 * target + 2.0))) < math.log(2.3)
    assert hill.seen[-1] == (found.hyperparameters, found.plan.mu_final)


def test_every_charge_is_in_the_ledger_and_the_total_is_kept() -> None:
    ledger, hill = Ledger("sqlite://"), Hill()
    found = tune.linear_scaling(hill, BOX, ONE, ledger=ledger, subject="people", draw_seed=1)
    charges = [entry for entry in ledger.entries("people") if entry.kind == "charge"]
    assert len(charges) == 6 + 6 + 1
    assert spent(ledger, "people") == pytest.approx(found.plan.mu, rel=1e-9)
    assert spent(ledger, "people") <= ONE.mu
    assert found.guarantee.epsilon <= 1.0
    assert found.guarantee.epsilon == pytest.approx(epsilon_of(found.plan.mu, 1e-5), rel=1e-6)
    assert found.final_run_guarantee is not None
    assert found.final_run_guarantee.epsilon < found.guarantee.epsilon
    with pytest.raises(BudgetExceeded):
        tune.linear_scaling(hill, BOX, ONE, ledger=ledger, subject="people")


@pytest.mark.parametrize("neighbours", list(Neighbours))
def test_every_relation_costs_the_same_mu(neighbours: Neighbours) -> None:
    ledger = Ledger("sqlite://")
    found = tune.linear_scaling(Hill(), BOX, ONE, ledger=ledger, subject="people", neighbours=neighbours, draw_seed=0)
    assert spent(ledger, "people") * neighbours.factor == pytest.approx(found.plan.mu, rel=1e-9)
    assert found.guarantee.epsilon <= 1.0


def test_the_noise_of_a_score_is_what_was_planned() -> None:
    ledger, size, mu = Ledger("sqlite://"), 100, 0.5
    ledger.subject("people", Budget(100.0, 1e-5))
    job = trials.Job(
        trainable=works,
        score=half,
        hyperparameters=tune.Hyperparameters(lr=0.1, steps=1),
        mu=0.01,
        mu_score=mu,
        size=size,
        subject="people",
        ledger=ledger.url,
        note="",
    )
    found = torch.tensor([job.run(ledger)[0].score for _ in range(100)])
    # the standard deviation of 100 normals is off by more than 37% with a chance below 1e-6
    expected = math.hypot(1 / mu, 3 * 2.0**-10) / size
    assert float((found - 0.5).pow(2).mean().sqrt()) == pytest.approx(expected, rel=0.37)


@pytest.mark.parametrize("neighbours", list(Neighbours))
def test_one_unit_moves_a_score_by_at_most_what_was_paid_for(neighbours: Neighbours) -> None:
    from tacit.privacy import grid_sum

    values = torch.tensor([0.0, 1.0, 0.3, 5.0, -2.0, math.nan, math.inf])
    totals = []
    for other in (0.0, 1.0, 0.77, math.nan, 1e30, -1e30):
        for place in range(len(values)):
            changed = values.clone()
            changed[place] = other
            totals.append(
                (
                    grid_sum(values, low=0.0, high=1.0, grid=2.0**-10),
                    grid_sum(changed, low=0.0, high=1.0, grid=2.0**-10),
                )
            )
    for one, two in totals:
        moved = abs(one.total[0] - two.total[0]) * one.grid
        assert moved <= neighbours.factor * one.bound("l2", neighbours) + 1e-12


def test_failed_trials_stay_charged_and_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    ledger, told = Ledger("sqlite://"), []

    with pytest.raises(tune.RunFailed, match="All 3 trials of sweep 1 failed, and the search has stopped") as failed:
        tune.linear_scaling(
            breaks,
            BOX,
            ONE,
            ledger=ledger,
            subject="people",
            score=half,
            size=1000,
            curator=lambda event: told.append(event.error),
        )
    found = failed.value.result
    assert found is not None
    assert [trial.failed for trial in found.trials] == [True] * 3
    assert (found.model, found.hyperparameters) == (None, None)
    plan = tune.plan(ONE, 3, size=1000)
    assert spent(ledger, "people") == pytest.approx(math.sqrt(3 * (plan.mu1**2 + plan.mu_score**2)), rel=1e-9)
    left = ledger.remaining("people").mu
    assert left == pytest.approx(math.sqrt(ONE.mu**2 - spent(ledger, "people") ** 2), rel=1e-6)
    assert told == ["ArithmeticError: patient 17 has a fever"] * 3  # the curator's, and nobody else's
    assert "patient" not in capsys.readouterr().out + str(failed.value) + repr(found) + repr(found.trials)


def test_a_sweep_in_which_some_trials_work_goes_on() -> None:
    calls = []

    def trains(hyperparameters: tune.Hyperparameters, mu: float, receipt: Receipt) -> float:
        calls.append(receipt.stage)
        return (breaks if len(calls) in (2, 3) else works)(hyperparameters, mu, receipt)

    found = tune.linear_scaling(trains, BOX, ONE, ledger=Ledger("sqlite://"), subject="people", score=half, size=1000)
    assert [trial.failed for trial in found.trials] == [True, True, False, False, False, False]
    assert found.model == 0.5
    assert calls == ["rehearsal"] + ["tune"] * 7


def test_trials_in_processes_charge_one_ledger_and_a_killed_one_stays_charged(tmp_path: Path) -> None:
    killed = Ledger(f"sqlite:///{tmp_path / 'killed.db'}")
    killed.subject("people", Budget(5.0, 1e-5))
    jobs = [
        trials.Job(
            trainable=dies,
            score=half,
            hyperparameters=tune.Hyperparameters(lr=lr, steps=2),
            mu=0.1,
            mu_score=0.1,
            size=100,
            subject="people",
            ledger=killed.url,
            note="",
        )
        for lr in (1.0, 0.05)
    ]
    done = {number: trial for number, trial, _ in tune.Processes(2)(jobs, killed)}
    assert [done[number].failed for number in range(2)] == [True, False]
    assert spent(killed, "people") == pytest.approx(math.sqrt(4 * 0.1**2), rel=1e-9)
    killed.verify()
    with pytest.raises(BudgetExceeded, match="cannot afford"):  # said in the other process, heard here
        list(tune.Processes(1)([replace(jobs[1], mu=50.0)], killed))


def test_what_other_processes_cannot_take_part_in_is_refused_before_a_charge(tmp_path: Path) -> None:
    common = {"subject": "people", "score": half, "size": 1000, "runner": tune.Processes(2)}
    with pytest.raises(ValueError, match="give it a file"):
        tune.linear_scaling(works, BOX, ONE, ledger=Ledger("sqlite://"), **common)  # type: ignore[arg-type]
    ledger = Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    with pytest.raises(ValueError, match="no lambda"):
        tune.linear_scaling(lambda *given: works(*given), BOX, ONE, ledger=ledger, **common)  # type: ignore[arg-type]
    assert ledger.get_subject("people") is None


def test_refusals_before_anything_is_spent() -> None:
    ledger = Ledger("sqlite://")
    ask = partial(tune.linear_scaling, works, BOX, ONE, ledger=ledger, subject="people")
    with pytest.raises(ValueError, match="Give size="):
        ask(score=half)
    with pytest.raises(ValueError, match="Give score="):
        ask(size=1000)
    with pytest.raises(ValueError, match="needs at least 3 sweeps"):
        ask(score=half, size=1000, degree=2)
    with pytest.raises(ValueError, match="The plan is for"):
        ask(score=half, size=1000, plan=tune.plan(Budget(2.0, 1e-5)))
    with pytest.raises(tune.BudgetTooSmall):
        tune.linear_scaling(works, BOX, Budget(0.01, 1e-5), ledger=ledger, subject="p", score=half, size=1000)
    assert ledger.subjects() == []
    ledger.subject("people", ONE, mode=Mode.RENYI)
    with pytest.raises(ValueError, match="gaussian mode"):
        ask(score=half, size=1000)


def test_degree_two_over_three_sweeps_and_all_ways_of_drawing() -> None:
    for draw in ("following", "stratified", "uniform", "independent"):
        hill = Hill()
        found = tune.linear_scaling(
            hill,
            BOX,
            ONE,
            ledger=Ledger("sqlite://"),
            subject="people",
            plan=tune.plan(ONE, 2, sweeps=(0.05, 0.1, 0.15)),
            degree=2,
            draw=draw,
            draw_seed=3,
        )
        assert len(found.trials) == 6
        assert len(found.line.points) == 3
        low, high = BOX.ends
        assert all(
            low <= trial.hyperparameters.r * (1 + 1e-9) and trial.hyperparameters.r <= high * (1 + 1e-9)
            for trial in found.trials
        )


def test_a_sweep_follows_the_best_trial_so_far() -> None:
    budget, box = Budget(8.0, 1e-5), tune.Space(lr=(1e-3, 10.0), steps=(1, 100))
    hill = Hill(size=100_000)
    found = tune.linear_scaling(hill, box, budget, ledger=Ledger("sqlite://"), subject="people", draw_seed=2)
    first, second = found.trials[:3], found.trials[3:]
    assert [int(3 * box.share(trial.hyperparameters.r)) for trial in first] == [0, 1, 2]  # one in each third
    winner = max(first, key=lambda trial: trial.score or 0)
    middle = box.share(winner.hyperparameters.r * 2)  # twice the epsilon, twice the r
    low = min(max(middle - 0.2, 0.0), 0.6)
    places = [(box.share(trial.hyperparameters.r) - low) / 0.4 for trial in second]
    assert [int(3 * place) for place in places] == [0, 1, 2]


def test_pay_once_then_read_the_line_at_any_later_target(tmp_path: Path) -> None:
    ledger, hill = Ledger("sqlite://"), Hill()
    found = tune.linear_scaling(hill, BOX, ONE, ledger=ledger, subject="people", draw_seed=0)
    found.line.save(tmp_path / "line.json")
    line = tune.Line.load(tmp_path / "line.json")
    later = tune.train(hill, line.at(2.0), Budget(2.0, 1e-5), ledger=ledger, subject="people, later")
    assert later.hyperparameters == line.at(2.0)
    assert spent(ledger, "people, later") == pytest.approx(mu_of(2.0, 1e-5), rel=1e-8)
    assert later.guarantee.epsilon <= 2.0
    assert spent(ledger, "people") == pytest.approx(found.plan.mu, rel=1e-9)


def test_progress_tells_what_is_spent() -> None:
    told: list[tuple[str, int, int]] = []
    share: list[float] = []

    def progress(what: str, done: int, total: int, *, spent: tuple[float, float] | None = None) -> None:
        told.append((what, done, total))
        share.append(spent[0] if spent else -1)

    tune.linear_scaling(Hill(), BOX, ONE, ledger=Ledger("sqlite://"), subject="people", progress=progress)
    assert told[-1] == ("final run", 7, 7)
    assert share == sorted(share)
    assert 0 < share[-1] <= 1.0


def test_a_seed_makes_it_reproducible_and_not_private() -> None:
    def search() -> tune.Scaled:
        return tune.linear_scaling(Hill(), BOX, ONE, ledger=Ledger("sqlite://"), subject="p", seed=3, draw_seed=3)

    one, two = search(), search()
    assert [trial.score for trial in one.trials] == [trial.score for trial in two.trials]
    assert len({trial.score for trial in one.trials}) > 3
    assert one.guarantee.seeded
    assert "not private" in str(one.guarantee)
