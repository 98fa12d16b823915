"""EATA's anchor: the importance of each parameter by a loop over rows, and the pull by finite differences."""

import pytest
import torch
from obvious import images, net
from torch import nn
from torch.nn import functional

from tacit.adapt import EATA, Fisher, fisher


def test_importance_is_the_mean_of_squared_row_gradients() -> None:
    model, batch = net(), images(7)
    names = [n for n, _ in model.named_parameters() if n.split(".")[0] in ("first", "second", "third", "fourth")]
    own = [p for n, p in model.named_parameters() if n in names]
    total = [torch.zeros_like(p) for p in own]
    for image in batch:
        x = model(image[None])
        loss = functional.cross_entropy(x, x.argmax(1))
        for t, g in zip(total, torch.autograd.grad(loss, own), strict=True):
            t += g**2
    for chunk in (64, 3, 1):
        found = fisher(model, batch, public=True, chunk=chunk)
        assert sorted(found.importance) == sorted(names)
        for name, t in zip(names, total, strict=True):
            torch.testing.assert_close(found.importance[name], t / 7)
            assert torch.equal(found.origin[name], dict(model.named_parameters())[name])


def test_it_is_not_the_square_of_a_batch_mean() -> None:
    model, batch = net(), images(7)
    x = model(batch)
    mean = torch.autograd.grad(functional.cross_entropy(x, x.argmax(1)), model.fourth.weight)[0] ** 2
    assert not torch.allclose(fisher(model, batch, public=True).importance["fourth.weight"], mean, rtol=0.1)


def test_the_pull_is_the_gradient_of_the_regulariser() -> None:
    """R = sum omega (theta - theta_0)^2, by central differences."""
    omega = torch.tensor([0.5, 2.0, 0.0], dtype=torch.float64)
    origin = torch.tensor([1.0, -1.0, 3.0], dtype=torch.float64)
    anchor = Fisher({"w": omega}, {"w": origin})
    theta = torch.tensor([1.5, 0.0, 2.0], dtype=torch.float64)
    found = anchor.gradient("w", theta)
    for i in range(3):
        shift = torch.zeros(3, dtype=torch.float64)
        shift[i] = 1e-6
        up, down = (float((omega * (theta + s * shift - origin) ** 2).sum()) for s in (1, -1))
        assert float(found[i]) == pytest.approx((up - down) / 2e-6, abs=1e-8)
    assert torch.equal(anchor.gradient("other", theta), torch.zeros(3, dtype=torch.float64))


def test_the_model_is_left_as_it_was() -> None:
    """Values, flags and the mode of every layer: a frozen BatchNorm in a training model stays frozen."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.LayerNorm(72), nn.Linear(72, 3))
    model.train()
    model[1].eval()
    model[4].weight.requires_grad_(False)
    before = {n: v.clone() for n, v in model.state_dict().items()}
    flags = [p.requires_grad for p in model.parameters()]
    found = fisher(model, torch.rand(4, 1, 8, 8), public=True)
    assert set(found.importance) == {"1.weight", "1.bias", "3.weight", "3.bias"}
    assert [m.training for m in model] == [True, False, True, True, True]
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_only_public_images_and_some_of_them() -> None:
    with pytest.raises(ValueError, match="public=True"):
        fisher(net(), images(3))
    with pytest.raises(ValueError, match="some public images"):
        fisher(net(), images(0), public=True)


def test_the_anchor_keeps_the_model_near_the_source() -> None:
    """A strong pull and no other force: back to the source at the rate 2 lr lambda omega."""
    model = net()
    ones = {n: torch.ones_like(p) for n, p in model.named_parameters()}
    origin = {n: p.detach().clone() for n, p in model.named_parameters()}
    adapter = EATA(model, anchor=Fisher(ones, origin), fisher_alpha=3.0, lr=0.1, momentum=0)
    for parameter in adapter.parameters.values():
        parameter.data += 1.0
    constant = {n: torch.zeros_like(p) for n, p in adapter.parameters.items()}
    adapter._update(constant)
    for name, parameter in adapter.parameters.items():
        torch.testing.assert_close(parameter.detach(), origin[name] + 1 - 0.1 * 3.0 * 2 * 1.0)
