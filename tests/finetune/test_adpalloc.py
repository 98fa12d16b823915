"""AdpAlloc: the schedules, what they cost, one run by hand, and a run that was interrupted."""

import math
from pathlib import Path
from typing import Any

import pytest
from by_hand import SEED, ByHand, clipped_sum, drawn, gap, net, one_row_units, people, same_bits, weights, with_noise
from dp_accounting import NeighboringRelation, dp_event
from dp_accounting.pld import PLDAccountant
from interrupted import whole_and_interrupted

from tacit.finetune import AdpAlloc, Decaying, Update, fit, plan

SHAPES: list[dict[str, Any]] = [
    {"noise": "exponential", "k": 0.2},
    {"noise": "time", "k": 0.2},
    {"noise": "step", "k": 0.6, "period": 2},
    {"noise": "polynomial", "k": 2.0, "end": 0.3},
]


FALLING = AdpAlloc(batch_size=8, steps=4, clip=0.5, k=0.3, period=1, lr=0.3, momentum=0.5)


def by_formula(shape: dict[str, Any], t: int, steps: int) -> float:
    """Yu et al. (2019), section 5.2, relative to sigma_0."""
    k = float(shape["k"])
    found: dict[str, float] = {
        "exponential": math.exp(-k * t),
        "time": 1 / (1 + k * t),
        "step": k ** (t // 2),
        "polynomial": (1 - 0.3) * (1 - t / steps) ** k + 0.3,
    }
    return found[shape["noise"]]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s["noise"])
def test_every_schedule_is_the_papers_and_meets_the_target_in_another_accountant(shape: dict[str, Any]) -> None:
    steps, q = 5, 0.1
    optimizer = AdpAlloc(batch_size=10, steps=steps, **shape)
    event = plan(optimizer, epsilon=2.0, delta=1e-5, size=100)
    sigmas = [leaf.event.noise_multiplier for leaf in event.events]
    assert sigmas == pytest.approx([sigmas[0] * by_formula(shape, t, steps) for t in range(steps)], rel=1e-12)
    accountant = PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=1e-3)
    for sigma in sigmas:
        accountant.compose(dp_event.PoissonSampledDpEvent(q, dp_event.GaussianDpEvent(sigma)))
    assert accountant.get_epsilon(1e-5) == pytest.approx(2.0, abs=0.01)


@pytest.mark.parametrize("shape", ["exponential", "time", "step", "polynomial"])
def test_without_k_the_noise_ends_where_it_is_told(shape: Any) -> None:
    noise = Decaying(shape=shape, end=0.25, period=1)
    sigmas = [noise.multiplier(2.0, t, 40) for t in range(40)]
    assert sigmas[0] == pytest.approx(2.0)
    assert sigmas[-1] == pytest.approx(0.5, rel=0.08 if shape == "polynomial" else 1e-9)
    assert sigmas == sorted(sigmas, reverse=True)
    assert len({Decaying(shape=shape).multiplier(1.0, t, 1000) for t in range(1000)}) <= 16


def test_wrong_schedules_are_refused() -> None:
    wrongs: list[dict[str, Any]] = [{"shape": "cubic"}, {"k": -1.0}, {"shape": "step", "k": 1.5}, {"end": 0.0}]
    for wrong in [*wrongs, {"period": 0}]:
        with pytest.raises(ValueError, match=r"schedule|k is|end is|period"):
            Decaying(**wrong)


def test_a_run_by_hand() -> None:
    data, steps, clip = people(), 4, 0.5
    update = Update(lr=0.3, momentum=0.5)
    model = net()
    options: dict[str, Any] = {"epsilon": 5.0, "delta": 1e-5, "size": 20, "scheme": "full", "head": "keep"}
    fitted = fit(model, data, optimizer=FALLING, seed=SEED, **options)
    other = net()
    parameters = dict(other.named_parameters())
    hand, units = ByHand(update, weights(other), steps), one_row_units(*data)
    for t in range(steps):
        multiplier = fitted.noise_multiplier * math.exp(-0.3 * t)
        chosen = [units[i] for i in drawn(t, len(units), 8 / 20)]
        hand.step({n: v / 8 for n, v in with_noise(clipped_sum(other, chosen, clip), t, multiplier, clip).items()}, t)
        for name, p in parameters.items():
            p.data = hand.weights[name]
    assert gap(weights(model), hand.weights) < 1e-9


def test_an_interrupted_run_ends_where_a_whole_one_does(tmp_path: Path) -> None:
    whole, parts = whole_and_interrupted(tmp_path, FALLING, at=3)
    assert same_bits(whole, parts)
