"""DPZO: slopes against autograd, sensitivity by brute force, parameters as they were, and an interrupted run."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import SEED, drawn, gap, key, net, one_row_units, people, same_bits, weights
from interrupted import whole_and_interrupted
from torch import Tensor, nn
from torch.nn import functional

from tacit.data._records import Rows
from tacit.finetune import DPZO, fit
from tacit.finetune._zeroth_order import SlopeAsker, ZerothOrderQuery


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def query(model: nn.Module, microbatch: int | None = None, **options: Any) -> SlopeAsker:
    found = ZerothOrderQuery(**options).open(model, loss, expected=1.0, microbatch=microbatch)
    assert isinstance(found, SlopeAsker)
    return found


def directions(step: int, count: int = 1, **options: Any) -> list[dict[str, Tensor]]:
    """The directions of a step: what a released slope of one in each of them would move."""
    found = []
    for place in range(count):
        asked = query(net(), directions=count, **options)
        asked.load({"step": torch.tensor(step)})
        found.append(asked.gradient({"slopes": count * functional.one_hot(torch.tensor(place), count).double()}))
    return found


def slope(model: nn.Module, inputs: Tensor, labels: Tensor, z: dict[str, Tensor]) -> float:
    gradient = torch.autograd.grad(functional.cross_entropy(model(inputs), labels), list(model.parameters()))
    return sum(float((g * z[n]).sum()) for g, (n, _) in zip(gradient, model.named_parameters(), strict=True))


@pytest.mark.parametrize("microbatch", [None, 5])
def test_slopes_are_directional_derivatives_of_each_unit(microbatch: int | None) -> None:
    inputs, labels = people()
    owner = torch.arange(24) // 3
    asked = query(net(), microbatch, directions=2, clip=0.8)
    total = asked.sum(Rows(inputs, labels, owner))
    truth = [
        [slope(net(), inputs[3 * u : 3 * u + 3], labels[3 * u : 3 * u + 3], z) for u in range(8)]
        for z in directions(0, 2)
    ]
    clipped = [sum(min(max(s, -0.8), 0.8) for s in line) for line in truth]
    assert any(abs(s) > 0.8 for line in truth for s in line)
    assert any(abs(s) < 0.8 for line in truth for s in line)
    assert total.sum["slopes"].tolist() == pytest.approx(clipped, abs=1e-4)
    assert total.bounds == {"slopes": pytest.approx(0.8 * math.sqrt(2))}


def test_directions_are_standard_normal_and_new_in_every_step() -> None:
    first, again, other = (torch.cat([v.flatten() for v in directions(t)[0].values()]) for t in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    wide = ZerothOrderQuery().open(nn.Linear(100, 100), loss, expected=1.0, microbatch=None)
    z = wide.gradient({"slopes": torch.ones(1)})["weight"]
    assert abs(float(z.mean())) < 0.05  # five standard deviations: false alarm below 1e-6
    assert abs(float(z.var()) - 1) < 0.08


def test_one_unit_moves_the_sum_by_no_more_than_its_bound() -> None:
    inputs, labels = people(6)
    owner = torch.tensor([0, 0, 1, 1, 2, 2])
    asked = query(net(), clip=0.3, directions=2)
    bound = asked.zero_sum().bounds["slopes"]
    without = asked.sum(Rows(inputs[2:], labels[2:], owner[2:] - 1)).sum["slopes"]
    for value in (0.0, 1.0, -1e3, 1e30, 1e300, math.nan, math.inf, -math.inf):
        hostile = inputs.clone()
        hostile[:2] = value * torch.randn(2, 4).sign()
        for rows in (hostile, torch.cat([hostile[:1], inputs[1:]])):
            found = asked.sum(Rows(rows, labels, owner)).sum["slopes"]
            assert bool(torch.isfinite(found).all())
            assert float((found - without).norm()) <= bound * (1 + 1e-12)
    bad = inputs.clone()
    bad[0, 0] = math.nan
    assert torch.allclose(asked.sum(Rows(bad, labels, owner)).sum["slopes"], without, atol=1e-12)


def test_parameters_come_back_bit_for_bit_even_after_an_error() -> None:
    model = net().float()
    before, places = weights(model), {n: p.data_ptr() for n, p in model.named_parameters()}
    inputs, labels = people()
    calls: list[Tensor] = []
    pulled = torch.tensor([False])  # no number that the model could decide by

    def failing(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        calls.append(next(model.parameters()).detach().clone())
        if pulled and len(calls) >= 2:
            raise RuntimeError("a cable was pulled")
        found = loss(model, batch)
        assert not found.requires_grad
        return found

    asked = ZerothOrderQuery(scale=0.1).open(model, failing, expected=1.0, microbatch=None)
    asked.sum(Rows(inputs.float(), labels, torch.arange(24)))  # which checks the model as well
    calls.clear()
    pulled.fill_(True)
    with pytest.raises(RuntimeError, match="cable"):
        asked.sum(Rows(inputs.float(), labels, torch.arange(24)))
    assert not torch.equal(calls[0], calls[1])  # they were moved, to both sides
    pulled.fill_(False)
    asked.sum(Rows(inputs.float(), labels, torch.arange(24)))
    after = weights(model)
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert places == {n: p.data_ptr() for n, p in model.named_parameters()}
    assert all(p.grad is None for p in model.parameters())


def test_a_run_by_hand() -> None:
    data, steps, batch, clip = people(), 4, 8, 0.7
    model, other, units = net(), net(), one_row_units(*data)
    optimizer = DPZO(batch_size=batch, steps=steps, clip=clip, directions=2, lr=0.05, momentum=0)
    options: dict[str, Any] = {"epsilon": 5.0, "delta": 1e-5, "size": 20, "scheme": "full", "head": "keep"}
    fitted = fit(model, data, optimizer=optimizer, seed=SEED, **options)
    for t in range(steps):
        chosen = [units[i] for i in drawn(t, len(units), batch / 20)]
        noise = fitted.noise_multiplier * clip * math.sqrt(2) * key().normals(t, 2)
        both = directions(t, 2)
        sums = [sum(min(max(slope(other, x, y, z), -clip), clip) for x, y in chosen) for z in both]
        released = [total + float(n) for total, n in zip(sums, noise, strict=True)]
        for name, p in other.named_parameters():
            p.data -= 0.05 * sum(s * z[name] for s, z in zip(released, both, strict=True)) / (2 * batch)
    assert gap(weights(model), weights(other)) < 1e-5  # differences are no derivatives


def test_a_model_that_mixes_rows_is_refused_without_a_backward() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 3)
            nn.init.zeros_(self.head.weight)

        def forward(self, x: Tensor) -> Tensor:
            return torch.as_tensor(self.head(x - x.mean(0)))

    asked = ZerothOrderQuery().open(Mixing(), loss, expected=1.0, microbatch=None)
    with pytest.raises(ValueError, match="Rows are mixed"):
        asked.check(torch.zeros(1, 4), torch.zeros(1, dtype=torch.long))


def test_an_interrupted_run_ends_where_a_whole_one_does(tmp_path: Path) -> None:
    whole, parts = whole_and_interrupted(tmp_path, DPZO(batch_size=8, steps=4, lr=0.05), at=3)
    assert same_bits(whole, parts)
    assert not same_bits(whole, net())


@pytest.mark.parametrize("scalar", [np.float16(0.3), np.float32(0.3), torch.tensor(0.3, dtype=torch.float16)])
def test_the_bound_of_a_clip_in_few_bits_is_not_rounded_down(scalar: Any) -> None:
    """0.3 sqrt(7) in 16 bits is 0.02% below what one unit may add."""
    asked = query(net(), directions=7, clip=scalar)
    total = asked._bounded(torch.full((1, 7), 1e9, dtype=torch.float64))
    assert type(total.bounds["slopes"]) is float
    assert float(total.sum["slopes"].norm()) <= total.bounds["slopes"] * (1 + 1e-12)
