"""Matrix weights: linear layers, matrix products, transformers' Conv1D."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tacit.gradients._grad_factors import Factored, PerRow
from tacit.gradients._recorder import Recorder
from tacit.gradients._traced_parameter import Target, TracedParameter, plain, rule


def positions(recorder: Recorder, target: Target, tensor: Tensor) -> Tensor:
    """(…rows…, features) -> (rows, positions, features)."""
    rows = recorder.rows_first(target, tensor)
    return rows if rows.dim() == 3 else rows.flatten(1, -2)


def autocast(*values: Tensor | None) -> tuple[Tensor | None, ...]:
    """What autocast would do to the inputs of a matrix product, done here because the rule keeps what it saw."""
    device = next(v.device.type for v in values if v is not None)
    if not torch.is_autocast_enabled(device):
        return values
    dtype = torch.get_autocast_dtype(device)
    return tuple(v.to(dtype) if v is not None and v.is_floating_point() else v for v in values)


class _Linear(torch.autograd.Function):
    """y = x W^T + b; a row's gradient is sum_t g_t x_t^T for W and sum_t g_t for b."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, use: Any, _: Tensor) -> Tensor:
        ctx.use = use
        if use[1] is None:  # only the bias is trained: the inputs are not needed
            ctx.save_for_backward(weight)
        else:
            ctx.save_for_backward(weight, x)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (g,) = grads
        recorder, on_weight, on_bias = ctx.use
        weight, *saved = ctx.saved_tensors
        live = None if on_weight is None else recorder.live(on_weight, g)
        length = g.shape[1] if live is not None else 0
        if live is not None:  # elsewhere it is zero, and so is everything that is made of it
            g = g[:, live.index]
        if on_weight is not None:
            x = saved[0] if live is None else saved[0][:, live.index]
            u, v = positions(recorder, on_weight, g), positions(recorder, on_weight, x)
            recorder.record(on_weight, Factored(u, v, tuple(weight.shape)))
        if on_bias is not None:
            rows = positions(recorder, on_bias, g)
            recorder.record(on_bias, PerRow(rows.sum(1) if rows.shape[1] != 1 else rows[:, 0]))
        dx = g @ weight if ctx.needs_input_grad[0] else None
        return (dx if dx is None or live is None else live.spread(dx, length)), None, None, None, None


@rule(F.linear)
def linear(recorder: Recorder, input: Any, weight: Any, bias: Any = None) -> Any:
    if isinstance(input, TracedParameter):
        return NotImplemented
    use = (recorder, recorder.uses(weight, "linear"), recorder.uses(bias, "linear"))
    x, w, b = autocast(input, plain(weight), plain(bias))
    return _Linear.apply(x, w, b, use, recorder.anchor)  # type: ignore[no-untyped-call]


class _Product(torch.autograd.Function):
    """y = x W for a matrix W; a row's gradient is sum_t x_t g_t^T."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, use: Any, _: Tensor) -> Tensor:
        ctx.use = use
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (g,) = grads
        recorder, target = ctx.use
        x, weight = ctx.saved_tensors
        u, v = positions(recorder, target, x), positions(recorder, target, g)
        recorder.record(target, Factored(u, v, tuple(weight.shape)))
        return (g @ weight.T if ctx.needs_input_grad[0] else None), None, None, None


def _batched(input: Tensor, weight: Tensor) -> bool:
    """A stack of matrices, one for each first place of the input: then the rows are in its second dimension."""
    return weight.dim() == input.dim() == 3 and weight.shape[0] == input.shape[0] > 1


@rule(torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__)
def product(recorder: Recorder, input: Any, other: Any) -> Any:
    if isinstance(other, TracedParameter) and not isinstance(input, TracedParameter) and _batched(input, plain(other)):
        return torch.einsum("nad,adk->nak", input.transpose(0, 1), other).transpose(0, 1)
    if isinstance(input, TracedParameter) or plain(other).dim() != 2 or input.dim() < 2:
        return NotImplemented
    x, w = autocast(input, plain(other))
    return _Product.apply(x, w, (recorder, recorder.uses(other, "matrix product")), recorder.anchor)  # type: ignore[no-untyped-call]


@rule(torch.addmm)
def addmm(_: Recorder, input: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    if (
        beta != 1
        or alpha != 1
        or isinstance(mat1, TracedParameter)
        or (isinstance(input, TracedParameter) and plain(input).dim() != 1)
    ):
        return NotImplemented
    return torch.matmul(mat1, mat2) + input
