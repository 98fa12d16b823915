"""BatchNorm with frozen statistics and GroupNorm: the model's own forward, each row's sums, and wrong rules caught."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from oracle import assert_close, brute_force, check
from torch import Tensor, nn

from tacit.gradients import Engine
from tacit.gradients import _kernels as kernels
from tacit.gradients._units import Units
from tacit.gradients.layers import _channel_norm as channel_norm

UNITS = [5, 5, 0, 2, 2, 2]


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).flatten(1).square().mean(1)


def random_statistics(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
        if isinstance(module, nn.modules.batchnorm._BatchNorm | nn.GroupNorm) and module.weight is not None:
            nn.init.normal_(module.weight, 1, 0.3)
            nn.init.normal_(module.bias)
    return model.eval()


def kinked(norm: type[nn.Module] | Any, blocks: int = 6) -> nn.Module:
    """Many ReLU, each behind a norm: whatever rounds in another way puts some numbers on the other side of zero."""
    torch.manual_seed(0)
    layers = [layer for _ in range(blocks) for layer in (nn.Conv2d(24, 24, 3, padding=1), norm(), nn.ReLU())]
    return random_statistics(nn.Sequential(nn.Conv2d(3, 24, 1), *layers, nn.Flatten(), nn.Linear(24 * 64, 3)))


def batch_norm() -> nn.Module:
    return nn.BatchNorm2d(24)


def group_norm() -> nn.Module:
    return nn.GroupNorm(4, 24)


@pytest.mark.parametrize(
    ("norm", "layout"),  # a GroupNorm in channels_last is written out, and has other bits
    [
        (batch_norm, torch.contiguous_format),
        (batch_norm, torch.channels_last),
        (group_norm, torch.contiguous_format),
    ],
)
def test_the_forward_has_the_bits_of_the_model(norm: Any, layout: Any) -> None:
    """Where it does, no number changes sides at a kink, and the gap to plain autograd is that of rounding."""
    model, x = kinked(norm), torch.randn(9, 3, 8, 8).contiguous(memory_format=layout)
    engine = Engine(model, loss, clip=1e9)
    found = engine(x)
    assert torch.equal(engine._watch(x, Units.singletons(9, x.device))[1], loss(model, x).detach())
    model.zero_grad()
    loss(model, x).sum().backward()
    truth = {n: p.grad for n, p in model.named_parameters()}
    assert_close(found.sum, truth, 1e-5)
    assert not engine.by_row


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("units", [None, UNITS])
def test_against_one_row_at_a_time(
    kernel: bool, dtype: torch.dtype, units: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernel:
        monkeypatch.setattr(channel_norm, "channel_sums", lambda *_: None)
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Tanh(), nn.GroupNorm(2, 6), nn.Flatten(), nn.BatchNorm1d(6 * 16)
    )
    random_statistics(model).to(dtype)
    check(
        model, loss, torch.randn(6, 3, 6, 6, dtype=dtype), units=units, tolerance=2e-6 if dtype.itemsize == 4 else 1e-10
    )


@pytest.mark.parametrize("trained", ["weight", "bias"])
@pytest.mark.parametrize("norm", [nn.BatchNorm1d(5), nn.GroupNorm(5, 5)])
def test_gain_or_shift_alone(norm: nn.Module, trained: str) -> None:
    model = random_statistics(nn.Sequential(nn.Conv1d(2, 5, 2), norm, nn.Tanh())).double()
    for name, p in model.named_parameters():
        p.requires_grad_(name == f"1.{trained}")
    check(model, loss, torch.randn(6, 2, 7).double(), units=UNITS)


class Elsewhere(nn.Module):
    """Rows in the first dimension once for each position, or all of them once for each view."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.mix, self.norm = where, nn.Linear(5, 5), nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.mix(x))  # (rows, positions, channels)
        if self.where == "folded":
            return self.norm(x.flatten(0, 1)).reshape(x.shape)
        seen = self.norm(torch.cat([x.mT, 2 * x.mT]))
        return torch.cat(seen.chunk(2), 2)


@pytest.mark.parametrize("where", ["folded", "stacked"])
def test_several_places_of_a_row(where: str) -> None:
    torch.manual_seed(2)
    model = random_statistics(Elsewhere(where)).double()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(model, loss, torch.randn(6, 4, 5).double(), units=UNITS)


def test_bfloat16_stays_within_its_rounding() -> None:
    model = random_statistics(nn.Sequential(nn.Conv1d(2, 5, 2), nn.BatchNorm1d(5), nn.GroupNorm(1, 5))).bfloat16()
    x = torch.randn(6, 2, 7).bfloat16()
    found = Engine(model, loss, clip=1e9)(x)
    expected = brute_force(model.double(), loss, x.double(), 1e9, list(range(6)))[0]
    assert_close(found.sum, expected, 3e-2)


