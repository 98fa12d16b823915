"""Functions that are written out in terms of others, which have rules."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tacit.gradients._recorder import Recorder
from tacit.gradients._traced_parameter import TracedParameter, plain, rule


@rule(torch.addcmul, torch.Tensor.addcmul)
def addcmul(_: Recorder, input: Any, tensor1: Any, tensor2: Any, *, value: float = 1) -> Any:
    """input + value tensor1 tensor2: a layer scale with its residual."""
    product = tensor1 * tensor2
    return input + (product if value == 1 else product * value)


@rule(F.prelu, torch.prelu, torch.Tensor.prelu)
def prelu(_: Recorder, input: Any, weight: Any) -> Any:
    """relu(x) - w relu(-x), with one slope or one for each channel."""
    if isinstance(input, TracedParameter):
        return NotImplemented
    slope = weight.reshape(-1, *[1] * (input.dim() - 2)) if plain(weight).numel() > 1 else weight
    return torch.relu(input) - torch.relu(-input) * slope


@rule(F.bilinear, torch.bilinear)
def bilinear(_: Recorder, input1: Any, input2: Any, weight: Any, bias: Any = None) -> Any:
    """y_o = x^T W_o z + b_o: linear in x, then a scalar product with z."""
    if isinstance(input1, TracedParameter) or isinstance(input2, TracedParameter):
        return NotImplemented
    out, left, right = plain(weight).shape
    mixed = F.linear(input1, weight.transpose(1, 2).reshape(out * right, left))
    found = (mixed.reshape(*mixed.shape[:-1], out, right) * input2.unsqueeze(-2)).sum(-1)
    return found if bias is None else found + bias


@rule(F.scaled_dot_product_attention)
def attention(
    _: Recorder,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attention with a bias that is trained (relative positions), in three steps."""
    if any(isinstance(t, TracedParameter) for t in (query, key, value)) or is_causal or enable_gqa:
        return NotImplemented
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    weights = torch.softmax(scores + attn_mask, -1)
    return F.dropout(weights, dropout_p) @ value


@rule(F.embedding_bag)
def embedding_bag(
    _: Recorder,
    input: Any,
    weight: Any,
    offsets: Any = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,  # noqa: ARG001
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,  # noqa: ARG001
    per_sample_weights: Any = None,
    include_last_offset: bool = False,  # noqa: ARG001
    padding_idx: int | None = None,
) -> Any:
    """Bags of equal length, one for each row: an embedding, added up."""
    if offsets is not None or mode not in ("sum", "mean") or input.dim() != 2:
        return NotImplemented
    lines = F.embedding(input, weight, padding_idx, max_norm, 2.0, scale_grad_by_freq)
    if per_sample_weights is not None:
        lines = lines * per_sample_weights.unsqueeze(-1)
    if padding_idx is None:
        return lines.sum(1) if mode == "sum" else lines.mean(1)
    kept = input != padding_idx % plain(weight).shape[0]
    total = (lines * kept.unsqueeze(-1)).sum(1)
    return total if mode == "sum" else total / kept.sum(1, keepdim=True).clamp(min=1)


def _lines(table: Any, index: Tensor) -> Any:
    """table[index] for any shape of a line."""
    size = plain(table).shape
    found = F.embedding(index % size[0], table.reshape(size[0], -1))
    return found.reshape(*index.shape, *size[1:])


@rule(torch.Tensor.__getitem__)
def item(_: Recorder, input: Any, index: Any) -> Any:
    whole_numbers = isinstance(index, Tensor) and not index.is_floating_point() and index.dtype != torch.bool
    if not isinstance(input, TracedParameter) or not whole_numbers or isinstance(index, TracedParameter):
        return NotImplemented
    return _lines(input, index)


@rule(torch.index_select, torch.Tensor.index_select)
def index_select(_: Recorder, input: Any, dim: int, index: Any) -> Any:
    if not isinstance(input, TracedParameter) or dim != 0:
        return NotImplemented
    return _lines(input, index)
