"""Whole runs of a few steps against brute force: units one by one, the seeded noise, the update by hand."""

from typing import Any

import pytest
import torch
from by_hand import SEED, gap, net, one_row_units, people, train, weights

from tacit.finetune import DPGD, DPSGD, Optimizer, Update, fit

STEPS, BATCH, CLIP = 5, 8, 0.4
UPDATES: dict[str, dict[str, Any]] = {
    "plain": {"momentum": 0.0},
    "momentum": {"lr": 0.3},
    "decay": {"weight_decay": 0.05},
    "adam": {"rule": "adam", "lr": 0.02, "weight_decay": 0.01, "betas": (0.8, 0.9)},
    "adamw": {"rule": "adamw", "lr": 0.02, "weight_decay": 0.2},
    "cosine": {"schedule": "cosine", "warmup": 2},
    "linear": {"schedule": "linear", "momentum": 0.5},
    "ema": {"average": "ema", "decay": 0.6},
    "swa": {"average": "swa", "swa_start": 0.3},
    "free step": {"free_step": True, "schedule": "linear"},
}


def run(optimizer: Optimizer, count: int = 24, **more: Any) -> Any:
    options: dict[str, Any] = {"epsilon": 5.0, "delta": 1e-5, "size": 20, "scheme": "full", "head": "keep"}
    return fit(net(), people(count), optimizer=optimizer, seed=SEED, **(options | more))


@pytest.mark.parametrize("case", UPDATES)
def test_dpsgd_is_what_one_does_by_hand(case: str) -> None:
    fitted = run(DPSGD(batch_size=BATCH, steps=STEPS, clip=CLIP, **UPDATES[case]))
    units, update = one_row_units(*people()), Update(**UPDATES[case])
    rate, scale = BATCH / 20, fitted.noise_multiplier
    expected = train(net(), units, update, steps=STEPS, clip=CLIP, rate=rate, scale=scale, divisor=BATCH)
    assert gap(weights(fitted.model), expected) < 1e-10
    assert gap(expected, weights(net())) > 1e-3
    assert fitted.steps == STEPS


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_dpgd_is_everybody_with_a_free_last_step(momentum: float) -> None:
    fitted = run(DPGD(steps=STEPS, clip=CLIP, lr=0.2, momentum=momentum))
    update = Update(lr=0.2, momentum=momentum, free_step=momentum > 0)
    units, scale = one_row_units(*people()), fitted.noise_multiplier
    expected = train(net(), units, update, steps=STEPS, clip=CLIP, rate=1.0, scale=scale, divisor=20)
    assert gap(weights(fitted.model), expected) < 1e-10


def test_the_free_step_is_the_last_one_twice() -> None:
    """One step: momentum's buffer is the released gradient, so the free step is that step again."""
    start = weights(net())
    once, twice = (weights(run(DPGD(steps=1, clip=CLIP, free_step=free)).model) for free in (False, True))
    assert gap({n: once[n] + (once[n] - start[n]) for n in once}, twice) < 1e-14


def test_without_noise_only_the_clip_is_left() -> None:
    fitted = run(DPSGD(batch_size=BATCH, steps=STEPS, clip=CLIP), epsilon=float("inf"))
    assert fitted.noise_multiplier == 0
    update, units = Update(), one_row_units(*people())
    expected = train(net(), units, update, steps=STEPS, clip=CLIP, rate=BATCH / 20, scale=0.0, divisor=BATCH)
    assert gap(weights(fitted.model), expected) < 1e-10
    assert "epsilon = inf: clipped, without noise; not private" in fitted.assumptions


def test_an_empty_draw_is_noised_and_counted() -> None:
    """One unit in a thousand: nobody is drawn in these steps, and the model moves by its noise alone."""
    sums: list[Any] = []
    fitted = run(
        DPSGD(batch_size=1, steps=3, clip=CLIP),
        count=2,
        size=1000,
        curator=lambda event: sums.append(event.clipped_sum),
    )
    assert [len(total.private.norms) for total in sums] == [0, 0, 0]
    assert all(not value.any() for total in sums for value in total.sum.values())
    expected = train(net(), [], Update(), steps=3, clip=CLIP, rate=0.001, scale=fitted.noise_multiplier, divisor=1)
    assert gap(weights(fitted.model), expected) < 1e-10
    assert fitted.steps == 3


def test_float32_models_get_the_same_in_their_own_precision() -> None:
    inputs, labels = people()
    model = net().float()
    optimizer = DPSGD(batch_size=BATCH, steps=STEPS, clip=CLIP)
    fitted = fit(
        model,
        (inputs.float(), labels),
        optimizer=optimizer,
        epsilon=5.0,
        delta=1e-5,
        size=20,
        scheme="full",
        head="keep",
        seed=SEED,
    )
    expected = weights(run(optimizer).model)
    found = {n: w.double() for n, w in weights(fitted.model).items()}
    assert gap(found, expected) < 1e-5
    assert all(w.dtype == torch.float32 for w in fitted.model.state_dict().values())
