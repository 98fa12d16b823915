"""One context instead of seven arguments: the same run, and nothing said twice."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tacit import Budget, Ledger, PrivacyContext, Receipt, adapt, finetune, tune
from tacit.gradients import clipped_sum
from tacit.privacy import mechanisms

BOX, ONE = tune.Space(lr=(0.1, 1.0), steps=(1, 2)), Budget(1.0, 1e-5)
SEARCHES = [
    tune.random_search,
    tune.grid_search,
    tune.linear_scaling,
    tune.train,
    tune.repeat_and_select,
    tune.subset_search,
    tune.adam_without_second_moment,
    tune.optuna_search,
    tune.noisy_selection,
]


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(40, 3, generator=generator), torch.randint(0, 2, (40,), generator=generator)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def trainable(point: tune.Hyperparameters, mu: float, receipt: Receipt) -> nn.Module:
    """Private gradient descent by hand: what a user's own trainable looks like."""
    del mu

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    model = net()
    for _ in range(point.steps):
        noisy = mechanisms.gaussian(clipped_sum(model, loss, rows(), clip=1.0), receipt)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter -= point.lr * noisy[name] / 40
    return model


def fitted(**how: Any) -> finetune.Fitted:
    return finetune.fit(
        net(), rows(), optimizer=finetune.DPGD(steps=2), epsilon=1.0, delta=1e-5, classes=2, size=40, **how
    )


def test_fit_with_a_context_is_fit_with_its_arguments() -> None:
    said: list[Any] = []
    one, other = Ledger("sqlite://"), Ledger("sqlite://")
    loose = fitted(ledger=one, subject="clinic", unit="sample", neighbours="replace-one", seed=0)
    context = PrivacyContext(
        ledger=other,
        subject="clinic",
        unit="sample",
        neighbours="replace-one",
        seed=0,
        curator=said.append,
    )
    whole = fitted(context=context)
    assert whole.guarantee == loose.guarantee
    assert "replace" in str(whole.guarantee)
    assert other.spent("clinic").epsilon == pytest.approx(1.0, rel=1e-6)
    assert len(said) == 2
    mine, theirs = (dict(each.model.named_parameters()) for each in (whole, loose))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_what_a_context_leaves_out_may_be_given_beside_it() -> None:
    ledger = Ledger("sqlite://")
    found = fitted(context=PrivacyContext(ledger=ledger), subject="clinic", neighbours="zero-out")
    assert ledger.get_subject("clinic") is not None
    assert found.guarantee.neighbours.value == "zero-out"


@pytest.mark.parametrize(
    ("name", "value"),
    [("seed", 0), ("subject", "b"), ("unit", "sample"), ("neighbours", "add-remove"), ("progress", True)],
)
def test_the_same_thing_twice_is_refused_before_any_charge(name: str, value: Any) -> None:
    ledger = Ledger("sqlite://")
    context = PrivacyContext(ledger=ledger, **{name: value})
    with pytest.raises(TypeError, match=rf"finetune.fit got {name}= and a context that has it: say it once\."):
        fitted(context=context, **{name: value})
    assert ledger.entries() == []


@pytest.mark.parametrize("search", SEARCHES, ids=lambda search: search.__name__)
def test_every_search_takes_a_context_and_needs_who_pays(search: Callable[..., Any]) -> None:
    assert "context" in inspect.signature(search).parameters
    where = f"tune.{search.__name__}"
    with pytest.raises(TypeError, match=rf"{where} needs ledger= and subject=, or a context= that has it\."):
        search()
    with pytest.raises(TypeError, match=f"{where} needs subject="):
        search(context=PrivacyContext(ledger=Ledger("sqlite://")))
    with pytest.raises(TypeError, match=f"{where} got subject= and a context"):
        search(context=PrivacyContext(subject="a"), ledger=Ledger("sqlite://"), subject="a")
    with pytest.raises(TypeError, match=r"context is a tacit.PrivacyContext, not dict"):
        search(context={"subject": "a"})


def test_a_search_with_a_context_is_the_search_with_its_arguments() -> None:
    ledgers = [Ledger("sqlite://"), Ledger("sqlite://")]
    loose = tune.random_search(trainable, BOX, ONE, ledger=ledgers[0], subject="clinic", seed=1, draw_seed=2)
    context = PrivacyContext(ledger=ledgers[1], subject="clinic", seed=1)
    whole = tune.random_search(trainable, BOX, ONE, context=context, draw_seed=2)
    assert whole.guarantee == loose.guarantee
    assert torch.equal(whole.model[0].weight, loose.model[0].weight)


def test_a_subset_search_hands_its_context_on() -> None:
    class Part:
        size = 6_000
        __call__ = staticmethod(trainable)

        @staticmethod
        def score(model: nn.Module) -> Tensor:
            return (model(rows()[0]).argmax(1) == rows()[1]).double()

    told: list[Any] = []
    ledger = Ledger("sqlite://")
    context = PrivacyContext(ledger=ledger, subject="clinic", seed=1, curator=told.append)
    how = {"search": tune.random_search, "trials": 2}
    found = tune.subset_search(None, BOX, ONE, parts=(Part(), Part()), context=context, **how)
    assert found.guarantee.seeded
    assert {each.name for each in ledger.subjects()} == {"clinic, to tune on", "clinic, the rest"}
    assert len(told) == 2


def test_an_adapter_takes_a_context_but_its_relation_is_that_of_its_form() -> None:
    ledger = Ledger("sqlite://")
    form = adapt.DP(1.0, 1e-5, clip=1.0)
    context = PrivacyContext(ledger=ledger, subject="ward", unit="patient", seed=3, progress=True)
    adapter = adapt.Tent(net().double(), privacy=form, batch_size=4, context=context)
    adapter(torch.rand(4, 3).double(), unit_ids=["a", "b", "c", "d"])
    assert ledger.spent("ward").unit == "patient"
    with pytest.raises(TypeError, match=r"adapt.Adapter has no neighbours=: leave it out of the context"):
        adapt.Tent(net(), privacy=form, context=PrivacyContext(neighbours="zero-out"))
