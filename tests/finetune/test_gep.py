"""GEP: the subspace, both clips, what is charged, DP-SGD as a special case, a run by hand, an interrupted run."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import SEED, clipped_sum, drawn, gap, key, net, one_row_units, people, released, same_bits, weights
from interrupted import whole_and_interrupted
from torch import Tensor, nn
from torch.nn import functional

from tacit.data._records import Rows
from tacit.data._tensor_records import TensorRecords
from tacit.finetune import GEP, fit
from tacit.finetune._subspace import Embedding, SubspaceAsker
from tacit.gradients import Engine
from tacit.privacy import Ledger, accounting, events

NUMBERS = 43  # in `net`
OPTIONS: dict[str, Any] = {"epsilon": 5.0, "delta": 1e-5, "size": 20, "scheme": "full", "head": "keep"}


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def public() -> tuple[Tensor, Tensor]:
    return people(60, seed=9)


def query(model: nn.Module | None = None, microbatch: int | None = None, **options: Any) -> SubspaceAsker:
    settings: dict[str, Any] = {"dimensions": 6, "clip_embedding": 0.5, "clip_residual": 0.2}
    model = model or net()
    rows, labels = public()
    query = Embedding(public=TensorRecords(rows.to(next(model.parameters()).dtype), labels), **(settings | options))
    found = query.open(model, loss, expected=8.0, microbatch=microbatch)
    assert isinstance(found, SubspaceAsker)
    return found


def gradient(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    found = torch.autograd.grad(functional.cross_entropy(model(inputs), labels), list(model.parameters()))
    return torch.cat([g.flatten() for g in found])


def gradients(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    return torch.stack([gradient(model, x, y) for x, y in one_row_units(*data)])


def to_length(values: Tensor, clip: float) -> Tensor:
    return values * min(1.0, clip * (1 - 1e-5) / float(values.norm()))


class Odd(nn.Module):
    """Uses its weight in a way for which there is no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([torch.as_tensor(row @ self.weight.T) for row in x])


@pytest.mark.filterwarnings("ignore:The layer", "ignore:There is no fast rule")
@pytest.mark.parametrize("make", [net, Odd])
@pytest.mark.parametrize("microbatch", [None, 4])
def test_the_engine_builds_every_units_gradient(make: Any, microbatch: int | None) -> None:
    torch.manual_seed(1)
    model = make()
    inputs, labels = people(9)
    owner = torch.tensor([0, 1, 1, 2, 2, 2, 0, 3, 4])
    parts = list(Engine(model, loss, clip=1.0, microbatch=microbatch).each((inputs, labels), unit_ids=owner))
    found = torch.cat([torch.cat([part[n].flatten(1) for n, _ in model.named_parameters()], 1) for part in parts])
    truth = torch.stack([gradient(model, inputs[owner == u], labels[owner == u]) for u in range(5)])
    assert torch.allclose(found, truth, atol=1e-12)
    assert len(parts) == (1 if microbatch is None else 3)


def test_the_basis_is_orthonormal_and_spans_the_main_directions() -> None:
    basis = query(power_iterations=200).basis
    assert torch.allclose(basis @ basis.T, torch.eye(6, dtype=torch.float64), atol=1e-10)
    main = torch.linalg.svd(gradients(net(), public())).Vh[:6]
    assert torch.allclose(basis.T @ basis, main.T @ main, atol=1e-3)
    assert torch.equal(query(power_iterations=2).basis, query(power_iterations=2).basis)
    assert torch.allclose(query().basis, query(microbatch=7).basis, atol=1e-9)


def test_the_basis_follows_the_weights_when_it_is_due() -> None:
    model = net()
    asked = query(model, refresh=2)
    first = asked.basis
    released = {name: torch.zeros_like(value) for name, value in asked.zero_sum().sum.items()}
    next(model.parameters()).data += 0.5
    asked.gradient(released)
    assert torch.equal(asked.basis, first)
    asked.gradient(released)
    assert not torch.equal(asked.basis, first)
    assert torch.equal(asked.basis, query(model).basis)


def test_with_a_full_basis_and_no_residual_it_is_dpsgd_with_rotated_noise() -> None:
    inputs, labels = people()
    asked = query(dimensions=NUMBERS, clip_embedding=0.5, residual=False)
    total = asked.sum(Rows(inputs, labels, torch.arange(24)))
    assert asked.split(1.3) == {"embedding": 1.3}
    noise = torch.randn(NUMBERS, dtype=torch.float64)
    basis = asked.basis
    found = torch.cat([v.flatten() for v in asked.gradient({"embedding": total.sum["embedding"] + noise}).values()])
    plain = torch.cat([v.flatten() for v in clipped_sum(net(), one_row_units(inputs, labels), 0.5).values()])
    assert torch.allclose(found, (plain + noise @ basis) / 8, atol=1e-10)
    assert float((noise @ basis).norm()) == pytest.approx(float(noise.norm()), rel=1e-12)


