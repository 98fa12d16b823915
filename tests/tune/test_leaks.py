"""Ways to learn more than was paid for, or to pay for nothing: each is tried here, and closed."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import traceback
import warnings
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from made_up import DRY, Hill, breaks, half, works
from torch import Tensor, nn

from tacit import finetune, tune
from tacit.data._records import Rows
from tacit.data._tensor_records import TensorRecords
from tacit.finetune import DPFTRL, DPGD, DPSGD, Optimizer
from tacit.finetune._evaluation import right_by_unit
from tacit.finetune._sources import as_records
from tacit.finetune._tasks import Classes, Labels
from tacit.privacy import Budget, BudgetExceeded, Ledger, Neighbours, Receipt, ReceiptError, Unit, events, mechanisms
from tacit.tune import _trials
from tacit.tune._sampled import is_sampled
from tacit.tune._trials import Job

BOX = tune.Space(lr=(0.1, 1.0), steps=(2, 4))
PASSES = tune.Space(lr=(0.1, 1.0), steps=(10, 10))  # of `in_batches`
ONE, EIGHT = Budget(1.0, 1e-5), Budget(8.0, 1e-5)


def rows(count: int = 400) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(count, 6, generator=torch.Generator().manual_seed(0))
    return inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long()


def probe() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(body=nn.Linear(6, 8), act=nn.Tanh(), head=nn.Linear(8, 3)))


class Unreadable(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Images of which some are broken files."""

    def __init__(self, count: int, broken: set[int]) -> None:
        self.targets = torch.arange(count) % 3
        self.broken = broken

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        if place in self.broken:
            raise OSError(f"patient-{place}.png is truncated")
        return torch.ones(6), int(self.targets[place])


def charges(ledger: Ledger) -> int:
    return sum(entry.kind == "charge" for entry in ledger.entries())


# A receipt serves one run


def in_batches(hyperparameters: tune.Hyperparameters) -> Optimizer:
    return DPFTRL(batches=10, lr=hyperparameters.lr)


@pytest.mark.parametrize("optimizer", [DPFTRL(batches=10, lr=0.1), DPGD(steps=10, lr=0.1)])
def test_a_run_that_was_interrupted_is_not_begun_again_on_its_receipt(optimizer: Optimizer) -> None:
    """A stream is one release because nobody is in it twice; half of it and another from the start would be."""
    ledger = Ledger("sqlite://")
    ledger.subject("people", Budget(20.0, 1e-5), neighbours="replace-one")
    receipt = ledger.charge("people", optimizer.event(10.0, 400), stage="tune")
    fit = partial(finetune.fit, optimizer=optimizer, delta=1e-5, scheme="linear", classes=3, receipt=receipt)

    def interrupts(event: Any) -> None:
        if event.step == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(probe(), rows(), curator=interrupts)
    assert receipt.used == 4
    with pytest.raises(ReceiptError, match="has served a run already"):
        fit(probe(), rows())
    assert receipt.used == 4


def test_no_two_runs_begin_on_one_receipt() -> None:
    """The second begins before the first has released anything."""
    optimizer = DPFTRL(batches=5, lr=0.1)
    ledger = Ledger("sqlite://")
    ledger.subject("people", Budget(20.0, 1e-5), neighbours="replace-one")
    receipt = ledger.charge("people", optimizer.event(1.0, 400), stage="tune")
    fit = partial(finetune.fit, optimizer=optimizer, delta=1e-5, scheme="linear", classes=3, receipt=receipt)
    refused: list[str] = []

    def begins(event: Any) -> None:
        if event.step == 0:
            with pytest.raises(ReceiptError, match="has served a run already") as error:
                fit(probe(), rows())
            refused.append(str(error.value))

    fit(probe(), rows(), curator=begins)
    assert len(refused) == 1
    assert receipt.used == 5


