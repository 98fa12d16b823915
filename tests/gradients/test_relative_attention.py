"""Relative attention by Einstein sums, as XLNet and Funnel have it, against brute force; and a wrong rule caught."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from oracle import assert_close, brute_force, check
from torch import Tensor, nn

from tacit.gradients import Engine
from tacit.gradients.layers import _einsum as einsum_rule

UNITS = [5, 5, 0, 2, 2, 2]


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).flatten(1).square().mean(1)


class Relative(nn.Module):
    """Attention as XLNet and Funnel have it: rows second, biases before an Einstein sum, segments, changes in place."""

    def __init__(self, rows_second: bool) -> None:
        super().__init__()
        self.rows_second = rows_second
        for name in ("q", "k", "r"):
            self.register_parameter(name, nn.Parameter(torch.randn(4, 2, 3)))
        for name in ("content_bias", "position_bias", "segment_bias"):
            self.register_parameter(name, nn.Parameter(torch.randn(2, 3)))
        self.segments, self.out = nn.Parameter(torch.randn(2, 2, 3)), nn.Parameter(torch.randn(4, 2, 3))

    def forward(self, x: Tensor) -> Tensor:
        if self.rows_second:
            return self.second(x.transpose(0, 1)).transpose(0, 1)
        q, k = (torch.einsum("bih,hnd->bind", x, w) for w in (self.q, self.k))
        places = torch.einsum("td,dnh->tnh", torch.arange(40.0, dtype=x.dtype).reshape(10, 4).sin(), self.r)
        scores = torch.einsum("bind,bjnd->bnij", q + 0.5 * self.content_bias, k)
        shifted = torch.einsum("bind,tnd->bnit", q + 0.5 * self.position_bias, places)[..., : x.shape[1]]
        shifted *= 0.5
        kinds = torch.einsum("bind,snd->bnis", q + 0.5 * self.segment_bias, self.segments)
        scores = scores + shifted + torch.einsum("ijbs,bnis->bnij", _segments(x.transpose(0, 1)), kinds)
        return torch.einsum("bind,hnd->bih", torch.einsum("bnij,bjnd->bind", scores.softmax(-1), k), self.out)

    def second(self, x: Tensor) -> Tensor:
        q, k = (torch.einsum("ibh,hnd->ibnd", x, w) for w in (self.q, self.k))
        places = torch.arange(4.0 * len(x), dtype=x.dtype).reshape(-1, 1, 4).sin().expand(-1, x.shape[1], -1)
        places = torch.einsum("ibh,hnd->ibnd", places, self.r)
        scores = torch.einsum("ibnd,jbnd->bnij", q + self.content_bias, k)
        scores = scores + torch.einsum("ibnd,jbnd->bnij", q + self.position_bias, places)
        segments = torch.einsum("ibnd,snd->ibns", q + self.segment_bias, self.segments)
        scores = scores + torch.einsum("ijbs,ibns->bnij", _segments(x), segments)
        return torch.einsum("ibnd,hnd->ibh", torch.einsum("bnij,jbnd->ibnd", scores.softmax(-1), k), self.out)


def _segments(x: Tensor) -> Tensor:
    """Whether two positions of a row are of one kind, as XLNet encodes it: (positions, positions, rows, 2)."""
    kind = x[..., 0] > 0
    return nn.functional.one_hot((kind[:, None] != kind[None]).long(), 2).to(x.dtype)


@pytest.mark.parametrize("positions", [5, 6, 7])  # 6 and 7: as many as rows that stand for a batch, or a multiple
@pytest.mark.parametrize("rows_second", [True, False])
@pytest.mark.parametrize("units", [None, UNITS])
def test_every_parameter_has_a_rule(rows_second: bool, positions: int, units: list[int] | None) -> None:
    torch.manual_seed(0)
    model, x = Relative(rows_second).double(), torch.randn(6, positions, 4).double()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # neither row by row nor torch.func
        check(model, loss, x, units=units)


def text_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    hidden = model(input_ids=batch[0], token_type_ids=batch[1])[0]
    return hidden.square().flatten(1).mean(1) + hidden.flatten(1).mean(1)


def transformer(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 30, "d_model": 8, "n_head": 2, "d_inner": 12}
    if name == "XLNet":
        model = transformers.XLNetModel(transformers.XLNetConfig(n_layer=2, **sizes))
    else:
        config = transformers.FunnelConfig(block_sizes=[1, 2], d_head=4, num_decoder_layers=1, **sizes)
        model = transformers.FunnelModel(config)
    return model.double().eval()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["XLNet", "Funnel"])
@pytest.mark.parametrize("units", [None, UNITS])
def test_models_with_segments(name: str, units: list[int] | None) -> None:
    torch.manual_seed(0)
    model = transformer(name)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    batch = torch.randint(0, 30, (6, 8)), torch.randint(0, 2, (6, 8))
    found = torch.autograd.grad(text_loss(model, batch).sum(), list(model.parameters()), allow_unused=True)
    for p, g in zip(model.parameters(), found, strict=True):
        p.requires_grad_(g is not None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(model, text_loss, batch, units=units, tolerance=1e-8)


@pytest.mark.parametrize("rows_second", [True, False])
def test_a_wrong_rule_is_caught(rows_second: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A position's gradient taken for a row's, as letters in the wrong order would do."""
    right = einsum_rule.PerRow

    def wrong(values: Tensor) -> Any:
        return right(values.roll(1, 0))

    monkeypatch.setattr(einsum_rule, "PerRow", wrong)
    torch.manual_seed(0)
    model, x = Relative(rows_second), torch.randn(4, 5, 4)
    engine = Engine(model, loss, clip=1.0)
    with pytest.warns(UserWarning, match="row by row"):
        found = engine(x)
    assert engine.by_row
    assert_close(found.sum, brute_force(model, loss, x, 1.0, list(range(4)))[0], 1e-5)
