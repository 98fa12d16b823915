"""Training with banded noise and cyclic Poisson sampling: as by hand, and what is refused before a charge."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from by_hand import SEED, clipped_sum, gap, key, net, one_row_units, people, weights

from tacit.finetune import DPSGD, BandMF, CyclicPoisson, fit
from tacit.finetune._sampling import batch_of
from tacit.privacy import Ledger, correlated


def run(optimizer: Any, **more: Any) -> Any:
    options: dict[str, Any] = {
        "epsilon": 5.0,
        "delta": 1e-5,
        "size": 24,
        "scheme": "full",
        "seed": SEED,
        "head": "keep",
    }
    return fit(net(), people(), optimizer=optimizer, **(options | more))


def test_steps_are_as_by_hand() -> None:
    """Groups by the hash of ids, draws of the key, y = C^-1 z by solving C y = z, plain descent."""
    ids = list(range(24))
    optimizer = BandMF(batch_size=3, steps=7, bands=3, clip=0.5, lr=0.1, momentum=0.0)
    fitted = run(optimizer, unit_ids=ids, unit="person")
    model, units = net(), one_row_units(*people())
    groups, rate = batch_of(ids, 3), 3 * 3 / 24
    strategy = correlated.toeplitz(7, 3)
    column, size = strategy.coefficients(), sum(p.numel() for p in model.parameters())
    scale = fitted.noise_multiplier * strategy.sensitivity() * 0.5
    past: list[torch.Tensor] = []
    for step in range(7):
        uniforms = key().uniforms(step, 24, 1).tolist()
        drawn = [i for i in range(24) if uniforms[i] <= rate and groups[i] == step % 3]
        total = clipped_sum(model, [units[i] for i in drawn], 0.5)
        fresh = key().normals(step, size)
        past.append(fresh - sum((column[k] * past[step - k] for k in range(1, min(step, 2) + 1)), torch.zeros(size)))
        parts = torch.split(scale * past[step], [p.numel() for p in model.parameters()])
        with torch.no_grad():
            for (name, parameter), part in zip(model.named_parameters(), parts, strict=True):
                parameter -= 0.1 * (total[name] + part.view_as(parameter)) / 3
    assert gap(weights(fitted.model), weights(model)) < 1e-3  # the public grid
    assert fitted.guarantee.epsilon <= 5.0


def test_one_band_is_dp_sgd() -> None:
    ids = list(range(24))
    plain = run(DPSGD(batch_size=6, steps=5, lr=0.1))
    banded = run(BandMF(batch_size=6, steps=5, bands=1, lr=0.1), unit_ids=ids, unit="person")
    assert banded.noise_multiplier == pytest.approx(plain.noise_multiplier, rel=1e-3)
    assert gap(weights(banded.model), weights(plain.model)) < 1e-2 * max(1.0, plain.noise_multiplier)


def test_two_draws_of_a_unit_are_as_far_apart_as_there_are_bands() -> None:
    sampler = CyclicPoisson(10, 4).over(list(range(100)))
    assert sampler.participations(10) == (3, 4)
    assert sampler.rate(100) == pytest.approx(0.4)
    assert sampler.group_of_unit is not None
    assert set(sampler.group_of_unit.tolist()) == {0, 1, 2, 3}


def test_what_has_no_guarantee_is_refused_before_a_charge() -> None:
    ledger = Ledger("sqlite://")
    optimizer = BandMF(batch_size=3, steps=6, bands=3)
    with pytest.raises(ValueError, match=r"give unit_ids=, which keep it, or give neighbours='zero-out' \(the number"):
        run(optimizer, ledger=ledger)
    with pytest.raises(ValueError, match="no known guarantee under replace-one"):
        run(optimizer, ledger=ledger, unit="person", unit_ids=list(range(24)), neighbours="replace-one")
    with pytest.raises(ValueError, match="give fewer bands"):
        run(BandMF(batch_size=12, steps=6, bands=3), ledger=ledger, unit="person", unit_ids=list(range(24)))
    with pytest.raises(ValueError, match="'toeplitz' or 'banded'"):
        BandMF(batch_size=3, steps=6, strategy="full")  # type: ignore[arg-type]
    assert ledger.entries() == []
    assert run(optimizer, neighbours="zero-out").guarantee.epsilon <= 5.0
    assert math.isinf(run(optimizer, unit="person", unit_ids=list(range(24)), epsilon=math.inf).guarantee.epsilon)


def test_bands_are_for_the_momentum_of_the_update() -> None:
    """The ledger's event names it; what a run adds up with another rule is a plain sum."""
    names = {
        momentum: BandMF(batch_size=3, steps=12, bands=3, momentum=momentum).event(1.0, 100).strategy
        for momentum in (0.0, 0.5, 0.9, 0.99999)
    }
    assert names == {0.0: "toeplitz:3", 0.5: "toeplitz:3@0.5", 0.9: "toeplitz:3@0.9", 0.99999: "toeplitz:3@0.9999"}
    assert BandMF(batch_size=3, steps=12, bands=3, rule="adam").event(1.0, 100).strategy == "toeplitz:3"
    assert BandMF(batch_size=3, steps=12, bands=3, strategy="banded").event(1.0, 100).strategy == "banded:3"
