"""`finetune.fit` on a receipt, and as a trainable."""

from __future__ import annotations

import math
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

from tacit import finetune, tune
from tacit.finetune import DPGD, DPSGD, Optimizer
from tacit.privacy import Budget, BudgetExceeded, Ledger, Neighbours, Receipt, accounting, events
from tacit.privacy.events import same

BOX = tune.Space(lr=(0.05, 5.0), steps=(2, 20))


def rows(count: int = 400, width: int = 6, classes: int = 3) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, width, generator=made)
    return inputs, (inputs @ torch.randn(width, classes, generator=made)).argmax(1)


def probe(width: int = 6, classes: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(body=nn.Linear(width, 8), act=nn.Tanh(), head=nn.Linear(8, classes)))


def charged(event: events.DpEvent, **terms: object) -> tuple[Ledger, Receipt]:
    ledger = Ledger("sqlite://")
    ledger.subject("people", Budget(20.0, 1e-5), **terms)  # type: ignore[arg-type]
    return ledger, ledger.charge("people", event, stage="tune", seed=7)


@pytest.mark.parametrize("neighbours", list(Neighbours))
def test_a_run_on_a_receipt_is_the_same_run(neighbours: Neighbours) -> None:
    data, optimizer = rows(), DPGD(lr=0.5, steps=5)
    first = Ledger("sqlite://")
    first.subject("people", Budget(20.0, 1e-5), neighbours=neighbours)
    common = {"optimizer": optimizer, "delta": 1e-5, "scheme": "linear", "classes": 3, "size": 400}
    paid = finetune.fit(
        probe(), data, epsilon=2.0, ledger=first, subject="people", neighbours=neighbours, seed=7, **common
    )
    event = optimizer.event(paid.noise_multiplier, 400)
    ledger, receipt = charged(event, neighbours=neighbours)
    again = finetune.fit(probe(), data, receipt=receipt, **common)
    assert again.noise_multiplier == pytest.approx(paid.noise_multiplier)
    for one, two in zip(paid.model.parameters(), again.model.parameters(), strict=True):
        torch.testing.assert_close(one, two)
    assert again.guarantee.epsilon == pytest.approx(ledger.spent("people").epsilon)
    assert again.guarantee.epsilon <= 2.0


def test_a_receipt_of_another_run_is_refused() -> None:
    data, optimizer = rows(), DPGD(lr=0.5, steps=5)
    for wrong in (events.gaussian(3.0, steps=6), events.gaussian(3.0, steps=4), events.laplace(3.0, steps=5)):
        _, receipt = charged(wrong)
        with pytest.raises(ValueError, match="did not pay for 5 steps of DPGD"):
            finetune.fit(
                probe(), data, optimizer=optimizer, delta=1e-5, scheme="linear", classes=3, size=400, receipt=receipt
            )
        assert receipt.used == 0
    _, receipt = charged(events.gaussian(3.0, steps=5))
    for extra in ({"epsilon": 1.0}, {"ledger": Ledger("sqlite://")}, {"subject": "x"}):
        with pytest.raises(ValueError, match="is paid for"):
            finetune.fit(probe(), data, optimizer=optimizer, delta=1e-5, size=400, receipt=receipt, **extra)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Give epsilon="):
        finetune.fit(probe(), data, optimizer=optimizer, delta=1e-5, size=400)


@pytest.mark.parametrize("neighbours", list(Neighbours))
@pytest.mark.parametrize("mu", [0.01, 0.3])
def test_a_trial_is_worth_its_mu(neighbours: Neighbours, mu: float) -> None:
    trainable = tune.Finetuning(probe(), rows(), classes=3, size=400)
    event = trainable.event(tune.Hyperparameters(lr=0.1, steps=7), mu, neighbours)
    (leaf, times), *more = events.leaves(event)
    assert not more
    assert times == 7
    assert neighbours.factor * math.sqrt(7) / leaf.noise_multiplier == pytest.approx(mu)


def small(hyperparameters: tune.Hyperparameters) -> Optimizer:
    return DPSGD(lr=hyperparameters.lr, steps=hyperparameters.steps, batch_size=40)


def test_batches_drawn_by_chance_meet_the_epsilon_of_their_mu() -> None:
    trainable = tune.Finetuning(probe(), rows(), classes=3, size=400, optimizer=small)
    point = tune.Hyperparameters(lr=0.1, steps=7)
    assert trainable.sampled(point)
    event = trainable.event(point, 0.3, Neighbours.ADD_REMOVE)
    found = accounting.guarantee(event, delta=1e-5).epsilon
    target = tune.plan(Budget(1.0, 1e-5)).epsilon(0.3)
    assert target * 0.999 <= found <= target
    noise = next(iter(events.leaves(event)))[0].event.noise_multiplier
    assert same(trainable.event_with(point, noise), event)


def test_the_head_on_cached_features_is_the_whole_model() -> None:
    inputs, labels = rows()
    model = probe()
    trainable = tune.Finetuning(model, (inputs, labels), classes=3, size=400)
    point = tune.Hyperparameters(lr=0.5, steps=5)
    event = trainable.event(point, 0.5, Neighbours.ADD_REMOVE)
    trained = trainable(point, 0.5, charged(event)[1])
    alone = finetune.fit(
        probe(),
        (inputs, labels),
        optimizer=tune.dpgd(point),
        delta=1e-5,
        scheme="linear",
        classes=3,
        size=400,
        receipt=charged(event)[1],
        standardise=finetune.RowNorm(),
    ).model
    torch.testing.assert_close(trained(inputs), alone(inputs))
    loss = torch.nn.functional.cross_entropy(trained(inputs).double(), labels, reduction="none")
    worth = 1 - (loss / (2 * math.log(3))).clamp(0, 1)
    torch.testing.assert_close(trainable.score(trained), worth, rtol=0, atol=1e-6)
    trainable.measure = "accuracy"
    torch.testing.assert_close(trainable.score(trained), (trained(inputs).argmax(1) == labels).double())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), probe().parameters(), strict=True))  # untouched


