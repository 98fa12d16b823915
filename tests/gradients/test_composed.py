"""Functions that are written out in terms of others: every parameter has a rule, and each row its own answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import check
from torch import Tensor, nn

from tacit.gradients import Engine


class Written(nn.Module):
    """One use of one or two parameters."""

    def __init__(self, shapes: list[tuple[int, ...]], use: Callable[..., Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(shape) for shape in shapes)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(x, *self.weights)


def places(x: Tensor) -> Tensor:
    """Whole numbers that depend on the row."""
    return (x[:, :, 0] * 7).long().abs() % 5


USES: dict[str, tuple[list[tuple[int, ...]], Callable[..., Tensor]]] = {
    "addcmul": ([(4,)], lambda x, w: torch.addcmul(x, x.cos(), w)),
    "addcmul, scaled": ([(4,), (4,)], lambda x, w, v: torch.addcmul(w, x, v, value=0.5)),
    "prelu, one slope": ([(1,)], lambda x, w: F.prelu(x, w)),
    "prelu, by channel": ([(3,)], lambda x, w: F.prelu(x, w)),
    "bilinear": ([(5, 4, 4), (5,)], lambda x, w, b: F.bilinear(x, x.cos(), w, b)),
    "attention bias": ([(1, 3, 3)], lambda x, w: F.scaled_dot_product_attention(x, x.cos(), x.sin(), w)),
    "attention bias, scaled": ([(3, 3)], lambda x, w: F.scaled_dot_product_attention(x, x.cos(), x, w, scale=0.3)),
    "table[index]": ([(5, 4)], lambda x, w: w[places(x)] * x),
    "table[index], lines of two dimensions": ([(5, 2, 2)], lambda x, w: w[places(x)].flatten(2) * x),
    "table[negative index]": ([(5, 4)], lambda x, w: w[places(x) - 5] * x),
    "embedding bag": ([(5, 4)], lambda x, w: F.embedding_bag(places(x), w) * x[:, 0]),
    "embedding bag, sum": ([(5, 4)], lambda x, w: F.embedding_bag(places(x), w, mode="sum") * x[:, 0]),
    "embedding bag, padded": ([(5, 4)], lambda x, w: F.embedding_bag(places(x), w, padding_idx=2) * x[:, 0]),
    "transposed 1": ([(3, 2, 3), (2,)], lambda x, w, b: F.conv_transpose1d(x, w, b, 2, 1, 1)),
    "transposed 1, groups": ([(3, 2, 3)], lambda x, w: F.conv_transpose1d(x, w, None, 2, 0, 0, 3, 2)),
    "transposed 2": ([(3, 2, 2, 2)], lambda x, w: F.conv_transpose2d(x.reshape(-1, 3, 2, 2), w, None, 2)),
    "two views": ([(5, 4), (5,)], lambda x, w, b: _two(F.linear(torch.cat([x, x.cos()]), w, b))),
    "two views, convolved": ([(5, 3, 2)], lambda x, w: _two(F.conv1d(torch.cat([x, x.cos()]), w))),
    "two views, scaled": ([(4,)], lambda x, w: _two(torch.cat([x, x.cos()]) * w)),
}


def _two(y: Tensor) -> Tensor:
    first, second = y.chunk(2)
    return first * second.sin() + first


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).sin().flatten(1).sum(1)


@pytest.mark.parametrize("name", USES)
def test_what_is_written_out_has_a_rule_and_the_right_answer(name: str) -> None:
    torch.manual_seed(1)
    model = Written(*USES[name]).double()
    x = torch.randn(6, 3, 4).double()
    check(model, loss, x, units=[0, 0, 1, 2, 2, 2])
    engine = Engine(model, loss, clip=1.0)
    engine(x)
    assert not engine.by_row
    assert not any(rule.startswith("torch.func") for rule in engine.served.values()), engine.served


class Cells(nn.Module):
    def __init__(self, kind: type[nn.RNNCellBase], **options: Any) -> None:
        super().__init__()
        self.cell = kind(4, 5, **options)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return state[0] if isinstance(state, tuple) else state


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
@pytest.mark.parametrize("bias", [True, False])
def test_cells_that_are_unrolled_by_hand(kind: type[nn.RNNCellBase], bias: bool) -> None:
    torch.manual_seed(0)
    model, x = Cells(kind, bias=bias).double(), torch.randn(6, 3, 4).double()
    own = model(x)
    engine = Engine(model, loss, clip=1.0)
    engine(x)
    assert set(engine.served.values()) == {"linear"}
    check(model, loss, x, units=[0, 0, 1, 2, 2, 2])
    assert torch.equal(model(x), own)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_attention_with_one_more_key_and_value(first: bool, masked: bool) -> None:
    torch.manual_seed(0)

    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, add_bias_kv=True, add_zero_attn=first, batch_first=first)

        def forward(self, x: Tensor) -> Tensor:
            x = x if first else x.transpose(0, 1)
            mask = torch.ones(3, 3, dtype=torch.bool).triu(1) if masked else None
            out = self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
            return out if first else out.transpose(0, 1)

    model, x = Attend().double(), torch.randn(6, 3, 8).double()
    check(model, loss, x, units=[0, 0, 1, 2, 2, 2])
    engine = Engine(model, loss, clip=1.0)
    engine(x)
    assert not engine.by_row
    assert not any(rule.startswith("torch.func") for rule in engine.served.values())


def test_ids_that_are_the_same_for_all_rows_are_ids_of_rows() -> None:
    class Types(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.types, self.out = nn.Embedding(2, 4), nn.Linear(4, 3)
            self.register_buffer("ids", torch.tensor([[0, 0, 1]]))

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.types(self.ids.expand(x.shape[0], -1)) + x)

    model, x = Types().double(), torch.randn(6, 3, 4).double()
    check(model, loss, x, units=[0, 0, 1, 2, 2, 2])
    engine = Engine(model, loss, clip=1.0)
    engine(x)
    assert not engine.by_row


class Experts(nn.Module):
    """As transformers keeps them: the weights of all experts in two parameters, tokens sorted by expert."""

    has_gate, has_bias, is_transposed = True, False, False

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(3, 4, 5))
        self.down_proj = nn.Parameter(torch.randn(3, 5, 2))

    def _apply_gate(self, up: Tensor) -> Tensor:
        gate, value = up.chunk(2, -1)
        return F.silu(gate) * value

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for expert in range(3):
            token, place = torch.where(top_k_index == expert)
            found = self._apply_gate(hidden_states[token] @ self.gate_up_proj[expert].T) @ self.down_proj[expert].T
            out = out.index_add(0, token, found * top_k_weights[token, place, None])
        return out


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(5, 3), Experts()

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.flatten(0, 1)
        shares, chosen = self.router(hidden).softmax(-1).topk(2, -1)
        return self.experts(hidden, chosen, shares).reshape(x.shape)


def test_experts_that_get_sorted_tokens() -> None:
    torch.manual_seed(0)
    model, x = Mixture().double(), torch.randn(6, 4, 5).double()
    check(model, loss, x, units=[0, 0, 1, 2, 2, 2])
    engine = Engine(model, loss, clip=1.0)
    engine(x)
    assert not engine.by_row
    assert engine.served["experts.gate_up_proj"] == "linear"
