"""Convolutions in one to three dimensions, with groups, stride, padding and dilation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tacit.gradients._grad_factors import TRAFFIC, Factored, PerRow, Piece, wide
from tacit.gradients._recorder import Recorder
from tacit.gradients._traced_parameter import Target, TracedParameter, plain, rule
from tacit.gradients._units import split_rows
from tacit.gradients.layers._linear import autocast

_OP: dict[int, Any] = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}
_TRANSPOSED: dict[int, Any] = {1: torch.conv_transpose1d, 2: torch.conv_transpose2d, 3: torch.conv_transpose3d}
Numbers = tuple[int, ...]


def patches(x: Tensor, kernel: Sequence[int], stride: Numbers, padding: Numbers, dilation: Numbers) -> Tensor:
    """(rows, channels, ...) -> (rows, positions, channels * kernel): what each output position looks at."""
    x = F.pad(x, [p for pad in reversed(padding) for p in (pad, pad)]) if any(padding) else x
    dims = len(kernel)
    for d in range(dims):
        x = x.unfold(2 + d, (kernel[d] - 1) * dilation[d] + 1, stride[d])
        x = x[..., :: dilation[d]]
    order = [0, *range(2, 2 + dims), 1, *range(2 + dims, 2 + 2 * dims)]
    return x.permute(order).flatten(1 + dims).flatten(1, dims)


def grouped(x: Tensor, g: Tensor, shape: torch.Size, geometry: Any, groups: int) -> Tensor:
    """Each row's weight gradient from one convolution in which every row is a group of its own."""
    rows = x.shape[0]
    weight = x.new_empty(1).expand(rows * shape[0], *shape[1:])
    found = torch.ops.aten.convolution_backward(
        g.reshape(1, -1, *g.shape[2:]),
        x.reshape(1, -1, *x.shape[2:]),
        weight,
        None,
        *geometry,
        False,
        [0] * len(geometry[0]),
        rows * groups,
        [False, True, False],
    )[1]
    return torch.reshape(found, (rows, *shape))


class _Conv(torch.autograd.Function):
    """A row's gradient is sum_t g_t patch_t^T over output positions, group by group."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, geometry: Any, groups: int, use: Any, _: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.geometry, ctx.groups, ctx.use = geometry, groups, use
        return _OP[w.dim() - 2](x, w, b, *geometry, groups)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (g,) = grads
        x, w = ctx.saved_tensors
        recorder, on_weight, on_bias = ctx.use
        if on_weight is not None:
            recorder.record(on_weight, _weight_piece(recorder, on_weight, x, g, w.shape, ctx.geometry, ctx.groups))
        if on_bias is not None:
            recorder.record(on_bias, PerRow(recorder.rows_first(on_bias, g.flatten(2).sum(2)).sum(1)))
        dx = None
        if ctx.needs_input_grad[0]:
            rest = (False, [0] * len(ctx.geometry[0]), ctx.groups, [True, False, False])
            dx = torch.ops.aten.convolution_backward(g, x, w, None, *ctx.geometry, *rest)[0]
        return dx, None, None, None, None, None, None


class _ConvTranspose(torch.autograd.Function):
    """The adjoint of a convolution: input and output gradient change places."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, geometry: Any, more: Any, groups: int, use: Any, _: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.geometry, ctx.groups, ctx.use = geometry, groups, use
        stride, padding, dilation = geometry
        return _TRANSPOSED[w.dim() - 2](x, w, b, stride, padding, more, groups, dilation)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (g,) = grads
        x, w = ctx.saved_tensors
        recorder, on_weight, on_bias = ctx.use
        if on_weight is not None:
            recorder.record(on_weight, _weight_piece(recorder, on_weight, g, x, w.shape, ctx.geometry, ctx.groups))
        if on_bias is not None:
            recorder.record(on_bias, PerRow(recorder.rows_first(on_bias, g.flatten(2).sum(2)).sum(1)))
        dx = _OP[w.dim() - 2](g, w, None, *ctx.geometry, ctx.groups) if ctx.needs_input_grad[0] else None
        return dx, None, None, None, None, None, None, None


def _weight_piece(
    recorder: Recorder, target: Target, x: Tensor, g: Tensor, shape: torch.Size, geometry: Any, groups: int
) -> Piece:
    x, g = recorder.whole_rows(target, x), recorder.whole_rows(target, g)
    fold = x.shape[0] // recorder.units.rows
    recorder.folds[target.names[0], fold] += 1
    if groups == 1 and _prefer_factors(shape, g, fold):
        v = patches(x, shape[2:], *geometry)
        u = g.flatten(2).mT
        return Factored(_unfold_rows(u, fold), _unfold_rows(v, fold), tuple(shape))
    rows = grouped(wide(x), wide(g), shape, geometry, groups)
    return PerRow(split_rows(rows, fold).sum(1) if fold > 1 else rows)


def _prefer_factors(shape: torch.Size, g: Tensor, fold: int) -> bool:
    """Whether the Gram matrices are cheaper than building each row's gradient.

    The shape of a row decides: how many rows others have must not change how a unit is computed. `Factored` itself
    decides again by each unit's own number of rows.
    """
    length = g[0, 0].numel() * fold
    m, n = shape[0], shape[1:].numel()
    return TRAFFIC * m * n >= length * length * (m + n)


def _unfold_rows(t: Tensor, fold: int) -> Tensor:
    return split_rows(t, fold).flatten(1, 2) if fold > 1 else t


def _conv(dims: int) -> None:
    @rule(_OP[dims])
    def conv(
        recorder: Recorder,
        input: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Any:
        if isinstance(input, TracedParameter) or input.dim() != dims + 2:
            return NotImplemented
        stride, dilation = _spread(stride, dims), _spread(dilation, dims)
        if isinstance(padding, str):
            input, padding = _named_padding(input, padding, plain(weight).shape[2:], dilation)
        x, w, b = autocast(input, plain(weight), plain(bias))
        use = (recorder, recorder.uses(weight, "convolution"), recorder.uses(bias, "convolution"))
        geometry = (stride, _spread(padding, dims), dilation)
        return _Conv.apply(x, w, b, geometry, groups, use, recorder.anchor)  # type: ignore[no-untyped-call]


def _conv_transpose(dims: int) -> None:
    @rule(_TRANSPOSED[dims])
    def conv_transpose(
        recorder: Recorder,
        input: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Any:
        if isinstance(input, TracedParameter) or input.dim() != dims + 2:
            return NotImplemented
        x, w, b = autocast(input, plain(weight), plain(bias))
        use = (recorder, recorder.uses(weight, "convolution"), recorder.uses(bias, "convolution"))
        geometry = (_spread(stride, dims), _spread(padding, dims), _spread(dilation, dims))
        more = _spread(output_padding, dims)
        return _ConvTranspose.apply(x, w, b, geometry, more, groups, use, recorder.anchor)  # type: ignore[no-untyped-call]


def _spread(value: Any, dims: int) -> list[int]:
    numbers = [value] if isinstance(value, int) else list(value)
    return numbers * dims if len(numbers) == 1 else numbers


def _named_padding(x: Tensor, name: str, kernel: Sequence[int], dilation: list[int]) -> tuple[Tensor, list[int]]:
    if name == "valid":
        return x, [0] * len(kernel)
    total = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    if any(t % 2 for t in total):
        x = F.pad(x, [p for t in reversed(total) for p in (0, t % 2)])
    return x, [t // 2 for t in total]


for _dims in _OP:
    _conv(_dims)
    _conv_transpose(_dims)