def test_one_unit_moves_each_part_by_no_more_than_its_bound() -> None:
    inputs, labels = people(6)
    inputs = inputs.float()
    owner = torch.tensor([0, 0, 1, 1, 2, 2])
    asked = query(net().float(), clip_embedding=0.3, clip_residual=0.1)
    without = asked.sum(Rows(inputs[2:], labels[2:], owner[2:])).sum
    reached = 0.0
    for value in (0.0, 1.0, -1e3, 1e18, 1e30, math.nan, math.inf):
        hostile = inputs.clone()
        hostile[:2] = value * torch.randn(2, 4).sign()
        for rows in (hostile, torch.cat([hostile[:1], inputs[1:]])):
            total = asked.sum(Rows(rows, labels, owner))
            assert total.bounds == {"embedding": 0.3, "residual": 0.1}
            for name, bound in total.bounds.items():
                assert bool(torch.isfinite(total.sum[name]).all())
                moved = float((total.sum[name] - without[name]).double().norm())
                assert moved <= bound * (1 + 1e-6)  # the rounding of sums in float32
                reached = max(reached, moved / bound)
    assert reached > 0.99


def test_one_draw_is_one_joint_gaussian() -> None:
    """q = 0.01, T = 1000, joint z = 1, delta = 1e-5 is epsilon 1.828; two sampled events would claim 1.441."""
    optimizer = GEP(public=public(), batch_size=10, steps=1000, dimensions=6)
    found = accounting.guarantee(optimizer.event(1.0, 1000), delta=1e-5).epsilon
    assert found == pytest.approx(1.828, abs=2e-3)
    assert found > 1.441
    split = query().split(1.0)
    assert split is not None
    assert events.joint_noise(split.values()) == pytest.approx(1.0, rel=1e-12)
    assert split["embedding"] == split["residual"]


def test_a_run_by_hand() -> None:
    data, steps, batch, clips = people(), 3, 8, (0.5, 0.2)
    model, other, units = net(), net(), one_row_units(*data)
    settings: dict[str, Any] = {"dimensions": 6, "clip_embedding": 0.5, "clip_residual": 0.2, "refresh": 2}
    optimizer = GEP(public=public(), batch_size=batch, steps=steps, lr=0.3, momentum=0, **settings)
    fitted = fit(model, data, optimizer=optimizer, seed=SEED, **OPTIONS)
    multiplier = fitted.noise_multiplier * math.sqrt(2)
    for t in range(steps):
        if t % 2 == 0:
            start = torch.randn(6, NUMBERS, generator=torch.Generator().manual_seed(20210225)).double()
            anchors = gradients(other, public())
            basis = torch.linalg.qr(anchors.T @ (anchors @ torch.linalg.qr(start.T).Q)).Q.T
        total = [torch.zeros(6).double(), torch.zeros(NUMBERS).double()]
        for i in drawn(t, len(units), batch / 20):
            g = gradient(other, *units[i])
            w = basis @ g
            total[0] += to_length(w, clips[0])
            total[1] += to_length(g - basis.T @ w, clips[1])
        noise = key().normals(t, 6 + NUMBERS)
        embedding = released(total[0], noise[:6], multiplier, clips[0])
        residual = released(total[1], noise[6:], multiplier, clips[1])
        step = (basis.T @ embedding + residual) / batch
        parts = torch.split(step, [p.numel() for p in other.parameters()])
        for p, part in zip(other.parameters(), parts, strict=True):
            p.data -= 0.3 * part.view(p.shape)
    assert gap(weights(model), weights(other)) < 1e-7


def test_public_rows_of_another_kind_are_refused_before_the_charge(tmp_path: Path) -> None:
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        wrong = GEP(public=(torch.randn(9, 7).double(), torch.zeros(9).long()), batch_size=8, steps=3, dimensions=2)
        with pytest.raises(ValueError, match="public rows are not like the private ones"):
            fit(net(), people(), optimizer=wrong, ledger=ledger, **OPTIONS)
        large = GEP(public=public(), batch_size=8, steps=3, dimensions=50)
        with pytest.raises(ValueError, match="no subspace of 50 dimensions"):
            fit(net(), people(), optimizer=large, ledger=ledger, **OPTIONS)
        assert "charge" not in {entry.kind for entry in ledger.entries()}
    with pytest.raises(ValueError, match="span at most as many"):
        GEP(public=public(), batch_size=8, steps=3, dimensions=61)


def test_other_public_rows_are_another_run() -> None:
    inputs, labels = public()
    same, other = (
        GEP(public=(rows, labels), batch_size=8, steps=3, dimensions=2) for rows in (inputs.clone(), inputs + 1)
    )
    assert repr(same) == repr(GEP(public=public(), batch_size=8, steps=3, dimensions=2))
    assert repr(same) != repr(other)


def test_an_interrupted_run_ends_where_a_whole_one_does(tmp_path: Path) -> None:
    optimizer = GEP(public=public(), batch_size=8, steps=5, dimensions=4, refresh=3, lr=0.3)
    whole, parts = whole_and_interrupted(tmp_path, optimizer, at=3)  # goes on at step 2, with the basis of step 0
    assert same_bits(whole, parts)
    assert not same_bits(whole, net())


@pytest.mark.parametrize("kind", [np.float16, np.float32])
def test_clips_in_few_bits_are_plain_numbers(kind: Any) -> None:
    """Noise is their product with a multiplier: in 16 bits it would be up to 0.05% less than was paid for."""
    found = query(clip_embedding=kind(0.3), clip_residual=kind(0.7)).zero_sum().bounds
    assert found == {"embedding": float(kind(0.3)), "residual": float(kind(0.7))}
    assert all(type(bound) is float for bound in found.values())