def test_a_search_over_fixed_passes_is_charged_as_one_release_each() -> None:
    ledger = Ledger("sqlite://")
    trainable = tune.Finetuning(probe(), rows(), classes=3, size=400, optimizer=in_batches)
    found = tune.linear_scaling(
        trainable, PASSES, EIGHT, ledger=ledger, subject="people", neighbours="replace-one", trials=1
    )
    assert found.model is not None
    assert not any(trial.failed for trial in found.trials)
    assert found.guarantee.epsilon <= 8.0
    for mu in (0.05, 0.5):
        event = trainable.event(tune.Hyperparameters(lr=0.1, steps=2), mu, Neighbours.REPLACE_ONE)
        assert 2 / event.noise_multiplier == pytest.approx(mu, rel=1e-9)


# Who is protected


SEARCHES: dict[str, Callable[..., Any]] = {
    "linear": tune.linear_scaling,
    "random": tune.random_search,
    "several": partial(tune.random_search, trials=2),
    "grid": tune.grid_search,
    "repeat": tune.repeat_and_select,
    "subset": partial(tune.subset_search, rate=0.5),
}


@pytest.mark.parametrize("scheme", ["linear", "full"])
@pytest.mark.parametrize("search", SEARCHES)
def test_nobody_is_promised_what_bounds_somebody_else(search: str, scheme: str) -> None:
    """Rows clipped one by one protect a row, not a patient with many; and the other way round."""
    ledger, (inputs, labels) = Ledger("sqlite://"), rows()
    by_row = tune.Finetuning(probe(), (inputs, labels), classes=3, size=400, scheme=scheme)
    owned = (inputs, labels, torch.arange(400) // 4)
    by_patient = tune.Finetuning(probe(), owned, classes=3, size=100, scheme=scheme, unit="patient")
    for trainable, unit in ((by_row, "patient"), (by_patient, "sample"), (by_patient, "user")):
        with pytest.raises(ValueError, match=f"of the kind '{trainable.unit}'"):
            SEARCHES[search](trainable, BOX, EIGHT, ledger=ledger, subject="people", unit=unit)
    assert charges(ledger) == 0


def test_single_runs_say_whom_they_protect_as_well() -> None:
    ledger = Ledger("sqlite://")
    trainable = tune.Finetuning(probe(), rows(), classes=3, size=400)
    point = tune.Hyperparameters(lr=0.1, steps=2)
    with pytest.raises(ValueError, match="of the kind 'sample'"):
        tune.train(trainable, point, EIGHT, ledger=ledger, subject="people", unit="patient")
    with pytest.raises(ValueError, match="of the kind 'sample'"):
        tune.adam_without_second_moment(trainable, EIGHT, steps=2, ledger=ledger, subject="people", unit="patient")
    assert charges(ledger) == 0
    ledger.subject("patients", EIGHT, unit="patient")
    event = trainable.event(point, 0.5, Neighbours.ADD_REMOVE)
    receipt = ledger.charge("patients", event, stage="tune")
    with pytest.raises(ValueError, match="of the kind 'sample'"):
        trainable(point, 0.5, receipt)
    assert receipt.used == 0


# What can be refused is refused before the first charge


@pytest.mark.parametrize("terms", [{"neighbours": "replace-one"}, {"unit": "patient"}])
def test_a_plan_for_other_terms_is_refused(terms: dict[str, str]) -> None:
    """Its final run would be priced for another relation, after all trials were paid."""
    ledger = Ledger("sqlite://")
    ask = partial(tune.linear_scaling, works, BOX, ONE, ledger=ledger, subject="people", score=half, size=1000)
    with pytest.raises(ValueError, match=r"another unit or neighbour relation|does not say what its units are"):
        ask(plan=tune.plan(ONE, size=1000), **terms)
    with pytest.raises(ValueError, match="another unit or neighbour relation"):
        ask(plan=tune.plan(ONE, size=1000, **terms))  # type: ignore[arg-type]
    for degree in (0, -1):
        with pytest.raises(ValueError, match="degree must be whole and at least 1"):
            ask(degree=degree)
    assert ledger.subjects() == []


def test_a_subject_that_cannot_pay_for_the_final_run_pays_for_no_trial() -> None:
    ledger = Ledger("sqlite://")
    ledger.subject("people", ONE)
    ledger.charge("people", events.gaussian(10.0), stage="calibrate")
    with pytest.raises(BudgetExceeded, match=r"cannot afford 7 runs and their scores.*Nothing was charged"):
        tune.linear_scaling(works, BOX, ONE, ledger=ledger, subject="people", score=half, size=1000)
    assert charges(ledger) == 1


def test_a_model_that_does_not_take_the_rows_is_refused_before_there_is_a_trial() -> None:
    narrow = nn.Sequential(OrderedDict(body=nn.Linear(5, 8), head=nn.Linear(8, 3)))
    for scheme in ("linear", "full"):
        with pytest.raises(ValueError, match="does not take these rows"):
            tune.Finetuning(narrow, rows(), classes=3, size=400, scheme=scheme)
    with pytest.raises(ValueError, match="size must be whole"):
        tune.Finetuning(probe(), rows(), classes=3, size=0)


def test_the_backbone_has_seen_every_row_before_the_first_charge() -> None:
    """A row that cannot be read has no features, and counts as wrong: nobody hears of it, then or later."""
    trainable = tune.Finetuning(probe(), Unreadable(400, {399}), classes=3, size=400)
    features = trainable._features
    assert isinstance(features, TensorRecords)
    assert torch.isfinite(features.inputs).all(1).tolist() == [True] * 399 + [False]
    assert trainable.score(probe())[399] == 0


def test_a_row_that_cannot_be_read_fails_no_trial() -> None:
    ledger, told = Ledger("sqlite://"), []
    trainable = tune.Finetuning(probe(), Unreadable(60, {7, 59}), classes=3, size=60, scheme="full")
    found = tune.random_search(
        trainable,
        BOX,
        EIGHT,
        trials=2,
        ledger=ledger,
        subject="people",
        curator=lambda event: told.append(event.error),
    )
    assert told == ["", ""]
    assert found.model is not None


@pytest.mark.parametrize("broken", [{0}, {0, 1, 2, 3}])
def test_a_score_does_not_fail_whoever_cannot_be_read(broken: set[int]) -> None:
    records = as_records(Unreadable(4, broken), Unit.SAMPLE)
    like = Rows(torch.zeros(1, 6), torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long))
    found = right_by_unit(probe(), records, Classes(3), like=like)  # known before the charge
    assert len(found) == 4
    assert all(found[place] == 0 for place in broken)


