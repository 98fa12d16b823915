"""Normalisation: the gradients of gain and shift are read off the normalised values."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tacit.gradients._grad_factors import PerRow, wide
from tacit.gradients._kernels import contiguous_norm_sums, norm_sums, serves
from tacit.gradients._recorder import Recorder
from tacit.gradients._traced_parameter import Target, TracedParameter, plain, rule

# Of torch >= 2.5; without it the short way of `forward` is not taken.
_top_saved_tensors_default_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


class _LayerNorm(torch.autograd.Function):
    """y = w * n(x) + b; a row's gradient is sum_t g_t * n(x)_t for w and sum_t g_t for b."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor | None, b: Tensor | None, shape: Any, eps: float, use: Any, _: Tensor
    ) -> Tensor:
        y, mean, rstd = torch.native_layer_norm(x, shape, w, b, eps)
        ctx.save_for_backward(x, w, b, mean, rstd)
        ctx.shape, ctx.use = shape, use
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (g,) = grads
        x, w, b, mean, rstd = ctx.saved_tensors
        recorder, on_weight, on_bias = ctx.use
        if on_weight is not None or on_bias is not None:
            _record(recorder, on_weight, on_bias, g, x, mean, rstd, len(ctx.shape))
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.ops.aten.native_layer_norm_backward(
                g.contiguous(), x, ctx.shape, mean, rstd, w, b, [True, False, False]
            )[0]
        return dx, None, None, None, None, None, None


Use = tuple[Recorder, Target | None, Target | None]


def forward(module: nn.LayerNorm, use: Use, names: tuple[str, ...], input: Any) -> Any:
    """The rule for a layer norm in a module of its own, by a short way: same result, same sums.

    A test-time step has little else to do than its norm layers, so what Python does for each of them counts. Torch's
    own node computes the gradient of the input, and a hook reads off those of gain and shift.
    """
    recorder = use[0]
    if not (
        type(input) is Tensor
        and input.requires_grad
        and torch.is_grad_enabled()
        and not recorder.closed
        and recorder.plan.enters.get((F.layer_norm, names, (input.dim(),)))
        and input.device.type == "cpu"
        and _stores_as_usual()
    ):
        return type(module).forward(module, input)
    shape, own = module.normalized_shape, module._parameters
    y, mean, rstd = torch.native_layer_norm(input, shape, plain(own["weight"]), plain(own["bias"]), module.eps)
    recorder.count_uses(names)
    y.grad_fn.register_prehook(partial(_seen, use, [input, mean, rstd], len(shape)))  # type: ignore[union-attr]
    return y


def _stores_as_usual() -> bool:
    """Whether nothing stands between a node and what it stores (checkpointing): a hook would keep that in memory."""
    return _top_saved_tensors_default_hooks is not None and _top_saved_tensors_default_hooks(False) is None


def _seen(use: Use, stored: list[Tensor], lead: int, grads: Any) -> None:
    recorder, on_weight, on_bias = use
    (x, mean, rstd), g = stored, grads[0]
    stored.clear()  # the graph outlives its nodes' turn
    if g is None:  # the loss does not depend on it
        return
    if on_weight is not None and lead == 1 and recorder.in_front(on_weight, g):
        found = contiguous_norm_sums(g.contiguous(), x.contiguous(), mean, rstd, recorder.units.rows)
        if found is not None:
            recorder.folds[on_weight.names[0], g.shape[0] // recorder.units.rows] += 1
            recorder.record(on_weight, PerRow(found[0]))
            if on_bias is not None:
                recorder.record(on_bias, PerRow(found[1]))
            return
    _record(recorder, on_weight, on_bias, g, x, mean, rstd, lead)


def _record(
    recorder: Recorder,
    on_weight: Target | None,
    on_bias: Target | None,
    g: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    lead: int,
) -> None:
    """Read off each row's gradient: sum_t g_t x_t r_t - sum_t g_t m_t r_t for the gain, sum_t g_t for the shift.

    The sums over positions are one pass over both tensors in a compiled kernel, or small matrix products.
    """
    target = on_weight or on_bias
    if target is None:
        raise ValueError("A norm layer was recorded of which neither gain nor shift is trained.")
    recorder.saw(g.itemsize)
    rows, shape = recorder.units.rows, x.shape[x.dim() - lead :]
    g = recorder.rows_first(target, g)
    if recorder.plan.batch_dim.get(target.names[0], 0):  # else the reshaping below is all there is to do
        x, mean, rstd = (recorder.rows_first(target, t) for t in (x, mean, rstd))
    g, x = wide(g.reshape(rows, -1, shape.numel())), wide(x.reshape(rows, -1, shape.numel()))
    if on_weight is None:
        recorder.record(target, PerRow(g.sum(1).reshape(rows, *shape)))
        return
    if g.device.type == "cpu":  # a copy costs less than the products that it saves
        g, x = g.contiguous(), x.contiguous()
    statistics = (wide(t).reshape(rows, -1).to(g.dtype) for t in (mean, rstd))
    gain, shift = (norm_sums if serves(g, x) else in_products)(g, x, *statistics)
    recorder.record(on_weight, PerRow(gain.reshape(rows, *shape)))
    if on_bias is not None:
        recorder.record(on_bias, PerRow(shift.reshape(rows, *shape)))


def in_products(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """`norm_sums` for any device and type."""
    scale = rstd[:, None]
    means = scale * mean[:, None]
    sums = torch.bmm(torch.cat([means, torch.ones_like(means)], 1), g)
    return torch.baddbmm(sums[:, :1], scale, g * x, beta=-1), sums[:, 1]


@rule(F.layer_norm, torch.layer_norm)
def layer_norm(
    recorder: Recorder,
    input: Any,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *_: Any,
) -> Any:
    if isinstance(input, TracedParameter):
        return NotImplemented
    if input.is_cuda and torch.is_autocast_enabled("cuda"):
        input = input.float()  # as autocast does there
    use = (recorder, recorder.uses(weight, "layer norm"), recorder.uses(bias, "layer norm"))
    return _LayerNorm.apply(input, plain(weight), plain(bias), list(normalized_shape), eps, use, recorder.anchor)  # type: ignore[no-untyped-call]


def affine(x: Tensor, weight: Any, bias: Any, channels_first: bool) -> Any:
    """x * weight + bias along the channels or the last dimensions; the rules for scaling and addition do the rest."""
    if weight is not None:
        x = x * (weight.reshape(-1, *[1] * (x.dim() - 2)) if channels_first else weight)
    if bias is not None:
        x = x + (bias.reshape(-1, *[1] * (x.dim() - 2)) if channels_first else bias)
    return x


@rule(F.rms_norm, torch.rms_norm)
def rms_norm(
    _recorder: Recorder, input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> Any:
    if isinstance(input, TracedParameter):
        return NotImplemented
    return affine(F.rms_norm(input, list(normalized_shape), eps=eps), weight, None, channels_first=False)