@pytest.mark.skipif(not kernels.kernels_in_use(), reason="needs a C compiler")
@pytest.mark.parametrize("shape", [(1, 1), (3, 2, 5), (2, 3, 7, 7), (4, 6, 4, 4), (2, 2, 3, 16, 17), (70, 64, 16, 16)])
@pytest.mark.parametrize("far", [0.0, 1e4])
@pytest.mark.parametrize("own", [False, True])
def test_sums_of_channels(shape: tuple[int, ...], far: float, own: bool) -> None:
    """Against float64 written out and the twin in torch; the same bits for any threads and for a row alone."""
    torch.manual_seed(len(shape))
    statistics = shape[:2] if own else shape[1:2]
    g, x = torch.randn(shape), far + torch.randn(shape)
    mean, scale = far + torch.randn(statistics), torch.rand(statistics)
    wanted = channel_norm.in_torch(g.double(), x.double(), mean.double(), scale.double())
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            given = kernels.channel_sums(g, x, mean, scale)
            assert given is not None
            found.append(given)
    finally:
        torch.set_num_threads(before)
    for mine, true in zip(found[0], wanted, strict=True):
        assert torch.allclose(mine.double(), true, rtol=1e-6, atol=1e-6)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
    last = (mean[-1:].clone(), scale[-1:].clone()) if own else (mean, scale)
    alone = kernels.channel_sums(g[-1:].clone(), x[-1:].clone(), *last)
    assert alone is not None
    assert all(torch.equal(a, b[-1:]) for a, b in zip(alone, found[0], strict=True))


def test_what_does_not_suit_is_left_to_torch() -> None:
    g, x, mean = torch.randn(3, 4, 5), torch.randn(3, 4, 5), torch.zeros(4)
    for given in (
        (g.double(), x.double(), mean.double(), mean.double()),
        (g.mT, x.mT, torch.zeros(5), torch.zeros(5)),
        (g[:2], x, mean, mean),
        (g, x, torch.zeros(8)[::2], mean),
        (g, x, torch.zeros(3), torch.zeros(3)),  # beyond its end it would read
        (g[:0], x[:0], mean, mean),
    ):
        assert kernels.channel_sums(*given) is None


def off_by(share: float, sums: Any) -> Any:
    def wrong(*given: Tensor) -> Any:
        gain, shift = sums(*given)
        return gain * (1 + share), shift

    return wrong


def of_the_neighbour(sums: Any) -> Any:
    def wrong(*given: Tensor) -> Any:
        return tuple(t.roll(1, 0) for t in sums(*given))

    return wrong


@pytest.mark.parametrize("wrong", [lambda sums: off_by(0.005, sums), of_the_neighbour])
def test_a_wrong_rule_is_caught(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By half a percent in one parameter of many, or a row's sums taken for another's: then row by row, and right."""
    monkeypatch.setattr(channel_norm, "channel_sums", wrong(channel_norm.in_torch))
    model, x = kinked(batch_norm, blocks=2), torch.randn(4, 3, 8, 8)
    engine = Engine(model, loss, clip=1.0)
    with pytest.warns(UserWarning, match="row by row"):
        found = engine(x)
    assert engine.by_row
    assert_close(found.sum, brute_force(model, loss, x, 1.0, list(range(4)))[0], 1e-5)


def test_one_unlucky_row_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a number at a kink may be, for one synthetic row: the second draw has other rows."""
    first: list[Tensor] = []

    def unlucky(g: Tensor, x: Tensor, *statistics: Tensor) -> Any:
        first.append(x[0].clone())
        gain, shift = channel_norm.in_torch(g, x, *statistics)
        return gain * (1.05 if any(torch.allclose(row, first[0]) for row in x) else 1), shift

    monkeypatch.setattr(channel_norm, "channel_sums", unlucky)
    torch.manual_seed(3)
    model = random_statistics(nn.Sequential(nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(20, 3)))
    x = torch.randn(4, 4, 5)
    engine = Engine(model, loss, clip=1.0)
    found = engine(x)
    assert not engine.by_row
    assert_close(found.sum, brute_force(model, loss, x, 1.0, list(range(4)))[0], 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "norm", [nn.GroupNorm(2, 4), nn.BatchNorm2d(4), nn.LayerNorm([4, 5, 5])], ids=lambda n: str(n)[:9]
)
def test_norms_alone_in_a_short_type_go_together(norm: nn.Module, dtype: torch.dtype) -> None:
    """Their sums are float32, and nothing else told in what the model computes: it went row by row."""
    torch.manual_seed(0)
    model = (
        nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), norm, nn.Tanh(), nn.Flatten(), nn.Linear(100, 8)).eval().to(dtype)
    )
    model.requires_grad_(False)[1].requires_grad_(True)
    engine = Engine(model, lambda m, rows: m(rows).float().log_softmax(1).square().sum(1), clip=1.0)
    engine(torch.randn(9, 1, 5, 5).to(dtype))
    assert not engine.by_row
