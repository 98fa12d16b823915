"""Tuning on a few: who is in which part, what both cost, and what is carried over."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from made_up import Hill, breaks, half, works
from scipy import stats
from torch import Tensor, nn

from tacit import tune
from tacit.finetune import DPSGD
from tacit.privacy import Budget, Guarantee, Ledger, Receipt, delta_of, mu_of
from tacit.tune._random_split import Part, coins

BOX = tune.Space(lr=(0.01, 10.0), steps=(1, 9))
ONE = Budget(1.0, 1e-5)


@dataclass
class Splitting(Hill):
    """A synthetic trainable that can be split."""

    parts: list[Splitting] = field(default_factory=list)

    def split(self, rate: float, *, seed: int | None = None) -> tuple[Splitting, Splitting]:
        del seed
        size = round(rate * self.size)
        self.parts = [replace(self, size=n, seen=[], parts=[]) for n in (size, self.size - size)]
        return self.parts[0], self.parts[1]


# Coins


def test_coins_are_fair_to_their_rate_and_fresh() -> None:
    first, second = coins(20_000, 0.2), coins(20_000, 0.2)
    for tossed in (first, second):
        assert stats.binomtest(int(tossed.sum()), 20_000, 0.2).pvalue > 1e-7
    assert stats.binomtest(int((first & second).sum()), 20_000, 0.04).pvalue > 1e-7
    assert torch.equal(coins(50, 0.5, seed=3), coins(50, 0.5, seed=3))


def test_coins_by_place_would_not_do_under_add_remove() -> None:
    """With a fixed seed, one row less at the front gives others another coin: the parts are no neighbours."""
    everyone = torch.arange(2000)
    before = set(everyone[coins(2000, 0.5, seed=1)].tolist())
    after = set(everyone[1:][coins(1999, 0.5, seed=1)].tolist())
    assert len(before ^ after) > 500


def test_the_mixture_is_as_private_as_its_worse_part() -> None:
    """Both worlds on a grid: x is what tuning releases, y the final run; a coin says which of them moves by one."""
    grid = np.linspace(-14, 14, 561)
    cell, sigma, rate = grid[1] - grid[0], (2.0, 1.6), 0.3
    still = [stats.norm.pdf(grid, 0, s) * cell for s in sigma]
    moved = [stats.norm.pdf(grid, 1, s) * cell for s in sigma]
    absent = np.outer(still[0], still[1])
    present = rate * np.outer(moved[0], still[1]) + (1 - rate) * np.outer(still[0], moved[1])
    for epsilon in (0.1, 0.5, 1.0, 2.0):
        worse = max(delta_of(epsilon, 1 / s) for s in sigma)
        for one, other in ((absent, present), (present, absent)):
            assert np.maximum(one - math.exp(epsilon) * other, 0).sum() <= worse + 1e-6


# Splitting a fine-tuning


def rows(size: int = 600) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    inputs = torch.randn(size, 4)
    return inputs, (inputs[:, 0] > 0).long()


def ids(part: tune.Finetuning) -> list[float]:
    """Which rows a part has, by their first value."""
    records: Any = part._features
    return records.rows(torch.arange(len(records)), None).inputs[:, 0].tolist()


def test_a_split_deals_everybody_to_one_part() -> None:
    inputs, labels = rows()
    body = nn.Sequential(nn.Identity(), nn.Linear(4, 2))
    whole = tune.Finetuning(body, (inputs, labels), size=640, standardise=None)
    few, rest = whole.split(0.25)
    assert (few.size, rest.size, whole.size) == (160, 480, 640)
    assert sorted(ids(few) + ids(rest)) == sorted(inputs[:, 0].tolist())
    assert len(few._records) == len(ids(few))
    assert few.score(few._probe()).shape == (len(ids(few)),)
    again, _ = whole.split(0.25)
    assert ids(again) != ids(few)
    for rate in (0.0, 1.0):
        with pytest.raises(ValueError, match="between 0 and 1"):
            whole.split(rate)


def test_a_split_keeps_owners_together() -> None:
    inputs, labels = rows()
    owners = torch.arange(600) // 3
    whole = tune.Finetuning(
        nn.Sequential(nn.Identity(), nn.Linear(4, 2)),
        (inputs, labels, owners),
        size=200,
        unit="patient",
        standardise=None,
    )
    few, rest = whole.split(0.5)
    mine = [{int(owners[inputs[:, 0] == value][0]) for value in ids(part)} for part in (few, rest)]
    assert mine[0] | mine[1] == set(range(200))
    assert not mine[0] & mine[1]
    assert [len(part._records) for part in (few, rest)] == [len(found) for found in mine]


def test_a_part_stands_for_its_records() -> None:
    class Texts:
        uniforms, most_rows, scored_by = 2, 3, "unit"
        sizes = torch.tensor([5, 6, 7, 8])

        def __len__(self) -> int:
            return 4

        def labels(self) -> Tensor:
            return torch.arange(4)

        def rows(self, units: Tensor, uniforms: Tensor | None) -> Any:
            return units.tolist(), uniforms

        def fingerprint(self) -> str:
            return "texts"

    part, other = Part(Texts(), torch.tensor([1, 3])), Part(Texts(), torch.tensor([1, 2]))
    assert (len(part), part.uniforms, part.most_rows, part.scored_by) == (2, 2, 3, "unit")
    assert part.rows(torch.tensor([1, 0]), None) == ([3, 1], None)
    assert part.sizes.tolist() == [6, 8]
    assert not hasattr(part, "synthetic")
    assert part.fingerprint() != other.fingerprint()
    assert part.labels().tolist() == [0, 1, 2, 3]


# The search


def test_both_parts_may_spend_everything_and_together_cost_no_more() -> None:
    ledger, hill = Ledger("sqlite://"), Splitting(size=20_000)
    found = tune.subset_search(hill, BOX, ONE, ledger=ledger, subject="people", rate=0.25, mean=3)
    few, rest = "people, to tune on", "people, the rest"
    assert ledger.spent(few).epsilon == pytest.approx(1.0, rel=3e-4)
    assert ledger.spent(rest).mu == pytest.approx(mu_of(1.0, 1e-5), rel=1e-8)
    assert found.guarantee.epsilon == max(ledger.spent(name).epsilon for name in (few, rest)) <= 1.0
    assert ledger.total().epsilon <= 1.0
    assert ledger.total(promised=True).epsilon <= 1.0
    assert found.trials == ()
    tuned, trained = hill.parts
    assert (tuned.size, trained.size) == (5000, 15_000)
    assert [point for point, _ in trained.seen] == [found.hyperparameters]
    assert found.hyperparameters is not None
    assert any(point.steps == found.hyperparameters.steps for point, _ in tuned.seen)


@pytest.mark.parametrize(("scale", "lr", "batch"), [("size", 3.0 * 0.5, 96), ("keep", 0.5, 32), ("size", 10.0, 128)])
def test_what_is_carried_over(scale: Any, lr: float, batch: int) -> None:
    box = tune.Space(lr=(0.01, 10.0), steps=(1, 9), batch_size=(1, 128))
    found_lr, found_batch = (9.0, 100) if lr == 10.0 else (0.5, 32)
    point = tune.Hyperparameters(lr=found_lr, steps=5, batch_size=found_batch)

    def search(*_: Any, ledger: Ledger, subject: str, **__: Any) -> tune.Tuned:
        ledger.subject(subject, ONE)
        return tune.Tuned(model=None, hyperparameters=point, trials=(), guarantee=Guarantee(epsilon=0.0, delta=1e-5))

    hill = Splitting(size=4000)
    found = tune.subset_search(
        hill, box, ONE, ledger=Ledger("sqlite://"), subject="people", rate=0.25, search=search, scale=scale
    )
    assert found.hyperparameters == tune.Hyperparameters(lr=pytest.approx(lr), steps=5, batch_size=batch)
    if scale == "size":
        assert found.decisions[0].startswith(f"3 times as many people: lr {found_lr:g} became {lr:g}")


def test_any_search_will_do_and_no_winner_means_the_middle() -> None:
    ledger, hill = Ledger("sqlite://"), Splitting(size=20_000)
    found = tune.subset_search(
        hill, BOX, ONE, ledger=ledger, subject="people", search=partial(tune.random_search, trials=3)
    )
    assert len(found.trials) == 3
    assert ledger.total().epsilon <= 1.0
    few = Sized(breaks, 5000)
    found = tune.subset_search(
        None, BOX, ONE, ledger=ledger, subject="again", parts=(few, Sized(works, 5000)), mean=2, score=half
    )
    assert found.hyperparameters == BOX.decompose(BOX.at(0.5))
    assert found.decisions[-1] == "The search has no winner: the middle of the box."


@dataclass
class Sized:
    """A function with a size."""

    run: Any
    size: int

    def __call__(self, hyperparameters: tune.Hyperparameters, mu: float, receipt: Receipt) -> Any:
        return self.run(hyperparameters, mu, receipt)


def test_what_cannot_be_is_refused_before_anything_is_charged() -> None:
    ledger = Ledger("sqlite://")
    with pytest.raises(ValueError, match="give parts="):
        tune.subset_search(works, BOX, ONE, ledger=ledger, subject="people")
    with pytest.raises(ValueError, match="A part of 20 declared units is too small"):
        tune.subset_search(Splitting(size=100), BOX, ONE, ledger=ledger, subject="people", rate=0.2)
    assert ledger.entries() == []
    ledger.subject("people, the rest", ONE)
    with pytest.raises(ValueError, match="choose a new name"):
        tune.subset_search(Splitting(), BOX, ONE, ledger=ledger, subject="people")


def test_fine_tuning_on_a_split_learns() -> None:
    ledger = Ledger("sqlite://")
    whole = tune.Finetuning(nn.Sequential(nn.Identity(), nn.Linear(4, 2)), rows(1500), size=1500)
    found = tune.subset_search(
        whole, tune.Space(lr=(0.1, 1.0), steps=(2, 6)), Budget(8.0, 1e-5), ledger=ledger, subject="p", mean=2, seed=1
    )
    assert float(whole.score(found.model).mean()) > 0.8
    assert found.guarantee.seeded
    assert found.guarantee.epsilon <= 8.0


def test_batches_drawn_by_chance_are_planned_for_the_rest() -> None:
    def poisson(point: tune.Hyperparameters) -> Any:
        return DPSGD(lr=point.lr, steps=point.steps, batch_size=50)

    ledger = Ledger("sqlite://")
    whole = tune.Finetuning(nn.Sequential(nn.Identity(), nn.Linear(4, 2)), rows(), size=600, optimizer=poisson)
    box, budget = tune.Space(lr=(0.1, 1.0), steps=(3, 3)), Budget(8.0, 1e-5)
    tune.subset_search(whole, box, budget, ledger=ledger, subject="p", rate=0.5, search=tune.random_search)
    spent = ledger.spent("p, the rest")
    assert 7.9 < spent.epsilon <= 8.0
    assert "mode plan" in str(spent)
    assert ledger.total().epsilon <= 8.0
