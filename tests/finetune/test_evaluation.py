"""Evaluations that are public or paid for, and early stopping that returns the rest."""

import math
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import SEED, key, net, people, same_bits
from torch import Tensor, nn

from tacit import GuardRailWarning
from tacit.data._records import Rows
from tacit.data._tensor_records import TensorRecords
from tacit.finetune import DPGD, DPSGD, Classes, Evaluation, Fitted, fit
from tacit.finetune._evaluation import Evaluator
from tacit.finetune._loop import Run
from tacit.finetune._sources import as_records
from tacit.privacy import Budget, BudgetExceeded, Ledger, Neighbours, ReceiptError, Unit, events
from tacit.report import Book

STEPS = 12


def run(ledger: Ledger, evaluate: Evaluation | None, **more: Any) -> Fitted:
    options: dict[str, Any] = {
        "optimizer": DPGD(steps=STEPS, lr=0.1),
        "epsilon": 4.0,
        "delta": 1e-5,
        "size": 20,
        "scheme": "full",
        "head": "keep",
        "seed": SEED,
        "subject": "clinic",
    }
    model = more.pop("model", None) or net()
    return fit(model, people(), ledger=ledger, evaluate=evaluate, **(options | more))


def worse_and_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores that fall: patience runs out."""
    scores = iter(range(100, 0, -1))
    monkeypatch.setattr(Evaluator, "__call__", lambda *_: {"accuracy": float(next(scores))})


def refund(ledger: Ledger, subject: str = "clinic") -> list[dict[str, Any]]:
    ledger.verify()
    return [entry.body for entry in ledger.entries(subject) if entry.kind == "settle"]


def test_public_or_paid_for() -> None:
    with pytest.raises(ValueError, match=r"public=True.*or charged"):
        Evaluation(data=people())
    with pytest.raises(ValueError, match=r"public=True.*or charged"):
        Evaluation(data=people(), public=True, epsilon=1.0)
    with pytest.raises(ValueError, match=r"needs subject= .* and size="):
        Evaluation(data=people(), epsilon=1.0)
    with pytest.raises(ValueError, match="patience counts evaluations"):
        Evaluation(data=people(), public=True, patience=2)


@pytest.mark.parametrize(("every", "steps", "at"), [(None, 12, [12]), (5, 12, [5, 10, 12]), (4, 12, [4, 8, 12])])
def test_when_it_looks(every: int | None, steps: int, at: list[int], ledger: Ledger) -> None:
    evaluation = Evaluation(data=people(), public=True, every=every)
    assert [t for t in range(1, steps + 1) if evaluation.due(t, steps)] == at
    assert evaluation.times(steps) == len(at)
    assert [score.step for score in run(ledger, evaluation).history] == at


def test_a_public_score_is_exact_and_free(ledger: Ledger) -> None:
    inputs, labels = people(50, seed=9)
    fitted = run(ledger, Evaluation(data=(inputs, labels), public=True))
    right = (fitted.model(inputs).argmax(1) == labels).double().mean()
    assert fitted.scores == {"accuracy": pytest.approx(100 * float(right))}
    assert [s.name for s in ledger.subjects()] == ["clinic"]


def test_the_score_is_of_the_weights_that_are_handed_out(ledger: Ledger) -> None:
    inputs, labels = people(50, seed=9)
    optimizer = DPGD(steps=STEPS, lr=0.5, average="ema", decay=0.9)
    fitted = run(ledger, Evaluation(data=(inputs, labels), public=True), optimizer=optimizer)
    right = (fitted.model(inputs).argmax(1) == labels).double().mean()
    assert fitted.scores["accuracy"] == pytest.approx(100 * float(right))


def test_a_charged_score_has_its_noise_and_its_own_subject(ledger: Ledger) -> None:
    """The exact count, plus the seeded noise of the charge, rounded to the grid, over the public size."""
    inputs, labels = people(50, seed=9)
    told = Evaluation(data=(inputs, labels), subject="held out", epsilon=1.0, delta=1e-6, size=40, every=6)
    fitted = run(ledger, told)
    charge = next(entry for entry in ledger.entries("held out") if entry.kind == "charge")
    assert charge.body["event"]["count"] == 2
    sigma = charge.body["event"]["event"]["noise_multiplier"]
    right = int((fitted.model(inputs).argmax(1) == labels).sum())
    noise = float(key(subject="held out").normals(1, 1)[0])
    expected = right + round(noise * sigma * 1024) / 1024
    assert fitted.scores["accuracy"] == pytest.approx(100 * expected / 40, abs=100 * 2 / 1024 / 40)
    assert abs(expected - right) > 0.1
    assert ledger.spent("held out").epsilon == pytest.approx(1.0, rel=1e-3)
    assert ledger.spent("clinic").epsilon == pytest.approx(4.0, rel=1e-3)


def test_one_held_out_patient_moves_the_sum_by_at_most_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows: each unit adds the mean over its rows."""
    sums: list[float] = []

    def noting(query: Any, _: Any) -> torch.Tensor:
        sums.append(query.total[0] * query.grid)
        return torch.zeros(1)

    monkeypatch.setattr("tacit.finetune._evaluation.mechanisms.gaussian_query", noting)
    ledger = Ledger("sqlite://")
    inputs, labels = people(12)
    model = net()
    guesses = model(inputs).argmax(1)
    for worst in (guesses, (guesses + 1) % 3):
        changed = torch.where(torch.arange(12) < 9, worst, labels)  # the first patient has nine rows
        owners = torch.tensor([0] * 9 + [1, 2, 3])
        told = Evaluation(data=(inputs, changed, owners), subject=f"h{len(sums)}", epsilon=1.0, size=4)
        evaluator = Evaluator(told, as_records(told.data, Unit.PATIENT), Classes(3))
        evaluator.charge(ledger, steps=1, unit="patient", neighbours="add-remove", seed=None)
        evaluator(model)
    assert sums[0] - sums[1] == pytest.approx(1.0, abs=1e-9)


