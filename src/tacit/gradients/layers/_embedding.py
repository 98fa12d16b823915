"""Embeddings: only the lines that a unit looks up receive a gradient."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tacit.gradients._grad_factors import Lookup
from tacit.gradients._recorder import Recorder
from tacit.gradients._traced_parameter import TracedParameter, plain, rule


class _Embedding(torch.autograd.Function):
    """y_t = W[ids_t]; a row's gradient adds g_t to line ids_t, except for the padding index."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding: int, use: Any, _: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.use, ctx.padding, ctx.shape = use, padding, tuple(weight.shape)
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (g,) = grads
        (ids,) = ctx.saved_tensors
        recorder, target = ctx.use
        rows, lines = recorder.rows_first(target, ids).flatten(1), recorder.rows_first(target, g)
        lines = lines.reshape(*rows.shape, -1)
        if ctx.padding >= 0:
            lines = lines.masked_fill((rows == ctx.padding)[..., None], 0)
        recorder.record(target, Lookup(rows, lines, ctx.shape))
        return None, None, None, None, None


@rule(F.embedding)
def embedding(
    recorder: Recorder,
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,  # noqa: ARG001
    scale_grad_by_freq: bool = False,
    sparse: bool = False,  # noqa: ARG001
) -> Any:
    if not isinstance(weight, TracedParameter):
        return NotImplemented
    if max_norm is not None or scale_grad_by_freq:
        raise ValueError(
            f"The embedding {weight.target.names[0]!r} uses max_norm or scale_grad_by_freq, by which one row changes "
            f"another row's gradient. Switch them off before training with privacy."
        )
    padding = -1 if padding_idx is None else padding_idx % plain(weight).shape[0]
    use = (recorder, recorder.uses(weight, "embedding"))
    return _Embedding.apply(input, plain(weight), padding, use, recorder.anchor)  # type: ignore[no-untyped-call]
