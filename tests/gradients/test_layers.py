"""Every rule against brute force, in float64, on shapes that hypothesis chooses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from oracle import check
from torch import Tensor, nn

sizes = st.integers(1, 4)
labels = st.none() | st.lists(st.integers(-3, 3), min_size=6, max_size=6)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    out = model(batch[0]).flatten(1)
    weights = torch.linspace(0.5, 1.5, out.shape[1], dtype=out.dtype)
    return (out * weights).sin().sum(1) * batch[1]


def compare(model: nn.Module, x: Tensor, units: list[int] | None = None, **options: Any) -> dict[str, str]:
    """The harness: same sum and same norms as brute force, relative error below 1e-10."""
    model = model.double()
    for p in model.parameters():
        nn.init.normal_(p, std=0.5)
    x = x.double() if x.is_floating_point() else x
    check(model, loss, (x, torch.rand(len(x)).double() + 0.5), units=units, **options)
    return {}


@given(lead=st.lists(sizes, max_size=2), m=sizes, n=sizes, bias=st.booleans(), units=labels)
def test_linear(lead: list[int], m: int, n: int, bias: bool, units: list[int] | None) -> None:
    compare(nn.Sequential(nn.Linear(m, n, bias=bias), nn.Tanh(), nn.Linear(n, m)), torch.randn(6, *lead, m), units)


@given(wide=st.booleans(), units=labels)
def test_linear_by_either_path(wide: bool, units: list[int] | None) -> None:
    # A long narrow layer builds the units' gradients, a short wide one uses Gram matrices.
    shape, layer = ((6, 2, 40), nn.Linear(40, 50)) if wide else ((6, 60, 3), nn.Linear(3, 2))
    compare(layer, torch.randn(*shape), units)


@given(
    dims=st.integers(1, 3),
    groups=st.integers(1, 3),
    cin=st.integers(1, 2),
    cout=st.integers(1, 2),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 2),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    units=labels,
)
def test_conv(
    dims: int,
    groups: int,
    cin: int,
    cout: int,
    kernel: int,
    stride: int,
    padding: int,
    dilation: int,
    units: list[int] | None,
) -> None:
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    layer = conv(cin * groups, cout * groups, kernel, stride, padding, dilation, groups)
    compare(layer, torch.randn(6, cin * groups, *[5, 6, 5][:dims]), units)


@pytest.mark.parametrize("units", [None, [0, 0, 1, 2, 2, 2]])
@pytest.mark.parametrize("padding", ["same", "valid", 2])
@pytest.mark.parametrize("mode", ["zeros", "circular"])
def test_conv_padding(padding: Any, mode: str, units: list[int] | None) -> None:
    compare(
        nn.Conv2d(3, 16, (2, 3), padding=padding, padding_mode=mode, dilation=(1, 2)), torch.randn(6, 3, 5, 6), units
    )


def test_conv_after_conv_and_depthwise() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True), nn.Conv2d(8, 16, 5, groups=8, padding=2), nn.Conv2d(16, 2, 1)
    )
    compare(model, torch.randn(6, 3, 8, 9), [4, 4, 1, 1, 1, 2])


@given(channels=st.integers(1, 3), positions=sizes, affine_only=st.booleans(), units=labels)
def test_norms(channels: int, positions: int, affine_only: bool, units: list[int] | None) -> None:
    width = 4 * channels
    model = nn.Sequential(
        nn.Conv1d(width, width, 1).requires_grad_(not affine_only),
        nn.GroupNorm(channels, width),
        nn.InstanceNorm1d(width, affine=True),
        nn.LayerNorm(positions + 2),
        nn.RMSNorm((width, positions + 2)),
        nn.LayerNorm((width, positions + 2), bias=False),
    )
    compare(model, torch.randn(6, width, positions + 2), units)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_frozen_batch_norm(dims: int) -> None:
    norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1](5)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    compare(norm.eval(), torch.randn(6, 5, *[3, 2, 4][:dims]), [1, 1, 1, 0, 0, 2])


@given(tokens=sizes, width=sizes, padding=st.none() | st.integers(-1, 6), units=labels)
def test_embedding(tokens: int, width: int, padding: int | None, units: list[int] | None) -> None:
    compare(nn.Embedding(7, width, padding_idx=padding), torch.randint(0, 7, (6, tokens)), units)


class Positions(nn.Module):
    def __init__(self, padding: int | None) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(9, 4, padding_idx=padding), nn.Linear(4, 2)
        self.register_buffer("places", torch.arange(9)[None] % 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x + self.table(self.places[:, : x.shape[1]]))


@pytest.mark.parametrize("padding", [None, 0, 2])
def test_position_embedding_at_the_same_places_for_all_rows(padding: int | None) -> None:
    compare(Positions(padding), torch.randn(6, 8, 4), [0, 0, 1, 1, 1, 2])


class Attend(nn.Module):
    def __init__(self, cross: bool, weights: bool, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, **options)
        self.cross, self.weights = cross, weights

    def forward(self, x: Tensor) -> Tensor:
        if not self.attention.batch_first:
            x = x.transpose(0, 1)
        other = x.cos() if self.cross else x
        mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
        hidden = torch.zeros(6, 5, dtype=torch.bool)[: x.shape[0 if self.attention.batch_first else 1]]
        hidden[:, -1] = True
        out, seen = self.attention(x, other, other, key_padding_mask=hidden, attn_mask=mask, need_weights=self.weights)
        out = out if self.attention.batch_first else out.transpose(0, 1)
        return out if seen is None else torch.cat([out.flatten(1), seen.flatten(1)], 1)


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize(
    "options",
    [{"batch_first": True}, {"batch_first": False}, {"kdim": 8, "vdim": 8, "bias": False, "batch_first": True}],
)
def test_attention(cross: bool, weights: bool, options: dict[str, Any]) -> None:
    model = Attend(cross, weights, **options).double()
    x = torch.randn(6, 5, 8).double()
    compare(model, x, [0, 0, 0, 1, 1, 2])


class Recur(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.recurrent = kind(3, 4, **options)

    def forward(self, x: Tensor) -> Tensor:
        first = self.recurrent.batch_first
        out, last = self.recurrent(x if first else x.transpose(0, 1))
        last = torch.cat(last, -1) if isinstance(last, tuple) else last
        return torch.cat([(out if first else out.transpose(0, 1)).flatten(1), last.transpose(0, 1).flatten(1)], 1)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(
    "options", [{"batch_first": True}, {"num_layers": 2, "bidirectional": True}, {"bias": False, "batch_first": True}]
)
def test_recurrent(kind: type[nn.RNNBase], options: dict[str, Any]) -> None:
    compare(Recur(kind, **options), torch.randn(6, 4, 3), [0, 0, 2, 1, 1, 1])


def test_recurrent_with_projection() -> None:
    compare(Recur(nn.LSTM, proj_size=2, batch_first=True), torch.randn(6, 4, 3))


class Bare(nn.Module):
    """Class token, position embedding, layer scale, matrix, scalar: used as people use them."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, 4))
        self.position = nn.Parameter(torch.zeros(1, 9, 4))
        self.gain = nn.Parameter(torch.zeros(4))
        self.matrix = nn.Parameter(torch.zeros(4, 3))
        self.shift = nn.Parameter(torch.zeros(3))
        self.temperature = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        x = x + self.position[:, : x.shape[1]]
        x = x * self.gain.view(1, 1, -1)
        x = (x @ self.matrix) / self.shift.exp() - self.shift
        x += self.shift
        x.mul_(self.shift)
        return torch.addmm(self.shift, x[:, 0], self.matrix.T @ self.matrix) * self.temperature.sigmoid()