def test_charged_rows_say_whose_they_are(ledger: Ledger) -> None:
    """Rows without owners would be counted one by one, and the guarantee is for patients."""
    inputs, labels = people()
    told = Evaluation(data=people(8), subject="held out", epsilon=1.0, size=8)
    call: dict[str, Any] = {"optimizer": DPGD(steps=2), "epsilon": 1.0, "delta": 1e-5, "size": 8, "scheme": "full"}
    data = (inputs, labels, torch.arange(24) // 3)
    with pytest.raises(ValueError, match="needs to know whose"):
        fit(net(), data, unit="patient", evaluate=told, ledger=ledger, **call)
    assert ledger.entries() == []


def test_private_data_are_never_looked_at_unpaid() -> None:
    told = Evaluation(data=people(), subject="held out", epsilon=1.0, size=20)
    evaluator = Evaluator(told, as_records(told.data), Classes(3))
    with pytest.raises(ReceiptError, match="charged before"):
        evaluator(net())


def test_a_run_that_cannot_be_paid_for_returns_the_evaluations(ledger: Ledger) -> None:
    ledger.subject("clinic", Budget(1.0, 1e-5))
    told = Evaluation(data=people(), subject="held out", epsilon=1.0, size=20)
    with pytest.raises(BudgetExceeded):
        run(ledger, told)
    assert ledger.spent("held out").epsilon == 0
    assert ledger.spent("clinic").epsilon == 0
    ledger.verify()


def test_stopping_returns_the_rest_of_full_batches(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sum of mu^2: four of twelve steps cost a third."""
    worse_and_worse(monkeypatch)
    fitted = run(ledger, Evaluation(data=people(), public=True, every=2, patience=1))
    assert fitted.steps == 4
    assert [settled["used"] for settled in refund(ledger)] == [4]
    assert ledger.spent("clinic").mu == pytest.approx(math.sqrt(4) / fitted.noise_multiplier, rel=1e-6)
    assert fitted.guarantee.epsilon == pytest.approx(4.0)  # where it stopped was chosen by releases: the cap
    assert "the cap" in str(fitted.guarantee)


def test_stopping_returns_the_rest_of_poisson_batches(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """At one order of Renyi divergence steps add up, so the refund is the share of those not made."""
    worse_and_worse(monkeypatch)
    told = Evaluation(data=people(), public=True, every=2, patience=2)
    fitted = run(ledger, told, optimizer=DPSGD(batch_size=5, steps=STEPS))
    assert fitted.steps == 6
    charge = next(entry.body for entry in ledger.entries() if entry.kind == "charge")
    (settled,) = refund(ledger)
    assert settled["used"] == 6
    assert settled["refund"] / charge["cost"] == pytest.approx(0.5, rel=1e-9)
    assert ledger.spent("clinic").epsilon < 4.0
    assert fitted.guarantee.epsilon == pytest.approx(4.0)
    assert Book.of(ledger).epsilon == pytest.approx(4.0)  # on pages and cards, too
    clinic = next(account for account in Book.of(ledger).accounts if account.name == "clinic")
    assert clinic.epsilon == pytest.approx(4.0)


def test_a_plan_refunds_nothing_so_no_run_on_it_stops_early(ledger: Ledger) -> None:
    optimizer = DPSGD(batch_size=5, steps=STEPS)
    ledger.subject("clinic", Budget(4.0, 1e-5), plan=[events.poisson(0.25, events.gaussian(3.0), STEPS)])
    before = ledger.entries()
    with pytest.raises(ValueError, match="a plan refunds nothing"):
        run(ledger, Evaluation(data=people(), public=True, every=2, patience=1), optimizer=optimizer)
    assert ledger.entries() == before


def test_scores_that_are_missing_count_for_nothing(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the evaluations that a kill has used up, nor an AUROC that does not exist."""
    scores = iter([{"accuracy": 5.0}, {}, {"accuracy": math.nan}, {"accuracy": 6.0}, {"accuracy": 5.0}, {}])
    monkeypatch.setattr(Evaluator, "__call__", lambda *_: next(scores))
    fitted = run(ledger, Evaluation(data=people(), public=True, every=2, patience=1))
    assert fitted.steps == 10


def in_a_child(work: Any) -> None:
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            work()
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("step", [1, 5, 11])
def test_charged_evaluations_go_on_after_a_kill(step: int, tmp_path: Path) -> None:
    """Before the first one, after it, after the last but one: paid for once, never more of them than were paid for."""

    def call(**more: Any) -> Fitted:
        told = Evaluation(data=people(30), subject="held out", epsilon=1.0, size=30, every=4)
        with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
            return run(ledger, told, checkpoint=tmp_path / "run", every=100, **more)

    in_a_child(lambda: call(curator=lambda event: die() if event.step == step else None))
    fitted = call()
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        ledger.verify()
        mine = ledger.entries("held out")
        assert [entry.kind for entry in mine].count("charge") == 1
        assert [entry.kind for entry in mine].count("settle") == 1
        assert ledger.spent("held out").epsilon <= 1.0 + 1e-6
    lost = step // 4
    assert [bool(score.scores) for score in fitted.history] == [True] * (3 - lost) + [False] * lost
    whole = run(Ledger("sqlite://"), None)
    assert same_bits(whole.model, fitted.model)


def test_a_decision_to_stop_outlives_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worse_and_worse(monkeypatch)
    told = Evaluation(data=people(), public=True, every=2, patience=1)

    def call(where: str) -> Fitted:
        with Ledger(f"sqlite:///{tmp_path / where}.db") as ledger:
            return run(ledger, told, checkpoint=tmp_path / f"{where}.run")

    def killed_at_the_end() -> None:
        plain = Run._steps
        Run._steps = lambda self: (plain(self), die())  # type: ignore[assignment, method-assign, return-value]
        call("parts")

    in_a_child(killed_at_the_end)
    fitted, whole = call("parts"), call("whole")
    assert fitted.steps == whole.steps == 4
    assert same_bits(fitted.model, whole.model)


def test_the_refund_covers_every_process_that_came_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine steps may have been seen of the first process: the third stops after eight, and returns three only."""
    told = Evaluation(data=people(), public=True, every=4, patience=1)

    def call(every: int, scores: list[float], at: int | None = None) -> Fitted:
        left = iter(scores)
        monkeypatch.setattr(Evaluator, "__call__", lambda *_: {"accuracy": next(left)})
        with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
            return run(
                ledger,
                told,
                checkpoint=tmp_path / "run",
                every=every,
                curator=lambda event: die() if event.step == at else None,
            )

    in_a_child(lambda: call(9, [1.0, 2.0], at=8))
    in_a_child(lambda: call(1, [1.0, 2.0], at=0))
    fitted = call(2, [2.0, 1.0])
    assert fitted.steps == 8
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        assert [settled["used"] for settled in refund(ledger)] == [9]


def test_a_model_that_does_not_take_the_held_out_rows_costs_nothing(ledger: Ledger) -> None:
    odd = Evaluation(data=(torch.zeros(3, 7, dtype=torch.float64), torch.zeros(3, dtype=torch.long)), public=True)
    with pytest.raises(ValueError, match="does not take these rows"):
        run(ledger, odd)
    assert ledger.entries() == []


@dataclass(frozen=True)
class Odd(Classes):
    """Three classes, and a mistake in one method."""

    outputs: int = 3
    mistake: str = ""

    def probs(self, outputs: Tensor) -> Tensor:
        return getattr(outputs, "sofmax" if self.mistake == "probs" else "softmax")(1)  # type: ignore[no-any-return]

    def scores(self, probs: Tensor, labels: Tensor) -> dict[str, float]:
        if self.mistake == "scores":
            raise AttributeError("no such score")
        if self.mistake in NO_SCORES:
            return NO_SCORES[self.mistake]  # type: ignore[no-any-return]
        if self.mistake == "tensor":
            return {"accuracy": torch.tensor(50.0)}  # type: ignore[dict-item]
        if self.mistake == "many" and len(labels) > 64:
            raise KeyError("a row that the first 64 did not have")
        if self.mistake == "few" and len(labels) < 100:
            raise ValueError("too few rows")
        return super().scores(probs, labels)

    def histogram(self, probs: Tensor, _labels: Tensor) -> Tensor:
        return nn.functional.one_hot(probs.argmax(1), 3).double()

    def scores_of(self, total: Tensor) -> dict[str, float]:
        if self.mistake in NO_SCORES:
            return NO_SCORES[self.mistake]  # type: ignore[no-any-return]
        return {"share": float(total[3 if self.mistake == "scores_of" else 0])}


NO_SCORES: dict[str, Any] = {"none": None, "list": [50.0], "word": {"accuracy": "good"}, "row": {"a": torch.ones(2)}}


@pytest.mark.parametrize("mistake", ["probs", "scores", *NO_SCORES])
@pytest.mark.parametrize("head", ["new", "keep"])
def test_a_mistake_in_a_tasks_scores_costs_nothing(mistake: str, head: str, ledger: Ledger) -> None:
    told = Evaluation(data=people(80), public=True)
    with pytest.raises(ValueError, match=r"evaluation fails. Nothing was charged"):
        run(ledger, told, task=Odd(mistake=mistake), head=head)
    assert ledger.entries() == []


def test_scores_that_are_tensors_are_kept_as_numbers(tmp_path: Path) -> None:
    told = Evaluation(data=people(80), public=True)
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        fitted = run(ledger, told, task=Odd(mistake="tensor"), checkpoint=tmp_path / "run")
    assert fitted.scores == {"accuracy": 50.0}


def test_scores_that_fail_on_all_rows_do_not_end_a_run_that_is_paid(ledger: Ledger) -> None:
    with pytest.warns(GuardRailWarning, match="could not score an evaluation"):
        fitted = run(ledger, Evaluation(data=people(80), public=True), task=Odd(mistake="many"), head="new")
    assert fitted.scores == {}
    assert fitted.steps == STEPS


def test_nor_does_a_public_row_that_the_model_fails_on(ledger: Ledger) -> None:
    """One of those that were not tried before the charge."""

    def refuse(_: nn.Module, args: tuple[Any, ...]) -> None:
        if bool((args[0] > 1e6).any()):
            raise RuntimeError("too large")

    inputs, labels = people(80)
    inputs[70] = 1e7
    model = net()
    model.register_forward_pre_hook(refuse)
    told = Evaluation(data=(inputs, labels), public=True)
    with pytest.warns(GuardRailWarning, match=r"could not score an evaluation.*too large"):
        fitted = run(ledger, told, model=model, head="new")
    assert fitted.scores == {}
    assert fitted.steps == STEPS


@pytest.mark.parametrize("mistake", ["probs", "scores_of", *NO_SCORES])
def test_nor_does_one_in_those_of_private_people(mistake: str, ledger: Ledger) -> None:
    told = Evaluation(data=people(80), subject="held out", epsilon=1.0, size=80)
    with pytest.raises(ValueError, match="cannot score synthetic rows"):
        run(ledger, told, task=Odd(mistake=mistake))
    assert ledger.entries() == []
    assert set(run(ledger, told, task=Odd()).scores) == {"share"}


def test_scores_that_take_more_than_a_few_rows_get_them(ledger: Ledger) -> None:
    task = Odd(mistake="few")
    assert run(ledger, Evaluation(data=people(120), public=True), task=task, head="new").scores.keys() == {"accuracy"}
    with pytest.raises(ValueError, match="too few rows"):
        run(ledger, Evaluation(data=people(30), public=True), task=task, head="new", subject="another")


def test_not_private_and_stopping_early_can_be_taken_up(tmp_path: Path) -> None:
    told = Evaluation(data=people(), public=True, every=2, patience=3)

    def call(**more: Any) -> Fitted:
        with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
            optimizer = DPSGD(batch_size=5, steps=STEPS)
            return run(ledger, told, checkpoint=tmp_path / "run", epsilon=math.inf, optimizer=optimizer, **more)

    in_a_child(lambda: call(curator=lambda event: die() if event.step == 3 else None))
    assert isinstance(call().model, nn.Module)


def test_a_unit_that_cannot_be_read_counts_as_wrong_and_nobody_hears_of_it(ledger: Ledger) -> None:
    """The noise is negligible here: what is left is 3 of 4."""

    class Broken(TensorRecords):
        def rows(self, units: torch.Tensor, uniforms: torch.Tensor | None) -> Rows:
            if uniforms is None and 2 in units.tolist() and self.ready:
                raise OSError("the file of the patient in bed 2")
            return super().rows(units, uniforms)

        ready = False

    held_out = Broken(torch.eye(4), torch.arange(4))
    evaluator = Evaluator(
        Evaluation(data=None, subject="held out", epsilon=1e12, delta=1e-5, size=4), held_out, Classes(4)
    )
    evaluator.charge(ledger, steps=1, unit=Unit.SAMPLE, neighbours=Neighbours.ADD_REMOVE, seed=None)
    held_out.ready = True
    model = torch.nn.Linear(4, 4, bias=False)
    torch.nn.init.eye_(model.weight)
    assert evaluator(model)["accuracy"] == pytest.approx(75, abs=1)
