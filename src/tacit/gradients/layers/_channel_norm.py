"""Norms with a gain and a shift for each channel: frozen BatchNorm, GroupNorm, InstanceNorm.

The forward is the call that the model makes, bit by bit: where it rounds in another way, a number near a kink (ReLU)
may fall to the other side, and the gradient then differs from plain autograd's by far more than rounding.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tacit.gradients._grad_factors import PerRow, wide
from tacit.gradients._kernels import channel_sums
from tacit.gradients._recorder import Recorder
from tacit.gradients._traced_parameter import TracedParameter, plain, rule
from tacit.gradients._units import split_rows
from tacit.gradients.layers._norm import Use, affine


class _FrozenBatchNorm(torch.autograd.Function):
    """y = w (x - m) r + b with m and r fixed; a row's gradient is sum_t g_t (x_t - m) r for w and sum_t g_t for b."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor | None, b: Tensor | None, statistics: Any, eps: float, use: Any, _: Tensor
    ) -> Tensor:
        mean, variance = statistics
        ctx.save_for_backward(x, w, mean, torch.rsqrt(variance + eps))
        ctx.use = use
        return F.batch_norm(x, mean, variance, w, b, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (g,) = grads
        x, w, mean, rstd = ctx.saved_tensors
        _record(ctx.use, g, x, mean, rstd)
        dx = None
        if ctx.needs_input_grad[0]:
            scale = rstd if w is None else rstd * w
            dx = (g * scale.reshape(-1, *[1] * (g.dim() - 2))).to(x.dtype)
        return dx, None, None, None, None, None, None


class _GroupNorm(torch.autograd.Function):
    """y = w (x - m) r + b with m and r of each row and group; the gradients as above."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor | None, b: Tensor | None, groups: int, eps: float, use: Any, _: Tensor
    ) -> Tensor:
        rows, channels, positions = x.shape[0], x.shape[1], x[0, 0].numel()
        y, mean, rstd = torch.native_group_norm(x, w, b, rows, channels, positions, groups, eps)
        ctx.sizes = (rows, channels, positions, groups)
        ctx.save_for_backward(x, w, mean, rstd)
        ctx.use = use
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (g,) = grads
        x, w, mean, rstd = ctx.saved_tensors
        each = ctx.sizes[1] // ctx.sizes[3]
        _record(ctx.use, g, x, *(t.repeat_interleave(each, 1) for t in (mean, rstd)))
        dx = None
        if ctx.needs_input_grad[0]:
            wanted = [True, False, False]
            dx = torch.ops.aten.native_group_norm_backward(g.contiguous(), x, mean, rstd, w, *ctx.sizes, wanted)[0]
        return dx, None, None, None, None, None, None


def _record(use: Use, g: Tensor, x: Tensor, mean: Tensor, r: Tensor) -> None:
    """Read off each row's gradients; mean and r are (channels,) or (rows, channels)."""
    recorder, on_weight, on_bias = use
    recorder.saw(g.itemsize)
    g, x, mean, r = (wide(t) for t in (g, x, mean, r))
    targets = [target for target in (on_weight, on_bias) if target is not None]
    found = channel_sums(g.contiguous(), x.contiguous(), mean, r) or in_torch(g, x, mean, r)
    for target in targets:
        sums = recorder.whole_rows(target, found[0] if target is on_weight else found[1])
        fold = sums.shape[0] // recorder.units.rows
        recorder.folds[target.names[0], fold] += 1
        recorder.record(target, PerRow(split_rows(sums, fold).sum(1) if fold > 1 else sums))


def in_torch(g: Tensor, x: Tensor, mean: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """`channel_sums` for any device and type."""
    g, x = (t.reshape(*t.shape[:2], -1) for t in (g, x))
    return (g * (x - mean.unsqueeze(-1))).sum(2) * r, g.sum(2)


@rule(F.group_norm, torch.group_norm)
def group_norm(
    recorder: Recorder, input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Any:
    if isinstance(input, TracedParameter):
        return NotImplemented
    if not input.is_contiguous() or torch.is_autocast_enabled(input.device.type):  # other layouts, other types
        return affine(F.group_norm(input, num_groups, eps=eps), weight, bias, channels_first=True)
    use = (recorder, recorder.uses(weight, "group norm"), recorder.uses(bias, "group norm"))
    return _GroupNorm.apply(input, plain(weight), plain(bias), num_groups, eps, use, recorder.anchor)  # type: ignore[no-untyped-call]


@rule(F.instance_norm)
def instance_norm(
    _recorder: Recorder,
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    if isinstance(input, TracedParameter):
        return NotImplemented
    normal = F.instance_norm(input, running_mean, running_var, None, None, use_input_stats, momentum, eps)
    return affine(normal, weight, bias, channels_first=True)


@rule(F.batch_norm, torch.batch_norm)
def batch_norm(
    recorder: Recorder,
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *_: Any,
) -> Any:
    """With frozen statistics BatchNorm is an affine map; with live ones it mixes rows and the engine refuses it."""
    if any(isinstance(t, TracedParameter) for t in (input, running_mean, running_var)):
        return NotImplemented
    if training:
        normal = F.batch_norm(input, running_mean, running_var, None, None, training, momentum, eps)
        return affine(normal, weight, bias, channels_first=True)
    use = (recorder, recorder.uses(weight, "batch norm"), recorder.uses(bias, "batch norm"))
    fixed = (running_mean, running_var)
    return _FrozenBatchNorm.apply(input, plain(weight), plain(bias), fixed, eps, use, recorder.anchor)  # type: ignore[no-untyped-call]
