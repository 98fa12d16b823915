"""Layer norms in modules of their own: the short way of `layers._norm.forward` against the rule that it stands for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tacit.gradients import ClippedSum, Engine
from tacit.gradients.layers import _norm as norm_layers


class Net(nn.Module):
    """Norms before and after linear layers; how the second one is used is the test's."""

    def __init__(self, use: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.LayerNorm(6)
        self.mix = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.use = use
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.use(self, torch.tanh(self.mix(self.first(x)))))


def once(net: Net, x: Tensor) -> Tensor:
    return x + net.norm(x)


def twice(net: Net, x: Tensor) -> Tensor:
    return net.norm(torch.sin(net.norm(x)))


def changed_in_place(net: Net, x: Tensor) -> Tensor:
    return net.norm(x).mul_(2).add_(x)


def checkpointed(net: Net, x: Tensor) -> Tensor:
    return checkpoint(net.norm, x, use_reentrant=False)  # type: ignore[no-any-return]


def rows_second(net: Net, x: Tensor) -> Tensor:
    return net.norm(x.transpose(0, 1)).transpose(0, 1)


def strided(net: Net, x: Tensor) -> Tensor:
    return net.norm(x.transpose(1, 2).contiguous().transpose(1, 2))


def without_graph(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        shift = net.norm(x)
    return net.norm(x) + shift


USES = (once, twice, changed_in_place, checkpointed, rows_second, strided, without_graph)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean((1, 2))


def net(use: Callable[[Net, Tensor], Tensor] = once) -> Net:
    torch.manual_seed(0)
    model = Net(use)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape))
    return model


def the_long_way(engine: Engine) -> Engine:
    engine._slots._norms.clear()
    return engine


def same(a: ClippedSum, b: ClippedSum) -> bool:
    return torch.equal(a.private.norms, b.private.norms) and all(torch.equal(v, b.sum[n]) for n, v in a.sum.items())


def one_by_one(model: nn.Module, x: Tensor, clip: float) -> dict[str, Tensor]:
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    total = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in parameters.items()}
    for row in x.split(1):
        found = torch.autograd.grad(loss(model, row).sum(), list(parameters.values()))
        norm = torch.stack([g.double().norm() for g in found]).norm()
        for name, g in zip(parameters, found, strict=True):
            total[name] += g.double() * min(1.0, clip / float(norm))
    return total


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What went the short way."""
    seen: list[Any] = []
    original = norm_layers._seen
    monkeypatch.setattr(norm_layers, "_seen", lambda *given: (seen.append(given[0]), original(*given))[1])
    return seen


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("trained", ["all", "norms", "gain"])
def test_the_same_bits_as_the_rule(use: Callable[[Net, Tensor], Tensor], trained: str) -> None:
    model, x = net(use), torch.randn(9, 5, 6)
    for name, p in model.named_parameters():
        wanted = ("norm" in name or "first" in name) and not (trained == "gain" and name.endswith("bias"))
        p.requires_grad_(trained == "all" or wanted)
    short, long = Engine(model, loss, clip=0.05), the_long_way(Engine(model, loss, clip=0.05))
    for ids in (None, torch.arange(9) // 3, torch.tensor([4, 1, 1, 7, 4, 4, 9, 1, 7])):
        assert same(short(x, unit_ids=ids), long(x, unit_ids=ids))
    expected = one_by_one(model, x, 0.05)
    for name, value in short(x).sum.items():
        assert torch.allclose(value, expected[name], rtol=1e-3, atol=1e-6)
    assert not short.by_row


def test_it_is_the_short_way(taken: list[Any]) -> None:
    """At a known step: the second norm, whose input has a graph, once per pass; the first one by the rule."""
    model, x = net(), torch.randn(4, 5, 6)
    engine = Engine(model, loss, clip=1.0)
    engine(x)
    while engine._spot(4) >= 0:  # steps at which a unit is checked make three passes
        pass
    engine._calls -= 1
    taken.clear()
    engine(x)
    assert len(taken) == 1
    assert "forward" not in model.norm.__dict__


def test_not_within_checkpoints(taken: list[Any]) -> None:
    """There a hook would keep in memory what is to be computed again."""
    model, x = net(checkpointed), torch.randn(4, 5, 6)
    Engine(model, loss, clip=1.0)(x)
    assert not taken


def test_the_users_own_forward_stays() -> None:
    model, x = net(), torch.randn(4, 5, 6)
    model.norm.forward = lambda t: 2 * nn.functional.layer_norm(t, (6,), model.norm.weight, model.norm.bias)  # type: ignore[method-assign]
    mine = model.norm.__dict__["forward"]
    found = Engine(model, loss, clip=1.0)(x)
    assert model.norm.__dict__["forward"] is mine
    for name, value in one_by_one(model, x, 1.0).items():
        assert torch.allclose(found.sum[name], value, rtol=1e-3, atol=1e-6)


def test_a_failing_row_is_zero_and_the_layers_are_put_back() -> None:
    model, x = net(), torch.randn(4, 5, 6)
    x[2] = torch.nan
    found = Engine(model, loss, clip=1.0)(x)
    kept = torch.tensor([0, 1, 3])
    for name, value in one_by_one(model, x[kept], 1.0).items():
        assert torch.allclose(found.sum[name], value, rtol=1e-3, atol=1e-6)
    assert found.private.nonfinite == 1
    assert all("forward" not in m.__dict__ for m in model.modules())
