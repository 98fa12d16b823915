"""Units, micro-batches, what a sum says of itself."""

from __future__ import annotations

import copy
import gc
import io
import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from oracle import assert_close, check
from torch import Tensor, nn

from tacit.gradients import Engine, clipped_sum
from tacit.gradients._units import Units


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)).double()


def batch(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 4).double(), torch.randint(0, 3, (rows,))


@given(
    units=st.lists(st.integers(-(2**60), 2**60) | st.integers(0, 3), min_size=1, max_size=9),
    microbatch=st.none() | st.integers(1, 9),
)
def test_units_and_micro_batches_of_any_size(units: list[int], microbatch: int | None) -> None:
    check(net(), loss, batch(len(units)), units=units, microbatch=microbatch)


@given(rows=st.integers(1, 9), microbatch=st.integers(1, 9))
def test_micro_batches_without_units(rows: int, microbatch: int) -> None:
    check(net(), loss, batch(rows), microbatch=microbatch)


def test_the_order_of_rows_does_not_matter() -> None:
    model, (x, y) = net(), batch(8)
    units = torch.tensor([3, 3, -1, 7, 7, 7, 0, 0])
    order = torch.randperm(8)
    first = clipped_sum(model, loss, (x, y), clip=0.3, unit_ids=units)
    second = clipped_sum(model, loss, (x[order], y[order]), clip=0.3, unit_ids=units[order], microbatch=4)
    assert_close(second.sum, first.sum, 1e-12)
    assert torch.allclose(first.private.norms, second.private.norms)


def test_ids_may_be_strings_and_the_earlier_name_warns() -> None:
    """By brute force: each person's mean gradient, clipped, summed."""
    model, (x, y) = net(), batch(5)
    names = ["bo", "al", "bo", "cy", "al"]
    found = clipped_sum(model, loss, (x, y), clip=0.3, unit_ids=names)
    for own in ([0, 2], [1, 4], [3]):
        model.zero_grad()
        loss(model, (x[own], y[own])).mean().backward()
        length = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters()))
        for name, p in model.named_parameters():
            found.sum[name] -= p.grad * min(1, 0.3 * (1 - 1e-5) / length)
    assert max(float(total.abs().max()) for total in found.sum.values()) < 1e-6
    numbers = torch.tensor([1, 0, 1, 2, 0])
    engine = Engine(model, loss, clip=0.3)
    expected = engine((x, y), unit_ids=numbers.tolist())
    for old in (
        lambda: clipped_sum(model, loss, (x, y), clip=0.3, units=numbers).sum,
        lambda: engine((x, y), units=numbers.to(torch.int32)).sum,
        lambda: {n: g.sum(0) for n, g in next(Engine(model, loss, clip=9.0).each((x, y), units=numbers)).items()},
    ):
        with pytest.warns(DeprecationWarning, match="units=…. is now unit_ids=…"):
            assert old().keys() == expected.sum.keys()
    with pytest.raises(TypeError, match="leave units= out"):
        engine((x, y), units=numbers, unit_ids=numbers)


@given(labels=st.lists(st.integers(-2, 2), min_size=1, max_size=8))
def test_units_mean(labels: list[int]) -> None:
    units = Units.from_labels(torch.tensor(labels))
    values = torch.randn(len(labels), 2).double()
    for position, label in enumerate(sorted(set(labels))):
        mine = [i for i, other in enumerate(labels) if other == label]
        assert torch.allclose(units.mean(values)[position], values[mine].mean(0))


@pytest.mark.parametrize("microbatch", [None, 4])
def test_an_empty_batch_gives_zero(microbatch: int | None) -> None:
    model = net()
    found = clipped_sum(model, loss, batch(0), clip=1.0, microbatch=microbatch)
    assert found.bounds == {"gradient": 1.0}
    assert {n: v.shape for n, v in found.sum.items()} == {n: p.shape for n, p in model.named_parameters()}
    assert all(float(v.abs().sum()) == 0 for v in found.sum.values())
    assert found.private.norms.numel() == 0
    assert found.private.clipped == 0.0


def test_batches_may_be_nested_and_change_size() -> None:
    model = net()

    def nested(model: nn.Module, batch: dict[str, object]) -> Tensor:
        return loss(model, (batch["in"][0], batch["label"])) * batch["weight"]

    engine = Engine(model, nested, clip=0.3)
    for rows in (5, 2, 7):
        x, y = batch(rows)
        found = engine({"in": [x], "label": y, "weight": 2.0})
        expected = clipped_sum(model, lambda m, b: loss(m, b) * 2.0, (x, y), clip=0.3)
        assert_close(found.sum, expected.sum, 1e-12)


def test_nothing_private_is_printed() -> None:
    found = clipped_sum(net(), loss, batch(5), clip=0.3)
    for text in (repr(found), str(found), repr(found.private), f"{found.private}"):
        assert "tensor" not in text
        assert not any(f"{float(norm):.3f}"[:5] in text for norm in found.private.norms)
    assert "gradient" in repr(found)


def test_what_the_curator_sees() -> None:
    model, rows = net(), batch(5)
    norms = clipped_sum(model, loss, rows, clip=1.0).private.norms
    found = clipped_sum(model, loss, rows, clip=float(norms.sort().values[2:4].mean()))
    assert found.private.clipped == pytest.approx(0.4)
    assert found.private.nonfinite == 0