@given(tokens=sizes, units=labels)
def test_bare_parameters(tokens: int, units: list[int] | None) -> None:
    compare(Bare(), torch.randn(6, tokens, 4), units)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4)
        self.twice = nn.Linear(4, 4)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.twice(self.twice(self.words(x)).tanh()))


@given(tokens=sizes, units=labels)
def test_tied_weights_and_a_layer_used_twice(tokens: int, units: list[int] | None) -> None:
    compare(Tied(), torch.randint(0, 7, (6, tokens)), units)


class Folded(nn.Module):
    """Windows are folded into the first dimension, as in Swin."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Unflatten(1, (1, -1)), nn.Conv2d(1, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.reshape(-1, 2, 4)).reshape(x.shape[0], -1)


def test_rows_folded_into_the_first_dimension() -> None:
    compare(Folded(), torch.randn(6, 4, 4), [1, 1, 1, 0, 2, 2])


def test_weight_norm_is_pulled_back() -> None:
    compare(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), torch.randn(6, 2, 4), [0, 0, 1, 1, 1, 5])


class Ruleless(nn.Module):
    """A parameter that enters a function for which there is no rule."""

    def __init__(self, use: Any) -> None:
        super().__init__()
        self.body, self.weight, self.use = nn.Linear(4, 4), nn.Parameter(torch.rand(4)), use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.body(x), self.weight)


@pytest.mark.parametrize(
    ("model", "shape", "named"),
    [
        (Ruleless(torch.hypot), (6, 3, 4), "hypot"),
        (Ruleless(torch.logaddexp), (6, 3, 4), "logaddexp"),
        (Ruleless(lambda x, w: torch.lerp(x, x.cos(), w)), (6, 3, 4), "lerp"),
    ],
)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_without_rule_the_answer_is_the_same_and_named_once(
    model: nn.Module, shape: tuple[int, ...], named: str
) -> None:
    with pytest.warns(UserWarning, match=named) as said:
        compare(model, torch.randn(*shape), [0, 0, 1, 2, 2, 2])
    assert sum(named in str(w.message) and "no fast rule" in str(w.message) for w in said) == 1


class _Hidden(torch.autograd.Function):
    """A custom function: torch functions inside it do not see the handles."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grads[0] * w, (grads[0] * x).sum(0)


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(_Hidden.apply(x, self.scale))


def test_what_no_rule_can_see_is_computed_row_by_row() -> None:
    with pytest.warns(UserWarning, match="'scale'.*row by row"):
        compare(Hidden(), torch.randn(6, 4), [0, 0, 1, 2, 2, 2], microbatch=4)


def test_embedding_that_couples_rows_is_refused() -> None:
    from tacit.gradients import clipped_sum

    model = nn.Embedding(5, 2, scale_grad_by_freq=True)
    with pytest.raises(ValueError, match="scale_grad_by_freq"):
        clipped_sum(model, lambda m, b: m(b).sum((1, 2)), torch.zeros(3, 2, dtype=torch.long), clip=1.0)


def test_functional_use_of_a_weight() -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(F.normalize(self.body(x), dim=-1), F.normalize(self.head.weight, dim=-1), self.head.bias)

    compare(Scores(), torch.randn(6, 4), [0, 0, 1, 2, 2, 2])
