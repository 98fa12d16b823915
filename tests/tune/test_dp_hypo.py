"""DP-HyPO: the theorem against brute force, what is charged, which points are tried, and what stays secret."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from made_up import Hill, half, works
from torch import nn

from tacit import tune
from tacit.privacy import Budget, Ledger, Neighbours, guarantee
from tacit.privacy.events import compose, from_json, gaussian_noise, leaves
from tacit.tune._dp_hypo import CANDIDATES, Process, halting_besides, tilted

BOX = tune.Space(lr=(0.01, 10.0), steps=(1, 9))
ONE = Budget(1.0, 1e-5)
ORDERS = [1 + 1.01**k for k in range(-400, 900)]


def winner_epsilon(mu: float, mean: float, ratio: float, delta: float) -> float:
    """Theorem 1 of Wang et al. (2023) at shape 1 for a Gaussian of mu, over a dense grid of orders, and the usual
    conversion.
    """
    second = min((1 - 1 / o) * o * mu**2 / 2 + math.log(mean) / o for o in ORDERS)
    found = (
        o * mu**2 / 2
        + 2 * second
        + math.log(mean) / (o - 1)
        + (o / (o - 1) + 2) * math.log(ratio)
        + math.log1p(-1 / o)
        - math.log(delta * o) / (o - 1)
        for o in ORDERS
    )
    return min(found)


@pytest.mark.parametrize("neighbours", list(Neighbours))
@pytest.mark.parametrize(("mean", "ratio"), [(2.0, 1.0), (10.0, 1.0), (10.0, 1.05), (3.0, 1.1)])
def test_a_trial_gets_the_most_that_the_theorem_allows(mean: float, ratio: float, neighbours: Neighbours) -> None:
    plan = tune.plan_dp_hypo(Hill(), BOX, ONE, mean=mean, ratio=ratio, neighbours=neighbours)
    one = gaussian_noise(compose([plan.training, plan.score]))
    assert one is not None
    exact = winner_epsilon(neighbours.factor / one, mean, ratio, 1e-5)
    # our orders are fewer, and under replace-one the accountant counts a constant divergence somewhat more than twice
    assert (0.9 if neighbours is Neighbours.REPLACE_ONE else 0.97) < exact <= 1.0
    assert 0.9998 < guarantee(plan.event, delta=1e-5, neighbours=neighbours).epsilon <= 1.0


def test_without_tilt_it_costs_what_repeat_and_select_does() -> None:
    adaptive = tune.plan_dp_hypo(Hill(), BOX, ONE, mean=8, ratio=1.0)
    plain = tune.plan_repeats(Hill(), BOX, ONE, mean=8)
    assert adaptive.mu == plain.mu
    assert adaptive.event == plain.event
    assert tune.plan_dp_hypo(Hill(), BOX, ONE, mean=8).mu < plain.mu


class Exact:
    """A search over two points, with outcomes 0 and 1, computed without drawing anything.

    An outcome is (score, point); the first of equal scores wins. `rule` says, of the best outcome and the last one, how
    much more likely the second point is than under the fixed draw, in [c, C].
    """

    def __init__(self, rule: Callable[[tuple[int, int], tuple[int, int]], float], mean: float) -> None:
        self.rule, self.mean = rule, mean

    def winners(self, right: tuple[float, float]) -> dict[tuple[int, int], float]:
        """The distribution of the winner, where a point has score 1 with probability `right`."""
        end = 1 / self.mean
        found = dict.fromkeys(product((0, 1), (0, 1)), 0.0)
        states: dict[Any, float] = {None: 1.0}
        for _ in range(int(60 * self.mean)):  # what is left is below e^-59
            after: dict[Any, float] = {}
            for state, share in states.items():
                second = 0.5 * (1.0 if state is None else self.rule(*state))
                for point, score in product((0, 1), (0, 1)):
                    chance = (second if point else 1 - second) * (right[point] if score else 1 - right[point])
                    last = (score, point)
                    best = last if state is None or score > state[0][0] else state[0]
                    after[best, last] = after.get((best, last), 0.0) + share * chance
            for (best, _), share in after.items():
                found[best] += end * share
            states = {state: (1 - end) * share for state, share in after.items()}
        return found


def renyi(p: list[float], q: list[float], order: float) -> float:
    return math.log(sum(a**order * b ** (1 - order) for a, b in zip(p, q, strict=True))) / (order - 1)


def rules(c: float, high: float) -> list[Callable[[tuple[int, int], tuple[int, int]], float]]:
    """Ways to learn, of which some are made to leak: by the best so far, by the last outcome, by both, not at all."""

    def made(prefers: Callable[[tuple[int, int], tuple[int, int]], bool]) -> Any:
        return lambda best, last: high if prefers(best, last) else c

    return [
        made(lambda best, _: bool(best[0])),
        made(lambda best, _: best != (1, 0)),
        made(lambda _, last: last == (1, 1)),
        made(lambda _, last: last[0] == 0),
        made(lambda best, last: best == last),
        lambda *_: 1.0,
    ]


@pytest.mark.parametrize("ratio", [1.0, 1.5, 4.0])
@pytest.mark.parametrize("mean", [1.5, 4.0, 20.0])
def test_the_theorem_holds_for_searches_that_can_be_computed(mean: float, ratio: float) -> None:
    c, high = 2 / (1 + ratio), 2 * ratio / (1 + ratio)
    for rule in rules(c, high):
        search = Exact(rule, mean)
        for right, other in [((0.5, 0.6), (0.6, 0.5)), ((0.02, 0.2), (0.05, 0.1)), ((0.9, 0.3), (0.97, 0.2))]:
            a, b = search.winners(right), search.winners(other)
            assert sum(a.values()) == pytest.approx(1)
            p, q = [a[k] for k in a], [b[k] for k in a]

            def one(order: float, x: tuple[float, float], y: tuple[float, float]) -> float:
                return max(renyi([x[i], 1 - x[i]], [y[i], 1 - y[i]], order) for i in (0, 1))

            def worst(order: float, right: Any = right, other: Any = other) -> float:
                return max(one(order, right, other), one(order, other, right))

            for order in (1.2, 2.0, 8.0, 40.0):
                second = min((1 - 1 / o) * worst(o) + math.log(mean) / o for o in (1.05, 1.5, 2.0, 4.0, 16.0, 64.0))
                bound = worst(order) + 2 * second + math.log(mean) / (order - 1)
                bound += (order / (order - 1) + 2) * math.log(ratio)
                assert max(renyi(p, q, order), renyi(q, p, order)) <= bound


@pytest.mark.parametrize("mean", [1.0, 2.0, 10.0])
@pytest.mark.parametrize("ratio", [1.0, 1.03, 2.0])
def test_the_number_of_trials_is_geometric_with_the_mean_that_was_asked_for(mean: float, ratio: float) -> None:
    charged, halt = 1 / (mean * ratio), halting_besides(mean, ratio)
    both = 1 - (1 - charged) * (1 - halt)
    assert both == pytest.approx(1 / mean, rel=2e-9)
    assert both >= (1 / mean) * (1 - 1e-15)


def test_so_many_trials_run() -> None:
    """Of 60 geometric numbers of mean 3, a sum below 100 or above 290 has a probability below 1e-6 (exact tails)."""
    told: list[Any] = []
    for seed in range(60):
        tune.dp_hypo(
            works,
            BOX,
            Budget(8.0, 1e-5),
            ledger=Ledger("sqlite://"),
            subject="people",
            score=half,
            size=10_000,
            mean=3,
            ratio=1.5,
            seed=seed,
            curator=told.append,
        )
    assert 100 <= len(told) <= 290


@pytest.mark.parametrize("ratio", [1.2, 3.0])
def test_no_point_is_more_or_less_likely_than_the_bounds_say(ratio: float) -> None:
    """Every candidate's probability, by going through a grid of both numbers that decide."""
    promise = torch.rand(8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    fine = 4000
    counts = torch.zeros(8)
    for side in range(1, fine + 1):
        for place in (0.25, 0.5, 0.75, 1.0):
            counts[tilted(promise, ratio, side / fine, place - 0.1)] += 1
    shares = 8 * counts / counts.sum()
    c, high = 2 / (1 + ratio), 2 * ratio / (1 + ratio)
    better = promise.argsort(descending=True)[:4]
    assert torch.allclose(shares[better], torch.full((4,), high), atol=3e-3)
    assert torch.allclose(shares.sort().values[:4], torch.full((4,), c), atol=3e-3)
    assert tilted(promise, 1.0, 0.9, 0.9) == 0  # nothing is learnt: the first is a plain draw


def test_a_process_knows_what_it_has_seen() -> None:
    process = Process(noise=0.001)
    points = torch.tensor([[0.1, 0.1], [0.9, 0.9], [0.12, 0.12], [0.88, 0.9]], dtype=torch.float64)
    assert process.promise(points).tolist() == [0.0] * 4
    process.learn(points[0], 0.2)
    process.learn(points[1], 0.8)
    said = process.promise(points)
    assert said[:2].tolist() == pytest.approx([0.2, 0.8], abs=0.01)
    assert said[3] > said[2]
    process.learn(points[1], -math.inf)  # a failed trial
    assert float(process.promise(points)[1]) < 0.5


def test_later_trials_are_better_where_the_budget_allows_it() -> None:
    first, last = [], []
    for seed in range(12):
        told: list[float] = []
        tune.dp_hypo(
            Hill(size=100_000, slope=0.1),  # the best r lies inside the box
            BOX,
            Budget(60.0, 1e-5),
            ledger=Ledger("sqlite://"),
            subject="people",
            mean=25,
            ratio=30.0,
            seed=seed,
            curator=lambda event, told=told: told.append(event.trial.score),
        )
        first += told[:2]
        last += told[12:]
    assert len(last) > 40
    assert sum(last) / len(last) > sum(first) / len(first) + 0.1


def test_the_search_is_one_charge_within_the_budget() -> None:
    ledger = Ledger("sqlite://")
    found = tune.dp_hypo(Hill(), BOX, ONE, ledger=ledger, subject="people", mean=6)
    entries = ledger.entries("people")
    assert [entry.kind for entry in entries] == ["subject", "charge"]
    event = from_json(entries[1].body["event"])
    tilt = 1 / 30
    assert event.mean == pytest.approx(6 * math.exp(tilt))
    assert [leaf.xi for leaf, _ in leaves(event.event) if hasattr(leaf, "xi")] == [pytest.approx(tilt)]
    assert 0.9997 < found.guarantee.epsilon <= 1.0
    assert found.trials == ()


def test_nothing_tells_how_many_trials_there_were(capfd: pytest.CaptureFixture[str]) -> None:
    numbers, seen = set(), set()
    for seed in range(8):
        ledger, told = Ledger("sqlite://"), []
        found = tune.dp_hypo(Hill(), BOX, ONE, ledger=ledger, subject="people", mean=6, seed=seed, curator=told.append)
        numbers.add(len(told))
        text = repr(found).replace(repr(found.hyperparameters), "POINT")
        entries = [(entry.kind, sorted(entry.body), entry.body.get("event")) for entry in ledger.entries()]
        seen.add((text, str(entries), "".join(capfd.readouterr())))
    assert len(numbers) > 3
    assert len(seen) == 1


def test_fine_tuning() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(2000, 4)
    rows = inputs, (inputs[:, 0] > 0).long()
    tuned = tune.Finetuning(nn.Sequential(nn.Identity(), nn.Linear(4, 2)), rows, size=2000, measure="accuracy")
    told: list[str] = []
    found = tune.dp_hypo(
        tuned,
        tune.Space(lr=(0.1, 1.0), steps=(2, 8)),
        Budget(8.0, 1e-5),
        ledger=Ledger("sqlite://"),
        subject="people",
        mean=2,
        seed=1,
        curator=lambda event: told.append(event.error),
    )
    assert set(told) == {""}
    assert float(tuned.score(found.model).mean()) > 0.8


def test_refusals() -> None:
    ledger = Ledger("sqlite://")
    for more, sentence in (
        ({"ratio": 0.9}, "at least 1"),
        ({"ratio": math.inf}, "at least 1"),
        ({"mean": 0.5}, "mean"),
    ):
        with pytest.raises(ValueError, match=sentence):
            tune.dp_hypo(Hill(), BOX, ONE, ledger=ledger, subject="people", **more)
    assert ledger.entries() == []
    assert CANDIDATES % 2 == 0
