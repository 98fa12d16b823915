"""One linear layer under cross entropy: the closed form is what the watched backward pass finds, row by row."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tacit.finetune import Classes
from tacit.finetune._silent import silent
from tacit.finetune._tasks import Labels, loss_of
from tacit.gradients import Engine, _closed_form, untouched
from tacit.gradients import _kernels as kernels
from tacit.gradients._norms import ghost_norms

CLASSES = 7


def watched(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The same loss, of which no closed form is known."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def rows(count: int = 40, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, 12, generator=generator, dtype=dtype) * torch.logspace(-3, 3, count)[:, None]
    return x.to(dtype), torch.randint(CLASSES, (count,), generator=generator)


def layer(kind: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Linear(12, CLASSES, bias=kind != "no bias").to(dtype)
    if kind == "frozen bias":
        model.bias.requires_grad_(False)
    if kind == "frozen weight":
        model.weight.requires_grad_(False)
    return model


def both(model: nn.Module, batch: Any, **options: Any) -> None:
    """Sums and norms agree; the closed form was taken once, and not where it is not known."""
    taken = []
    original = _closed_form.closed_form

    def spy(*args: Any) -> Any:
        taken.append(original(*args))
        return taken[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tacit.gradients._engine.closed_form", spy)
        found = Engine(model, loss_of(Classes(CLASSES)), clip=0.3)(batch, **options)
        assert [each is not None for each in taken] == [True]
        slow = Engine(model, watched, clip=0.3)(batch, **options)
        assert [each is not None for each in taken] == [True, False]
    assert found.bounds == slow.bounds
    assert list(found.sum) == list(slow.sum)
    small = 1e-11 if batch[0].dtype == torch.float64 else 2e-6
    for name, value in slow.sum.items():
        assert found.sum[name].dtype == torch.float64
        assert torch.allclose(found.sum[name], value, rtol=small, atol=small)
    finite = torch.isfinite(slow.private.norms)
    assert torch.equal(torch.isfinite(found.private.norms), finite)
    assert torch.allclose(found.private.norms[finite], slow.private.norms[finite], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["both", "no bias", "frozen bias", "frozen weight"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_are_those_of_the_backward_pass(kind: str, dtype: torch.dtype) -> None:
    both(layer(kind, dtype), rows(dtype=dtype))


def test_units_of_several_rows_and_muted_ones() -> None:
    both(layer("both"), rows(), unit_ids=torch.arange(40) // 3)
    both(layer("both"), rows(), mute=torch.arange(40) % 5 == 0)


def test_rows_with_odd_labels_or_values_add_what_they_add_alone() -> None:
    """Torch's -100 has no gradient, a label that is no class fails, NaN contributes zero: no other row notices."""
    x, labels = rows()
    labels[3], labels[7], labels[9] = -100, CLASSES, -5
    x[11, 2], x[12] = torch.nan, torch.inf
    engine = Engine(layer("both"), loss_of(Classes(CLASSES)), clip=0.3)
    engine.validate(rows())
    found = engine((x, labels))
    odd = torch.zeros(40, dtype=torch.bool)
    odd[[3, 7, 9, 11, 12]] = True
    without = engine(rows(), mute=odd)
    for name, value in without.sum.items():
        assert torch.equal(value, found.sum[name])  # to the last bit
    assert not torch.isfinite(found.private.norms[[7, 9, 11, 12]]).any()
    assert float(found.private.norms[3]) < 1e-30


def test_the_gradient_by_the_outputs_is_autograds() -> None:
    outputs = (torch.randn(50, CLASSES) * torch.logspace(-3, 4, 50)[:, None]).requires_grad_()
    labels = torch.randint(CLASSES, (50,))
    labels[5] = -100
    losses = nn.functional.cross_entropy(outputs, labels, reduction="none")
    (expected,) = torch.autograd.grad(losses.sum(), outputs)
    mine, found, failing = Classes(CLASSES).output_gradients(outputs.detach(), labels)
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-7)
    assert torch.allclose(mine, losses.detach(), rtol=1e-6, atol=1e-6)
    assert failing is not None
    assert not failing.any()
    assert Classes(CLASSES).output_gradients(outputs.detach()[:0], labels[:0])[1].shape == (0, CLASSES)


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def hooked(model: nn.Module) -> nn.Module:
    model.register_forward_hook(lambda *args: 2 * args[-1])
    return model


def replaced(model: nn.Module) -> nn.Module:
    model.forward = lambda x: 2 * nn.functional.linear(x, model.weight, model.bias)  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize("change", [lambda _: Doubled(12, CLASSES), hooked, replaced, nn.Sequential])
def test_another_model_goes_the_usual_way(change: Callable[[nn.Module], nn.Module]) -> None:
    model = change(layer("both"))
    loss, batch = loss_of(Classes(CLASSES)), rows()
    parameters = dict(model.named_parameters())
    units = _closed_form.Units.singletons(40, torch.device("cpu"))
    assert _closed_form.closed_form(model, loss, parameters, batch, units) is None
    found, slow = Engine(model, loss, clip=0.3)(batch), Engine(model, watched, clip=0.3)(batch)
    for name, value in slow.sum.items():
        assert torch.equal(value, found.sum[name])


@pytest.mark.skipif(not kernels.kernels_in_use(), reason="no C compiler")
def test_norms_in_one_pass_are_never_too_small() -> None:
    generator = torch.Generator().manual_seed(1)
    for m, k in ((1, 1), (7, 33), (100, 384)):
        u = torch.randn(60, 1, m, generator=generator) * torch.logspace(-30, 12, 60)[:, None, None]
        v = torch.randn(60, 1, k, generator=generator)
        u[5], v[6], u[7, 0, 0], v[8] = 0, torch.inf, torch.nan, 1e-45
        found = kernels.outer_norms(u, v)
        expected, _ = ghost_norms(u, v, run=0, repair=False)
        assert torch.equal(torch.isfinite(found), torch.isfinite(expected))
        good = torch.isfinite(expected)
        assert torch.allclose(found[good], expected[good], rtol=4e-16, atol=0)
        true = (u[good].double().mT @ v[good].double()).square().sum((1, 2))
        assert (found[good] >= true * (1 - 1e-15)).all()
        assert torch.isinf(found[~good]).all()


def test_models_that_may_draw_are_not_taken_for_silent_ones() -> None:
    own = loss_of(Classes(CLASSES))
    assert silent(nn.Linear(3, 2), own)
    assert silent(nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 2)), loss_of(Labels(2)))
    assert not silent(nn.Linear(3, 2), watched)
    assert not silent(nn.Linear(3, 2), loss_of(type("Mine", (Classes,), {})(CLASSES)))
    assert not silent(nn.Sequential(nn.Dropout(0.0), nn.Linear(3, 2)), own)
    assert not silent(Doubled(3, 2), own)
    assert not silent(hooked(nn.Linear(3, 2)), own)
    assert not silent(replaced(nn.Linear(12, 2)), own)
    assert not untouched(nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)))
    anywhere = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert not silent(nn.Linear(3, 2), own)
    finally:
        anywhere.remove()
