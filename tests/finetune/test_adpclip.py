"""AdpClip: the quantile, the split of the noise, what is charged, one run by hand, and an interrupted run."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import (
    SEED,
    clipped_sum,
    drawn,
    flat,
    gap,
    key,
    net,
    one_row_units,
    people,
    released,
    same_bits,
    shaped,
    weights,
)
from interrupted import whole_and_interrupted
from torch import Tensor, nn
from torch.nn import functional

from tacit.data._records import Rows
from tacit.finetune import DPSGD, AdpClip, fit
from tacit.finetune._adaptive import QuantileAsker, QuantileClip
from tacit.gradients import AdaptiveQuantile
from tacit.privacy import Ledger, accounting, events

OPTIONS: dict[str, Any] = {"epsilon": 5.0, "delta": 1e-5, "size": 20, "scheme": "full", "head": "keep"}


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def query(expected: float = 24.0, **options: Any) -> QuantileAsker:
    found = QuantileClip(**options).open(net(), loss, expected=expected, microbatch=None)
    assert isinstance(found, QuantileAsker)
    return found


def norms(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    found = []
    for inputs, labels in one_row_units(*data):
        gradient = torch.autograd.grad(functional.cross_entropy(model(inputs), labels), list(model.parameters()))
        found.append(math.sqrt(sum(float(g.square().sum()) for g in gradient)))
    return torch.tensor(found).sort().values


@pytest.mark.parametrize(("quantile", "begin"), [(0.25, 8.0), (0.75, 0.1)])
def test_without_noise_the_clip_finds_the_true_quantile(quantile: float, begin: float) -> None:
    inputs, labels = people()
    asked = query(clip=begin, quantile=quantile)
    rows = Rows(inputs, labels, torch.arange(24))
    for _ in range(160):
        asked.gradient(asked.sum(rows).sum)
    true = norms(net(), (inputs, labels))
    place = round(quantile * 24)
    step = math.exp(0.2 / 24)  # the clip wanders by one unit's worth around the quantile
    assert true[place - 1] / step <= asked.clip.bound <= true[place] * step


def test_one_update_is_the_papers() -> None:
    inputs, labels = people()
    asked = query(clip=0.7, quantile=0.5, rate=0.2)
    share = float((norms(net(), (inputs, labels)) <= 0.7).double().mean())
    asked.gradient(asked.sum(Rows(inputs, labels, torch.arange(24))).sum)
    assert asked.clip.bound == pytest.approx(0.7 * math.exp(-0.2 * (share - 0.5)), rel=1e-12)


@pytest.mark.parametrize("z", [0.4, 1.0, 7.0])
def test_gradient_and_count_together_are_what_was_charged(z: float) -> None:
    split = query(expected=64.0, count_noise=3.6).split(z) if z < 7.2 else None
    assert split is not None
    assert split["count"] * 0.5 == pytest.approx(3.6)  # relative to its bound of a half
    assert split["gradient"] == pytest.approx((z**-2 - (2 * 3.6) ** -2) ** -0.5, rel=1e-12)
    for given in (split, query(expected=64.0).split(z)):
        assert given is not None
        assert events.joint_noise(given.values()) == pytest.approx(z, rel=1e-12)


def test_one_draw_is_one_joint_gaussian() -> None:
    """q = 0.01, T = 1000, joint z = 1, delta = 1e-5 is epsilon 1.828; two sampled events would claim 1.441."""
    event = AdpClip(batch_size=10, steps=1000).event(1.0, 1000)
    found = accounting.guarantee(event, delta=1e-5).epsilon
    assert found == pytest.approx(1.828, abs=2e-3)
    assert found > 1.441


def test_a_run_by_hand() -> None:
    data, steps, batch, sigma = people(), 4, 8, 1.5
    model = net()
    optimizer = AdpClip(
        batch_size=batch, steps=steps, clip=0.6, quantile=0.4, rate=0.5, count_noise=sigma, lr=0.3, momentum=0
    )
    fitted = fit(model, data, optimizer=optimizer, seed=SEED, **OPTIONS)
    z = (fitted.noise_multiplier**-2 - (2 * sigma) ** -2) ** -0.5
    other, units, clip = net(), one_row_units(*data), 0.6
    for t in range(steps):
        chosen = [units[i] for i in drawn(t, len(units), batch / 20)]
        total = clipped_sum(other, chosen, clip)
        mine = [torch.autograd.grad(functional.cross_entropy(other(x), y), list(other.parameters())) for x, y in chosen]
        below = sum(math.sqrt(sum(float(g.square().sum()) for g in gradient)) <= clip for gradient in mine)
        noise = key().normals(t, 43 + 1)
        count = float(released(torch.tensor([below - len(chosen) / 2]).double(), noise[-1:], 2 * sigma, 0.5))
        noisy = shaped(released(flat(total), noise[:-1], z, clip), total)
        for name, p in other.named_parameters():
            p.data -= 0.3 * noisy[name] / batch
        share = min(max(count / batch + 0.5, 0.0), 1.0)
        clip *= math.exp(-0.5 * (share - 0.4))
    assert gap(weights(model), weights(other)) < 1e-9


def test_too_little_noise_on_the_count_is_refused_before_the_charge(tmp_path: Path) -> None:
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        with pytest.raises(ValueError, match=r"count_noise=0.1 .* above half the noise"):
            fit(net(), people(), optimizer=AdpClip(batch_size=8, steps=4, count_noise=0.1), ledger=ledger, **OPTIONS)
        assert "charge" not in {entry.kind for entry in ledger.entries()}
    with pytest.raises(ValueError, match="use AdpClip"):
        DPSGD(batch_size=8, steps=4, clip=AdaptiveQuantile(1.0))


def test_the_clip_cannot_run_away() -> None:
    asked = query(clip=1.0, rate=50.0)
    total = asked.zero_sum().sum
    for _ in range(5):
        asked.gradient(total | {"count": torch.tensor(1e9)})
    assert asked.clip.bound == pytest.approx(1e-6)
    for _ in range(5):
        asked.gradient(total | {"count": torch.tensor(-1e9)})
    assert asked.clip.bound == pytest.approx(1e6)


def test_an_interrupted_run_ends_where_a_whole_one_does(tmp_path: Path) -> None:
    whole, parts = whole_and_interrupted(tmp_path, AdpClip(batch_size=8, steps=4, rate=1.0, lr=0.3), at=3)
    assert same_bits(whole, parts)
    assert not same_bits(whole, net())