@pytest.mark.parametrize("measure", ["loss", "accuracy"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38])
def test_a_row_that_is_no_number_fails_no_score_and_counts_as_wrong(value: float, measure: Any) -> None:
    inputs, classes = rows(40)
    inputs[5] = value
    several = torch.nn.functional.one_hot(classes, 3).float()
    several[7, 1] = math.nan  # not known
    for labels, task in ((classes, Classes(3)), (several, Labels(3))):
        trainable = tune.Finetuning(probe(), (inputs, labels), task=task, size=40, scheme="full", measure=measure)
        found = trainable.score(trainable._with_head())
        assert bool(((found >= 0) & (found <= 1)).all())
        clean = inputs.clone()
        clean[5] = 0.0
        other = tune.Finetuning(probe(), (clean, labels), task=task, size=40, scheme="full", measure=measure)
        rest = torch.arange(40) != 5
        torch.testing.assert_close(found[rest], other.score(other._with_head())[rest])


def test_a_task_that_cannot_be_scored_is_refused_before_there_is_a_trial() -> None:
    class Old:
        outputs, measure = 3, "accuracy"

        def check(self, labels: Tensor) -> None:
            del labels

        probs, right = Classes(3).probs, Classes(3).right

    task: Any = Old()
    with pytest.raises(ValueError, match="measure='accuracy'"):
        tune.Finetuning(probe(), rows(), task=task, size=400)
    tune.Finetuning(probe(), rows(), task=task, size=400, measure="accuracy")


def test_fixed_places_under_add_remove_are_refused_before_a_charge() -> None:
    ledger = Ledger("sqlite://")
    trainable = tune.Finetuning(probe(), rows(), classes=3, size=400, optimizer=in_batches)
    with pytest.raises(ValueError, match="give neighbours='replace-one'"):
        tune.linear_scaling(trainable, PASSES, EIGHT, ledger=ledger, subject="people")
    assert charges(ledger) == 0


