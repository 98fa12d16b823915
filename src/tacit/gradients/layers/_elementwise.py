"""Parameters that belong to no layer class: class tokens, position embeddings, layer scales, gains."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tacit.gradients._grad_factors import PerRow
from tacit.gradients._recorder import EXPANDING, Recorder, UnsupportedPattern
from tacit.gradients._traced_parameter import Target, TracedParameter, plain, rule


def reduce_rows(recorder: Recorder, target: Target, g: Tensor) -> Tensor:
    """Undo broadcasting within each row: (…rows…) -> (rows, *shape of the parameter)."""
    shape = target.shape
    recorder.learns_rows(target, g)
    dim = max(recorder.plan.batch_dim.get(target.names[0], 0), 0)
    missing = g.dim() - len(shape)
    if dim >= missing and shape[dim - missing] != 1:
        raise UnsupportedPattern(target.names[0])
    summed = [d for d in range(g.dim()) if d != dim and (d < missing or (shape[d - missing] == 1 and g.shape[d] != 1))]
    rows = recorder.rows_first(target, g.sum(summed, keepdim=True) if summed else g)
    return rows.sum(1).reshape(recorder.units.rows, *shape) if rows.shape[1] != 1 else rows.reshape(-1, *shape)


class _Add(torch.autograd.Function):
    """y = x + p; a row's gradient is its output gradient, summed over what was broadcast."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: Tensor, use: Any, _: Tensor) -> Tensor:
        ctx.use, ctx.like = use, (x.shape, x.dtype)
        return x + p

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (g,) = grads
        recorder, target = ctx.use
        recorder.record(target, PerRow(reduce_rows(recorder, target, g)))
        shape, dtype = ctx.like
        return (g.sum_to_size(shape).to(dtype) if ctx.needs_input_grad[0] else None), None, None, None


class _Scale(torch.autograd.Function):
    """y = x * p; a row's gradient is g * x, summed over what was broadcast."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: Tensor, use: Any, _: Tensor) -> Tensor:
        ctx.use = use
        ctx.save_for_backward(x, p)
        return x * p

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (g,) = grads
        recorder, target = ctx.use
        x, p = ctx.saved_tensors
        recorder.record(target, PerRow(reduce_rows(recorder, target, g * x)))
        return ((g * p).sum_to_size(x.shape).to(x.dtype) if ctx.needs_input_grad[0] else None), None, None, None


class _Expand(torch.autograd.Function):
    """y = p, repeated for every row."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, use: Any, _: Tensor) -> Tensor:
        ctx.use = use
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (g,) = grads
        recorder, target = ctx.use
        recorder.record(target, PerRow(reduce_rows(recorder, target, g)))
        return None, None, None


def add(recorder: Recorder, x: Tensor, p: TracedParameter) -> Tensor:
    return _Add.apply(x, plain(p), (recorder, recorder.uses(p, "addition")), recorder.anchor)  # type: ignore[no-untyped-call, no-any-return]


def scale(recorder: Recorder, x: Tensor, p: TracedParameter) -> Tensor:
    return _Scale.apply(x, plain(p), (recorder, recorder.uses(p, "scaling")), recorder.anchor)  # type: ignore[no-untyped-call, no-any-return]


def _pair(input: Any, other: Any) -> tuple[Tensor, TracedParameter] | None:
    """The tensor with rows and the parameter, if the two arguments are just that."""
    if isinstance(input, TracedParameter) == isinstance(other, TracedParameter):
        return None
    x, p = (other, input) if isinstance(input, TracedParameter) else (input, other)
    return (x, p) if isinstance(x, Tensor) else None


@rule(torch.add, torch.Tensor.add, torch.Tensor.__radd__, torch.Tensor.__add__)
def addition(recorder: Recorder, input: Any, other: Any, *, alpha: float = 1) -> Any:
    pair = _pair(input, other)
    return NotImplemented if pair is None or alpha != 1 else add(recorder, *pair)


@rule(torch.mul, torch.Tensor.mul, torch.Tensor.__rmul__, torch.Tensor.__mul__, torch.multiply, torch.Tensor.multiply)
def multiplication(recorder: Recorder, input: Any, other: Any) -> Any:
    pair = _pair(input, other)
    return NotImplemented if pair is None else scale(recorder, *pair)


@rule(torch.sub, torch.Tensor.sub, torch.Tensor.__sub__)
def subtraction(_: Recorder, input: Any, other: Any, *, alpha: float = 1) -> Any:
    pair = _pair(input, other)
    if pair is None or alpha != 1:
        return NotImplemented
    return input + -other if isinstance(other, TracedParameter) else -other + input


@rule(torch.div, torch.Tensor.div, torch.Tensor.__truediv__, torch.true_divide)
def division(_: Recorder, input: Any, other: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode is not None or not isinstance(other, TracedParameter) or isinstance(input, TracedParameter):
        return NotImplemented
    return input * other.reciprocal()


@rule(torch.Tensor.add_, torch.Tensor.__iadd__)
def add_in_place(recorder: Recorder, input: Any, other: Any, *, alpha: float = 1) -> Any:
    pair = _pair(input, other)
    if pair is None or alpha != 1 or isinstance(input, TracedParameter):
        return NotImplemented
    return input.copy_(add(recorder, *pair))


@rule(torch.Tensor.mul_, torch.Tensor.__imul__)
def multiply_in_place(recorder: Recorder, input: Any, other: Any) -> Any:
    if not isinstance(other, TracedParameter) or isinstance(input, TracedParameter):
        return NotImplemented
    return input.copy_(scale(recorder, input.clone(), other))


def _expanding(function: Any) -> None:
    @rule(function)
    def expand(recorder: Recorder, input: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(input, TracedParameter):
            return NotImplemented
        use = (recorder, recorder.uses(input, "expansion"))
        return _Expand.apply(function(plain(input), *args, **kwargs), use, recorder.anchor)  # type: ignore[no-untyped-call]


for _function in EXPANDING:
    _expanding(_function)
