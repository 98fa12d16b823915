"""The perturbed step: against a reference written out by hand, its bounds, and what is put back."""

import copy
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from tacit.pretrain import Perturbation, Robust
from tacit.pretrain._plan import Method
from tacit.pretrain._robust import uphill

LR, MOMENTUM, DECAY = 0.1, 0.9, 1e-2


def rows(count: int = 12, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(4, (count,), generator=generator)


def net(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).to(dtype)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)


def backward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    functional.cross_entropy(model(batch[0]), batch[1]).backward()


def gradient_by_hand(weights: list[Tensor], batch: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Of the mean cross entropy of Linear, tanh, Linear, by the chain rule written out."""
    a, b, c, d = weights
    inputs, labels = batch
    hidden = torch.tanh(inputs @ a.T + b)
    scores = hidden @ c.T + d
    chance = scores.exp() / scores.exp().sum(1, keepdim=True)
    error = (chance - torch.eye(4, dtype=a.dtype)[labels]) / len(labels)
    back = error @ c * (1 - hidden**2)
    return [back.T @ inputs, back.sum(0), error.T @ hidden, error.sum(0)]


def length(parts: list[Tensor]) -> float:
    return math.sqrt(sum(float((part.double() ** 2).sum()) for part in parts))


def delta_by_hand(gradients: list[Tensor], method: Method, radius: float, lr: float) -> list[Tensor]:
    norm = length(gradients)
    if method == "sam":
        return [radius * g / norm for g in gradients]
    step = [lr * g for g in gradients]
    return [radius * s / length(step) for s in step] if length(step) > radius else step


@pytest.mark.parametrize("radius", [0.01, 100.0])
@pytest.mark.parametrize("method", ["sam", "amp", "dpadapter"])
def test_two_steps_against_a_hand_written_reference(method: Method, radius: float) -> None:
    model, expected = net(), [p.detach().clone() for p in net().parameters()]
    robust = Robust(sgd(model), method=method, radius=radius, perturb_lr=0.7)
    buffers = [torch.zeros_like(w) for w in expected]
    for step in range(2):
        large, small = rows(40, seed=step), rows(6, seed=10 + step)
        if method != "dpadapter":
            large = small
        backward(model, large)
        robust.perturb()
        backward(model, small)
        robust.step()
        robust.zero_grad()
        delta = delta_by_hand(gradient_by_hand(expected, large), method, radius, 0.7)
        at = [w + d for w, d in zip(expected, delta, strict=True)]
        for place, gradient in enumerate(gradient_by_hand(at, small)):
            whole = gradient + DECAY * expected[place]
            buffers[place] = whole if step == 0 else MOMENTUM * buffers[place] + whole
            expected[place] = expected[place] - LR * buffers[place]
    for found, wanted in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(found.detach(), wanted, rtol=1e-12, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    radius=st.floats(0, 1e3),
    scale=st.floats(1e-12, 1e12),
    lr=st.floats(1e-3, 1e3),
    method=st.sampled_from(["sam", "amp", "dpadapter"]),
    adaptive=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_the_norm_never_exceeds_the_radius(
    radius: float, scale: float, lr: float, method: Method, adaptive: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(shape, generator=generator) for shape in ((7, 3), (5,))]
    gradients = [scale * torch.randn(w.shape, generator=generator) for w in weights]
    how = Perturbation(method=method, radius=radius, perturb_lr=lr, adaptive=adaptive)
    delta = uphill(weights, gradients, how)
    if adaptive:
        delta = [d.double() / (w.abs() + 0.01).double() for d, w in zip(delta, weights, strict=True)]
    slack = 1 + 1e-6 if adaptive else 1  # dividing again rounds
    assert length(delta) <= radius * slack


def test_sam_always_scales_to_the_radius_and_amp_only_shrinks() -> None:
    weights, gradients = [torch.zeros(4)], [torch.tensor([3.0, 0.0, 0.0, 4.0])]  # of length 5
    for radius in (0.5, 5.0, 50.0):
        (sam,) = uphill(weights, gradients, Perturbation(method="sam", radius=radius))
        torch.testing.assert_close(sam, gradients[0] * radius / 5)
    for method in ("amp", "dpadapter"):
        (inside,) = uphill(weights, gradients, Perturbation(method=method, radius=6.0))  # type: ignore[arg-type]
        (beyond,) = uphill(weights, gradients, Perturbation(method=method, radius=2.0))  # type: ignore[arg-type]
        assert torch.equal(inside, gradients[0])
        torch.testing.assert_close(beyond, gradients[0] * 2 / 5)


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_radius_per_tensor_is_a_ball_for_each(adaptive: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator).double() for shape in ((4, 3), (5,), (2,))]
    gradients = [
        scale * torch.randn(w.shape, generator=generator).double()
        for scale, w in zip((9, 1e-3, 0), weights, strict=True)
    ]
    for method in ("sam", "amp"):
        how = Perturbation(method=method, radius=0.5, adaptive=adaptive, per_tensor=True)  # type: ignore[arg-type]
        alone = [
            uphill([w], [g], Perturbation(method=method, radius=0.5, adaptive=adaptive))[0]  # type: ignore[arg-type]
            for w, g in zip(weights, gradients, strict=True)
        ]
        for found, wanted in zip(uphill(weights, gradients, how), alone, strict=True):
            assert torch.equal(found, wanted)
    together = uphill(weights, gradients, Perturbation(method="amp", radius=0.5, adaptive=adaptive))
    assert length([together[1]]) < length([alone[1]])  # one ball for all: the large gradient takes nearly all of it


def test_an_adaptive_radius_is_that_of_asam() -> None:
    """Kwon et al. (2021), equation 6: radius T^2 g / |T g|; checked as the maximiser of g.d over |d / T| <= radius."""
    weights, gradients = [torch.tensor([1.0, -2.0, 0.0]).double()], [torch.tensor([0.3, -0.1, 2.0]).double()]
    (delta,) = uphill(weights, gradients, Perturbation(method="sam", radius=0.2, adaptive=True))
    scale = torch.tensor([1.01, 2.01, 0.01]).double()
    torch.testing.assert_close(delta, 0.2 * scale**2 * gradients[0] / torch.linalg.vector_norm(scale * gradients[0]))
    generator = torch.Generator().manual_seed(0)
    others = torch.randn(2000, 3, generator=generator, dtype=torch.float64)
    others = 0.2 * others / torch.linalg.vector_norm(others, dim=1, keepdim=True) * scale
    assert bool((others @ gradients[0] <= delta @ gradients[0] + 1e-9).all())
    (amp,) = uphill(weights, gradients, Perturbation(method="amp", radius=1e9, perturb_lr=0.5, adaptive=True))
    torch.testing.assert_close(amp, 0.5 * scale**2 * gradients[0])


def test_weights_come_back_bit_for_bit_and_only_the_update_stays() -> None:
    model = net(torch.float32)
    inputs, labels = rows()
    batch = inputs.float(), labels
    before = [p.detach().clone() for p in model.parameters()]
    robust = Robust(sgd(model), radius=1e3, perturb_lr=1e3)
    backward(model, batch)
    robust.perturb()
    assert robust.perturbed
    assert not any(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    robust.revert()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert not robust.perturbed
    # a step: what stays is what the optimizer would do at the old weights with that gradient
    robust = Robust(sgd(model), radius=1e3, perturb_lr=1e3)
    backward(model, batch)
    robust.perturb()
    backward(model, batch)
    twin = copy.deepcopy(model)
    for mine, value, other in zip(twin.parameters(), before, model.parameters(), strict=True):
        mine.data.copy_(value)
        mine.grad = other.grad.clone()
    robust.step()
    sgd(twin).step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_the_same_rows_in_both_batches_is_amp() -> None:
    """Bit for bit: DPAdapter on its own batch, with the closure of AMP."""
    first, second = net(), net()
    amp, adapter = Robust(sgd(first), method="amp", radius=0.3), Robust(sgd(second), method="dpadapter", radius=0.3)
    batch = rows()

    def closure() -> Tensor:
        amp.zero_grad()
        loss = functional.cross_entropy(first(batch[0]), batch[1])
        loss.backward()
        return loss

    for _ in range(3):
        amp.step(closure)
        adapter.zero_grad()
        backward(second, batch)
        adapter.perturb()
        backward(second, batch)
        adapter.step()
    assert all(torch.equal(p, q) for p, q in zip(first.parameters(), second.parameters(), strict=True))


def test_a_radius_of_zero_and_the_standard_method_change_nothing() -> None:
    nets = [net() for _ in range(3)]
    plain = sgd(nets[0])
    wrapped = [Robust(sgd(nets[1]), method="standard"), Robust(sgd(nets[2]), method="sam", radius=0.0)]
    for step in range(3):
        batch = rows(seed=step)
        plain.zero_grad()
        backward(nets[0], batch)
        plain.step()
        for model, robust in zip(nets[1:], wrapped, strict=True):
            robust.zero_grad()
            if robust.due:
                backward(model, rows(seed=99))
            robust.perturb()
            backward(model, batch)
            robust.step()
    for model in nets[1:]:
        assert all(torch.equal(p, q) for p, q in zip(nets[0].parameters(), model.parameters(), strict=True))


def test_a_reused_perturbation_serves_its_steps_and_survives_saving() -> None:
    model = net()
    robust = Robust(sgd(model), radius=0.3, reuse=3)
    dues, deltas = [], []
    for step in range(6):
        dues.append(robust.due)
        if robust.due:
            backward(model, rows(seed=step))
        robust.perturb()
        deltas.append([d.clone() for d in robust.perturbation.values()])
        backward(model, rows(seed=step))
        robust.step()
        robust.zero_grad()
        if step == 3:  # in the middle: another wrapper takes over
            state = robust.state_dict()
            robust = Robust(sgd(model), radius=0.3, reuse=3)
            robust.load_state_dict(state)
    assert dues == [True, False, False, True, False, False]
    same = [all(torch.equal(a, b) for a, b in zip(x, y, strict=True)) for x, y in pairwise(deltas)]
    assert same == [True, True, False, True, True]


def test_running_statistics_do_not_see_perturbed_weights() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double().train()
    robust = Robust(sgd(model), radius=50.0, perturb_lr=1e3, model=model)
    batch = rows()
    backward(model, batch)
    seen = [b.clone() for b in model.buffers()]
    robust.perturb()
    backward(model, batch)
    robust.step()
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), seen, strict=True))


def test_what_is_refused() -> None:
    model = net()
    robust = Robust(sgd(model), radius=1.0)
    with pytest.raises(ValueError, match="no gradient to go along"):
        robust.perturb()
    backward(model, rows())
    robust.perturb()
    with pytest.raises(ValueError, match="perturbed already"):
        robust.perturb()
    with pytest.raises(ValueError, match="save after step"):
        robust.state_dict()
    robust.revert()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, math.nan)
    with pytest.raises(ValueError, match="not finite"):
        Robust(sgd(model)).perturb()
    with pytest.raises(ValueError, match="no method 'ssam'"):
        Robust(sgd(model), method="ssam")  # type: ignore[arg-type]
    for wrong in ({"radius": -1.0}, {"radius": math.inf}, {"perturb_lr": 0.0}, {"reuse": 0}):
        with pytest.raises(ValueError, match=r"at least|above"):
            Robust(sgd(model), **wrong)  # type: ignore[arg-type]