def hidden(hyperparameters: tune.Hyperparameters) -> Optimizer:
    """Batches by chance in the middle of the box alone, where no corner tells of them."""
    if hyperparameters.steps == 3:
        return DPSGD(lr=hyperparameters.lr, steps=3, batch_size=40)
    return DPGD(lr=hyperparameters.lr, steps=hyperparameters.steps)


def test_chance_that_the_corners_do_not_tell_of_is_refused_by_the_ledger() -> None:
    ledger = Ledger("sqlite://")
    trainable = tune.Finetuning(probe(), rows(), classes=3, size=400, optimizer=hidden)
    with pytest.raises(ValueError, match="A sampled release is not a Gaussian one"):
        tune.grid_search(trainable, BOX, EIGHT, ledger=ledger, subject="people", points=3)
    assert ledger.spent("people").epsilon <= 8.0


def by_batch(hyperparameters: tune.Hyperparameters) -> Optimizer:
    return DPSGD(lr=hyperparameters.lr, steps=hyperparameters.steps, batch_size=hyperparameters.batch_size or 1)


@pytest.mark.parametrize(("batch", "sampled"), [((100, 800), True), ((400, 800), False), ((399, 399), True)])
def test_a_box_of_batches_is_sampled_if_any_of_them_is(batch: tuple[int, int], sampled: bool) -> None:
    trainable = tune.Finetuning(probe(), rows(), classes=3, size=400, optimizer=by_batch)
    box = tune.Space(lr=(0.1, 1.0), steps=(2, 4), batch_size=batch)
    assert is_sampled(trainable, box) is sampled


# What a secret number of trials says


def loud(hyperparameters: tune.Hyperparameters, mu: float, receipt: Receipt) -> float:
    """Prints where Python's own streams do not see it."""
    os.write(1, b"trial\n")
    os.write(2, b"trial\n")
    subprocess.run(["echo", "trial"], check=True)
    print("trial", file=sys.__stdout__)
    print("trial", file=sys.__stderr__)
    return works(hyperparameters, mu, receipt)