def test_the_score_of_a_unit_is_between_0_and_1_whatever_its_rows() -> None:
    inputs, labels = rows()
    inputs[3] = math.nan
    owners = torch.arange(400) // 4
    trainable = tune.Finetuning(probe(), (inputs, labels, owners), classes=3, size=100, unit="user", scheme="full")
    score = trainable.score(probe())
    assert len(score) == 100
    assert bool(((score >= 0) & (score <= 1)).all())


@pytest.mark.parametrize("scheme", ["linear", "full"])
def test_a_whole_search(scheme: str) -> None:
    data = rows(3000)
    budget, ledger = Budget(8.0, 1e-5), Ledger("sqlite://")
    trainable = tune.Finetuning(probe(), data, classes=3, size=3000, scheme=scheme)
    found = tune.linear_scaling(trainable, BOX, budget, ledger=ledger, subject="people", draw_seed=0)
    accuracy = float((found.model(data[0]).argmax(1) == data[1]).double().mean())
    assert accuracy > 0.6
    assert ledger.spent("people").epsilon <= 8.0
    for trial in found.trials:
        assert trial.score is not None
        assert -0.1 < trial.score < 1.1


def test_a_search_with_batches_drawn_by_chance_is_composed_by_pld() -> None:
    ledger, budget = Ledger("sqlite://"), Budget(3.0, 1e-5)
    trainable = tune.Finetuning(probe(), rows(), classes=3, size=400, optimizer=small)
    plan = tune.plan(budget, 1, sweeps=(0.2, 0.4), size=400)
    found = tune.linear_scaling(trainable, BOX, budget, ledger=ledger, subject="people", plan=plan, draw_seed=0)
    charges = [events.from_json(e.body["event"]) for e in ledger.entries("people") if e.kind == "charge"]
    whole = accounting.guarantee(events.compose(charges), delta=1e-5).epsilon
    assert whole <= 3.0
    assert whole > 2.98
    assert found.plan.guarantee.epsilon == pytest.approx(whole)
    assert found.guarantee.epsilon == pytest.approx(whole)
    assert found.hyperparameters is not None
    assert found.hyperparameters.steps == 20  # fixed before: a plan cannot depend on a score
    # what sqrt(sum mu^2) would have said of the same runs is no bound on them, and here it is another number
    assert found.plan.mu_final > max(found.plan.sweeps)


def test_rows_each_and_augment_reach_the_records() -> None:
    """They belong to the data, which is prepared once: a trial that was told of them again would fail, charged."""
    inputs = torch.randn(300, 1, 4, 4)
    labels, owners = (inputs.mean((1, 2, 3)) > 0).long(), torch.arange(300) // 3
    body = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2))
    for options in ({"rows_each": 1}, {"augment": 2}, {"rows_each": 2, "augment": 2, "scheme": "full"}):
        told: list[str] = []
        found = tune.random_search(
            tune.Finetuning(body, (inputs, labels, owners), size=100, unit="patient", **options),
            tune.Space(lr=(0.1, 1.0), steps=(2, 2)),
            Budget(8.0, 1e-5),
            ledger=Ledger("sqlite://"),
            subject="people",
            trials=2,
            unit="patient",
            curator=lambda event, told=told: told.append(event.error),
        )
        assert told == ["", ""]
        assert found.model is not None


def test_a_measure_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="its loss or its accuracy"):
        tune.Finetuning(probe(), rows(), classes=3, size=400, measure="auroc")  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["checkpoint", "ledger", "epsilon", "shceme", "neighbours"])
def test_what_a_trial_cannot_have_is_refused_before_any_charge(option: str) -> None:
    with pytest.raises(ValueError, match=f"cannot be given '{option}'"):
        tune.Finetuning(probe(), rows(), classes=3, size=400, **{option: 1})  # type: ignore[arg-type]


def test_one_run_of_subsampled_batches_is_planned_and_fills_its_budget() -> None:
    """A line that a search over subsampled batches has found is read by such runs."""

    def poisson(point: tune.Hyperparameters) -> Optimizer:
        return DPSGD(batch_size=40, steps=point.steps, lr=point.lr)

    trainable, ledger = tune.Finetuning(probe(), rows(), size=400, classes=3, optimizer=poisson), Ledger("sqlite://")
    point, budget = tune.Hyperparameters(lr=0.5, steps=10), Budget(2.0, 1e-5)
    found = tune.train(trainable, point, budget, ledger=ledger, subject="people")
    assert found.hyperparameters == point
    (entry,) = [entry for entry in ledger.entries("people") if entry.kind == "charge"]
    event = events.from_json(entry.body["event"])
    noise = poisson(point).scale_of(event, 400)
    assert noise is not None  # ten steps of forty rows, each with this noise
    assert 1.95 < accounting.guarantee(event, delta=1e-5).epsilon <= 2.0
    assert found.guarantee.epsilon <= 2.0
    with pytest.raises(BudgetExceeded, match="budget of people is spent"):  # the same people a second time
        tune.train(trainable, point, budget, ledger=ledger, subject="people")