def with_logits(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    logits = model(batch[0])
    return F.cross_entropy(logits, batch[1], reduction="none"), logits


@pytest.mark.parametrize("microbatch", [None, 1, 2, 3, 8])
@pytest.mark.parametrize("units", [None, [3, 0, 3, 1, 0, 3, 3]])
def test_what_the_loss_returns_beside_the_losses_is_handed_out_row_by_row(
    microbatch: int | None, units: list[int] | None
) -> None:
    model, rows = net(), batch(7)
    found = clipped_sum(model, with_logits, rows, clip=0.3, unit_ids=units, microbatch=microbatch)
    plain = clipped_sum(model, loss, rows, clip=0.3, unit_ids=units, microbatch=microbatch)
    assert all(torch.equal(found.sum[name], value) for name, value in plain.sum.items())
    assert plain.private.outputs is None
    assert found.private.outputs is not None
    assert found.private.outputs.known.all()
    assert not found.private.outputs.values.requires_grad
    torch.testing.assert_close(found.private.outputs.values, model(rows[0]).detach(), rtol=1e-12, atol=1e-12)
    assert "tensor" not in repr(found.private.outputs)


def test_outputs_of_rows_that_fail_are_not_known() -> None:
    """In their places others stood: nobody may take these outputs for theirs."""

    def picky(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        if bool((batch[0] == 7).all(1).any()):
            raise ArithmeticError
        return with_logits(model, batch)

    model, (x, y) = net(), batch(6)
    x[2] = 7.0
    outputs = clipped_sum(model, picky, (x, y), clip=0.3).private.outputs
    assert outputs is not None
    assert outputs.known.tolist() == [True, True, False, True, True, True]
    assert (outputs.values[2] == 0).all()
    torch.testing.assert_close(outputs.values[outputs.known], model(x[outputs.known]).detach(), rtol=1e-12, atol=1e-12)


def test_outputs_have_one_entry_per_row() -> None:
    with pytest.raises(ValueError, match=r"one entry per row, \(3,\) of them, but is of shape \(2,\)"):
        clipped_sum(net(), lambda m, b: (loss(m, b), torch.zeros(2)), batch(3), clip=1.0)


@pytest.mark.parametrize(
    ("units", "error"),
    [
        ([1, 2], "one integer or string per row"),
        (torch.tensor([1, 2]), "one integer or string per row"),
        ([[1]] * 5, "one integer or string per row"),
        ([0.5] * 5, "one integer or string per row"),
        (torch.full((5,), 0.5, dtype=torch.bfloat16), "one integer or string per row"),
        ([True] * 5, "one integer or string per row"),
        ([1, "a", 1, 1, 1], "one integer or string per row"),
    ],
)
def test_labels_that_are_none(units: list[object], error: str) -> None:
    with pytest.raises((ValueError, TypeError), match=error):
        clipped_sum(net(), loss, batch(5), clip=1.0, unit_ids=units)


def test_a_ragged_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="disagree on the number of rows"):
        clipped_sum(net(), loss, (torch.randn(5, 4), torch.zeros(4, dtype=torch.long)), clip=1.0)


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="no trainable parameter"):
        clipped_sum(net().requires_grad_(False), loss, batch(5), clip=1.0)


def test_complex_parameters_are_refused() -> None:
    model = net()
    model.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(ValueError, match="'phase' is complex"):
        clipped_sum(model, loss, batch(5), clip=1.0)
    model.phase.requires_grad_(False)
    assert "phase" not in clipped_sum(model, loss, batch(5), clip=1.0).sum


def test_the_model_is_left_as_it_was() -> None:
    model = net()
    before = copy.deepcopy(model.state_dict())
    clipped_sum(model, loss, batch(5), clip=1.0)
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items())
    assert all(p.grad is None and type(p) is nn.Parameter for p in model.parameters())
    loss(model, batch(3)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_the_model_is_left_as_it_was_when_the_loss_fails() -> None:
    model = net()
    engine = Engine(model, loss, clip=1.0)
    engine.validate(batch(5))
    total = engine((torch.randn(5, 4).double(), torch.full((5,), 9)))  # labels of private rows that do not exist
    assert not any(value.any() for value in total.sum.values())
    assert total.private.nonfinite == 5
    assert all(type(p) is nn.Parameter for p in model.parameters())
    with pytest.raises(IndexError):
        Engine(model, loss, clip=1.0).validate((torch.randn(5, 4).double(), torch.full((5,), 9)))
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_the_one_call_form_follows_a_model_that_changes() -> None:
    model, rows = net(), batch(5)
    clipped_sum(model, loss, rows, clip=1.0)
    model[3].requires_grad_(False)
    assert set(clipped_sum(model, loss, rows, clip=1.0).sum) == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_the_one_call_form_keeps_nothing_alive_and_stays_out_of_copies() -> None:
    model = net()
    clipped_sum(model, loss, batch(5), clip=1.0)
    twin, rows = copy.deepcopy(model), batch(5)
    assert_close(clipped_sum(twin, loss, rows, clip=1.0).sum, clipped_sum(model, loss, rows, clip=1.0).sum, 1e-12)
    file = io.BytesIO()
    torch.save(model, file)
    assert b"tacit.gradients" not in file.getvalue()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_forward_without_gradient_inside_the_loss() -> None:
    def two(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.no_grad():
            weight = model(batch[0]).softmax(1).amax(1)
        return loss(model, batch) * weight

    check(net(), two, batch(6), units=[0, 0, 1, 1, 1, 2])


def test_every_parameter_says_which_rule_serves_it() -> None:
    engine = Engine(net(), loss, clip=1.0)
    engine.validate(batch(5))
    assert engine.served == {
        "0.weight": "linear",
        "0.bias": "linear",
        "1.weight": "layer norm",
        "1.bias": "layer norm",
        "3.weight": "linear",
        "3.bias": "linear",
    }