def test_no_trial_of_a_secret_number_is_heard_by_any_way(capfd: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []
    os.write(1, b"before\n")
    tune.repeat_and_select(
        loud,
        BOX,
        ONE,
        ledger=Ledger("sqlite://"),
        subject="people",
        score=half,
        size=1000,
        mean=3,
        curator=lambda event: told.append(event.error),
    )
    os.write(1, b"after\n")
    assert set(told) == {""}
    assert capfd.readouterr() == ("before\nafter\n", "")


# What a run says when it fails


def test_a_final_run_that_fails_keeps_its_words_and_what_the_trials_found() -> None:
    ledger, told, calls = Ledger("sqlite://"), [], []

    def trains(hyperparameters: tune.Hyperparameters, mu: float, receipt: Receipt) -> float:
        calls.append(mu)  # the dry run, six trials, the final run
        return (breaks if len(calls) == 8 else works)(hyperparameters, mu, receipt)

    with pytest.raises(tune.RunFailed, match=r"The final run failed\.") as failed:
        tune.linear_scaling(
            trains,
            BOX,
            ONE,
            ledger=ledger,
            subject="people",
            score=half,
            size=1000,
            curator=lambda event: told.append(event.error),
        )
    found = failed.value.result
    assert isinstance(found, tune.Scaled)
    assert found.line.at(1.0) is not None
    assert found.model is None
    assert found.decisions[-1] == "The final run failed: there is no model."
    assert len(found.trials) == 6
    assert told[-1] == "ArithmeticError: patient 17 has a fever"
    assert "patient" not in repr(found)
    assert ledger.spent("people").epsilon == pytest.approx(1.0, rel=1e-6)


def test_a_single_run_that_fails_keeps_its_words() -> None:
    point, told = tune.Hyperparameters(lr=0.1, steps=2), []
    run = partial(tune.train, breaks, point, ONE, subject="people", curator=lambda event: told.append(event.error))
    with pytest.raises(tune.RunFailed, match="stays charged") as failed:
        run(ledger=Ledger("sqlite://"))
    assert "patient" not in "".join(traceback.format_exception(failed.value))
    assert told == ["ArithmeticError: patient 17 has a fever"]


@pytest.mark.parametrize("search", ["linear", "several", "grid", "repeat"])
def test_an_interrupt_is_not_swallowed_and_leaves_everything_charged(search: str) -> None:
    ledger, given = Ledger("sqlite://"), []

    def interrupted(point: Any, mu: float, receipt: Receipt) -> float:
        if receipt.stage == DRY:
            return works(point, mu, receipt)
        given.append(receipt)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        SEARCHES[search](interrupted, BOX, ONE, ledger=ledger, subject="people", score=half, size=1000)
    assert len(given) == 1
    assert charges(ledger) == (1 if search == "repeat" else 2)
    assert all(entry.kind != "settle" for entry in ledger.entries())
    if search == "repeat":  # a trial's receipt dies with its search
        with pytest.raises(ReceiptError):
            mechanisms.gaussian_query(_trials.grid_sum(torch.ones(3), low=0.0, high=1.0), given[0])


def test_a_job_does_not_print_how_to_open_the_ledger() -> None:
    job = Job(
        trainable=Hill(),
        score=half,
        hyperparameters=tune.Hyperparameters(lr=0.1, steps=2),
        mu=0.1,
        mu_score=0.1,
        size=1,
        subject="people",
        ledger="postgresql://curator:secret@clinic/ledger",
        note="a trial",
    )
    assert "secret" not in repr(job)


class Talkative(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Data whose code warns of one row, or raises at it, with its name; labels are read item by item."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __len__(self) -> int:
        return 24

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        if place == 17 and self.how == "warns":
            warnings.warn("patient Miller is 47 years old", stacklevel=1)
        if place == 17 and self.how == "raises":
            raise ValueError("patient Miller is 47 years old")
        return torch.ones(6), place % 3


def test_a_trainable_says_nothing_of_rows_that_cannot_be_read() -> None:
    with pytest.raises(ValueError, match="The data cannot be read") as raised:
        tune.Finetuning(probe(), Talkative("raises"), size=24, classes=3)
    assert "is 47" not in str(raised.value)
    assert raised.value.__context__ is None
    with pytest.raises(ValueError, match="The data cannot be read"):
        finetune.cache_blocks(probe(), Talkative("raises"), last_blocks=1)


def test_warnings_about_private_rows_reach_the_curator_alone() -> None:
    """Where labels are read as well: a warning that names a row was printed."""
    heard: list[Any] = []
    options: dict[str, Any] = {"epsilon": 8.0, "delta": 1e-5, "size": 24, "scheme": "full", "classes": 3}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("always", message="patient")
        with pytest.MonkeyPatch.context() as patched:
            shown: list[str] = []
            patched.setattr(warnings, "showwarning", lambda message, *_, **__: shown.append(str(message)))
            data = Talkative("warns")
            tune.Finetuning(probe(), data, size=24, classes=3)
            ledger = Ledger("sqlite://")
            finetune.fit(probe(), data, optimizer=DPGD(steps=1), ledger=ledger, curator=heard.append, **options)
    assert not [text for text in shown if "Miller" in text]
    assert [event for event in heard if "Miller" in str(getattr(event, "details", event))]


def test_a_part_of_another_size_cannot_draw_batches_of_a_fixed_size_and_is_charged_nothing() -> None:
    """Coins decide who is in a part, so that its declared size is not its number of units."""

    def fixed(point: tune.Hyperparameters) -> Optimizer:
        return DPSGD(batch_size=50, steps=point.steps, lr=point.lr, sampling="fixed-size")

    trainable = tune.Finetuning(probe(), rows(), size=400, classes=3, optimizer=fixed)
    point = tune.Hyperparameters(lr=0.1, steps=2)
    assert events.releases(trainable.event(point, 1.0, Neighbours.REPLACE_ONE)) == 2
    for part in trainable.split(0.3, seed=1):
        assert part.size != len(part._records)
        with pytest.raises(ValueError, match="true number"):
            part.event(point, 1.0, Neighbours.REPLACE_ONE)
        with pytest.raises(ValueError, match="true number"):
            part.event_with(point, 1.0)
